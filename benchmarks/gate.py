# SPDX-License-Identifier: Apache-2.0
"""The gate before publishing: planted faults, and clean streams that it must let pass.

`clean` runs each stream with several seeds and counts the versions that were held. `faults` plants
each fault in each stream. A version is bad if its log loss on the next 2,000 clean events is more
than 2 % above that of a run without the fault at the same step. Both print one JSON line a run.

    python benchmarks/gate.py clean ../shared/data/ml1m_u2999/ratings_early.csv --seeds 20
    python benchmarks/gate.py faults ../shared/data/ml1m_u2999/ratings_early.csv
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.persist.container.format import Saved

ROOT = Path(__file__).resolve().parent.parent
Columns = dict[str, np.ndarray]

EVERY = 8  # steps from version to version
BATCH = 128
STREAMS = ("movielens", "simulated")
NEXT = 2_000  # clean events on which a version is measured
WORSE = 1.02
RATINGS = 42_000
BEGIN = 0.6
"""Share of the stream before the fault."""


# --- streams --------------------------------------------------------------------------------------


def movielens(seed: int, ratings: str) -> Columns:
    """Ratings of MovieLens 1M in the order of time; a seed leaves 5 % of them out."""
    events = hb.sources.Csv(ratings).sort("timestamp")
    parts = [batch for batch, _ in events.read()]
    names = {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "t"}
    rows = {
        new: np.concatenate([part.column(old).to_numpy(zero_copy_only=False) for part in parts])
        for old, new in names.items()
    }
    kept = np.random.default_rng(seed).random(len(rows["t"])) > 0.05
    kept[RATINGS:] = False
    years = np.zeros(10_000, np.float32)
    for line in Path(ratings).with_name("movies.dat").read_text(encoding="latin-1").splitlines():
        number, title = line.split(";")[:2]
        years[int(number)] = int(title[-5:-1]) - 1900
    return {
        "user": rows["user"][kept].astype(np.int64),
        "item": rows["item"][kept].astype(np.int64),
        "number": years[rows["item"][kept].astype(np.int64)],
        "y": (rows["rating"][kept] >= 4).astype(np.int64),
        "t": rows["t"][kept].astype(np.int64),
    }


def simulated(seed: int, days: int = 2) -> Columns:
    """Clicks of 3,000 users on 800 items, of which some are new each day, by day and by night."""
    draw = np.random.default_rng(seed)
    world = np.random.default_rng(7)
    number = 16_000 * days
    seconds = np.sort(draw.random(2 * number)) * days * 86_400
    by_day = 1 + 0.6 * np.sin(2 * np.pi * seconds / 86_400)
    seconds = seconds[draw.random(len(seconds)) < by_day / 2]
    users = (3_000 * draw.power(0.5, len(seconds))).astype(np.int64)
    items = (800 * draw.power(0.4, len(seconds))).astype(np.int64)
    items += (seconds // 86_400).astype(np.int64) * 40  # a part of the items is new each day
    taste = world.normal(size=(3_000, 4))
    quality = world.normal(size=(2_000, 4))
    bias = world.normal(size=2_000) - 1.5
    price = draw.lognormal(1, 0.5, len(seconds)).astype(np.float32)
    logit = bias[items] + (taste[users] * quality[items]).sum(axis=1) * 0.5 - 0.3 * np.log(price)
    clicks = draw.random(len(seconds)) < 1 / (1 + np.exp(-logit))
    return {
        "user": users,
        "item": items,
        "number": price,
        "y": clicks.astype(np.int64),
        "t": 1_700_000_000 + seconds.astype(np.int64),
    }


def events_of(stream: str, seed: int, ratings: str) -> Columns:
    return simulated(seed) if stream == "simulated" else movielens(seed, ratings)


SCHEMA = hb.Schema(
    [
        hb.Label("y"),
        hb.Time("t", unit="s"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Dense("number", transforms=[hb.transforms.FillMissing(0.0)]),
    ]
)


# --- faults ---------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What goes wrong in the events from `begin` to `end`, or in the steps that learn them.

    Attributes:
        change: returns the events of the fault in place of the clean ones.
        rate: factor of the learning rates meanwhile.
    """

    change: Callable[[Columns, np.random.Generator], Columns] = lambda rows, draw: rows
    rate: float = 1.0


def with_(name: str, make: Callable[[Columns, np.random.Generator], np.ndarray]) -> Fault:
    """A fault of one column."""
    return Fault(lambda rows, draw: {**rows, name: make(rows, draw)})


def taken(rows: Columns, places: np.ndarray) -> Columns:
    return {name: values[places] for name, values in rows.items()}


def half_silent(rows: Columns, draw: np.random.Generator) -> Columns:
    """Leave out the partitions of half of the users."""
    return taken(rows, np.flatnonzero(rows["user"] * 2654435761 % 8 < 4))


def repeated(rows: Columns, draw: np.random.Generator) -> Columns:
    return taken(rows, np.repeat(np.arange(len(rows["t"])), 2))


def labels_of(rows: Columns, share: float, value: int, draw: np.random.Generator) -> np.ndarray:
    return np.where(draw.random(len(rows["y"])) < share, value, rows["y"])


FAULTS: dict[str, Fault] = {
    "labels flipped": with_("y", lambda rows, draw: 1 - rows["y"]),
    "all labels 0": with_("y", lambda rows, draw: 0 * rows["y"]),
    "all labels 1": with_("y", lambda rows, draw: 0 * rows["y"] + 1),
    "labels at random": with_("y", lambda rows, draw: draw.integers(0, 2, len(rows["y"]))),
    "labels of other events": with_("y", lambda rows, draw: draw.permutation(rows["y"])),
    "half of the positives lost": with_("y", lambda rows, draw: labels_of(rows, 0.5, 0, draw)),
    "item null": with_("item", lambda rows, draw: np.full(len(rows["t"]), -1)),
    "number null": with_("number", lambda rows, draw: np.full(len(rows["t"]), np.nan, np.float32)),
    "items shifted": with_("item", lambda rows, draw: rows["item"] + 1_000_000),
    "users hashed anew": with_("user", lambda rows, draw: rows["user"] * 2654435761 % 2**40),
    "items permuted": with_(
        "item",
        lambda rows, draw: np.unique(rows["item"])[draw.permutation(len(np.unique(rows["item"])))][
            np.searchsorted(np.unique(rows["item"]), rows["item"])
        ],
    ),
    "user and item swapped": Fault(
        lambda rows, draw: {**rows, "user": rows["item"], "item": rows["user"]}
    ),
    "a stale vocabulary": with_(
        "item", lambda rows, draw: np.where(rows["item"] % 10 < 6, 0, rows["item"])
    ),
    "one user for all": with_("user", lambda rows, draw: 0 * rows["user"] + 1),
    "number in other units": with_("number", lambda rows, draw: rows["number"] * 1000),
    "clock a day ahead": with_("t", lambda rows, draw: rows["t"] + 86_400),
    "clock a day behind": with_("t", lambda rows, draw: rows["t"] - 86_400),
    "half of the partitions silent": Fault(half_silent),
    "events twice": Fault(repeated),
    "learning rate x100": Fault(rate=100.0),
}


# --- runs -----------------------------------------------------------------------------------------


class Noted(hb.checkpoints.Publisher):
    """Notes the steps whose versions it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def publish(self, saved: Saved) -> None:
        self.steps.append(hb.checkpoints.open_checkpoint(saved.folder).progress["run"]["step"])


@dataclass
class Course:
    """What a run did.

    Attributes:
        losses: log loss on the next clean events, by step of each version.
        published: steps of the versions that were published.
        reasons: why versions were held, by step.
        values: what each rule measured, by step.
    """

    losses: dict[int, float] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    values: dict[int, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    seconds: float = 0.0


class Watch:
    """Measures the version of each save on the clean events that come next, and plants a rate."""

    def __init__(self, course: Course, clean: Columns, places: np.ndarray, rate: Any) -> None:
        self._course = course
        self._clean = clean
        self._places = places
        self._rate = rate
        self._factor = 1.0

    def on_step_end(self, run: Any) -> None:
        learned = run.samples
        if run.step % EVERY == 0:
            begin = int(self._places[min(learned, len(self._places) - 1)])
            rows = {name: values[begin : begin + NEXT] for name, values in self._clean.items()}
            if len(rows["t"]):
                loss = run.model.evaluate(hb.Dataset(hb.sources.Memory(rows), SCHEMA, NEXT))
                self._course.losses[run.step] = loss["log_loss"]
        factor = self._rate(learned)
        if factor != self._factor:
            for optimizer in (run.learner.dense, run.learner.sparse):
                for group in optimizer.param_groups:
                    group["lr"] *= factor / self._factor
            self._factor = factor


def train(stream: str, clean: Columns, seed: int, fault: Fault, length: int, gate: Any) -> Course:
    """Learn events with a fault in `length` of them, after 60 % of the stream."""
    number = len(clean["t"])
    first = int(BEGIN * number)
    part = {name: values[first : first + length] for name, values in clean.items()}
    changed = fault.change(part, np.random.default_rng(seed))
    rows = {
        name: np.concatenate([values[:first], changed[name], values[first + length :]])
        for name, values in clean.items()
    }
    extra = len(changed["t"]) - length
    places = np.arange(number + extra)  # of the clean event after each learned one
    places[first + length + extra :] -= extra
    places[first : first + length + extra] = first + length
    end = first + length + extra
    if length:  # twelve versions after the fault are enough
        rows = {name: values[: end + 12 * EVERY * BATCH] for name, values in rows.items()}
    torch.manual_seed(seed)
    tables = hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.05), seed=seed)
    network = hb.models.DeepFM(SCHEMA, tables, hidden=(16,))
    model = hb.RecModel(network, "bce", hb.Adam(), metrics=["log_loss"])
    course = Course()
    publisher = Noted()
    with tempfile.TemporaryDirectory() as folder:
        states = hb.callbacks.Checkpoint(
            folder, every_steps=EVERY, publish=publisher, gate=gate, wait=True, full_every=50
        )
        callbacks = [Recorder(course, states), states]
        if length or gate is None:  # else nothing is compared
            rate = lambda at: fault.rate if first <= at < end else 1.0  # noqa: E731
            callbacks.insert(0, Watch(course, clean, places, rate))
        began = time.perf_counter()
        data = hb.Dataset(hb.sources.Memory(rows), SCHEMA, BATCH)
        model.online_train(data, callbacks, progress=False)
        course.seconds = time.perf_counter() - began
    course.published = publisher.steps
    return course


class Recorder:
    """Notes what the gate decided of the version before."""

    def __init__(self, course: Course, states: Any) -> None:
        self._course = course
        self._states = states

    def on_step_begin(self, run: Any) -> None:
        keeper = self._states.gatekeeper
        if keeper is not None and run.step and run.step % EVERY == 0:
            self._course.values[run.step] = keeper.measured
            if keeper.reasons:
                self._course.reasons[run.step] = [reason.reason for reason in keeper.reasons]


def clean(a: argparse.Namespace, stream: str) -> None:
    total = held = 0
    for seed in range(a.first_seed, a.first_seed + a.seeds):
        course = train(stream, events_of(stream, seed, a.ratings), seed, Fault(), 0, hb.Gate())
        total += len(course.published) + len(course.reasons)
        held += len(course.reasons)
        if a.values:
            path = Path(a.values) / f"{stream}-{seed}.json"
            path.write_text(json.dumps(course.values))
        line = {
            "stream": stream,
            "seed": seed,
            "versions": len(course.published) + len(course.reasons),
            "held": course.reasons,
            "seconds": round(course.seconds, 1),
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"stream": stream, "versions": total, "held": held}), flush=True)


def faults(a: argparse.Namespace, stream: str) -> None:
    events = events_of(stream, 0, a.ratings)
    twin = train(stream, events, 0, Fault(), 0, None)
    begin = BEGIN * len(events["t"]) / BATCH
    for name, fault in FAULTS.items():
        if a.only and name not in a.only:
            continue
        length = 3 * EVERY * BATCH
        course = train(stream, events, 0, fault, length, hb.Gate())
        if a.values:
            path = Path(a.values) / f"{stream}-{name}.json"
            path.write_text(json.dumps(course.values))
        bad = [
            step
            for step, loss in course.losses.items()
            if step > begin and not loss <= WORSE * twin.losses.get(step, loss)
        ]
        held = [step for step in course.reasons if step > begin]
        line = {
            "stream": stream,
            "fault": name,
            "held": len(held),
            "bad": len(bad),
            "bad and published": [step for step in bad if step in course.published],
            "held before the fault": len(course.reasons) - len(held),
            "reasons": course.reasons[held[0]] if held else [],
            "worst": round(max(course.losses[step] / twin.losses[step] for step in bad), 3)
            if bad
            else 1.0,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("clean", "faults"))
    parser.add_argument("ratings", help="ratings_early.csv of MovieLens 1M: user_id, item_id, …")
    parser.add_argument("--streams", nargs="+", default=STREAMS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--values", help="a folder for what the rules measured")
    a = parser.parse_args()
    torch.set_num_threads(1)
    no_graph = ConfigError("export: a graph takes seconds, and no server follows")
    with patch.object(hb.RecModel, "graph", side_effect=no_graph):
        for stream in a.streams:
            {"clean": clean, "faults": faults}[a.what](a, stream)


if __name__ == "__main__":
    main()
