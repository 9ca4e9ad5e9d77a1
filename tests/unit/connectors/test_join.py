# SPDX-License-Identifier: Apache-2.0
"""What a join takes, counts and refuses; its arithmetic is in tests/property/test_join.py."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotbed import config
from hotbed.connectors import (
    AsTheyCome,
    DeadLetters,
    Follow,
    Join,
    Journal,
    Kafka,
    Live,
    Memory,
    Outcome,
    Position,
    ReadPlan,
    Replay,
    Skips,
    Source,
    Spill,
    Wait,
)
from hotbed.connectors.join.keys import keys_of
from hotbed.connectors.join.lanes import IdleClock, Lanes
from hotbed.connectors.plan import JoinWishes
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError
from hotbed.testing import FakeStream

SHOWN = {"id": [1, 2, 3, 9], "time": [0, 5, 10, 100]}
CLICKS = {"id": [2, 9], "time": [6, 100]}
KEEPS = JoinWishes(keeps_open=True)


def rows(join: Join, **plan: Any) -> list[dict[str, Any]]:
    return [row for batch, _ in join.read(plan=ReadPlan(**plan)) for row in batch.to_pylist()]


def labels(join: Join) -> dict[Any, float]:
    return {row["id"]: row["label"] for row in rows(join)}


def day(number: int) -> datetime.datetime:
    return datetime.datetime(2026, 11, number)


@pytest.mark.parametrize(
    ("shown", "clicked"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([2], pa.int64())),
        (pa.array([-1, 2**63 - 1], pa.int64()), pa.array([2**63 - 1], pa.uint64())),
        (pa.array(["a", "b"]), pa.array(["b"]).dictionary_encode()),
        (pa.array(["a", "b"], pa.large_string()), pa.array(["b"])),
        (pa.array([day(1), day(2)], pa.timestamp("s")), pa.array([day(2)], pa.timestamp("ns"))),
        (pa.array([False, True]), pa.array([1])),
    ],
    ids=["widths", "signs", "dictionary", "large", "times", "booleans"],
)
@pytest.mark.parametrize("more", [{}, {"shop": [7, 7]}], ids=["one key", "two keys"])
def test_keys_are_equal_in_every_type_of_their_kind(
    shown: pa.Array, clicked: pa.Array, more: dict[str, Any]
) -> None:
    few = {name: values[:1] for name, values in more.items()}
    both = keys_of([shown, *map(pa.array, more.values())])
    other = keys_of([clicked, *map(pa.array, few.values())])
    assert [both.first[1], both.second[1]] == [other.first[0], other.second[0]]
    assert both.first[0] != other.first[0]


def test_keys_of_two_columns_are_not_those_of_their_order() -> None:
    one, two = pa.array([1, 2, 1]), pa.array([2, 1, 1])
    keys = keys_of([one, two])
    assert len(set(keys.first.tolist())) == len(set(keys.second.tolist())) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": [1.5, 2.5]}, "must hold whole numbers, text or times, got double"),
        ({"id": ["x", "y"]}, "holds numbers on one side, got text"),
        ({"other": [1, 2]}, r"join.outcomes.label: columns \['id'\] are absent"),
    ],
)
def test_keys_that_cannot_meet_are_refused(change: dict[str, Any], message: str) -> None:
    clicks = {"time": [6, 100], **change}
    with pytest.raises(SchemaError, match=message):
        rows(Join(Memory(SHOWN), Memory(clicks), on="id", within=10, unit="s"))


@pytest.mark.parametrize(
    ("impressions", "outcomes", "event"),
    [({"id": [1]}, CLICKS, "join.impressions"), (SHOWN, {"id": [1]}, "join.outcomes.label")],
)
def test_a_missing_time_is_refused_by_name(impressions: Any, outcomes: Any, event: str) -> None:
    join = Join(Memory(impressions), Memory(outcomes), on="id", within=10, unit="s")
    with pytest.raises(SchemaError, match=rf"{event}: columns \['time'\] are absent"):
        rows(join)


def joined(**arguments: Any) -> Join:
    return Join(Memory(SHOWN), Memory(CLICKS), **{"on": "id", "within": 1, **arguments})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Join(Memory(SHOWN), Memory(CLICKS), on="id"), "got within=None and Memory"),
        (lambda: Join(Memory(SHOWN), {}, on="id"), "1 to 8 labels, got 0"),
        (lambda: Join(Memory(SHOWN), Memory(CLICKS), on=[], within=1), "needs key columns"),
        (lambda: Join("a.csv", Memory(CLICKS), on="id", within=1), "join.impressions: not a sou"),
        (lambda: Outcome(Memory(CLICKS), 0), "outcome.within"),
        (lambda: Outcome(Memory(CLICKS), math.inf), "outcome.within: must be a finite number"),
        (lambda: Outcome(Memory(CLICKS), 1, where={"kind": 3}), "outcome.where: must map names"),
        (lambda: joined(where="kind"), "join.where: must map names"),
        (lambda: joined(lateness_seconds=math.inf), "join.lateness_seconds: must be a finite"),
        (lambda: joined(idle_seconds=math.inf), "join.idle_seconds: must be a finite"),
        (lambda: joined(rule="wait"), r"join.rule: .* got 'wait'. Give such as hb.sources.Wait()"),
        (lambda: joined(rule=Wait), "join.rule: takes a value of JoinRule"),
        (lambda: joined(spill="/tmp"), "join.spill: takes a value of Spill"),
        (lambda: joined(label="id"), r"join.label: .* got 'id' in \['id', 'time'\]"),
        (lambda: Join(Memory(SHOWN), {"y": Memory(CLICKS)}, on="id"), "join.outcomes.y: takes a"),
        (lambda: Spill("s3://bucket/spill"), "spill.directory: must be a local path"),
        (lambda: rows(joined(spill=Spill("/nowhere"))), "spill.directory: does not exist"),
    ],
)
def test_arguments_are_checked(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_where_compares_texts_and_refuses_lists_by_name() -> None:
    shown = {**SHOWN, "kind": [["a"]] * len(SHOWN["id"])}
    join = Join(Memory(shown), Memory(CLICKS), on="id", within=1, unit="s", where={"kind": "a"})
    with pytest.raises(SchemaError, match="`where` compares texts, got column 'kind' of list"):
        rows(join)


def test_a_job_describes_a_join_as_its_constructor_does() -> None:
    kafka = {"kind": "kafka", "servers": "b:9092", "topic": "actions"}
    clicked = {"source": kafka, "within": 60, "where": {"kind": "click"}}
    spec = {
        "kind": "join",
        "impressions": {**kafka, "topic": "shown"},
        "outcomes": {"clicked": clicked, "bought": {"source": kafka, "within": 9.5}},
        "on": ["user", "item"],
        "rule": "as_they_come",
        "spill": {"disk_bytes": 1000},
    }
    join = config.build(spec, Source, "job.stream")
    topic = Kafka("b:9092", "actions")
    assert join == Join(
        Kafka("b:9092", "shown"),
        {"clicked": Outcome(topic, 60, {"kind": "click"}), "bought": Outcome(topic, 9.5)},
        on=("user", "item"),
        rule=AsTheyCome(),
        spill=Spill(disk_bytes=1000),
    )
    assert config.build(config.describe(join), Source, "job.stream") == join
    assert join.endless
    assert len(join.inputs) == 2


def test_one_topic_may_hold_impressions_and_several_kinds_of_outcomes() -> None:
    kinds = ["view", "view", "click", "buy", "view"]
    log = Memory({"id": [1, 2, 1, 1, 7], "time": [0, 1, 2, 30, 99], "kind": kinds})
    outcomes = {
        "clicked": Outcome(log, 5, where={"kind": "click"}),
        "bought": Outcome(log, 50, where={"kind": "buy"}),
    }
    join = Join(log, outcomes, on="id", unit="s", where={"kind": "view"})
    assert join.inputs == [log]
    found = {row["id"]: (row["clicked"], row["bought"]) for row in rows(join)}
    assert found == {1: (1.0, 1.0), 2: (0.0, 0.0)}
    assert join.schema().names == ["id", "time", "kind", "clicked", "bought"]
    assert rows(join, columns=("bought", "time")) == [
        {"time": 0, "bought": 1.0}, {"time": 1, "bought": 0.0}
    ]  # fmt: skip


def test_outcomes_may_have_other_names_and_units() -> None:
    clicks = Memory({"shown_id": [2, 9], "at": ["1970-01-01T00:00:06", "1970-01-01T00:01:40"]})
    outcome = Outcome(clicks, 10, on="shown_id", time="at", unit="iso")
    join = Join(Memory(SHOWN), {"label": outcome}, on="id", unit="s")
    assert labels(join) == {1: 0.0, 2: 1.0, 3: 0.0}


def test_rows_without_key_or_time_are_bad_rows() -> None:
    shown = {"id": [1, None, 3, 9], "time": [0, 5, None, 100]}
    join = Join(Memory(shown), Memory(CLICKS), on="id", within=10, unit="s")
    with pytest.raises(
        DecodeError,
        match=r"join.impressions: column 'time' of a row holds no key or time, got None",
    ):
        rows(join)
    skips = Skips()
    assert [row["id"] for row in rows(join, skips=skips)] == [1]
    assert skips.counts == {"value": 2}


def test_late_impressions_become_dead_letters_and_no_negatives(tmp_path: Path) -> None:
    shown = {"id": [1, 9, 2], "time": [0, 100, 3], "x": [1, 2, 3]}
    live = Live(dead_letters=DeadLetters(tmp_path / "letters"))
    sources = (
        FakeStream(shown, [2, 1], ends=True),
        FakeStream({"id": [9], "time": [100]}, ends=True),
    )
    join = Join(*sources, on="id", within=10, unit="s")
    items = list(join.read(plan=ReadPlan(live=live)))
    assert [row["id"] for batch, _ in items for row in batch.to_pylist()] == [1]
    assert items[-1][1]["counts"]["late"] == 1
    (line,) = (tmp_path / "letters").read_text().splitlines()
    letter = json.loads(line)
    assert letter["place"] == {"row": 2}
    assert letter["reason"] == "late"
    assert json.loads(letter["payload"]) == {"id": 2, "time": 3, "x": 3}


def test_a_position_holds_its_turn_and_needs_the_open_rows_of_its_state() -> None:
    """Without a journal, whatever the clock does in the next life, the turn is the same."""
    shown = {"id": [*range(20), 99], "time": [*range(20), 99]}
    clicks = {"id": [3, 99], "time": [4, 99]}

    def join(*takes: int) -> Join:
        return Join(
            FakeStream(shown, takes, ends=True), FakeStream(clicks, ends=True), "id", 10, unit="s"
        )

    live = Live(Journal())
    whole = [row for batch, _ in join(15, 6).read(None, 4) for row in batch.to_pylist()]
    items = join(15, 6).read(None, 4, ReadPlan(live=live, wishes=KEEPS))
    first, position = next(item for item in items if item[0].num_rows)
    assert first.num_rows == 4
    assert live.open_rows is not None
    text = json.dumps(position.to_json())
    state = json.loads(text)
    with pytest.raises(DataError, match="needs the open impressions of its checkpoint"):
        next(join(1).read(Position.from_json(text), 4, ReadPlan(live=Live())))
    saved = JoinWishes(saved=live.open_rows.saved_at(state, None))
    plan = ReadPlan(live=Live(), wishes=saved)
    rest = join(1, 1, 1).read(Position.from_json(text), 4, plan)
    found = [row for batch, _ in [(first, None), *rest] for row in batch.to_pylist()]
    assert [row["id"] for row in found] == [row["id"] for row in whole] == [*range(20)]


def test_lanes_and_the_clock_of_idle_ones() -> None:
    lanes = Lanes(2)
    lanes.rise(0, {"": 90})  # of files before the topic
    lanes.rise(0, {"0": 50})
    lanes.set_names(0, ["0", "1"])
    lanes.set_names(1, [])
    lanes.rise(1, {"": 70})
    assert lanes.settle([]) < 0  # partition 1 was never read
    assert lanes.settle([(0, "1")]) == 50
    assert lanes.settle([(0, "1"), (0, "0")]) == 70
    assert lanes.settle([(0, "1"), (0, "0"), (1, "")]) == 70
    lanes.rise(0, {"1": 10})
    assert lanes.settle([]) == 70  # it never falls
    seconds = [100.0]
    clock = IdleClock(5, lambda: seconds[0])
    seconds[0] = 104
    assert clock.idle([(0, "0")]) == []
    clock.touch([(0, "1")])
    seconds[0] = 106
    assert clock.idle([(0, "0"), (0, "1")]) == [(0, "0")]


def test_an_input_that_ends_holds_no_window_open_while_another_goes_on() -> None:
    """The reader finds the end of a paced replay while it reads: the next turn records it."""
    shown = FakeStream({"id": np.arange(90), "time": np.arange(90)}, then=30)
    clicks = Memory({"id": np.arange(0, 90, 2), "time": np.arange(0, 45)})
    replay = Replay([clicks], time="time", unit="s", speed=1e9)
    join = Join(shown, replay, on="id", within=5, unit="s", idle_seconds=1000)
    live = Live(Journal(), tick_seconds=0.001)
    samples: list[int] = []
    for batch, _ in islice(join.read(plan=ReadPlan(live=live)), 60):
        samples += batch.column("id").to_pylist() if batch.num_rows else []
    assert samples == list(range(84))
    assert live.lag == 0


def test_followed_folders_are_joined_and_resume_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A column of nulls gets its type later, and places of many files lie on the disk."""
    monkeypatch.setattr("hotbed.connectors.join.segment.SEGMENT_ROWS", 64)
    for number in range(12):
        rows_of_file = range(number * 20, number * 20 + 20)
        shown = [{"id": f"x{n}", "at": n, "word": "a" if n > 50 else None} for n in rows_of_file]
        clicks = [{"id": f"x{n}", "at": n + 4} for n in rows_of_file if n % 3 == 0]
        for folder, events in (("shown", shown), ("clicks", clicks)):
            (tmp_path / folder).mkdir(exist_ok=True)
            text = "".join(json.dumps(event) + "\n" for event in events)
            (tmp_path / folder / f"{number:03}.jsonl").write_text(text)
    folders = (Follow(tmp_path / "shown"), Follow(tmp_path / "clicks"))
    spill = Spill(memory_bytes=0)
    join = Join(*folders, on="id", within=30, time="at", unit="s", spill=spill)
    live = Live(Journal(), tick_seconds=0.001)
    samples: list[Any] = []
    states = []
    for batch, position in islice(join.read(plan=ReadPlan(live=live, wishes=KEEPS)), 60):
        samples += batch.to_pylist()
        assert live.open_rows is not None
        saved = live.open_rows.saved_at(position.state, None)
        states.append((len(samples), position, saved))
    assert len(samples) == 209
    assert all(row["label"] == (row["at"] % 3 == 0) for row in samples)
    for count, position, saved in states[3::11]:
        again = Live(live.journal, tick_seconds=0.001)
        plan = ReadPlan(live=again, wishes=JoinWishes(saved=saved))
        rest = islice(join.read(position, plan=plan), 60)
        assert [row for batch, _ in rest for row in batch.to_pylist()] == samples[count:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 45, "at', r"003.jsonl, line 6: cannot be read"),
        ('{"id": null, "at": 65}', r"003.jsonl, line 6: column 'id' of a row holds no key"),
        (None, r"003.jsonl: it changed before it was read to its end"),
    ],
    ids=["torn", "no key", "good"],
)
def test_a_file_that_stopped_a_join_may_be_corrected_and_no_other(
    line: str | None, message: str, tmp_path: Path
) -> None:
    def write(number: int, line: str | None = None) -> None:
        rows_of_file = [{"id": n, "at": n} for n in range(number * 20, number * 20 + 20)]
        for folder, events in (("shown", rows_of_file), ("clicks", rows_of_file[::3])):
            lines = [json.dumps(event) for event in events]
            if line is not None and folder == "shown":
                lines[5] = line
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{number:03}.jsonl").write_text("\n".join([*lines, ""]))

    def read(position: Position | None, saved: Any = None) -> Iterator[Any]:
        folders = (Follow(tmp_path / "shown"), Follow(tmp_path / "clicks"))
        join = Join(*folders, on="id", within=30, time="at", unit="s")
        live = Live(journal, tick_seconds=0.001)
        for batch, after in join.read(
            position, plan=ReadPlan(live=live, wishes=replace(KEEPS, saved=saved))
        ):
            yield batch.to_pylist(), after, live.open_rows.saved_at(after.state, None)  # type: ignore[union-attr]

    journal = Journal(tmp_path / "journal")
    for number in range(7):
        write(number, line if number == 3 else None)
    samples: list[Any] = []
    state: tuple[Any, Any] = (None, None)
    with pytest.raises(DecodeError, match=message) if line else nullcontext():
        for rows_of_batch, position, saved in islice(read(None), 40):
            samples += rows_of_batch
            state = (position, saved)
    write(3, None if line else '{"id": 65, "at": 64}')
    if line is None:
        with pytest.raises(DataError, match=message):
            list(islice(read(None), 90))
        return
    for rows_of_batch, *_ in islice(read(*state), 90):
        samples += rows_of_batch
    assert [row["id"] for row in samples] == list(range(len(samples)))
    assert len(samples) > 80
    assert all(row["label"] == (row["id"] % 20 % 3 == 0) for row in samples)


class _Unforeseen(FakeStream):
    """A stream that does not know what will arrive."""

    def read(self, position: Any = None, batch_rows: int = 9, plan: Any = None) -> Any:
        for item in super().read(position, batch_rows, plan):
            plan.live.lag = 0
            yield item


def test_an_input_is_not_idle_because_nobody_asked_it() -> None:
    """The reader stands still for an hour: the outcomes that came meanwhile are not late."""
    seconds = [0.0]
    shown = {"id": [1, 2, 3], "time": [0, 50, 5000]}
    clicks = {"id": [7, 1, 2, 9], "time": [1, 30, 60, 5001]}
    sources = (
        _Unforeseen(shown, [1, 0, 0, 0, 0, 2], then=0),
        _Unforeseen(clicks, [1, 0, 0, 0, 0, 0, 0, 3], then=0),
    )
    join = Join(*sources, on="id", within=100, unit="s", idle_seconds=60)
    live = Live(clock=lambda: seconds[0], tick_seconds=0.001)
    items = join.read(plan=ReadPlan(live=live))
    samples: list[dict[str, Any]] = []
    for batch, _ in islice(items, 7):
        samples += batch.to_pylist()
    seconds[0] = 3600
    for batch, _ in islice(items, 20):
        samples += batch.to_pylist()
    assert [(row["id"], row["label"]) for row in samples] == [(1, 1.0), (2, 1.0)]


def test_what_is_open_beyond_its_memory_lies_on_disk_with_the_same_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hotbed.connectors.join.matches.CHUNK_ROWS", 16)
    monkeypatch.setattr("hotbed.connectors.join.segment.SEGMENT_ROWS", 64)
    count = 1000
    words = pa.array([f"word {number}" for number in range(count)]).dictionary_encode()
    bags = [[number] * (number % 3) for number in range(count)]
    shown = pa.table({"id": range(count), "time": range(count), "word": words, "bag": bags})
    picks = np.random.default_rng(1).integers(0, count, 300)
    clicks = {"id": picks, "time": picks + 5}
    found = []
    for memory_bytes in (1 << 20, 20_000, 0):
        spill = Spill(tmp_path, memory_bytes)
        sources = (FakeStream(shown, then=30, ends=True), FakeStream(clicks, then=9, ends=True))
        join = Join(*sources, on="id", within=500, unit="s", spill=spill)
        live = Live()
        disk = 0
        spilled: set[Any] = set()
        samples = []
        for batch, _ in join.read(plan=ReadPlan(live=live)):
            logs: Any = live.open_rows
            disk = max(disk, logs.disk_bytes)
            are_held = [segment.disk_bytes > 0 for segment in logs.outcomes]
            spilled |= {*are_held, "matches" if logs.matches.disk_bytes else ""}
            samples += batch.to_pylist()
        found.append(samples)
        assert (disk > 0) == (memory_bytes < 1 << 20)
        assert (True in spilled) == ("matches" in spilled) == (memory_bytes < 1 << 20)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("log", ["impressions", "outcomes"])
def test_a_full_disk_pauses_reading_and_says_why(
    log: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hotbed.connectors.join.segment.SEGMENT_ROWS", 16)
    shown = {"id": range(1000), "time": range(1000)}
    spill = Spill(memory_bytes=1000, disk_bytes=1500)
    sources = [FakeStream(shown, then=10), FakeStream(CLICKS, then=1)]
    if log == "outcomes":  # they wait for impressions
        sources.reverse()
    join = Join(*sources, on="id", within=5000, unit="s", spill=spill)
    items = islice(join.read(plan=ReadPlan(live=Live(tick_seconds=0.001))), 300)
    positions = [position for _, position in items]
    counts = [position["counts"][log] for position in positions]
    assert 0 < counts[-1] < 1000
    assert counts[-1] == counts[-100]
    assert caplog.text.count("reading waits, because open impressions and held outcomes fill") == 1
