# SPDX-License-Identifier: Apache-2.0
"""Planted faults in recorded streams, and how many bad versions a `PublishGate` lets pass.

A version is bad if its log loss on the 15,000 clean events after the run, which nobody learned, is
more than 1 % above that of the version that is served, or not finite. Each model learns the events
before the stream in two epochs, then the stream in steps of 256 events, and is saved each 8 steps.
One event in ten is held back. A fault lasts 24 steps. The command prints one JSON line a run.

    python tests/planted_faults.py faults movielens "labels flipped" --data DATA
    python tests/planted_faults.py clean mind --seeds 10 --data DATA
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError
from hotbed.training.run import Run

Columns = dict[str, np.ndarray]

BATCH = 256
EVERY = 8  # steps from version to version
FAULT = 3 * EVERY * BATCH
AFTER = 12 * EVERY * BATCH  # events after a fault
NEXT = 15_000  # clean events on which versions are measured
WORSE = 1.01
GATE = hb.checkpoints.PublishGate(held_back=0.1)
SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Time("t", unit="s"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Dense("number", transforms=[hb.transforms.FillMissing(0.0)]),
    ]
)


# --- streams --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Events in the order of time. `start`: the first of the stream; `fault`: of a fault; `end`."""

    read: Callable[[Path], Columns]
    start: int
    fault: int
    end: int


def movielens(data: Path) -> Columns:
    """The newest 330,000 of the ratings of MovieLens 1M that are there; 4 and 5 are positive."""
    folder = data / "ml1m_u2999"
    rows = np.loadtxt(folder / "ratings_early.csv", np.int64, delimiter=",", skiprows=1)[-330_000:]
    years = np.zeros(10_000, np.float32)
    for line in (folder / "movies.dat").read_text(encoding="latin-1").splitlines():
        number, title = line.split(";")[:2]
        years[int(number)] = (int(title[-5:-1]) - 1900) / 100
    user, item, rating, second = rows.T
    positive = (rating >= 4).astype(np.int64)
    return {"user": user, "item": item, "number": years[item], "y": positive, "t": second}


def mind(data: Path) -> Columns:
    """Candidates of the impressions of MIND, clicked or not; the number is that of past clicks."""
    rows = []
    for line in (data / "mind/behaviors.tsv").read_text().splitlines():
        user, when, past, candidates = line.split("\t")[-4:]
        moment = datetime.strptime(when, "%m/%d/%Y %I:%M:%S %p").replace(tzinfo=UTC)
        clicks = min(len(past.split()), 50)
        for candidate in candidates.split():
            item, clicked = candidate.rsplit("-", 1)
            row = (int(moment.timestamp()), int(user[1:]), int(item[1:]), clicks, int(clicked))
            rows.append(row)
    rows.sort(key=lambda row: row[0])
    second, user, item, clicks, clicked = np.array(rows).T
    number = (clicks / 50).astype(np.float32)
    return {"user": user, "item": item, "number": number, "y": clicked, "t": second}


STREAMS = {
    "movielens": Stream(movielens, 80_000, 130_000, 200_000),
    "mind": Stream(mind, 60_000, 100_000, 170_000),
}


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What goes wrong: in the events, in the learning rates, or in the network.

    Attributes:
        change: returns the events of the fault in place of the clean ones.
        rate: factor of the learning rates meanwhile.
        is_nan: whether a parameter becomes NaN.
    """

    change: Callable[[Columns, np.random.Generator], Columns] = lambda rows, draw: rows
    rate: float = 1.0
    is_nan: bool = False


def of_column(name: str, make: Callable[[Columns, np.random.Generator], np.ndarray]) -> Fault:
    return Fault(lambda rows, draw: {**rows, name: make(rows, draw)})


def at_places(rows: Columns, places: np.ndarray) -> Columns:
    return {name: values[places] for name, values in rows.items()}


def half_silent(rows: Columns, draw: np.random.Generator) -> Columns:
    """Leave out half of the users, as if they were in partitions of which nothing comes."""
    return at_places(rows, np.flatnonzero(rows["user"] * 2654435761 % 8 < 4))


def permuted(rows: Columns, draw: np.random.Generator) -> np.ndarray:
    items, places = np.unique(rows["item"], return_inverse=True)
    return items[draw.permutation(len(items))][places]


def lost(rows: Columns, draw: np.random.Generator) -> np.ndarray:
    return np.where(draw.random(len(rows["y"])) < 0.5, 0, rows["y"])


FAULTS: dict[str, Fault] = {
    "labels flipped": of_column("y", lambda rows, draw: 1 - rows["y"]),
    "all labels 0": of_column("y", lambda rows, draw: 0 * rows["y"]),
    "all labels 1": of_column("y", lambda rows, draw: 0 * rows["y"] + 1),
    "labels at random": of_column("y", lambda rows, draw: draw.integers(0, 2, len(rows["y"]))),
    "half of the positives lost": of_column("y", lost),
    "item null": of_column("item", lambda rows, draw: np.full(len(rows["t"]), -1)),
    "number null": of_column(
        "number", lambda rows, draw: np.full(len(rows["t"]), np.nan, np.float32)
    ),
    "items shifted": of_column("item", lambda rows, draw: rows["item"] + 1_000_000),
    "users hashed anew": of_column("user", lambda rows, draw: rows["user"] * 2654435761 % 2**40),
    "items permuted": of_column("item", permuted),
    "user and item swapped": Fault(
        lambda rows, draw: {**rows, "user": rows["item"], "item": rows["user"]}
    ),
    "a stale vocabulary": of_column(
        "item", lambda rows, draw: np.where(rows["item"] % 10 < 6, 0, rows["item"])
    ),
    "one user for all": of_column("user", lambda rows, draw: 0 * rows["user"] + 1),
    "number in other units": of_column("number", lambda rows, draw: rows["number"] * 1000),
    "clock a day ahead": of_column("t", lambda rows, draw: rows["t"] + 86_400),
    "clock a day behind": of_column("t", lambda rows, draw: rows["t"] - 86_400),
    "half of the partitions silent": Fault(half_silent),
    "events twice": Fault(
        lambda rows, draw: at_places(rows, np.repeat(np.arange(len(rows["t"])), 2))
    ),
    "learning rate x100": Fault(rate=100.0),
    "NaN in the network": Fault(is_nan=True),
}


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """A version of a run.

    Attributes:
        step: of the stream.
        loss: on the clean events after the run.
        reasons: why the gate held it.
    """

    step: int
    loss: float
    reasons: list[str]


@dataclass
class Course:
    """The versions of a run, in their order, and the seconds that it took."""

    versions: list[Version] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bad(self) -> list[Version]:
        """Versions that are worse than the version that was served when they were made."""
        return [version for version, served in self._with_served() if is_bad(version, served)]

    @property
    def bad_and_served(self) -> list[Version]:
        return [version for version in self.bad if not version.reasons]

    @property
    def held(self) -> list[Version]:
        return [version for version in self.versions if version.reasons]

    def _with_served(self) -> Iterator[tuple[Version, Version]]:
        served = self.versions[0]
        for number, version in enumerate(self.versions):
            if number > GATE.warm_up:
                yield version, served
            if not version.reasons:
                served = version


def is_bad(version: Version, served: Version) -> bool:
    return not math.isfinite(version.loss) or version.loss > WORSE * served.loss


class Published(hb.checkpoints.Publisher):
    """Notes the steps of the versions that it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def publish(self, saved: Any, *, forced: str | None = None) -> None:
        self.steps.append(hb.checkpoints.open_checkpoint(saved.folder).progress["run"]["step"])


class Watch:
    """Plants a fault of training, and measures each version on clean events of the future."""

    def __init__(
        self, course: Course, model: hb.RecModel, future: Any, fault: Fault, samples: range
    ) -> None:
        self._course = course
        self._model = model
        self._future = future
        self._fault = fault
        self._samples = samples  # of the fault, without those that are held back
        self._factor = 1.0
        self._is_planted = False

    def on_step_begin(self, run: Run) -> None:
        (states,) = run.callbacks.of(hb.callbacks.Checkpoint)
        gatekeeper = states.gatekeeper
        assert gatekeeper is not None
        if run.step % EVERY == 0:  # the state of the step before was saved at its end
            loss = self._model.evaluate(self._future)["log_loss"]
            reasons = [entry.reason for entry in gatekeeper.reasons]
            self._course.versions.append(Version(run.step, loss, reasons))
        is_fault = run.samples in self._samples
        factor = self._fault.rate if is_fault else 1.0
        for optimizer in (run.learner.dense, run.learner.sparse):
            for group in optimizer.param_groups:
                group["lr"] *= factor / self._factor
        self._factor = factor
        if self._fault.is_nan and is_fault and not self._is_planted:
            self._is_planted = True
            with torch.no_grad():
                next(iter(hb.dense_parameters(run.learner.network))).fill_(math.nan)


def train(stream: Stream, rows: Columns, seed: int, fault: Fault | None = None) -> Course:
    """Learn a stream, with a fault in some of its events; a seed leaves 5 % of the events out."""
    draw = np.random.default_rng(seed)
    end = stream.end if fault is None else stream.fault + FAULT + AFTER
    before = at_places(rows, np.arange(stream.start))
    future = at_places(rows, np.arange(end, end + NEXT))
    places = np.arange(stream.start, end)
    if seed:
        places = places[draw.random(len(places)) > 0.05]
    events = at_places(rows, places)
    begin = stream.fault - stream.start
    changed = at_places(events, np.arange(begin, begin + FAULT))
    if fault is not None:
        changed = fault.change(changed, draw)
        events = {
            name: np.concatenate([values[:begin], changed[name], values[begin + FAULT :]])
            for name, values in events.items()
        }
    torch.manual_seed(seed)
    tables = hb.make_tables(SCHEMA, 8, rule=hb.Adagrad(lr=0.02), seed=seed)
    network = hb.models.DeepFM(SCHEMA, tables, hidden=(16,))
    model = hb.RecModel(network, "bce", hb.Adam(lr=0.01), metrics=["log_loss"])
    early = hb.Dataset(hb.sources.Memory(before), SCHEMA, BATCH, shuffle=100_000, seed=seed)
    model.fit(early, epochs=2, progress=False)
    model.learner.dense.param_groups[0]["lr"] = 3e-4
    course = Course()
    share = 1 - GATE.held_back
    samples = range(int(share * begin), int(share * (begin + len(changed["t"]))))
    data = hb.Dataset(hb.sources.Memory(future), SCHEMA, NEXT)
    watch = Watch(course, model, data, fault or Fault(), samples)
    publisher = Published()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, suppress(HotbedError):  # of a NaN
        states = hb.callbacks.Checkpoint(
            folder, EVERY, publish=publisher, gate=GATE, wait=True, full_every=50
        )
        dataset = hb.Dataset(hb.sources.Memory(events), SCHEMA, BATCH)
        model.online_train(dataset, [watch, states], progress=False)
    course.seconds = time.perf_counter() - started
    assert states.gatekeeper is not None
    held = {step for step, _ in states.gatekeeper.log}
    assert held.isdisjoint(publisher.steps)
    return course


def summary(stream: str, name: str, course: Course) -> dict[str, Any]:
    return {
        "stream": stream,
        "run": name,
        "versions": len(course.versions),
        "bad": len(course.bad),
        "bad and served": [version.step for version in course.bad_and_served],
        "held": [version.step for version in course.held],
        "reasons": course.held[0].reasons[:3] if course.held else [],
        "seconds": round(course.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("clean", "faults"))
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("names", nargs="*", help="names of faults; none: all of them")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    a = parser.parse_args()
    torch.set_num_threads(1)
    stream = STREAMS[a.stream]
    rows = stream.read(a.data)
    no_graph = ConfigError("export: a graph takes seconds, and no server follows")
    courses = []
    with patch.object(hb.RecModel, "graph", side_effect=no_graph):
        names = [str(seed) for seed in range(a.seeds)]
        if a.what == "faults":
            names = a.names or list(FAULTS)
        for name in names:
            if a.what == "faults":
                course = train(stream, rows, 0, FAULTS[name])
            else:
                course = train(stream, rows, int(name))
            courses.append(course)
            print(json.dumps(summary(a.stream, name, course)), flush=True)
    total = {
        "stream": a.stream,
        "runs": len(courses),
        "versions": sum(len(course.versions) for course in courses),
        "held": sum(len(course.held) for course in courses),
        "runs with a bad version": sum(bool(course.bad) for course in courses),
        "bad": sum(len(course.bad) for course in courses),
        "bad and served": sum(len(course.bad_and_served) for course in courses),
    }
    print(json.dumps(total), flush=True)


if __name__ == "__main__":
    main()
