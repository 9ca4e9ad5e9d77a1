# SPDX-License-Identifier: Apache-2.0
"""The dense part on a device: named, moved to, saved from, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import devices
import torch
from devices import Schedule, finds_removed, schedules, wait_sites
from devices.operations import launch
from forked import SERVER, LogLines, ranks_of
from schedule import in_soak

import hotbed as hb
from hotbed.cli.device import print_checks
from hotbed.cli.show import console
from hotbed.embedding.device import link_to, named_failure
from hotbed.embedding.device.link import DeviceLink
from hotbed.embedding.lookups import LocalLookup
from hotbed.embedding.modules import RowTargets, compiled
from hotbed.errors import ConfigError, MissingExtra
from hotbed.job.job import Fit, Job
from hotbed.training.device_checks import checks
from hotbed.training.devices import places
from hotbed.training.devices.step_times import StepParts

DRAW = np.random.default_rng(0)
ROWS = {
    "item": DRAW.integers(0, 40, 192),
    "price": DRAW.normal(size=192).astype(np.float32),
    "click": (DRAW.random(192) < 0.3).astype(np.float32),
}
SCHEMA = hb.Schema([hb.Label("click"), hb.Id("item"), hb.Dense("price")])


def data() -> hb.Dataset:
    return hb.Dataset(hb.sources.Memory(ROWS), SCHEMA, batch_size=32)


def network() -> Any:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, dim=4)
    return hb.models.DNN(SCHEMA, tables, hidden=[8])


def model(device: str | None = None, **arguments: Any) -> hb.RecModel:
    """Return a model that has not learned; its optimizer has one kernel on all devices."""
    arguments = {"optimizer": "rmsprop", **arguments}
    return hb.RecModel(network(), "bce", metrics={"auc"}, device=device, **arguments)


def bits_of(trained: hb.RecModel) -> Any:
    """Return the dense weights of a model, the content of its tables, and its scores."""
    weights = hb.dense_parameters(trained.network)
    digest = hb.checkpoints.content_digest(trained.tables)
    return [weight.tolist() for weight in weights], digest, trained.predict(data()).tolist()


def refusal(call: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cpu:1", "meta", "gpu"])
def test_device_that_is_absent_is_refused_by_name(name: str, tmp_path: Path) -> None:
    expected = f"device: this machine has no such device, got '{name}'. Leave it out"
    assert refusal(lambda: model(name)).startswith(expected)
    model().save(tmp_path)
    assert refusal(lambda: hb.load(tmp_path, device=name)).startswith(f"load: {expected}")
    job = Job(SCHEMA, "dnn", hb.sources.Memory(ROWS), fit=Fit(device=name))
    assert refusal(lambda: job.rec_model(SCHEMA)).startswith(f"job.fit.{expected}")


def on_both(folder: str) -> Any:
    """Return what models have that began, resumed or were loaded on a device or on the CPU."""
    devices.install().reset(Schedule("lazy"))
    lines = LogLines()
    logging.getLogger("hotbed.persist").addHandler(lines)
    fits: dict[str, Any] = {}
    for name, then in {"cpu": "cpu", "fake": "fake", "to fake": "fake", "to cpu": "cpu"}.items():
        first = {"to fake": "cpu", "to cpu": "fake"}.get(name, name)
        for device, steps in ((first, 4), (then, 12)):
            trained = model(device)
            checkpoint = hb.callbacks.Checkpoint(f"{folder}/{name}", every_steps=4)
            trained.fit(data(), None, 2, [checkpoint], progress=False, max_steps=steps)
        fits[name] = (str(trained.device), *bits_of(trained))
    loaded = []
    for device in (None, "fake:0"):
        there = hb.load(f"{folder}/fake", device=device)
        loaded.append((str(there.device), *bits_of(there)))
    return fits, loaded, lines.lines


def test_states_are_saved_on_a_device_and_resumed_on_the_cpu_and_back(tmp_path: Path) -> None:
    fits, loaded, lines = SERVER.call(on_both, str(tmp_path))
    devices_of = {name: fit[0] for name, fit in fits.items()}
    assert devices_of == {"cpu": "cpu", "fake": "fake:0", "to fake": "fake:0", "to cpu": "cpu"}
    assert len({str(fit[1:]) for fit in fits.values()}) == 1
    assert [of_load[0] for of_load in loaded] == ["cpu", "fake:0"]
    assert {str(of_load[1:]) for of_load in loaded} == {str(fits["cpu"][1:])}
    changes = [line.partition(": ")[2] for line in lines if "machine.device" in line]
    assert [change.partition(";")[0] for change in changes] == [
        "machine.device was 'cpu', resumed with 'fake'",
        "machine.device was 'fake', resumed with 'cpu'",
    ]


def moved_and_refused() -> Any:
    """Return where the parts of a model lie that RecModel moved, and what it refuses to move."""
    devices.install()
    before = network()
    evaluation = torch.nn.Linear(1, 1)
    moved = hb.RecModel(
        before,
        torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(())),
        torch.optim.SGD(hb.dense_parameters(before), lr=0.1),
        eval_network=evaluation,
        device="fake",
    )
    parts = (*hb.dense_parameters(moved.network), *evaluation.parameters())
    places = {str(part.device) for part in parts}
    loss = moved.fit(data(), progress=False).epochs[0]["loss"]
    rows = {str(rows.device) for rows in moved.learner.network_pass.row_parameters}
    unmoved = network()
    adagrad = torch.optim.Adagrad(hb.dense_parameters(unmoved), lr=0.1)
    refusals = [
        refusal(lambda: hb.RecModel(unmoved, "bce", adagrad, device="fake")),
        refusal(lambda: model("fake:3")),
    ]
    return places, rows, loss, refusals


def test_network_loss_and_evaluation_are_moved_and_a_stale_optimizer_is_refused() -> None:
    places, rows, loss, (stale, absent) = SERVER.call(moved_and_refused)
    assert (places, rows) == ({"fake:0"}, {"cpu"})
    assert 0 < loss < 1
    assert "does not follow a network to fake:0, got Adagrad" in stale
    assert absent.endswith("Give one of ['cpu', 'fake:0'].")


class Plain(torch.nn.Module):
    """A model of torch alone, for hb.auto."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = torch.nn.Embedding(40, 4)
        self.top = torch.nn.Linear(5, 1)

    def forward(self, item: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.item(item), price[:, None]], 1)).squeeze(1)


def converted(device: str) -> hb.RecModel:
    plain = Plain().to(device)
    plain, optimizer, _ = hb.auto(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return hb.RecModel(plain, "bce", optimizer)


MADE = {"hb.models": model, "hb.auto": converted}


def exported(kind: str, folder: str) -> Any:
    """Return what a model on a device and what is served of it score, and where it is then."""
    devices.install()
    on_device = MADE[kind]("fake")
    on_device.fit(data(), progress=False)
    parameters = hb.dense_parameters(on_device.network)
    on_device.export(folder)
    assert hb.dense_parameters(on_device.network) == parameters
    places = {str(parameter.device) for parameter in parameters}
    session = hb.InferenceSession(folder)
    served = session.predict({name: ROWS[name] for name in ("item", "price")})
    trained = on_device.predict(data())
    on_device.fit(data(), progress=False)
    return np.asarray(served).tolist(), trained.tolist(), places


@pytest.mark.parametrize("kind", in_soak(MADE, quick={"hb.auto"}))
def test_model_on_a_device_is_exported_and_served_on_the_cpu(kind: str, tmp_path: Path) -> None:
    served, trained, places = SERVER.call(exported, kind, str(tmp_path))
    assert places == {"fake:0"}
    np.testing.assert_allclose(served, trained, rtol=1e-6)


def checked() -> Any:
    """Return what the command prints of a sound device, and how a check fails without each wait."""
    queues = devices.install()
    queues.reset(Schedule("lazy"))
    small = checks.Size(steps=3, samples=16, rounds=6, copied_bytes=1 << 14)
    patch.object(checks, "Size", lambda: small).start()  # its fork ends with this test
    patch.object(hb.RecModel, "graph", no_extra).start()  # exports have a test of their own
    with console.capture() as printed:
        sound = print_checks("fake")
    waits = checks.DeviceChecks(torch.device("fake:0")).check_waits
    failures = {
        site: list(finds_removed(queues, waits, site, waits(), schedules(drawn=2)))
        for site in wait_sites(queues, waits)
        if site[0] == "link.py"  # the check itself waits to measure time
    }
    queues.reset(Schedule("lazy"))
    bring = DeviceLink.bring

    def one_bit_off(link: DeviceLink, values: Any) -> Any:
        return bring(link, [None if part is None else part * (1 + 2**-23) for part in values])

    with patch.object(DeviceLink, "bring", one_bit_off), console.capture() as of_bad:
        usable = print_checks("fake")
    return sound, printed.get(), failures, usable, of_bad.get()


def no_extra(model: hb.RecModel) -> Any:
    raise MissingExtra("export")


def test_doctor_passes_a_sound_device_and_refuses_one_that_loses_a_bit() -> None:
    sound, printed, failures, usable, of_bad = SERVER.call(checked)
    assert sound, printed
    assert "fake:0 passed all 8 checks." in printed
    assert "no export without hotbed[export]" in printed
    assert len(failures) == 4
    assert all(failures.values()), failures
    assert not usable
    assert "FAILED rows: tables that learned on the device differ" in of_bad
    assert "failed 2 of 8 checks: waits under load, rows" in of_bad


SLOW_SECONDS = 0.02


def timed() -> Any:
    """Return where time goes in a fit whose sums of gradients and whose network are slow."""
    devices.install().reset(Schedule("lazy"))
    on_device = model("fake")
    on_device.network.register_forward_hook(lambda *_: launch(lambda: time.sleep(SLOW_SECONDS)))
    sum_gradients = LocalLookup.sum_gradients

    def slow_sums(*arguments: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return sum_gradients(*arguments)

    lines = LogLines()
    logging.getLogger("hotbed").addHandler(lines)
    logging.getLogger("hotbed").setLevel(logging.INFO)
    with patch.object(LocalLookup, "sum_gradients", slow_sums):
        times = on_device.fit(data(), progress=False).step_times
    few = on_device.fit(data(), progress=False, max_steps=3).step_times
    link = link_to(torch.device("fake:0"))
    first, second = (link.bring([torch.ones(1).to("fake")]) for _ in range(2))
    assert first._computing[1] is second._computing[0], "no time counts twice"
    return times, few, [line for line in lines.lines if "a step took" in line]


def test_fit_on_a_device_says_where_the_time_of_a_step_went() -> None:
    times, few, lines = SERVER.call(timed)
    assert times.rows >= SLOW_SECONDS
    assert times.device >= SLOW_SECONDS
    assert times.copies > 0
    assert times.step >= times.rows
    assert few is None
    assert lines == [f"fake:0: {times}"]


def test_line_of_a_step_says_what_would_help() -> None:
    of_rows = StepParts(3.6e-3, 2.1e-3, 0.5e-3, 1.0e-3, threads=8, cores=32)
    assert str(of_rows) == (
        "a step took 3.60 ms: rows 2.10, copies 0.50, device 1.00, the rest 0.00. The work on rows "
        "limits: hb.set_num_threads(16) instead of 8 gives about 1.3x. With grains the parts "
        "overlap: at best 1.7x."
    )
    limits = {
        "rows": "a host with more cores than 4",
        "copies": "narrower tables",
        "device": "rows on the host suffice",
        "rest": "larger batches",
    }
    for limit, text in limits.items():
        parts = {name: 9e-3 if name == limit else 0.1e-3 for name in ("rows", "copies", "device")}
        line = str(StepParts(9.3e-3, **parts, threads=4, cores=4))
        assert text in line
        assert "With grains" not in line


def travelled(grains: int) -> Any:
    """Return the copies and blocking operations of four steps that clip gradients, by kind."""
    queues = devices.install()
    totals = []
    for steps in (1, 2, 6):  # the first time, memory is new
        queues.reset(Schedule())
        trained = model("fake", grains=grains)
        devices.counts.clear()
        clip = hb.callbacks.ClipGradients(0.1)
        trained.fit(data(), progress=False, max_steps=steps, callbacks=[clip])
        totals.append(devices.counts.copy())
    _, few, many = totals
    return many - few


def test_clipping_reads_nothing_of_its_own_and_ranks_bring_dense_sums_once() -> None:
    """The norms come with the values of the step. Ranks also compare the dense parameters."""
    gradients_and_values, sums, parameters = 2, 1, 4
    clipped = {"up, non-blocking": 4 * 2, "down, non-blocking": 4 * gradients_and_values}
    assert SERVER.call(travelled, 1) == clipped
    of_rank = {"up, non-blocking": 4 * (2 + sums)}
    of_rank["down, non-blocking"] = 4 * (gradients_and_values + sums + parameters)
    assert ranks_of(travelled, 2, 2) == [of_rank, of_rank]


def blocking() -> list[int]:
    """Return the blocking copies down of a pass with weights that learn, and of `RowTargets`."""
    devices.install().reset(Schedule())
    collection = hb.EmbeddingCollection(SCHEMA, hb.make_tables(SCHEMA, dim=4)).to("fake")
    ids = torch.tensor([1, 2, 3])
    weights = torch.ones(3).to("fake").requires_grad_()
    numbers = []
    for flow, inputs in (
        (collection.flow, hb.Ids(ids, None, weights)),
        (RowTargets(), hb.Ids(ids)),
    ):
        collection.flow = flow
        devices.counts.clear()
        collection.flat({"item": inputs}).sum().backward()
        numbers.append(devices.counts["down, blocking"])
    return numbers


def test_weights_that_learn_and_row_targets_wait_as_often_as_the_docs_say() -> None:
    in_forward, in_backward = 1, 1
    assert SERVER.call(blocking) == [in_forward + in_backward, in_backward]


def of_links() -> Any:
    """Return a sum of rows whose gradient was overwritten, and what a full memory is reported as.

    Compiled code uses memory again once an operator that reads it has returned.
    """
    devices.install().reset(Schedule("main"))
    collection = hb.EmbeddingCollection(SCHEMA, hb.make_tables(SCHEMA, dim=4)).to("fake")
    nothing = torch.empty(0, dtype=torch.int64)
    ids = torch.tensor([1, 2, 3])
    _, ticket = compiled.pool(
        collection.anchor, [ids], [nothing], [nothing], nothing, collection.number, True, True
    )
    gradient = torch.ones(3, 4).to("fake")
    compiled.receive(ticket, [gradient], collection.number)
    gradient.zero_()
    sums = collection.rows[0].grad.tolist()
    device = torch.device("fake:0")
    before = link_to(device).pinned_bytes
    link_to(device).bring([torch.ones(100, 4).to("fake")]).drop()
    pinned = link_to(device).pinned_bytes
    message = str(named_failure(torch.OutOfMemoryError("out of memory"), device))
    return sums, before, pinned, message


def test_memory_of_compiled_code_may_change_and_pinned_memory_is_named_when_it_is_full() -> None:
    sums, before, pinned, message = SERVER.call(of_links)
    assert sums == [[1.0] * 4] * 3
    assert before < 100 * 4 * 4 <= pinned
    assert f"Hotbed has pinned {pinned:,} bytes of the host for its copies." in message


def of_rank(device: str) -> Any:
    """Return where a rank computes, the dense weights after a fit by grains, and the scores."""
    devices.install().reset(Schedule("lazy"))
    trained = model(device, grains=2)
    trained.fit(data(), progress=False, callbacks=[hb.callbacks.ClipGradients(0.1)])
    weights = [weight.tolist() for weight in hb.dense_parameters(trained.network)]
    return str(trained.device), weights, trained.predict(data()).tolist()


def test_ranks_compute_on_a_device_each_and_have_the_bits_of_one_process_on_the_cpu() -> None:
    (expected,) = ranks_of(of_rank, 1, "cpu")
    for device, weights, scores in ranks_of(of_rank, 2, "fake"):
        assert device == "fake:0"
        assert (weights, scores) == expected[1:]


def test_ranks_share_out_the_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "trains_together", lambda: True)
    monkeypatch.setattr(places, "_num_devices", lambda kind: 2)
    for rank in range(4):
        monkeypatch.setattr(places, "local_rank", lambda number=rank: number)
        assert places.find_device("device", "cuda") == torch.device("cuda", rank % 2)
        assert places.find_device("device", "cuda:0") == torch.device("cuda", 0)


def in_mixed_precision() -> Any:
    """Return what mixed precision leaves under several orders of the device's work.

    It computes in float16, and one batch overflows.
    """
    queues = devices.install()
    results = []
    for schedule in (Schedule(), Schedule("lazy"), Schedule("main"), Schedule("random", 1)):
        queues.reset(schedule)
        trained = model("fake", amp_level="O2")
        scaler = trained.learner.network_pass.scaler
        losses = []
        for number, batch in enumerate(data()):
            if number == 2:
                scaler.update(2.0**100)
            losses.append(trained.step(batch))
            if number == 2:
                scaler.update(1024.0)
        results.append((losses, trained.learner.skipped, bits_of(trained)))
    return results, [model("cpu").step(batch) for batch in list(data())[:1]]


def test_mixed_precision_on_a_device_waits_for_its_scale_and_skips_an_overflow() -> None:
    results, of_cpu = SERVER.call(in_mixed_precision)
    losses, skipped, _ = results[0]
    assert {str(result) for result in results} == {str(results[0])}
    assert skipped == 1
    assert losses[:1] != of_cpu
    assert losses[0] == pytest.approx(of_cpu[0], abs=1e-2)


def of_a_loader() -> list[str]:
    """Return what is logged of ids that a loop brings to the device."""
    devices.install()
    plain = Plain().to("fake")
    plain, _, _ = hb.auto(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    lines = LogLines()
    logging.getLogger("hotbed").addHandler(lines)
    price = torch.ones(3).to("fake")
    for ids in (torch.arange(3), torch.arange(3).to("fake"), torch.arange(3, 6).to("fake")):
        plain(ids, price)
    return [line for line in lines.lines if "its ids lie on" in line]


def test_ids_that_a_loader_brings_to_the_device_are_logged_once() -> None:
    (line,) = SERVER.call(of_a_loader)
    assert "its ids lie on fake:0, so each lookup waits" in line


SCRIPT = Path(__file__).parents[3] / "benchmarks/device.py"


def of_the_script() -> Any:
    """Return what the script for a real device finds of the fake one, in its short form."""
    devices.install().reset(Schedule("lazy"))
    spec = importlib.util.spec_from_file_location("device_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.TRIES = 1
    device = torch.device("fake:0")
    found = script.waits(device, script.SHORT)["found"]
    steps = script.trained(16, 5, "fake", 2)
    sys.argv = ["device.py", "--device", "fake", "--sections"]
    printed = StringIO()
    with redirect_stdout(printed):
        script.main()
    return found, steps, json.loads(printed.getvalue())


def test_script_for_a_real_device_finds_each_wait_that_it_takes_out() -> None:
    found, steps, printed = SERVER.call(of_the_script)
    assert list(found.values()) == [1, 1, 1, 1]
    assert "a step took" in steps["step"]
    assert printed["device"] == "fake:0"
    assert printed["sections"] == {}
