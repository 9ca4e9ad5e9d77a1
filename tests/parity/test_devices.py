# SPDX-License-Identifier: Apache-2.0
"""A network on a device trains its rows to the bits of a CPU, in any order of the device's streams.

The device is the one of `tests/devices`. Each line of Hotbed that waits is removed in turn, and
the bits must then differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torch", reason="torch absent")

import devices
import torch
from devices import finds_removed, schedules, wait_sites
from forked import SERVER
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import DeviceError
from hotbed.persist import open_checkpoint

DRAW = np.random.default_rng(0)
BATCH = 16
STEPS = 4
NUM = 3 * BATCH * STEPS
SCHEMA = hb.Schema(
    [
        hb.Label("click"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("seen", table="item", pooling="none"),
        hb.Dense("price"),
    ]
)
COLUMNS = {
    "user": DRAW.integers(0, 12, NUM),
    "item": DRAW.integers(0, 20, NUM),
    "seen": [DRAW.integers(0, 20, length) for length in DRAW.integers(0, 4, NUM)],
    "price": DRAW.normal(size=NUM).astype(np.float32),
    "click": (DRAW.random(NUM) < 0.4).astype(np.float32),
}


def data(steps: int = STEPS) -> hb.Dataset:
    columns = pa.table(COLUMNS)[: BATCH * steps]
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, batch_size=BATCH)


class Network(nn.Module):
    """Pooled features, a sequence, a dense column, a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = hb.EmbeddingCollection(SCHEMA, hb.make_tables(SCHEMA, dim=4))
        self.norm = nn.BatchNorm1d(9)
        self.hidden = nn.Linear(9, 6)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(6, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        pooled, sequences = self.rows.flat_and_sequences(batch)
        both = torch.cat([pooled, batch.dense["price"].reshape(-1, 1)], 1)
        hidden = self.dropout(torch.relu(self.hidden(self.norm(both))))
        return self.out(hidden).squeeze(1) + sequences["seen"].sum()


def state_of(network: nn.Module) -> Any:
    """Return each bit that training changes: dense weights, and rows with their state."""
    weights = [w.tolist() for w in (*hb.dense_parameters(network), *network.buffers())]
    tables = {table.name: table for table in network.rows.tables}
    return weights, hb.checkpoints.content_digest(tables)


def fresh(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = Network().to(device)
    return network, torch.optim.Adagrad(hb.dense_parameters(network), lr=0.1)


def fit(device: str, grains: int = 1) -> Any:
    """Train and predict; gradients are clipped in a part of the training."""
    network, dense = fresh(device)
    losses: list[float] = []

    class Losses:
        def on_step_end(self, run: Any) -> None:
            losses.append(run.loss.item())

    model = hb.RecModel(network, "bce", dense, grains=grains)
    model.fit(data(), callbacks=[Losses()])
    model.fit(data(2), callbacks=[hb.callbacks.ClipGradients(0.1)])
    return losses, state_of(network), model.predict(data()).tolist()


def fit_by_grains(device: str) -> Any:
    return fit(device, 4)


def plain_loop(device: str) -> Any:
    """Train in a loop of torch: two batches a step, and gradients clipped."""
    network, dense = fresh(device)
    sparse = hb.SparseOptimizer(network)
    losses = []
    for number, batch in enumerate(data().epoch(0)):
        label = torch.from_numpy(batch.labels["click"]).to(device)
        batch = batch.map_arrays(torch.from_numpy)
        dense_columns = {name: values.to(device) for name, values in batch.dense.items()}
        logits = network(hb.Batch(batch.ids, dense_columns))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        loss.backward()
        losses.append(loss.detach())
        if number % 2:
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()
    return [loss.item() for loss in losses], state_of(network)


def scores(device: str) -> list[float]:
    """Score batches, and read all scores in the end: the host is ahead of the device."""
    network = Network().to(device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        network.rows.train()
        rows = [network.rows.flat(batch) for batch in data().epoch(0)]
        return [row.sum().item() for row in rows]


FLOWS: list[Callable[[str], Any]] = [scores, plain_loop, fit, fit_by_grains]


def found(drawn: int) -> Any:
    """Return the flows whose bits differ on the device, the lines that wait, and those needed."""
    queues = devices.install()
    differing = []
    sites: set[devices.Site] = set()
    needed: set[devices.Site] = set()
    for flow in FLOWS:
        expected = flow("cpu")
        for schedule in schedules(drawn):
            queues.reset(schedule)
            if flow("fake") != expected:
                differing.append(f"{flow.__name__}: {schedule}")
        run = functools.partial(flow, "fake")
        sites |= set(wait_sites(queues, run))
        for site in sites - needed:
            if any(finds_removed(queues, run, site, expected, schedules(drawn))):
                needed.add(site)
    return differing, sites, needed


def test_bits_are_those_of_a_cpu_and_each_wait_is_needed() -> None:
    differing, sites, needed = SERVER.call(found, 0)
    assert not differing
    assert {name for name, _ in sites} == {"link.py"}
    assert len(sites) == 4
    assert needed == sites


class ElsewhereEvent(devices.Event):
    """Is recorded on the stream that computes, wherever the copy is."""

    def record(self, stream: Any = None) -> None:
        super().record(torch.get_device_module("fake").default_stream())


def frees_early(link: Any) -> None:
    """Gradients do not live until they have arrived."""
    bring = link.DeviceLink.bring

    def without_sources(self: Any, values: Any) -> Any:
        arrival = bring(self, values)
        arrival._sources = ()
        return arrival

    link.DeviceLink.bring = without_sources


def records_elsewhere(link: Any) -> None:
    """The event of a copy is on another stream than the copy."""
    link.new_event = lambda device: ElsewhereEvent()


def forgets_the_stream(link: Any) -> None:
    """Memory of the stream of copies is used on another one, which its allocator does not know."""
    link.keep_for = lambda values, stream: None


def shares_memory(link: Any) -> None:
    """Results of all batches lie in one memory of the device."""
    send = link.DeviceLink.send
    shared: dict[Any, Tensor] = {}

    def into_shared(self: Any, slot: Any, values: Any) -> list[Tensor]:
        results = send(self, slot, values)
        return [shared.setdefault(part.shape, part).copy_(part) for part in results]

    link.DeviceLink.send = into_shared


def trusts_non_blocking(link: Any) -> None:
    """The host reads a copy that does not block, and does not wait for it."""
    read = link.Arrival.read

    def at_once(self: Any, use: Any) -> Any:
        rest = iter([part.to("cpu", non_blocking=True) for part in self._sources])
        values = [None if part is None else next(rest) for part in self._arriving]
        return read(self, lambda _: use(values))

    link.Arrival.read = at_once


FAULTS = [frees_early, records_elsewhere, forgets_the_stream, shares_memory, trusts_non_blocking]


def flow_that_finds(number: int) -> str:
    """Return the first flow whose bits or whose end a fault changes; "" for none."""
    from hotbed.embedding.device import link

    queues = devices.install()
    expected = [flow("cpu") for flow in FLOWS]
    link._links.clear()
    FAULTS[number](link)
    for flow, bits in zip(FLOWS, expected, strict=True):
        run = functools.partial(flow, "fake")
        if any(finds_removed(queues, run, None, bits, schedules(3))):
            return flow.__name__
    return ""


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.__name__ for fault in FAULTS])
def test_fault_in_the_link_changes_the_bits_of_a_flow(number: int) -> None:
    assert SERVER.call(flow_that_finds, number)


def order_of_grains() -> str:
    """Return in which order results of grains are sent (S), and what they leave is read (R)."""
    from hotbed.embedding.device import link

    devices.install()
    done: list[str] = []

    def noting(letter: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            done.append(letter)
            return function(*arguments)

        return call

    link.DeviceLink.send = noting("S", link.DeviceLink.send)
    link.Arrival.read = noting("R", link.Arrival.read)
    network, dense = fresh("fake")
    hb.RecModel(network, "bce", dense, grains=4).fit(data(1))
    return "".join(done)


def test_host_pools_and_sums_other_grains_while_the_device_computes_one() -> None:
    """Gradients and buffers of a grain are read once the next one is sent; then loss and norms."""
    assert SERVER.call(order_of_grains) == "S" + "SRR" + "SRR" + "SRR" + "RR" + "R"


class Failing(Network):
    """Raises an error of torch in its third forward pass, when the rows are looked up."""

    error: Exception | None = None
    passes = 0

    def forward(self, batch: hb.Batch) -> Tensor:
        logits = super().forward(batch)
        self.passes += 1
        if self.passes == 3 and self.error is not None:
            raise self.error
        return logits


def ended_by(folder: str, error_type: str, device: str) -> Any:
    """Return the message of an error that ends a fit, the saved step, and what the model has."""
    if device == "fake":
        devices.install().reset(devices.Schedule("lazy"))
    torch.manual_seed(0)
    network = Failing().to(device)
    network.error = getattr(torch, error_type)("of torch\nwith more lines")
    dense = torch.optim.Adagrad(hb.dense_parameters(network), lr=0.1)
    model = hb.RecModel(network, "bce", dense)
    checkpoint = hb.callbacks.Checkpoint(folder, every_steps=2)
    with pytest.raises(DeviceError) as raised:
        model.fit(data(), callbacks=[checkpoint])
    return str(raised.value), open_checkpoint(folder).manifest.counters["steps"], state_of(network)


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("OutOfMemoryError", "a step needs more memory than it has, got: of torch. Nothing of"),
        ("AcceleratorError", "it failed in a step, got: of torch. Rows may be a step ahead"),
    ],
)
def test_failure_of_a_device_is_named_and_no_half_step_is_saved(
    tmp_path: Path, error_type: str, message: str
) -> None:
    on_cpu = SERVER.call(ended_by, str(tmp_path / "cpu"), error_type, "cpu")
    text, steps, state = SERVER.call(ended_by, str(tmp_path / "fake"), error_type, "fake")
    assert text.startswith(f"device 'fake:0': {message}")
    assert steps == on_cpu[1] == 2
    assert state == on_cpu[2]


def counted(steps: int) -> Any:
    """Return the copies and waits of so many steps more than `STEPS`, by kind and by line."""
    queues = devices.install()
    totals = []
    for num_steps in (STEPS, STEPS, STEPS + steps):  # the first time, memory is new
        network, dense = fresh("fake")
        model = hb.RecModel(network, "bce", dense)
        devices.counts.clear()
        queues.sites.clear()
        model.fit(data(num_steps))
        totals.append((devices.counts.copy(), queues.sites.copy()))
    (_, (copies, waits), (more_copies, more_waits)) = totals
    return more_copies - copies, sorted((more_waits - waits).values())


def test_copies_and_waits_of_a_step_are_those_that_it_needs() -> None:
    """Columns, pooled rows and a sequence go up; two gradients and the values of the step down."""
    copies, waits = SERVER.call(counted, 8)
    assert copies == {"up, non-blocking": 8 * 3, "down, non-blocking": 8 * 3}
    twice_a_step, four_times = 8 * 2, 8 * 4  # two groups of copies go up, and two come down
    assert waits == [twice_a_step, twice_a_step, twice_a_step, four_times]
