# SPDX-License-Identifier: Apache-2.0
"""A gate publishes good versions and holds bad ones, and decides the same after a kill."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from schedule import in_soak

import hotbed as hb
from hotbed.config import build, describe
from hotbed.errors import ConfigError, PersistError
from hotbed.metrics.stability import stability
from hotbed.persist.container.format import open_checkpoint, open_folder
from hotbed.persist.container.store import open_store
from hotbed.persist.publish.gate import LIMITS, PublishGate
from hotbed.persist.state import saver
from hotbed.persist.state.checkpoint import Capture
from hotbed.persist.upkeep.inspect import describe_checkpoint
from hotbed.persist.upkeep.rollback import number_of_good, roll_back
from hotbed.training.gate.command import call
from hotbed.training.gate.counts import BINS, EventCounter, EventCounts
from hotbed.training.gate.gatekeeper import MOST_USUAL, Gatekeeper
from hotbed.training.gate.held_back import HeldBackEvents, divided
from hotbed.training.gate.rules import (
    RULES,
    SERVED_RULES,
    Difference,
    GateRule,
    VersionFacts,
    against_served,
)
from hotbed.training.watching.history import History
from hotbed.training.watching.readings import readings
from hotbed.training.watching.report import write_report

from .conftest import SCHEMA, columns

ROWS = 8192
BATCH = 128
EVERY = 4  # steps from version to version
BEGIN, END = 5120, 6656  # rows of the fault: three versions
GATE = PublishGate(held_back=0.1, min_samples=400, warm_up=4, sample=512, probation=1)


class Noted(hb.checkpoints.Publisher):
    """Notes the steps whose versions it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def publish(self, saved: Any, *, forced: str | None = None) -> None:
        self.steps.append(open_checkpoint(saved.folder).progress["run"]["step"])


def events(fault: Mapping[str, Any] | None = None, num: int = END) -> dict[str, Any]:
    """Return so many events, of which some columns are replaced while the fault lasts."""
    rows = columns(ROWS)
    for name, change in (fault or {}).items():
        rows[name] = np.concatenate(
            [rows[name][:BEGIN], change(rows[name][BEGIN:END]), rows[name][END:]]
        )
    return {name: values[:num] for name, values in rows.items()}


@dataclass(frozen=True)
class Learned:
    """What a run left: its history, and its states with their gate."""

    history: History
    states: hb.callbacks.Checkpoint

    @property
    def gatekeeper(self) -> Gatekeeper:
        assert self.states.gatekeeper is not None
        return self.states.gatekeeper


def learn(folder: Path, rows: Mapping[str, Any], *callbacks: Any, **save: Any) -> Learned:
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.1))
    model = hb.RecModel(hb.models.FM(SCHEMA, tables), "bce", hb.Adam(lr=0.01), ["auc"])
    steps = save.pop("max_steps", None)
    settings = {"every_steps": EVERY, "wait": True, "gate": GATE, "publish": Noted(), **save}
    states = hb.callbacks.Checkpoint(folder, **settings)
    dataset = hb.Dataset(hb.sources.Memory(rows), SCHEMA, BATCH, prefetch=0)
    history = model.online_train(dataset, [*callbacks, states], max_steps=steps, progress=False)
    return Learned(history, states)


@pytest.fixture(autouse=True)
def without_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no graph, which takes a second."""

    def refuse(*_: Any) -> None:
        raise ConfigError("export: a graph takes seconds")

    monkeypatch.setattr(hb.RecModel, "graph", refuse)


FAULTS: dict[str, dict[str, Any]] = {  # by the rule that holds the first version
    "served_loss": {"y": lambda y: 1 - y},
    "unseen_ids": {"item": lambda item: item + np.arange(len(item))},
    "columns": {"user": lambda user: 0 * user},
    "clock": {"t": lambda t: t + 86_400},
    "repeats": {name: lambda v: v[np.arange(len(v)) // 2 * 2] for name in columns(2)},
}


@pytest.mark.parametrize("rule", in_soak(FAULTS, {"served_loss", "columns"}))
def test_versions_of_a_fault_are_held_and_clean_ones_before_it_are_not(
    rule: str, tmp_path: Path
) -> None:
    publisher = Noted()
    learned = learn(tmp_path, events(FAULTS[rule]), publish=publisher)
    begin = BEGIN // BATCH
    assert publisher.steps[: begin // EVERY + 1] == list(range(0, begin + 1, EVERY))
    held = dict(learned.gatekeeper.log)
    assert begin + EVERY in held
    assert begin + EVERY not in publisher.steps
    assert set(held).isdisjoint(publisher.steps)
    manifests = {}
    store = open_store(tmp_path)
    for folder in store.folders():
        reader = open_folder(store, folder)
        manifests[reader.progress["run"]["step"]] = reader.manifest
    rules = {entry.rule for entry in manifests[begin + EVERY].held or ()}
    assert rule in rules
    assert manifests[begin].held is None


def test_reasons_stand_in_log_metrics_report_and_inspect(tmp_path: Path, caplog: Any) -> None:
    shown: dict[int, dict[Any, float]] = {}

    class Look:
        def on_step_end(self, run: Any) -> None:
            values = [value for value in readings(run) if value.name.startswith("gate_")]
            shown[run.step] = {
                (value.name, *value.labels.values()): value.value for value in values
            }

    rows = events({"y": lambda y: 1 - y})
    learned = learn(tmp_path / "states", rows, Look())
    step = BEGIN // BATCH + EVERY
    assert f"the version at step {step} is saved, not published: loss against" in caplog.text
    assert shown[BEGIN // BATCH][("gate_held_versions",)] == 0
    after = shown[step + 1]
    assert after[("gate_held_versions",)] == after[("gate_held_in_a_row",)] == 1
    assert after[("gate_broken", "served_loss")] == 1
    assert after[("gate_broken", "not_finite")] == 0
    facts = describe_checkpoint(tmp_path / "states")
    assert any("loss against the version" in reason for reason in facts["held"])
    page = tmp_path / "report.html"
    write_report(page, {"stream": learned.history})
    assert "Versions that were not published" in page.read_text()
    assert "loss against the version" in page.read_text()


def test_next_good_version_is_a_full_and_goes_on_from_the_chain(tmp_path: Path) -> None:
    publisher = hb.PublishDirectory(tmp_path / "published", keep=100)
    rows = events({"t": lambda t: t + 86_400}, ROWS)
    learn(tmp_path / "states", rows, publish=publisher, full_every=100, keep=100)
    store = open_store(tmp_path / "published")
    manifests = [open_folder(store, folder).manifest for folder in store.folders()]
    kinds = {manifest.version: manifest.kind for manifest in manifests}
    begin = BEGIN // BATCH
    assert [kinds[step] for step in (0, EVERY, begin)] == ["full", "delta", "delta"]
    assert begin + EVERY not in kinds
    after = [version for version in kinds if version > begin]
    assert kinds[after[0]] == "full"
    assert {kinds[version] for version in after[1:]} <= {"delta", "full"}
    replica = hb.checkpoints.Replica()
    for version in hb.Follower(tmp_path / "published").poll():
        replica.apply(version)
    assert replica.tables


def test_run_that_was_killed_decides_as_an_unbroken_one(tmp_path: Path) -> None:
    moments = [2, BEGIN // BATCH + 6]

    class Kill:
        """Copies what a kill at these steps would leave."""

        def on_step_begin(self, run: Any) -> None:
            if run.step in moments:
                (states,) = run.callbacks.of(hb.callbacks.Checkpoint)
                states._saver.wait()
                shutil.copytree(tmp_path / "states", tmp_path / str(run.step))

    rows = events({"y": lambda y: 1 - y})
    unbroken = learn(tmp_path / "states", rows, Kill())
    held = {step for step, _ in unbroken.gatekeeper.log}
    assert held
    for step in moments:
        publisher = Noted()
        resumed = learn(tmp_path / str(step), rows, publish=publisher)
        assert resumed.gatekeeper.log == unbroken.gatekeeper.log
        np.testing.assert_equal(resumed.gatekeeper.state(), unbroken.gatekeeper.state())
        assert held.isdisjoint(publisher.steps)


def test_no_version_is_compared_with_one_that_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A run whose every second save fails decides as one that saves half as often."""
    rows = events()
    step = BEGIN // BATCH
    unbroken = learn(tmp_path / "unbroken", rows, every_steps=2 * EVERY, max_steps=step)
    write = saver.write

    def write_half(where: Path, captured: Capture, *others: Any) -> Any:
        if captured.manifest.counters["steps"] % (2 * EVERY):
            captured.close(saved=False)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(where, captured, *others)

    monkeypatch.setattr(saver, "write", write_half)
    publisher = Noted()
    broken = learn(tmp_path / "broken", rows, publish=publisher, max_steps=step)
    assert publisher.steps == list(range(0, step + 1, 2 * EVERY))
    assert f"not saved at step {EVERY}" in caplog.text
    assert _rounded(broken.gatekeeper.state()) == _rounded(unbroken.gatekeeper.state())


def _rounded(state: Any) -> Any:
    """Return a state with 9 decimals: a loss may have other last bits in another place of memory."""
    return json.loads(
        json.dumps(state, default=np.ndarray.tolist), parse_float=lambda text: round(float(text), 9)
    )


def test_held_state_is_published_by_force_alone_and_the_gate_goes_on_from_it(
    tmp_path: Path, caplog: Any
) -> None:
    states = tmp_path / "states"
    rows = events({"y": lambda y: 1 - y})
    publisher = hb.PublishDirectory(tmp_path / "published")
    learn(states, rows, publish=publisher, max_steps=BEGIN // BATCH + EVERY)
    held = open_checkpoint(states)
    assert held.manifest.held
    for forced in (None, " "):
        with pytest.raises(PersistError, match="a gate held this state, got loss against"):
            publisher.publish(held, forced=forced)
    version = publisher.publish(held, forced="the labels are right, Ann")
    assert version is not None
    facts = describe_checkpoint(tmp_path / "published")
    assert facts["forced"] == "the labels are right, Ann"
    assert facts["held"]
    caplog.set_level(logging.INFO)
    learn(states, rows, publish=publisher, max_steps=BEGIN // BATCH + 2 * EVERY)
    assert "was published although it was held" in caplog.text
    assert not open_checkpoint(states).manifest.held
    # the state after it is a delta on the version that was forced
    assert open_checkpoint(tmp_path / "published").manifest.kind == "delta"


def test_held_state_is_not_published_by_a_resume(tmp_path: Path) -> None:
    rows = events({"y": lambda y: 1 - y})
    learn(tmp_path, rows, max_steps=BEGIN // BATCH + EVERY)
    publisher = Noted()
    learn(tmp_path, rows, publish=publisher, max_steps=BEGIN // BATCH + EVERY)
    assert publisher.steps == []


def test_newest_good_state_is_kept_and_gone_back_to(tmp_path: Path) -> None:
    rows = events({"y": lambda y: 1 - y})
    learn(tmp_path, rows, full_every=1, keep=1)
    assert open_checkpoint(tmp_path).manifest.held
    facts = roll_back(tmp_path, number_of_good(tmp_path))
    assert open_checkpoint(tmp_path).progress["run"]["step"] == BEGIN // BATCH
    assert not open_checkpoint(tmp_path).manifest.held
    assert len(facts["aside"]) >= 1


def test_command_is_called_once_after_so_many_held_versions(tmp_path: Path) -> None:
    called = tmp_path / "called"
    code = f"import sys; open({str(called)!r}, 'a').write(sys.stdin.read() + '\\n')"
    gate = PublishGate(
        held_back=0.1, min_samples=400, warm_up=4, hold_for=2, command=[sys.executable, "-c", code]
    )
    learn(tmp_path / "states", events({"y": lambda y: 1 - y}), gate=gate)
    (line,) = called.read_text().splitlines()
    message = json.loads(line)
    assert message["held"] == 2
    assert message["step"] == BEGIN // BATCH + 2 * EVERY
    assert message["states"] == str(tmp_path / "states")
    assert any("loss" in reason for reason in message["reasons"])


def test_command_may_be_a_url(tmp_path: Path, caplog: Any) -> None:
    received: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    rows = events({"y": lambda y: 1 - y}, BEGIN + 1024)
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/held"
        gate = PublishGate(held_back=0.1, min_samples=400, warm_up=4, hold_for=1, command=url)
        learn(tmp_path / "states", rows, gate=gate)
        server.shutdown()
        thread.join()
    assert [message["held"] for message in received] == [1]
    call(["/no/such/program"], {})  # training does not depend on it
    assert "the command of the gate failed, got FileNotFoundError" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=answer_badly, args=(other,))
        thread.start()
        call(f"http://127.0.0.1:{other.getsockname()[1]}", {})
        thread.join()
    assert "the command of the gate failed, got BadStatusLine" in caplog.text


def answer_badly(other: socket.socket) -> None:
    """Answer one request by something else than HTTP."""
    connection, _ = other.accept()
    with connection:
        received = b""
        while not received.endswith(b"{}"):
            received += connection.recv(4096)
        connection.sendall(b"+OK\r\n")


def test_rules_are_judged_after_a_warm_up_of_more_versions_than_usual_values(
    tmp_path: Path,
) -> None:
    gate = replace(GATE, warm_up=MOST_USUAL + 2, min_samples=100)
    rows = events({"t": lambda t: t + 86_400})
    first = BEGIN // BATCH + 2
    learned = learn(tmp_path, rows, gate=gate, every_steps=2, max_steps=first)
    reasons = dict(learned.gatekeeper.log)[first]
    assert any("advance of event time" in reason for reason in reasons)


def test_gate_that_holds_nothing_back_changes_no_bit_of_the_model(tmp_path: Path) -> None:
    rows = events(num=2048)
    learn(tmp_path / "with", rows, gate=PublishGate())
    learn(tmp_path / "nothing", rows, gate=PublishGate(held_back=0))
    learn(tmp_path / "without", rows, gate=None)
    digests = [
        hb.checkpoints.content_digest(open_checkpoint(tmp_path / name))
        for name in ("with", "nothing", "without")
    ]
    assert digests[1] == digests[2]
    assert digests[0] != digests[2]


# --- held-back events -----------------------------------------------------------------------------


def batch_of(rows: dict[str, Any]) -> hb.Batch:
    (batch,) = hb.Dataset(hb.sources.Memory(rows), SCHEMA, len(rows["t"]), prefetch=0)
    return batch


def times_of(batch: hb.Batch | None) -> set[int]:
    return set() if batch is None else set(batch.time.tolist())


def test_held_back_events_are_the_same_ones_in_any_batches_and_none_is_learned() -> None:
    whole = batch_of(columns(4000))
    learned, held_back = divided(whole, 0.1)
    assert times_of(learned) | times_of(held_back) == times_of(whole)
    assert times_of(learned).isdisjoint(times_of(held_back))
    assert 300 < len(times_of(held_back)) < 500
    parts = [divided(whole[first : first + 100], 0.1)[1] for first in range(0, 4000, 100)]
    assert set().union(*map(times_of, parts)) == times_of(held_back)
    flipped = columns(4000)
    flipped["y"] = 1 - flipped["y"]
    assert times_of(divided(batch_of(flipped), 0.1)[1]) == times_of(held_back)
    assert divided(whole, 0.0) == (whole, None)


def test_grains_of_a_batch_hold_the_events_that_are_learned() -> None:
    whole = hb.Batch(labels=batch_of(columns(100)).labels, time=np.arange(100), grain_ends=(30, 30))
    learned, held_back = divided(whole, 0.2)
    assert held_back is not None
    ends = [int((learned.time < 30).sum())] * 2
    assert list(learned.grain_ends) == ends


def test_model_learns_no_held_back_event(tmp_path: Path) -> None:
    """Held-back events with wild labels leave the bits of a model as they are."""
    rows = events(num=2048)
    held_back = sorted(times_of(divided(batch_of(rows), 0.1)[1]))
    assert held_back
    places = np.flatnonzero(np.isin(rows["t"] * 1_000_000, held_back))
    others = {**rows, "y": rows["y"].copy()}
    others["y"][places] = 1 - others["y"][places]
    learn(tmp_path / "one", rows)
    learn(tmp_path / "other", others)
    digests = [
        hb.checkpoints.content_digest(open_checkpoint(tmp_path / name)) for name in ("one", "other")
    ]
    assert digests[0] == digests[1]


def test_versions_are_compared_on_the_events_that_both_scored() -> None:
    batch = batch_of(columns(60))
    events_of_gate = HeldBackEvents(25)
    begins = (0, 20, 40)
    for save, begin in enumerate(begins):
        events_of_gate.add(batch[begin : begin + 20])
        everything = events_of_gate.all
        assert everything is not None
        events_of_gate.trust({"": everything.time / 1e6 + 1000 * save}, save)
    trusted = events_of_gate.trusted
    assert trusted is not None
    for version in events_of_gate.past:
        rows, scores = events_of_gate.shared(version, "")
        seconds = trusted.time[rows] / 1e6
        assert (scores == seconds + 1000 * version.save).all()
        assert len(scores) == (0, 5, 25)[version.save]
    again = HeldBackEvents(25)
    again.load_state(events_of_gate.state())
    np.testing.assert_equal(again.state(), events_of_gate.state())


# --- rules ----------------------------------------------------------------------------------------


def sums(**members: Any) -> VersionFacts:
    return VersionFacts(EventCounts(samples=1000.0, **members))


def histogram(*places: int) -> np.ndarray:
    counts = np.zeros(1 + BINS)
    counts[list(places)] = 1000 / len(places)
    return counts


def compared(loss: float, scores: float = 1.0) -> VersionFacts:
    return VersionFacts(differences=[Difference(1, "", loss, scores)], served=1)


def shifted(member: str, *places: int) -> VersionFacts:
    before = EventCounts(**{member: {"user": histogram(1, 2)}})
    return VersionFacts(EventCounts(**{member: {"user": histogram(*places)}}), before)


PLAIN = np.array([1000.0, 100.0, 100.0, 300.0, 100.0])
WORSE = sums(labels={"": PLAIN * [1, 1, 1, 1.2, 1]})
BROKEN: dict[str, tuple[VersionFacts, VersionFacts]] = {
    "not_finite": (VersionFacts(norms={"user": 1.0}), VersionFacts(norms={"user": math.nan})),
    "loss": (sums(labels={"": PLAIN}), WORSE),
    "entropy": (sums(labels={"": PLAIN}), WORSE),
    "calibration": (sums(labels={"": PLAIN}), sums(labels={"": PLAIN * [1, 1, 0.5, 1, 1]})),
    "unseen_ids": (
        sums(tables={"user": np.array([10.0, 0, 0, 1000])}),
        sums(tables={"user": np.array([10.0, 200, 0, 1000])}),
    ),
    "missing_values": (sums(columns={"user": histogram(1)}), sums(columns={"user": histogram(0)})),
    "columns": (shifted("columns", 1, 2), shifted("columns", 3, 4)),
    "scores": (shifted("scores", 1, 2), shifted("scores", 3, 4)),
    "evicted_rows": (
        VersionFacts(EventCounts(tables={"user": np.zeros(4)}), rows={"user": 50}),
        VersionFacts(EventCounts(tables={"user": np.array([0, 0, 500.0, 0])}), rows={"user": 50}),
    ),
    "norms": (
        VersionFacts(served_norms={"user": 1.0}, norms={"user": 1.0}),
        VersionFacts(served_norms={"user": 1.0}, norms={"user": 2.0}),
    ),
    "clock": (sums(seconds=60.0), sums(seconds=60.0, late_seconds=8.64e7)),
    "volume": (sums(seconds=60.0), sums(seconds=600.0)),
    "partitions": (sums(partitions={"0": 5.0, "1": 5.0}), sums(partitions={"0": 5.0, "1": 0.0})),
    "repeats": (sums(), sums(repeated=500.0)),
    "served_loss": (compared(1.0), compared(1.01)),
    "served_scores": (compared(1.0), compared(1.0, 0.5)),
}


@pytest.mark.parametrize("rule", [*RULES, *SERVED_RULES], ids=lambda rule: rule.name)
def test_rule_is_broken_by_what_it_is_for_and_not_by_usual_values(rule: GateRule) -> None:
    good, bad = BROKEN[rule.name]
    usual = {what: [value] * 10 for what, value in rule.measure(good).items()}
    limit = LIMITS[rule.name]
    assert list(rule.broken(rule.measure(good), usual, limit)) == []
    sentences = list(rule.broken(rule.measure(bad), usual, limit))
    assert sentences
    assert all(" is " in sentence and ", usual is at " in sentence for sentence in sentences)
    if rule.needs_usual:
        assert list(rule.broken(rule.measure(bad), {}, limit)) == []


def test_every_rule_has_a_limit() -> None:
    assert {rule.name for rule in (*RULES, *SERVED_RULES)} == LIMITS.keys()


def test_held_version_is_compared_with_what_is_usual_so_many_saves_later() -> None:
    (rule, _) = SERVED_RULES
    facts = VersionFacts(differences=[Difference(saves, "", 1.02) for saves in (1, 2, 3)], served=3)
    measured = rule.measure(facts)
    usual = {
        "loss against the version 1 saves before": [0.001] * 9,
        "loss against the version 2 saves before": [0.03] * 9,
        "loss against the version 3 saves before": [0.0] * 2,  # too few
    }
    values, usual_values = against_served(facts, measured, usual)
    assert list(values) == ["loss against the version 3 saves before"]
    assert list(usual_values.values()) == [[0.03] * 9]
    assert list(rule.broken(values, usual_values, LIMITS["served_loss"])) == []
    assert list(rule.broken(values, {}, LIMITS["served_loss"])) != []


def test_chance_alone_is_no_shift() -> None:
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.ones(BINS))
    indexes = []
    for _ in range(200):
        parts = [np.concatenate([[0], draw.multinomial(n, shares)]) for n in (1000, 4000)]
        indexes.append(stability(*(part.astype(np.float64) for part in parts)))
    assert np.mean(indexes) < 0.02
    assert max(indexes) < 0.1


def test_counts_do_not_depend_on_how_a_stream_is_cut_into_batches() -> None:
    from hotbed.training.step.example import CPU, prepare

    whole = EventCounter()
    parts = EventCounter()
    (batch,) = hb.Dataset(hb.sources.Memory(columns(500)), SCHEMA, 500)
    whole.count((), prepare(batch, CPU, labelled=True), None)
    for first in range(0, 500, 100):
        parts.count((), prepare(batch[first : first + 100], CPU, labelled=True), None)
    np.testing.assert_equal(whole.counts.state(), parts.counts.state())
    whole.count((), prepare(batch, CPU, labelled=True), None)
    assert whole.counts.repeated > 490  # each event came twice; some share a place


def test_gate_is_a_value_of_a_job() -> None:
    limits = {"loss": 0.2, "columns": None}
    gate = PublishGate(limits=limits, hold_for=5, command=["notify"])
    assert build(json.loads(json.dumps(describe(gate))), PublishGate, "gate") == gate
    assert describe(PublishGate()) == {"kind": "publish_gate"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_samples": 0},
        {"held_back": 1},
        {"limits": {"los": 0.1}},
        {"limits": {"loss": -1}},
        {"limits": {1: 0.1}},
        {"limits": None},
        {"command": "notify team"},
        {"command": [1]},
        {"command": []},
        {"command": 5},
        {"hold_for": 0},
    ],
)
def test_wrong_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"PublishGate\.{next(iter(wrong))}"):
        PublishGate(**wrong)


def test_gate_needs_a_publisher_and_a_stream(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Checkpoint\.gate: must be a PublishGate, beside"):
        hb.callbacks.Checkpoint(tmp_path, gate=PublishGate())
    tables = hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.1))
    model = hb.RecModel(hb.models.FM(SCHEMA, tables), "bce", hb.Adam(lr=0.01))
    states = hb.callbacks.Checkpoint(tmp_path, publish=Noted(), gate=PublishGate())
    data = hb.Dataset(hb.sources.Memory(columns(64)), SCHEMA, 64)
    with pytest.raises(ConfigError, match=r"Checkpoint\.gate: it decides of the versions of a st"):
        model.fit(data, callbacks=[states])
    windows = hb.callbacks.Windows(samples=32, scored="shown")
    with pytest.raises(
        ConfigError, match=r"'shown' counts .* a gate that holds back 0\.02 of them"
    ):
        model.online_train(data, [windows, states], progress=False)
