# SPDX-License-Identifier: Apache-2.0
"""Each impression is learned exactly as its rule says, whatever the order of events and however
often a reader dies: compared with a dict that replays the whole log, turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.connectors import (
    AsTheyCome,
    Join,
    Journal,
    Live,
    Memory,
    Outcome,
    Position,
    ReadPlan,
    Source,
    Wait,
)
from hotbed.connectors.join import segment
from hotbed.connectors.times import EARLIEST
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core


@dataclass
class Oracle:
    """What a join of some turns yields, by dicts and loops.

    `windows`, `lateness`: in seconds. `turns`: (input, rows) of each turn.
    """

    windows: Mapping[str, float]
    lateness: float
    as_they_come: bool
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.impressions: dict[tuple[Any, float], dict[str, Any]] = {}
        self.outcomes: dict[tuple[Any, float, str], bool] = {}
        self.watermark = float("-inf")

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def is_over(self, time: float) -> bool:
        return time + max(self.windows.values()) + self.lateness < self.watermark

    def take(self, impressions: list[Any], outcomes: list[Any], watermark: float) -> list[Any]:
        """Return the samples of a turn: (n, labels)."""
        for key, time, n in impressions:
            if self.is_over(time):
                self.count("late")
            elif (key, time) in self.impressions:
                self.count("repeated")
            else:
                self.count("impressions")
                self.impressions[key, time] = {"n": n, "decided": {}, "new": True}
        for key, time, label in outcomes:
            if self.is_over(time):
                self.count("unmatched")
            elif (key, time, label) in self.outcomes:
                self.count("outcomes_repeated")
            else:
                self.count("outcomes")
                self.outcomes[key, time, label] = False
        positive = self._positive()
        self.watermark = max(self.watermark, watermark)
        samples = self._samples(positive)
        for outcome, matched in list(self.outcomes.items()):
            if self.is_over(outcome[1]):
                del self.outcomes[outcome]
                if not matched:
                    self.count("unmatched")
        return samples

    def _positive(self) -> dict[tuple[Any, float], set[str]]:
        """Return the labels of each impression that have an outcome while they are undecided."""
        positive: dict[tuple[Any, float], set[str]] = {}
        for (key, time), impression in self.impressions.items():
            positive[key, time] = set(impression.get("positive", ()))
            for other, when, label in self.outcomes:
                window = self.windows[label]
                if other == key and time <= when <= time + window:
                    last = window if self.as_they_come else max(self.windows.values())
                    is_open = time + last + self.lateness >= self.watermark
                    if is_open or impression["new"]:
                        self.outcomes[other, when, label] = True
                        positive[key, time].add(label)
        return positive

    def _samples(self, positive: Mapping[Any, set[str]]) -> list[Any]:
        samples = []
        for place, impression in list(self.impressions.items()):
            impression["new"] = False
            impression["positive"] = positive[place]
            time = place[1]
            if not self.as_they_come:
                if self.is_over(time):
                    labels = [float(label in positive[place]) for label in self.windows]
                    samples.append((impression["n"], labels))
                    del self.impressions[place]
                continue
            told = {}
            for label, window in self.windows.items():
                is_over = time + window + self.lateness < self.watermark
                if label not in impression["decided"] and (is_over or label in positive[place]):
                    told[label] = float(label in positive[place])
            impression["decided"] |= told
            if told:
                samples.append((impression["n"], [told.get(name, -1.0) for name in self.windows]))
            if self.is_over(time):
                del self.impressions[place]
        return samples


events = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-6, 3)), max_size=40
)  # key, and how much earlier than its place in the log an event happened


def log(drawn: list[tuple[int, int]], kinds: list[str]) -> dict[str, list[Any]]:
    rows = [(key, max(0, place + shift)) for place, (key, shift) in enumerate(drawn)]
    return {
        "key": [key for key, _ in rows],
        "time": [time for _, time in rows],
        "n": list(range(len(rows))),
        "kind": [kinds[place % len(kinds)] for place in range(len(rows))],
    }


def table(rows: dict[str, list[Any]]) -> pa.Table:
    kinds = {"key": pa.int64(), "time": pa.int64(), "n": pa.int64(), "kind": pa.string()}
    return pa.table({name: pa.array(rows[name], kind) for name, kind in kinds.items()})


def by_oracle(
    oracle: Oracle, inputs: list[dict[str, list[Any]]], turns: list[tuple[int, int]], ends: bool
) -> list[Any]:
    """What the oracle yields of the turns (input, rows)."""
    used, highs = [0] * len(inputs), [float("-inf")] * len(inputs)
    samples = []
    for number, count in turns:
        rows = range(used[number], used[number] + count)
        used[number] += count
        log = inputs[number]
        for row in rows:
            highs[number] = max(highs[number], log["time"][row])
        impressions = [(log["key"][row], log["time"][row], log["n"][row]) for row in rows]
        outcomes = [(log["key"][row], log["time"][row], log["kind"][row]) for row in rows]
        left = [i for i, log in enumerate(inputs) if used[i] < len(log["key"]) or not ends]
        mark = min([highs[i] for i in left], default=max(highs))
        samples += oracle.take(
            impressions if number == 0 else [], outcomes if number else [], mark
        )
    return samples


def values(rows: list[dict[str, Any]], labels: list[str]) -> list[Any]:
    return [(row["n"], [row[label] for label in labels]) for row in rows]


def joined(
    sources: list[Source], windows: Mapping[str, float], lateness: float, *, as_they_come: bool
) -> Join:
    outcomes = {
        label: Outcome(sources[1], window, where={"kind": label})
        for label, window in windows.items()
    }
    rule = AsTheyCome() if as_they_come else Wait()
    return Join(
        sources[0], outcomes, on="key", unit="s", rule=rule, lateness_seconds=lateness
    )


windows_drawn = st.sampled_from([{"click": 5}, {"click": 2, "buy": 9}, {"buy": 30, "click": 1}])


@given(
    shown=events, heard=events, windows=windows_drawn, lateness=st.sampled_from([0, 3]),
    as_they_come=st.booleans(), run=st.integers(1, 20), whole=st.integers(1, 9),
    at=st.integers(0, 60),
)  # fmt: skip
def test_a_join_of_logs_that_end_labels_each_impression_as_the_oracle_does(
    shown: Any, heard: Any, windows: Any, lateness: int, as_they_come: bool, run: int, whole: int,
    at: int,
) -> None:  # fmt: skip
    kinds = [*windows, "view"]
    inputs = [log(shown, ["view"]), log(heard, kinds[:-1])]
    sources: list[Source] = [Memory(table(rows)) for rows in inputs]
    join = joined(sources, windows, lateness, as_they_come=as_they_come)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.connectors.join.reading.READ_ROWS", run)
        patch.setattr(segment, "SEGMENT_ROWS", whole)
        items = list(join.read(None, 2))
        turns: list[tuple[int, int]] = []
        used, highs = [0, 0], [float("-inf")] * 2
        while any(used[i] < len(inputs[i]["key"]) for i in (0, 1)):
            waiting = [i for i in (0, 1) if used[i] < len(inputs[i]["key"])]
            number = min(waiting, key=lambda i: (highs[i], i))
            count = min(run, len(inputs[number]["key"]) - used[number])
            times = inputs[number]["time"][used[number] : used[number] + count]
            highs[number] = max(highs[number], *times)
            used[number] += count
            turns.append((number, count))
        oracle = Oracle(windows, lateness, as_they_come)
        expected = by_oracle(oracle, inputs, turns, ends=True)
        found = values([row for batch, _ in items for row in batch.to_pylist()], list(windows))
        assert found == expected
        if items:
            _, after = items[at % len(items)]
            position = Position.from_json(json.dumps(after.to_json()))
            rest = [row for batch, _ in join.read(position, 3) for row in batch.to_pylist()]
            done = sum(batch.num_rows for batch, _ in items[: at % len(items) + 1])
            assert values(rest, list(windows)) == expected[done:]
