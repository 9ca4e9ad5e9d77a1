# SPDX-License-Identifier: Apache-2.0
"""Each impression is learned exactly as its rule says, whatever the order of events and however
often a reader dies: compared with a dict that replays the whole log, turn by turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from join_oracle import Oracle

from hotbed.connectors import (
    AsTheyCome,
    DeadLetters,
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
from hotbed.connectors.plan import JoinWishes
from hotbed.connectors.position import COUNTED, decisions_of
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core


def log(draw: random.Random, kinds: list[str]) -> dict[str, list[Any]]:
    """Events of a few keys, up to ten seconds out of order, some of which come twice."""
    rows: list[tuple[int, int, str]] = []
    for place in range(draw.randint(0, 50)):
        if rows and draw.random() < 0.15:
            rows.append(draw.choice(rows))
        else:
            time = max(0, place + draw.choice([-10, -3, -1, 0, 0, 0, 1]))
            rows.append((draw.randrange(4), time, draw.choice(kinds)))
    return {
        "key": [key for key, _, _ in rows],
        "time": [time for _, time, _ in rows],
        "kind": [kind for _, _, kind in rows],
        "n": list(range(len(rows))),
    }


def table(rows: dict[str, list[Any]]) -> pa.Table:
    kinds = {"key": pa.int64(), "time": pa.int64(), "n": pa.int64(), "kind": pa.string()}
    return pa.table({name: pa.array(rows[name], kind) for name, kind in kinds.items()})


def by_oracle(
    oracle: Oracle, inputs: list[dict[str, list[Any]]], turns: list[Any], *, ends: bool
) -> list[Any]:
    """What the oracle yields of turns: (input, rows), or decisions of a journal."""
    used, highs = [0] * len(inputs), [float("-inf")] * len(inputs)
    samples = []
    for turn in turns:
        idle: list[int] = []
        number, count = turn if isinstance(turn, tuple) else (turn["input"], turn["rows"])
        if not isinstance(turn, tuple):
            idle = [lane for lane, _ in turn["idle"]]
        impressions: list[Any] = []
        outcomes: list[Any] = []
        if number is not None:
            rows = inputs[number]
            for row in range(used[number], used[number] + count):
                highs[number] = max(highs[number], rows["time"][row])
                if number == 0:
                    impressions.append((rows["key"][row], rows["time"][row], rows["n"][row]))
                else:
                    outcomes.append((rows["key"][row], rows["time"][row], rows["kind"][row]))
            used[number] += count
        active = [i for i in range(len(inputs)) if i not in idle]
        if ends:
            active = [i for i in active if used[i] < len(inputs[i]["key"])]
        mark = min([highs[i] for i in active], default=max(highs))
        samples += oracle.take(impressions, outcomes, mark)
    return samples


WINDOWS = [{"click": 5}, {"click": 2, "buy": 9}, {"buy": 25, "click": 1}]


@dataclass(frozen=True)
class Case:
    """A join that a seed draws, its logs, and how it is read."""

    windows: Mapping[str, float]
    lateness: int
    as_they_come: bool
    inputs: list[dict[str, list[Any]]]

    @classmethod
    def of(cls, draw: random.Random) -> Case:
        windows = draw.choice(WINDOWS)
        inputs = [log(draw, ["view"]), log(draw, [*windows])]
        return cls(windows, draw.choice([0, 0, 3]), draw.random() < 0.6, inputs)

    @property
    def oracle(self) -> Oracle:
        return Oracle(self.windows, self.lateness, self.as_they_come)

    def join(self, sources: list[Source]) -> Join:
        outcomes = {}
        for label, window in self.windows.items():
            outcomes[label] = Outcome(sources[1], window, where={"kind": label})
        rule = AsTheyCome() if self.as_they_come else Wait()
        return Join(
            sources[0], outcomes, on="key", unit="s", rule=rule, lateness_seconds=self.lateness
        )

    def values(self, rows: list[dict[str, Any]]) -> list[Any]:
        """What the rows of a join say: (n, labels, whether tables count the sample)."""
        labels = [[row[label] for label in self.windows] for row in rows]
        return [
            (row["n"], told, row.get(COUNTED, True)) for row, told in zip(rows, labels, strict=True)
        ]


def counted_once(samples: list[Any]) -> list[Any]:
    """Samples (n, labels) with whether they are the first ones of their impressions."""
    seen: set[int] = set()
    return [(n, labels, n not in seen and not seen.add(n)) for n, labels in samples]


SEEDS = 15
"""Logs of a test with each of its parameters, at most; `make soak` has four times as many."""


@pytest.fixture(
    params=[*range(2), *(pytest.param(place, marks=pytest.mark.soak) for place in range(2, 8))]
)
def small_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("hotbed.connectors.join.segment.SEGMENT_ROWS", 4)
    return int(request.param)


def counted(position: Position) -> dict[str, int]:
    return {name: count for name, count in position["counts"].items() if count}


def unmatched(letters: Path) -> list[Any]:
    """The outcomes among dead letters: the numbers of their rows."""
    lines = letters.read_text().splitlines() if letters.exists() else []
    found = [json.loads(line) for line in lines]
    assert all(letter["reason"] in ("unmatched", "late") for letter in found)
    payloads = [json.loads(letter["payload"]) for letter in found if letter["reason"] != "late"]
    return sorted((row["key"], row["time"], row["outcome"]) for row in payloads)


def turns_of(case: Case, run: int) -> list[tuple[int, int]]:
    """The turns of logs that end: of the one that is furthest behind, so many rows."""
    used, highs = [0, 0], [float("-inf")] * 2
    turns = []
    while waiting := [i for i in (0, 1) if used[i] < len(case.inputs[i]["key"])]:
        number = min(waiting, key=lambda i: (highs[i], i))
        times = case.inputs[number]["time"][used[number] : used[number] + run]
        highs[number] = max(highs[number], *times)
        used[number] += len(times)
        turns.append((number, len(times)))
    return turns


def test_a_join_of_logs_that_end_labels_each_impression_as_the_oracle_does(
    small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(small_segments, 8 * 2 * SEEDS, 8):
        draw = random.Random(seed)
        case = Case.of(draw)
        run = draw.randint(1, 20)
        monkeypatch.setattr("hotbed.connectors.join.turns.READ_ROWS", run)
        join = case.join([Memory(table(rows)) for rows in case.inputs])
        items = list(join.read(None, 2))
        oracle = case.oracle
        turns = turns_of(case, run)
        expected = counted_once(by_oracle(oracle, case.inputs, turns, ends=True))
        rows = [row for batch, _ in items for row in batch.to_pylist()]
        assert case.values(rows) == expected, seed
        if items:
            place = draw.randrange(len(items))
            text = json.dumps(items[place][1].to_json())
            rest = [
                row
                for batch, _ in join.read(Position.from_json(text), 3)
                for row in batch.to_pylist()
            ]
            done = sum(batch.num_rows for batch, _ in items[: place + 1])
            assert case.values(rest) == expected[done:], seed


@dataclass
class Saved:
    """What was open at a position, as a file would hold it."""

    opened: Mapping[str, int]
    logs: dict[str, list[pa.RecordBatch]]

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        return iter(self.logs[name])


def saved_at(live: Live, state: Mapping[str, Any]) -> Saved:
    assert live.open_rows is not None
    logs = live.open_rows.saved_at(state, None)
    batches = {name: list(logs.batches(name)) for name in logs.opened}
    return Saved(dict(state["opened"]), batches)


def script(draw: random.Random, total: int) -> list[int]:
    takes = []
    while sum(takes) < total:
        takes.append(draw.choice([0, 0, 1, 2, 5, 9]))
    return [*takes, 0, 0, 0]


def test_a_reader_that_dies_again_and_again_yields_what_the_journal_says(
    small_segments: int, tmp_path: Path
) -> None:
    """States are of any position behind the reader; nothing before a state is read again."""
    for seed in range(small_segments, 8 * SEEDS, 8):
        draw = random.Random(seed)
        case = Case.of(draw)
        seconds = [1000.0]

        def clock(draw: random.Random = draw, seconds: list[float] = seconds) -> float:
            seconds[0] += draw.choice([0, 0, 0, 1])
            return seconds[0]

        seen: dict[tuple[int, int], list[Any]] = {}
        position, saved = Position({}), None
        path = tmp_path / f"{seed}"
        turns: dict[int, Any] = {}
        is_last = False
        while not is_last:
            is_last = draw.random() < 0.2
            journal = Journal(path)
            letters = DeadLetters(tmp_path / f"{seed}.letters")
            live = Live(journal, letters, clock=clock, tick_seconds=0.001)
            sources: list[Source] = []
            for rows in case.inputs:
                takes = script(draw, len(rows["key"]))
                sources.append(FakeStream(table(rows), takes, then=0))
            join = case.join(sources)
            join = replace(join, idle_seconds=15, keeps_unmatched=True)
            plan = ReadPlan(live=live, wishes=JoinWishes(keeps_open=True, saved=saved))
            items = join.read(position or None, draw.randint(1, 5), plan)
            number, row = position.state.get("block", 0), position.state.get("row", 0)
            passed = []
            for batch, after in islice(items, 400 if is_last else draw.randint(0, 60)):
                if batch.num_rows:
                    found = case.values(batch.to_pylist())
                    for place, sample in enumerate(found, row):
                        assert seen.setdefault((number, place), sample) == sample, seed
                number, row = after["block"], after["row"]
                passed.append(after)
            for turn, value in journal.after("block", -1):
                assert turns.setdefault(turn, value) == value, seed
            if passed:
                position = Position.from_json(json.dumps(draw.choice(passed).to_json()))
                saved = saved_at(live, position.state)
                join.commit(position)
                journal.forget(decisions_of(position.state))
            items.close()
            journal.close()
        oracle = case.oracle
        decided = by_oracle(oracle, case.inputs, list(turns.values()), ends=False)
        expected = counted_once(decided)
        assert [seen[place] for place in sorted(seen)] == expected, seed
        assert counted(passed[-1]) == oracle.counts, seed
        assert unmatched(tmp_path / f"{seed}.letters") == sorted(oracle.unmatched), seed
