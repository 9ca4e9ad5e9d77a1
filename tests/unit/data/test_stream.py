# SPDX-License-Identifier: Apache-2.0
"""Endless datasets: blocks, cuts and ticks; what the clock decided once is decided again after a
crash.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hotbed.connectors import Concat, DeadLetters, Journal, Live, Memory, Position, SourceStatus
from hotbed.connectors.position import PLACE
from hotbed.data import Batch, Dataset, Id, Label, Schema, Time
from hotbed.errors import ConfigError, DataError, DecodeError
from hotbed.testing import FakeStream

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row")])


def log(count: int) -> dict[str, Any]:
    return {"row": list(range(count)), "label": [i % 2 for i in range(count)]}


def rows(batches: Any) -> list[list[int]]:
    return [batch.ids["row"].values.tolist() for batch in batches if batch is not None]


def make(
    stream: FakeStream, batch_size: int = 4, journal: Journal | None = None, **arguments: Any
) -> Dataset:
    dataset = Dataset(stream, SCHEMA, batch_size, **{"prefetch": 0, **arguments})
    dataset.live = Live(journal or Journal())
    return dataset


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_cut_by_count_whatever_the_blocks(prefetch: int) -> None:
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    for takes in ([1, 2, 0, 3], [14], [5, 5, 5], [4, 4, 4, 2]):
        stream = FakeStream(log(14), takes, ends=True)
        assert rows(make(stream, prefetch=prefetch)) == expected
        assert rows(make(stream, prefetch=prefetch).stream()) == expected


def test_a_tick_is_none_and_leaves_the_position() -> None:
    dataset = make(FakeStream(log(8), [4, 0, 0, 2, 0, 2]))
    items = dataset.stream()
    first = next(items)
    assert isinstance(first, Batch)
    assert [next(items), next(items), next(items)] == [None] * 3
    assert dataset.position == first.position
    assert rows([next(items)]) == [[4, 5, 6, 7]]


def test_iteration_leaves_ticks_out_and_map_keeps_the_stream() -> None:
    dataset = make(FakeStream(log(8), [1, 0, 0, 4], ends=True))
    assert rows(dataset.map(lambda batch: batch[:2])) == [[0, 1], [4, 5]]
    assert dataset.map(lambda batch: batch).live is dataset.live
    assert dataset.endless


def test_what_a_source_knows_is_of_the_newest_reading_of_one_dataset() -> None:
    """Whether the source is read alone, after files, or with a side table."""
    stream = FakeStream(log(8), [4, 0, 2], then=0)
    sides = Memory({"row": range(8), "side": range(8)})
    for source in (stream, Concat([Memory(log(2)), stream]), stream.join(sides, "row")):
        dataset = Dataset(source, SCHEMA, 2, prefetch=0)
        assert dataset.status == SourceStatus()
        items = dataset.stream()
        assert [next(items) is None for _ in range(4)][:2] == [False, False]
        lag = dataset.lag
        assert lag in (2, 4, 8)
        other = dataset.without_labels()
        assert [next(other.stream()) is None for _ in range(1)] == [False]
        assert dataset.lag == lag
        items.close()
        assert dataset.lag == lag  # as it was last
        dataset.resume({})
        assert dataset.lag is None
    with pytest.raises(FrozenInstanceError):
        dataset.live.lag = 3  # type: ignore[attr-defined]  # no source and no run leaves word there


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resuming_after_any_batch_goes_on_exactly_with_the_journal_and_without(
    prefetch: int,
) -> None:
    journal = Journal()
    whole = list(make(FakeStream(log(50), [1, 2, 0, 9], then=7, ends=True), 4, journal))
    for number, batch in enumerate(whole):
        assert batch.position is not None
        text = json.dumps(batch.position.to_json())
        for kept in (journal, Journal()):
            other = make(
                FakeStream(log(50), [3, 3], then=2, ends=True), 4, kept, prefetch=prefetch
            ).resume(text)
            rest = list(other)
            assert rows(rest) == rows(whole[number + 1 :])
            if kept is journal:
                assert [b.position for b in rest] == [b.position for b in whole[number + 1 :]]


def test_resume_with_another_batch_size_loses_and_repeats_nothing() -> None:
    first = list(islice(make(FakeStream(log(40), then=7)), 3))
    assert first[-1].position is not None
    rest = make(FakeStream(log(40), then=3, ends=True), 5).resume(first[-1].position)
    assert [row for batch in rows(rest) for row in batch] == list(range(12, 40))


class Clock:
    """Seconds that pass only when told to, a little at each look."""

    def __init__(self, step: float = 1.0) -> None:
        self.seconds, self.step = 1_000.0, step

    def __call__(self) -> float:
        self.seconds += self.step
        return self.seconds


def test_idle_rows_are_a_batch_after_flush_seconds_and_again_in_the_next_life() -> None:
    journal = Journal()
    dataset = make(
        FakeStream(log(20), [3, 0, 0, 0, 0, 0, 6, 0], then=20, ends=True),
        4,
        journal,
        flush_seconds=3,
    )
    dataset.live = replace(dataset.live, clock=Clock())
    whole = list(dataset)
    assert rows(whole)[:3] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    assert list(journal.after("cut", -1)) == [(3, {})]
    again = make(FakeStream(log(20), then=20, ends=True), 4, journal, flush_seconds=3)
    again.live = replace(again.live, clock=Clock())
    assert rows(again) == rows(whole)
    assert whole[0].position is not None
    resumed = make(FakeStream(log(20), ends=True), 4, journal, flush_seconds=3).resume(
        whole[0].position
    )
    assert rows(resumed) == rows(whole)[1:]


def test_no_new_cut_while_blocks_on_record_are_still_to_come() -> None:
    """The first life got block 1 in time; the second must wait for it however slow its broker is."""
    journal = Journal()
    first = make(FakeStream(log(8), [3, 5]), 4, journal)
    assert rows(islice(first, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    class Slow(FakeStream):
        def read(self, *arguments: Any, **keywords: Any) -> Iterator[Any]:
            for batch, position in super().read(*arguments, **keywords):
                yield batch, position
                for _ in range(9):
                    yield batch.slice(0, 0), position

    second = make(Slow(log(8)), 4, journal, flush_seconds=3)
    second.live = replace(second.live, clock=Clock())
    assert rows(islice(second, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert journal.last("cut") == -1


def test_a_clock_that_goes_back_cuts_nothing_early() -> None:
    dataset = make(FakeStream(log(3), [3]), 4, flush_seconds=5)
    dataset.live = replace(dataset.live, clock=Clock(step=-100.0))
    assert list(islice(dataset.stream(), 20)) == [None] * 20


def test_the_journal_knows_a_block_before_its_rows_are_handed_out() -> None:
    journal = Journal()
    items = make(FakeStream(log(9), [4, 5]), 4, journal).stream()
    next(items)
    assert journal.last("block") == 0
    next(items)
    assert journal.last("block") == 1


def test_commit_tells_the_source_and_forgets_what_led_there() -> None:
    journal, stream = Journal(), FakeStream(log(40), [3, 3, 3], then=5)
    dataset = make(stream, 4, journal)
    batches = list(islice(dataset, 4))
    position = batches[2].position
    assert position is not None
    dataset.commit(position)
    assert stream.commits[0].state == position["source"]
    assert next(journal.after("block", -1))[0] == position["source"]["block"]
    assert rows(islice(make(stream, 4, journal).resume(position), 1)) == rows(batches[3:])


def test_events_too_far_ahead_of_the_clock_are_dead_letters_and_are_not_learned(
    tmp_path: Path,
) -> None:
    clock, second = Clock(step=0), 1_000_000
    times = [1000, 999, 1011, 1010, 2**40, 500, 1000, 1000]
    data = {**log(8), "at": [t * second for t in times]}
    schema = Schema([Label("label"), Id("row"), Time("at", unit="us")])
    journal, letters = Journal(), DeadLetters(tmp_path / "dead.jsonl")

    def dataset(now: float) -> Dataset:
        found = Dataset(
            FakeStream(data, [8], ends=True), schema, 3, max_ahead_seconds=10, prefetch=0
        )
        clock.seconds = now
        found.live = Live(journal, letters, clock=clock)
        return found

    first = dataset(1000.0)
    batches = list(first)
    assert rows(batches) == [[0, 1, 3], [5, 6, 7]]
    assert letters.counts == {"future": 2}
    assert first.skips.counts == {"future": 2}
    assert rows(dataset(5000.0)) == rows(batches)  # the clock of the block is on record
    resumed = dataset(5000.0).resume(batches[0].position or {})
    assert rows(resumed) == rows(batches)[1:]
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert [line["place"] for line in lines] == [{"row": 2}, {"row": 4}]
    assert json.loads(lines[0]["payload"]) == {"row": 2, "label": 0, "at": 1011 * second}


def test_rows_that_do_not_encode_are_dead_letters_or_named_errors() -> None:
    data = {"row": list(range(6)), "label": [0.0, 1.0, None, 0.0, 1.0, 1.0]}
    dataset = make(FakeStream(data, [4], ends=True), 2, on_error="skip")
    assert rows(dataset) == [[0, 1], [3, 4], [5]]
    assert dataset.live.dead_letters.counts == {"value": 1}
    with pytest.raises(DecodeError, match=r"row 2: label 'label'"):
        list(make(FakeStream(data, [4], ends=True), 2))


def test_labels_outside_0_to_1_are_dead_letters_of_a_stream() -> None:
    data = {"row": list(range(6)), "label": [0.0, 1.0, -1.0, 0.25, 5.0, 1.0]}
    dataset = make(FakeStream(data, [4], ends=True), 2, on_error="skip")
    dataset.restrict_labels(["label"])
    assert rows(dataset) == [[0, 1], [3, 5]]
    assert dataset.live.dead_letters.counts == {"value": 2}
    strict = make(FakeStream(data, [4], ends=True), 2)
    strict.restrict_labels(["label"])
    with pytest.raises(DecodeError, match=r"row 2: label 'label': .* got -1"):
        list(strict)


ZEROS = "label 'label': expected 0 and 1, got 0 in all of the first 6 rows"
ONES = "label 'label': expected 0 and 1, got 1 in all of the first 6 rows"


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("label", "values", "message"),
    [
        (Label("label", positive="Yes"), ["no"] * 8, "none of 6 rows is positive='Yes', got 'no'"),
        (Label("label", positive="Yes"), ["no"] * 5 + ["Yes"] + ["no"] * 2, None),
        (Label("label", positive="Yes"), ["Yes"] * 8, ONES),
        (Label("label"), [0] * 8, ZEROS),
        (Label("label"), [0.0] * 8, ZEROS),
        (Label("label"), ["0"] * 8, ZEROS),
        (Label("label"), [True] * 8, ONES),
        (Label("label"), [0] * 5 + [1] + [0] * 2, None),
        (Label("label", threshold=4), [3] * 8, ZEROS),
        (Label("label", threshold=4), [5] * 8, ONES),
        (Label("label"), [0.5] * 8, None),  # an amount may be constant
    ],
)
def test_label_that_is_always_0_or_always_1_in_a_stream_is_a_warning(
    label: Label, values: list[Any], message: str | None, ends: bool, monkeypatch: Any
) -> None:
    """While it runs, once, also of recorded events that are read as a stream."""
    monkeypatch.setattr("hotbed.data.numbers.FIRST_ROWS", 5)
    source: Any = FakeStream({**log(8), "label": values}, [2] * 4, ends=True)
    if ends:
        source = Memory({**log(8), "label": values})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = Dataset(source, Schema([label, Id("row")]), 2, prefetch=0)
        monkeypatch.setattr("hotbed.data.dataset.READ_ROWS", 2)
        dataset.restrict_labels(must_match=False)  # of recorded events it is an error at their end
        batches = dataset.stream()
        next(batches)
        assert not caught
        assert len([batch for batch in batches if batch is not None]) == 3
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (message is not None)
    assert not messages or message in messages[0]


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (pa.array([1, 2**63 - 1, -(2**63), 4]), "s"),
        (pa.array([1, 2**64 - 1, 2**63, 4], pa.uint64()), "us"),
        (pa.array([1.0, 1e300, float("nan"), 4.0]), "ms"),
        (pa.array([1, 2**62, -(2**62), 4], pa.timestamp("s")), "s"),
        (pa.array(["1", "9223372036854775807", "1e3", "4"]), "s"),
    ],
)
def test_a_time_that_int64_microseconds_cannot_hold_is_one_bad_row(
    times: pa.Array, unit: str
) -> None:
    schema = Schema([Label("label"), Id("row"), Time("at", unit=unit)])
    stream = FakeStream({**log(4), "at": times}, [4], ends=True)
    dataset = Dataset(stream, schema, 2, on_error="skip", prefetch=0)
    assert rows(dataset) == [[0, 3]]
    assert dataset.live.dead_letters.counts == {"value": 2}
    with pytest.raises(DecodeError, match=r"row 1: time 'at': expected times of unit"):
        list(Dataset(stream, schema, 2, prefetch=0))


def test_closing_a_stream_stops_its_thread_though_nothing_comes() -> None:
    before = set(threading.enumerate())
    items = make(FakeStream(log(4), [4]), 4, prefetch=2).stream()
    assert rows([next(items)]) == [[0, 1, 2, 3]]
    assert next(items) is None
    items.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_stream_reaches_who_reads_after_the_rows_before_it(prefetch: int) -> None:
    items = make(FakeStream(log(20), then=2, fails=6), 4, prefetch=prefetch).stream()
    assert rows([next(items)]) == [[0, 1, 2, 3]]
    with pytest.raises(OSError, match="the stream broke after 6 rows"):
        list(items)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": 10}, r"dataset.shuffle: the source is endless"),
        ({"cache": True}, r"dataset.cache: the source is endless"),
        ({"flush_seconds": -1}, r"dataset.flush_seconds: must be a finite number >= 0 .*got -1"),
        (
            {"flush_seconds": "soon"},
            r"dataset.flush_seconds: must be a finite number >= 0 .*got 'soon'",
        ),
        ({"max_ahead_seconds": 5}, r"dataset.max_ahead_seconds: events need a time"),
    ],
)
def test_what_makes_no_sense_for_a_stream_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(FakeStream(log(4)), **arguments)
    with pytest.raises(ConfigError, match="flush_seconds: the source has an end, got 1"):
        Dataset(Memory(log(4)), SCHEMA, flush_seconds=1)


@pytest.mark.parametrize("cache", [False, True])
def test_rows_of_a_source_that_ends_may_lie_so_far_ahead_of_its_first_reading(cache: bool) -> None:
    """One row of the year 2100 would end the time to live of every other one."""
    schema = Schema([Label("label"), Id("row"), Time("at")])
    source = Memory({**log(8), "at": [1000, 999, 1011, 1010, 4_102_444_800, 500, 1000, 1000]})
    clock = Clock(step=0)

    def dataset(now: float) -> Dataset:
        found = Dataset(source, schema, 2, max_ahead_seconds=10, prefetch=0, cache=cache)
        clock.seconds = now
        found.live = replace(found.live, clock=clock)
        return found

    first = dataset(1000.0)
    batches = list(first)
    assert rows(batches) == [[0, 1], [3, 5], [6, 7]]
    assert first.skips.counts == {"future": 2}
    clock.seconds = 5e9
    assert rows(list(first)) == rows(batches)  # the next epoch, too
    resumed = dataset(5e9).resume(batches[0].position or {})
    assert rows(list(resumed)) == rows(batches)[1:]
    assert rows(list(dataset(5e9))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("ahead", [2 * 86_400, 100 * 365 * 86_400, 300 * 365 * 86_400])
@pytest.mark.parametrize("kind", ["ends", "streams", "history"])
def test_a_row_of_the_future_is_not_learned_by_default(kind: str, ahead: int) -> None:
    """It would end the time to live of every other row, and of each window of metrics."""
    now = 1_700_000_000
    times = [now + 86_400, now, now + ahead, now - 9]
    columns = {**log(4), "at": times}
    schema = Schema([Label("label"), Id("row"), Time("at")])
    source: Any = Memory(columns)
    if kind != "ends":
        source = FakeStream(columns, ends=True)
    if kind == "history":
        source = Concat([Memory(columns), FakeStream(pa.table(columns).slice(0, 0), ends=True)])

    def dataset(on_error: str) -> Dataset:
        made = Dataset(source, schema, 4, on_error=on_error, prefetch=0)
        made.live = Live(clock=lambda: float(now))
        return made

    made = dataset("skip")
    assert rows(list(made)) == [[0, 1, 3]]
    assert made.skips.counts == {"future": 1}
    made = dataset("raise")
    if kind == "ends":
        with pytest.raises(DecodeError, match=r"row 3: time 'at': an event ahead of the clock"):
            list(made)
        made.restrict_labels(must_match=False)  # as an evaluation does
        assert rows(list(made)) == [[0, 1, 2, 3]]
        limited = Dataset(source, schema, 4, max_ahead_seconds=9)
        for unlabelled in (dataset("raise"), limited):  # each row has its score
            assert rows(list(unlabelled.without_labels())) == [[0, 1, 2, 3]]
    else:
        assert rows(list(made)) == [[0, 1, 3]]
        assert made.live.dead_letters.counts == {"future": 1}


def test_an_endless_source_has_no_slice_and_no_order_but_joins_a_side_table() -> None:
    stream = FakeStream(log(6), [2, 0], ends=True)
    for refused in (
        lambda: stream.slice(0.0, 0.5),
        lambda: stream.sort("row"),
        lambda: Memory(log(2)).join(stream, "row"),
    ):
        with pytest.raises(ConfigError, match="needs a source that ends"):
            refused()
    with pytest.raises(ConfigError, match="fitting a schema needs a source that ends"):
        SCHEMA.fit(stream)
    with pytest.raises(ConfigError, match="a count of rows needs a source that ends"):
        stream.count_rows()
    joined = stream.join(Memory({"row": [1, 2, 3], "kind": ["a", "b", "c"]}), on="row")
    dataset = make(stream, 4)
    dataset = Dataset(joined, Schema([Label("label"), Id("row"), Id("kind")]), 4, prefetch=0)
    items = list(dataset.stream())
    assert [None if item is None else item.num_samples for item in items] == [None, 4, 2]
    assert items[1] is not None
    dataset.commit(items[1].position)
    assert len(stream.commits) == 1


class Bare(FakeStream):
    """An endless source of one's own whose rows and positions lack a part."""

    lacking = ""

    def read(self, *arguments: Any, **keywords: Any) -> Iterator[Any]:
        for batch, after in super().read(*arguments, **keywords):
            if self.lacking in batch.schema.names:
                batch = batch.drop_columns([self.lacking])
            state = {name: each for name, each in after.state.items() if name != self.lacking}
            yield batch, Position(state)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_bad_row_of_a_source_without_places_is_a_named_error(on_error: str) -> None:
    source = Bare({"row": [1, 2, 3], "label": [0, 1, None]}, [3], ends=True)
    source.lacking = PLACE
    with pytest.raises(DataError, match=r"no column '.*place' that says where it is, got"):
        list(make(source, 2, on_error=on_error))


def test_a_bad_row_of_a_source_without_blocks_is_a_decode_error() -> None:
    source = Bare({"row": [1, 2, 3], "label": [0, 1, None]}, [3], ends=True)
    source.lacking = "block"
    with pytest.raises(DecodeError, match="row"):
        list(make(source, 2))


def test_times_of_a_source_without_a_clock_are_a_named_error() -> None:
    def read(schema: Schema) -> list[Any]:
        source = Bare({**log(4), "time": [1, 2, 3, 4]}, ends=True)
        source.lacking = "now"
        return list(Dataset(source, schema, 2, prefetch=0))

    assert len(read(SCHEMA)) == 2  # it needs none
    with pytest.raises(DataError, match="no member 'now', by which times are limited, got"):
        read(Schema([*SCHEMA.columns, Time("time", unit="s")]))
