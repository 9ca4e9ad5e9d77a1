# SPDX-License-Identifier: Apache-2.0
"""The fake device of tests: a CPU's bits, no access by the host, and no wait that nobody misses."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from typing import Any

import devices
import torch
from devices import Schedule, finds_removed, schedules, wait_sites
from forked import SERVER, ending_signal
from torch import nn


def trained(device: str, steps: int = 3) -> Any:
    """Return losses and weights of a network with dropout and a batch norm."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    network = network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        batch = torch.rand(5, 3).to(device, non_blocking=True)
        loss = network(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = [*losses, *network.state_dict().values()]
    return [value.tolist() for value in values]


def bits_under_each_schedule() -> Any:
    """Return what the CPU computes, and what the device does under each schedule."""
    queues = devices.install()
    expected = trained("cpu")
    bits = {}
    for schedule in schedules(drawn=2):
        queues.reset(schedule)
        bits[str(schedule)] = trained("fake")
    return expected, bits


def test_fake_device_has_the_bits_of_a_cpu_under_each_schedule() -> None:
    expected, bits = SERVER.call(bits_under_each_schedule)
    assert len(bits) == 5
    assert {name for name, values in bits.items() if values != expected} == set()


def signal_of_an_access() -> int:
    devices.install()
    tensor = torch.ones(3).to("fake")
    return ending_signal(lambda: ctypes.string_at(tensor.data_ptr(), 4))


def test_host_access_to_memory_of_the_fake_device_is_a_fault() -> None:
    assert SERVER.call(signal_of_an_access) == signal.SIGSEGV


def brought(queues: devices.Queues, *, waits: bool = True, keeps: bool = True) -> list[float]:
    """Return values that a stream of copies brought to the host.

    Args:
        queues: of the device.
        waits: whether the host waits for the copy to the host.
        keeps: whether the values live until they are there.
    """
    copies = torch.Stream(device="fake")
    values = torch.arange(4.0).to("fake") * 2
    ready = torch.Event(device="fake")
    ready.record()
    ready.wait(copies)
    target = torch.empty(4, pin_memory=True)
    with copies:
        target.copy_(values, non_blocking=True)
        ready.record()
    if not keeps:
        del values
        torch.zeros(4).to("fake")
    if waits:
        ready.synchronize()
    result = target.tolist()
    queues.finish()
    return result


def found_faults() -> Any:
    """Return which lines wait, and under which schedules what goes wrong is found."""
    queues = devices.install()
    queues.watch(str(Path(__file__).parent))
    sites = wait_sites(queues, lambda: brought(queues))
    expected = [0.0, 2.0, 4.0, 6.0]
    tried = schedules(drawn=2)
    right = {}
    for schedule in tried:
        queues.reset(schedule)
        right[str(schedule)] = brought(queues)
    removed = [
        list(finds_removed(queues, lambda: brought(queues), s, expected, tried)) for s in sites
    ]
    no_wait = finds_removed(queues, lambda: brought(queues, waits=False), None, expected, tried)
    freed = finds_removed(queues, lambda: brought(queues, keeps=False), None, expected, tried)
    return right, removed, list(no_wait), list(freed)


def test_removed_wait_and_freed_memory_are_found_and_nothing_else() -> None:
    right, removed, no_wait, freed = SERVER.call(found_faults)
    assert set(map(tuple, right.values())) == {(0.0, 2.0, 4.0, 6.0)}
    device_waits, host_waits = removed
    assert "copies" in device_waits
    assert "lazy" in host_waits
    assert {"lazy", "main", "copies"} <= set(no_wait)
    assert "main" in freed


def test_schedule_of_a_seed_draws_the_same_again() -> None:
    first, again = Schedule("random", 3), Schedule("random", 3)
    queue = devices.Queues().add("main")
    assert [first.num_tasks(queue) for _ in range(50)] == [
        again.num_tasks(queue) for _ in range(50)
    ]
