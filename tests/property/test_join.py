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
    Skips,
    Source,
    Wait,
)
from hotbed.connectors.live import HeldRows
from hotbed.connectors.position import COUNTED, decisions_of
from hotbed.connectors.read_plan import JoinWishes
from hotbed.connectors.status import status_of
from hotbed.testing import FakeStream

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:join.on:UserWarning")]
PLAN = ReadPlan(skips=Skips())


FUTURE = 3_000_000_000
"""A time far ahead of every clock here, in seconds."""


@dataclass(frozen=True)
class Log:
    """Events of one input, each with what it says and what a join has to make of it.

    `own`: kinds whose times stand in a column of their own, in milliseconds.
    """

    own: frozenset[str]
    rows: list[tuple[int, int, str]]  # key, time, kind

    def table(self) -> pa.Table:
        columns: dict[str, list[Any]] = {"key": [], "time": [], "kind": [], "n": []}
        columns |= {f"{kind}_ms": [] for kind in sorted(self.own)}
        for place, (key, time, kind) in enumerate(self.rows):
            later = time + 7200 if kind in self.own else time
            row = {"key": key, "time": later, "kind": kind, "n": place}
            for other in self.own:
                row[f"{other}_ms"] = time * 1000 if other == kind else (time + 50) * 1000
            for name, values in columns.items():
                values.append(row[name])
        kinds = {"kind": pa.string()}
        return pa.table({n: pa.array(v, kinds.get(n, pa.int64())) for n, v in columns.items()})

    def moves(self, place: int, kinds: Any) -> float:
        """How far a row moves the clock: an event to its time, another row to its earliest one."""
        _, time, kind = self.rows[place]
        if kind not in kinds and kinds and self.own >= set(kinds):
            time += 50
        return time if time < FUTURE else float("-inf")


def log(draw: random.Random, kinds: list[str]) -> Log:
    """Events of a few keys, up to ten seconds out of order, some of which come twice.

    Some are of the future, some of kinds that nobody asked for.
    """
    rows: list[tuple[int, int, str]] = []
    own = frozenset(kind for kind in kinds if kind != "view" and draw.random() < 0.3)
    for place in range(draw.randint(0, 50)):
        if rows and draw.random() < 0.15:
            rows.append(draw.choice(rows))
        else:
            time = max(0, place + draw.choice([-10, -3, -1, 0, 0, 0, 1]))
            if draw.random() < 0.04:
                time += FUTURE
            rows.append((draw.randrange(4), time, draw.choice([*kinds, *kinds, "other"])))
    return Log(own, rows)


def by_oracle(oracle: Oracle, inputs: list[Log], turns: list[Any], *, ends: bool) -> list[Any]:
    """What the oracle yields of turns: (input, rows), or decisions of a journal."""
    used, highs = [0] * len(inputs), [float("-inf")] * len(inputs)
    kinds = [{"view"}, set(oracle.windows)]
    samples = []
    for turn in turns:
        idle: list[int] = []
        number, count = turn if isinstance(turn, tuple) else (turn["input"], turn["rows"])
        if not isinstance(turn, tuple):
            idle = [lane for lane, _ in turn["idle"]]
        events: list[list[Any]] = [[], []]
        if number is not None:
            for place in range(used[number], used[number] + count):
                key, time, kind = inputs[number].rows[place]
                highs[number] = max(highs[number], inputs[number].moves(place, kinds[number]))
                if kind in kinds[number] and time >= FUTURE:
                    oracle.count("future")
                elif kind in kinds[number]:
                    events[number].append((key, time, place if number == 0 else kind))
            used[number] += count
        active = [i for i in range(len(inputs)) if i not in idle]
        if ends:
            active = [i for i in active if used[i] < len(inputs[i].rows)]
        mark = min([highs[i] for i in active], default=max(highs))
        samples += oracle.take(*events, mark)
    return samples


WINDOWS = [{"click": 5}, {"click": 2, "buy": 9}, {"buy": 25, "click": 1}]


@dataclass(frozen=True)
class Case:
    """A join that a seed draws, its logs, and how it is read."""

    windows: Mapping[str, float]
    lateness: int
    as_they_come: bool
    inputs: list[Log]

    @classmethod
    def of(cls, draw: random.Random) -> Case:
        windows = draw.choice(WINDOWS)
        windows = dict(draw.sample(list(windows.items()), k=len(windows)))
        inputs = [log(draw, ["view"]), log(draw, [*windows])]
        return cls(windows, draw.choice([0, 0, 3]), draw.random() < 0.6, inputs)

    @property
    def oracle(self) -> Oracle:
        return Oracle(self.windows, self.lateness, self.as_they_come)

    def join(self, sources: list[Source]) -> Join:
        outcomes = {}
        for label, window in self.windows.items():
            clock = {}
            if label in self.inputs[1].own:
                clock = {"time": f"{label}_ms", "unit": "ms"}
            outcomes[label] = Outcome(sources[1], window, where={"kind": label}, **clock)
        return Join(
            sources[0],
            outcomes,
            on="key",
            rule=AsTheyCome() if self.as_they_come else Wait(),
            where={"kind": "view"},
            lateness_seconds=self.lateness,
        )

    def unmatched(self, letters: Path) -> list[Any]:
        """The outcomes among dead letters that met no impression: (key, time, label)."""
        lines = letters.read_text().splitlines() if letters.exists() else []
        found = []
        for letter in map(json.loads, lines):
            assert letter["reason"] in ("unmatched", "late", "future")
            row = json.loads(letter["payload"])
            if letter["reason"] == "unmatched":
                label = row["outcome"]
                is_own = label in self.inputs[1].own
                time = row[f"{label}_ms"] // 1000 if is_own else row["time"]
                found.append((row["key"], time, label))
        return sorted(found)

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


def turns_of(case: Case, run: int) -> list[tuple[int, int]]:
    """The turns of logs that end: of the one that is furthest behind, so many rows."""
    used, highs = [0, 0], [float("-inf")] * 2
    kinds = [{"view"}, set(case.windows)]
    turns = []
    while waiting := [i for i in (0, 1) if used[i] < len(case.inputs[i].rows)]:
        number = min(waiting, key=lambda i: (highs[i], i))
        places = range(used[number], min(used[number] + run, len(case.inputs[number].rows)))
        moves = [case.inputs[number].moves(place, kinds[number]) for place in places]
        highs[number] = max(highs[number], *moves)
        used[number] += len(moves)
        turns.append((number, len(moves)))
    return turns


def test_a_join_of_logs_that_end_labels_each_impression_as_the_oracle_does(
    small_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(small_segments, 8 * 2 * SEEDS, 8):
        draw = random.Random(seed)
        case = Case.of(draw)
        run = draw.randint(1, 20)
        monkeypatch.setattr("hotbed.connectors.join.turns.READ_ROWS", run)
        join = case.join([Memory(rows.table()) for rows in case.inputs])
        items = list(join.read(None, 2, PLAN))
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
                for batch, _ in join.read(Position.from_json(text), 3, PLAN)
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


def saved_at(held: HeldRows | None, state: Mapping[str, Any]) -> Saved:
    assert held is not None
    logs = held.saved_at(state, None)
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
                takes = script(draw, len(rows.rows))
                sources.append(FakeStream(rows.table(), takes, then=0))
            join = case.join(sources)
            kinds = dict(draw.sample([*join.kinds.items()], len(join.kinds)))  # any order of labels
            join = replace(join, outcomes=kinds, idle_seconds=15, keeps_unmatched=True)
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
                saved = saved_at(status_of(items).open_rows, position.state)
                join.commit(position)
                journal.forget(decisions_of(position.state))
            items.close()
            journal.close()
        oracle = case.oracle
        decided = by_oracle(oracle, case.inputs, list(turns.values()), ends=False)
        expected = counted_once(decided)
        assert [seen[place] for place in sorted(seen)] == expected, seed
        assert counted(passed[-1]) == oracle.counts, seed
        assert case.unmatched(tmp_path / f"{seed}.letters") == sorted(oracle.unmatched), seed
