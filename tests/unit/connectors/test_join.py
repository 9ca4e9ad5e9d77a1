# SPDX-License-Identifier: Apache-2.0
"""What a join takes, counts and refuses; its arithmetic is in tests/property/test_join.py."""

from __future__ import annotations

import datetime
import json
import math
import re
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
    Concat,
    DeadLetters,
    Follow,
    Join,
    Journal,
    Kafka,
    LateLabels,
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
from hotbed.connectors.read_plan import JoinWishes
from hotbed.connectors.status import SourceReading, SourceStatus, status_of
from hotbed.data import Dataset, Id, Label, Schema, Time
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError
from hotbed.testing import FakeStream

SHOWN = {"id": [1, 2, 3, 9], "time": [0, 5, 10, 100]}
CLICKS = {"id": [2, 9], "time": [6, 100]}
ENDLESS = Join(FakeStream(SHOWN), FakeStream(CLICKS), on="id", within=1)
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
        (pa.array([-1, 2**31 - 1], pa.int64()), pa.array([2**31 - 1], pa.uint32())),
        (pa.array(["a", "b"]), pa.array(["b"]).dictionary_encode()),
        (pa.array(["a", "b"], pa.large_string()), pa.array(["b"])),
        (pa.array([day(1), day(2)], pa.timestamp("s")), pa.array([day(2)], pa.timestamp("ns"))),
        (pa.array([1_000, 1_001], pa.timestamp("ns")), pa.array([1_001], pa.timestamp("ns"))),
    ],
    ids=["widths", "signs", "dictionary", "large", "times", "nanoseconds"],
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
    ("shown", "clicked"),
    [
        (pa.array([-1, 5]), pa.array([2**64 - 1, 3], pa.uint64())),
        (pa.array([1, 5], pa.int8()), pa.array([True, False])),
        (pa.array([1, 5]), pa.array(["1", "5"])),
        (pa.array(["1", "5"]), pa.array([b"1", b"5"])),
        (
            pa.array([day(1)] * 2, pa.timestamp("us")),
            pa.array([day(1)] * 2, pa.timestamp("s", "Z")),
        ),
        (pa.array([day(1)] * 2, pa.timestamp("us")), pa.array([day(1)] * 2, pa.date32())),
        (pa.array([1, 5]), pa.array([day(1)] * 2, pa.timestamp("us"))),
    ],
    ids=["signs", "booleans", "text", "bytes", "zones", "dates", "times"],
)
def test_keys_of_types_that_do_not_meet_are_refused(shown: pa.Array, clicked: pa.Array) -> None:
    """As docs/types.md says, whichever side comes first, alone and beside another key."""
    for first, second in ((shown, clicked), (clicked, shown)):
        for on in (["id"], ["shop", "id"]):
            sides = [
                Memory(pa.table({"shop": [1, 1], "id": ids, "time": [0, 9]}))
                for ids in (first, second)
            ]
            message = (
                f"the key 'id' holds {first.type} on one side, got {second.type} in column 'id'"
            )
            with pytest.raises(SchemaError, match=re.escape(message)):
                rows(Join(*sides, on=on, within=10))
    with pytest.raises(SchemaError, match="must hold whole numbers, text or times, got double"):
        rows(Join(Memory(SHOWN), Memory({"id": [1.5, 2.5], "time": [6, 100]}), on="id", within=10))


@pytest.mark.parametrize(
    ("impressions", "outcomes", "event"),
    [
        ({"id": [1]}, CLICKS, r"join.impressions: columns \['time'\] are absent"),
        (SHOWN, {"id": [1]}, r"join.outcomes.label: columns \['time'\] are absent"),
        (SHOWN, {"other": [1], "time": [1]}, r"join.outcomes.label: columns \['id'\] are absent"),
    ],
)
def test_a_missing_column_is_refused_by_name(impressions: Any, outcomes: Any, event: str) -> None:
    with pytest.raises(SchemaError, match=event):
        rows(Join(Memory(impressions), Memory(outcomes), on="id", within=10))


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
        *(
            (lambda over=over, side=side: Join(*side(over(ENDLESS)), "id", 1), "got another join")
            for over in (
                lambda join: join,
                lambda join: join.join(Memory({"id": [1], "word": ["a"]}), on="id"),
                lambda join: Concat([Memory({**SHOWN, "label": [0.0] * 4}), join]),
            )
            for side in (
                lambda join: (join, Memory(CLICKS)),
                lambda join: (Memory(SHOWN), join),
                lambda join: (FakeStream(SHOWN), join),
            )
        ),
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


@pytest.mark.parametrize(
    ("ids", "missing"),
    [
        (pa.array([1, None, 3, 9]), None),
        (pa.array(["a", None, "c", "z"]), None),
        (pa.array(["a", "", "c", "z"]), ""),
        (pa.array([b"a", b"", b"c", b"z"], pa.large_binary()), b""),
        (pa.array(["a", "", "c", "z"]).dictionary_encode(), ""),
    ],
    ids=["numbers", "text", "empty", "bytes", "dictionary"],
)
def test_rows_without_key_or_time_are_bad_rows(ids: pa.Array, missing: Any) -> None:
    """A key that is missing on both sides is not an equal key."""
    shown = pa.table({"id": ids, "time": [0, 5, None, 100]})
    clicks = pa.table({"id": ids, "time": [1, 6, 7, 100]})
    for on in (["id"], ["id", "time"]):
        with pytest.raises(DecodeError, match="column 'time' of a row holds no key"):
            rows(Join(Memory(shown), Memory(clicks), on=on, within=10))
    for sides in ((shown.slice(0, 2), clicks.slice(0, 1)), (shown.slice(0, 1), clicks.slice(0, 2))):
        message = f"column 'id' of a row holds no key or time, got {missing!r}"
        with pytest.raises(DecodeError, match=message):
            rows(Join(*map(Memory, sides), on="id", within=10))
    skips = Skips()
    join = Join(Memory(shown), Memory(clicks), on="id", within=10)
    assert [row["label"] for row in rows(join, skips=skips)] == [1.0]
    assert skips.counts == {"value": 3}


BEGIN = 1_790_000_000
FAR = 4_102_444_800


def by_minutes(count: int, *, at: int | None, ahead: int) -> tuple[Any, Any]:
    """Impressions a minute apart, every second one clicked; `at`: the place of a fast clock."""
    shown = [(n, BEGIN + 60 * n) for n in range(count)]
    clicks = [(n, time + 5) for n, time in shown[::2]]
    for log in (shown, clicks):
        if at is not None:
            log.insert(at, (-len(log), BEGIN + ahead))
        log.append((-1, BEGIN + 60 * count + 500))
    return tuple(
        {"id": [id for id, _ in log], "time": [t for _, t in log]} for log in (shown, clicks)
    )


@pytest.mark.parametrize("rule", [Wait(), AsTheyCome()], ids=["wait", "as they come"])
@pytest.mark.parametrize("ahead", [86_400, FAR - BEGIN], ids=["a day", "year 2100"])
@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)], ids=["impression", "outcome", "both"])
def test_a_fast_clock_closes_no_window(
    rule: Any, ahead: int, where: tuple[int, ...], tmp_path: Path
) -> None:
    """An hour ahead of the clock is the limit of a live join, also if nobody gave one."""
    good = by_minutes(40, at=None, ahead=0)
    bad = by_minutes(40, at=3, ahead=ahead)
    sides = [bad[side] if side in where else good[side] for side in (0, 1)]
    letters = DeadLetters(tmp_path / "letters")
    clock = [BEGIN + 3000.0]

    def read(journal: Journal, **plan: Any) -> list[Any]:
        live = Live(journal, letters, clock=lambda: clock[0], tick_seconds=0.001)
        sources = (FakeStream(sides[0], then=4, ends=True), FakeStream(sides[1], then=2, ends=True))
        items = list(
            Join(*sources, on="id", within=60, rule=rule).read(plan=ReadPlan(live=live, **plan))
        )
        assert items[-1][1]["counts"]["future"] == len(where)
        samples = [(row["id"], row["label"]) for batch, _ in items for row in batch.to_pylist()]
        return [sample for sample in samples if sample[0] >= 0]

    journal = Journal()
    samples = read(journal)
    assert sorted(samples) == [(n, float(n % 2 == 0)) for n in range(40)]
    assert letters.counts == {"future": len(where)}
    clock[0] = FAR + 1  # what was decided stays decided, whatever the clock and the limit are then
    assert read(journal) == samples
    assert read(journal, max_ahead_seconds=1e12) == samples
    assert letters.counts == {"future": len(where)}


def test_the_limit_of_a_dataset_acts_before_the_join() -> None:
    shown, clicks = by_minutes(40, at=3, ahead=3000 + 900)
    schema = Schema([Time("time"), Label("label"), Id("id")])
    for limit, right in ((600.0, True), (1000.0, False), (None, False)):
        sources = (FakeStream(shown, then=4, ends=True), FakeStream(clicks, then=2, ends=True))
        dataset = Dataset(Join(*sources, on="id", within=60), schema, max_ahead_seconds=limit)
        dataset.live = replace(dataset.live, clock=lambda: BEGIN + 3000.0)
        labels = {
            i: label
            for batch in dataset
            for i, label in zip(batch.ids["id"].values.tolist(), batch.labels["label"], strict=True)
        }
        assert all(labels.get(n) == float(n % 2 == 0) for n in range(40)) == right
        assert dataset.live.dead_letters.counts.get("future", 0) == (2 if right else 0)


def test_recorded_events_of_the_future_are_bad_rows_for_a_whole_reading() -> None:
    shown, clicks = by_minutes(40, at=3, ahead=FAR - BEGIN)
    join = Join(Memory(shown), Memory(clicks), on="id", within=60)
    live = Live(clock=lambda: BEGIN + 9000.0)
    with pytest.raises(DecodeError, match="column 'time' of a row holds a time ahead of the clock"):
        rows(join, live=live)
    plan = ReadPlan(skips=Skips(), live=live)
    items = list(join.read(None, 7, plan))
    later = replace(plan, live=Live(clock=lambda: FAR + 9.0))
    rest = [batch for batch, _ in join.read(items[1][1], 7, later)]
    samples = [row for batch, _ in items for row in batch.to_pylist()]
    assert [row for batch in rest for row in batch.to_pylist()] == samples[14:]
    assert {row["id"]: row["label"] for row in samples} == {n: float(n % 2 == 0) for n in range(40)}


@pytest.mark.parametrize("names", [["clicked", "bought"], ["bought", "clicked"]])
@pytest.mark.parametrize("only", ["", "buy"])
def test_rows_of_a_kind_move_the_clock_by_their_own_column(names: list[str], only: str) -> None:
    """`at` of a purchase is its settlement, two hours later."""
    count = 40
    shown = {"id": [*range(count), -1], "at": [10 * n for n in range(count)] + [900]}
    log = [(n, "click", 10 * n + 5, None) for n in range(count)]
    log += [(n, "buy", 10 * n + 9 + 7200, 10 * n + 9) for n in range(0, count, 4)]
    log = sorted((row for row in log if only in row[1]), key=lambda row: row[3] or row[2])
    log += [(-1, "buy", 900 + 7200, 900), (-1, "other", 10**7, 901), (-1, "other", 10**7, None)]
    columns = {
        name: [row[place] for row in log] for place, name in enumerate(("id", "kind", "at", "paid"))
    }
    actions = FakeStream(columns, then=5, ends=True)
    kinds = {
        "clicked": Outcome(actions, 20, where={"kind": "click"}),
        "bought": Outcome(actions, 20, where={"kind": "buy"}, time="paid"),
    }
    outcomes = {name: kinds[name] for name in names}
    join = Join(FakeStream(shown, then=5, ends=True), outcomes, on="id", time="at")
    found = {row["id"]: (row["clicked"], row["bought"]) for row in rows(join)}
    found.pop(-1, None)
    assert found == {n: (float(not only), float(n % 4 == 0)) for n in range(count)}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("unit", "factors", "message"),
    [
        ("ms", (1000, 1), "years apart, got a median of 1970-01-21T.* rows of join.outcomes.label"),
        ("ms", (1, 1000), "years apart, got a median of 1970-01-21T.* rows of join.impressions"),
        ("s", (1, 1000), r"times of join.outcomes.label: .* year 5\d,\d\d\d, .*Give unit='ms'"),
        ("s", (10**6, 1), r"times of join.impressions: .* with unit 's'. Give unit='us'"),
        ("s", (10**9, 10**9), r"times of join.impressions: .* with unit 's'. Give unit='ns'"),
    ],
)  # fmt: skip
def test_a_wrong_unit_of_an_input_is_refused(
    live: bool, unit: str, factors: tuple[int, int], message: str
) -> None:
    sides = by_minutes(30, at=None, ahead=0)
    sides = [
        {"id": side["id"], "time": [time * factor for time in side["time"]]}
        for side, factor in zip(sides, factors, strict=True)
    ]
    sources: list[Source] = [Memory(side) for side in sides]
    if live:
        sources = [FakeStream(side, then=3, ends=True) for side in sides]
    with pytest.raises(SchemaError, match=message):
        rows(Join(*sources, on="id", within=60, unit=unit), skips=Skips())


def test_first_events_with_a_wrong_clock_do_not_stop_a_join() -> None:
    shown, clicks = by_minutes(30, at=0, ahead=FAR - BEGIN)
    clicks["time"][0] = 10**11  # the year 5138
    sources = (FakeStream(shown, then=1, ends=True), FakeStream(clicks, then=1, ends=True))
    found = {row["id"]: row["label"] for row in rows(Join(*sources, on="id", within=60))}
    assert found == {n: float(n % 2 == 0) for n in range(30)}


@pytest.mark.parametrize("live", [True, False])
def test_a_kind_that_first_comes_after_years_is_not_one_of_a_wrong_unit(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.connectors.join.turns.READ_ROWS", 20)
    times = [BEGIN - 4 * 31_556_952 + 10**6 * n for n in range(127)]
    shown = {"id": [*range(127)], "at": times}
    kinds = ["click"] * 110 + ["refund"] * 17
    log = {"id": [*range(127)], "kind": kinds, "at": [time + 5 for time in times]}
    sides: list[Source] = [Memory(shown), Memory(log)]
    if live:
        sides = [FakeStream(side, then=5, ends=True) for side in (shown, log)]
    outcomes = {kind: Outcome(sides[1], 9, where={"kind": kind}) for kind in ("click", "refund")}
    join = Join(sides[0], outcomes, "id", time="at")
    assert sum(row["refund"] for row in rows(join)) >= 16


def test_a_schema_and_a_source_read_a_time_by_one_unit() -> None:
    shown, clicks = by_minutes(5, at=None, ahead=0)
    late = LateLabels(["id"], "kind", "view", "buy", within_seconds=9)
    events = Memory({**shown, "kind": ["view"] * 6})
    for unit in ("s", "ms"):
        schema = Schema([Time("time", unit=unit), Label("label"), Id("id")])
        for source in (
            Join(Memory(shown), Memory(clicks), "id", 60),
            Replay([events], "time", late=late),
        ):
            with (
                nullcontext()
                if unit == "s"
                else pytest.raises(
                    ConfigError, match="has the unit 'ms' in the schema's time, got 's'"
                )
            ):
                assert len(list(Dataset(source, schema))) == 1
    moments = [
        {**side, "time": pa.array(side["time"], pa.timestamp("s"))} for side in (shown, clicks)
    ]
    assert len(list(Dataset(Join(*map(Memory, moments), "id", 60), schema))) == 1  # need no unit


def test_offsets_are_instants_and_a_missing_zone_is_not_one() -> None:
    """A topic in UTC, another in local time that changes to summer time."""

    def text(minute: int, zone: str) -> str:
        hours = int(zone[1:3] or 0) if zone not in ("", "Z") else 0
        moment = datetime.datetime(2024, 3, 31) + datetime.timedelta(minutes=minute, hours=hours)
        return moment.isoformat() + zone

    minutes = range(0, 120, 2)
    shown = {"id": [*minutes], "time": [text(n, "Z") for n in minutes]}
    times = [text(n + 1, "+01:00" if n < 60 else "+02:00") for n in minutes]
    join = Join(Memory(shown), Memory({"id": [*minutes], "time": times}), "id", 90, unit="iso")
    assert all(label == 1.0 for label in labels(join).values())
    assert len(labels(join)) > 50
    clicks = Memory({"id": [*minutes], "time": [text(n, "") for n in minutes]})
    with pytest.raises(DataError, match="some have a zone and some have none"):
        rows(replace(join, outcomes=clicks))


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
    held = status_of(items).open_rows
    assert held is not None
    text = json.dumps(position.to_json())
    state = json.loads(text)
    with pytest.raises(DataError, match="needs the open impressions of its checkpoint"):
        next(join(1).read(Position.from_json(text), 4, ReadPlan(live=Live())))
    saved = JoinWishes(saved=held.saved_at(state, None))
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
    items = join.read(plan=ReadPlan(live=live))
    for batch, _ in islice(items, 60):
        samples += batch.column("id").to_pylist() if batch.num_rows else []
    assert samples == list(range(84))
    assert status_of(items).lag == 0


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
    items = join.read(plan=ReadPlan(live=live, wishes=KEEPS))
    held = status_of(items).open_rows
    assert held is not None
    for batch, position in islice(items, 60):
        samples += batch.to_pylist()
        saved = held.saved_at(position.state, None)
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
        items = join.read(position, plan=ReadPlan(live=live, wishes=replace(KEEPS, saved=saved)))
        held: Any = status_of(items).open_rows
        for batch, after in items:
            yield batch.to_pylist(), after, held.saved_at(after.state, None)

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


@pytest.mark.parametrize("side", ["shown", "clicks"])
@pytest.mark.parametrize(
    "left", [19, 1, 0, None], ids=["a row less", "one row", "no row", "removed"]
)
def test_a_corrected_file_may_have_fewer_rows(side: str, left: int | None, tmp_path: Path) -> None:
    """No other file follows: the turn takes the rows that there are."""
    for folder in ("shown", "clicks"):
        events = [{"id": n, "at": n} for n in range(20)]
        if folder == side:
            events[19]["id"] = None
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (tmp_path / "shown" / "1.jsonl").write_text('{"id": 99, "at": 99}\n')
    journal = Journal(tmp_path / "journal")

    def read(turns: int) -> list[Any]:
        folders = (Follow(tmp_path / "shown"), Follow(tmp_path / "clicks"))
        join = Join(*folders, on="id", within=5, time="at", idle_seconds=0.001)
        items = join.read(plan=ReadPlan(live=Live(journal, tick_seconds=0.001)))
        return [row["id"] for batch, _ in islice(items, turns) for row in batch.to_pylist()]

    with pytest.raises(DecodeError, match="column 'id' of a row holds no key"):
        read(60)
    path = tmp_path / side / "0.jsonl"
    if left is None:
        path.unlink()
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
    count = 20 if side == "clicks" else left or 0
    assert read(60) == [*range(count)]
    assert read(60) == [*range(count)]  # as the journal has it


class _Unforeseen(FakeStream):
    """A stream that does not know what will arrive."""

    def read(self, position: Any = None, batch_rows: int = 9, plan: Any = None) -> Any:
        return SourceReading(super().read(position, batch_rows, plan), lambda: SourceStatus(lag=0))


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


def test_a_clock_that_is_set_back_keeps_no_partition_busy() -> None:
    seconds = [10_000.0]

    def clock() -> float:
        seconds[0] += 1 if seconds[0] != 10_050 else -3600
        return seconds[0]

    shown = {"id": [*range(400)], "time": [*range(400)]}
    sources = (_Unforeseen(shown, then=4), _Unforeseen({"id": [7], "time": [1]}, [1], then=0))
    join = Join(*sources, on="id", within=5, idle_seconds=60)
    items = join.read(plan=ReadPlan(live=Live(clock=clock, tick_seconds=0.001)))
    assert sum(batch.num_rows for batch, _ in islice(items, 600)) > 300


def test_several_items_of_one_key_and_time_are_a_warning() -> None:
    shown = {"user": [1, 1, 1, 2], "item": [5, 6, 7, 5], "time": [3, 3, 3, 90]}
    clicks = Memory({"user": [1], "item": [6], "time": [4]})
    with pytest.warns(UserWarning, match=r"several with \{'user': 1\} that differ in \['item'\]"):
        assert len(rows(Join(Memory(shown), clicks, on="user", within=9))) == 1
    assert len(rows(Join(Memory(shown), clicks, on=["user", "item"], within=9))) == 3
    twice = {name: values[:1] * 2 + values[-1:] for name, values in shown.items()}
    assert len(rows(Join(Memory(twice), clicks, on="user", within=9))) == 1


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
        items = join.read()
        logs: Any = status_of(items).open_rows
        disk = 0
        spilled: set[Any] = set()
        samples = []
        for batch, _ in items:
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


def test_a_join_that_reads_for_a_minute_without_a_sample_says_what_holds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown = FakeStream({"id": np.arange(90), "time": np.arange(90)}, then=30)
    clicks = FakeStream({"id": [0], "time": [7]})
    seconds = iter(range(0, 100_000, 10))
    live = Live(Journal(), tick_seconds=0.001, clock=lambda: float(next(seconds)))
    join = Join(shown, clicks, on="id", within=1800, unit="s", idle_seconds=1e6)
    items = join.read(plan=ReadPlan(live=live))
    for _ in islice(items, 60):
        pass
    assert "no sample is decided: input 1 holds the windows open" in caplog.text
    assert "newest event is of 1970-01-01T00:00:07+00:00 (unit 's')" in caplog.text
    held = status_of(items).open_rows
    assert held is not None
    assert held.levels()["open_impressions"] == 90
    assert held.levels()["held_outcomes"] == 1
    assert held.counts["impressions"] == 90
    assert held.newest() == [{"": 89_000_000}, {"": 7_000_000}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_join_without_a_sample_to_its_end_says_so(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As where seconds are read as microseconds: no window closes, and nothing fails."""
    shown: Any = Memory({"id": [1, 2], "time": [0, 90]})
    if stream:
        shown = FakeStream({"id": [1, 2], "time": [0, 90]}, ends=True)
    join = Join(shown, Memory({"id": [1], "time": [95]}), on="id", within=60, unit="us")
    assert rows(join) == []
    assert "no sample comes of 2 impressions" in caplog.text
    assert "1970-01-01T00:00:00.000095+00:00 (unit 'us')" in caplog.text
    caplog.clear()
    assert labels(replace(join, unit="s")) == {1: 0.0}
    assert not caplog.text
