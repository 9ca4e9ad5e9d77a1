# SPDX-License-Identifier: Apache-2.0
"""Dataset: each row once an epoch, in an order fixed by (seed, epoch), resumable at any batch, read
ahead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hotbed.connectors import Csv, Memory, Parquet, Position, Source
from hotbed.data import Batch, Dataset, Dense, Id, Label, Normalize, Schema, Time
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core
ROWS = 1003
SCHEMA = Schema([Label("label"), Id("row"), Id("bag"), Dense("x")])
ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": 1},
    {"shuffle": 64},
    {"shuffle": 200, "prefetch": 0},
    {"shuffle": 10_000},
    {"shuffle": 1, "cache": True},
    {"cache": True},
    {"batch_size": 1, "shuffle": 300},
    {"batch_size": 5_000, "shuffle": 100},
    {"drop_last": True, "shuffle": 100},
]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    rows = range(ROWS)
    table = pa.table(
        {
            "row": rows,
            "bag": [[i] * (i % 3) for i in rows],
            "x": rows,
            "label": [i % 2 for i in rows],
        }
    )
    pq.write_table(table.slice(0, 400), tmp_path / "1.parquet", row_group_size=90)
    pq.write_table(table.slice(400), tmp_path / "2.parquet", row_group_size=333)
    return Parquet(str(tmp_path / "*.parquet"))


def make(source: Source, **arguments: Any) -> Dataset:
    return Dataset(source, SCHEMA, **{"batch_size": 32, "seed": 5, **arguments})


def rows(batches: Iterator[Batch] | list[Batch] | Dataset) -> list[int]:
    return [row for batch in batches for row in batch.ids["row"].values.tolist()]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_epoch_holds_each_row_once_with_all_its_columns(
    source: Source, order: dict[str, Any]
) -> None:
    dataset = make(source, **order)
    size = dataset.batch_size
    for _ in range(2):
        batches = list(dataset)
        kept = rows(batches)
        assert sorted(kept) == sorted(set(kept))
        assert len(kept) == (ROWS - ROWS % size if dataset.drop_last else ROWS)
        assert {batch.num_samples for batch in batches[:-1]} <= {size}
        for batch in batches:
            row = batch.ids["row"].values
            assert (batch.dense["x"] == row).all()
            assert (batch.labels["label"] == row % 2).all()
            assert (batch.ids["bag"].lengths() == row % 3).all()
        assert len(batches) == len(dataset) == dataset.num_batches


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_resuming_after_any_batch_goes_on_exactly(source: Source, order: dict[str, Any]) -> None:
    dataset = make(source, **order)
    first, second, third = list(dataset), list(dataset), list(dataset)
    for batches, later in ((first, second), (second, third)):
        for number in {0, 1, len(batches) // 2, len(batches) - 2, len(batches) - 1} & set(
            range(len(batches))
        ):
            position = json.dumps(batches[number].position.to_json())
            resumed = make(source, **order).resume(position)
            assert rows(resumed) == rows(batches[number + 1 :])
            assert rows(resumed) == rows(later)


def test_a_place_of_a_reader_without_a_cache_resumes_with_one() -> None:
    users = Memory({"user": range(80_000)})
    data = Dataset(users, Schema([Id("user")]), 10_000, prefetch=0)
    *_, batch, _ = data  # after the first piece of the source
    cached = Dataset(users, data.schema, 10_000, cache=True).resume(batch.position.to_json())
    first = [batch.ids["user"].values[0] for batch in [*cached, *cached]]
    assert first == [70_000, *range(0, 80_000, 10_000)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_resumed_batches_carry_the_same_positions(source: Source, order: dict[str, Any]) -> None:
    batches = list(make(source, **order))
    resumed = make(source, **order).resume(batches[len(batches) // 2].position)
    expected = [batch.position for batch in batches[len(batches) // 2 + 1 :]]
    assert [batch.position for batch in resumed] == expected


def test_the_dataset_knows_its_position(source: Source) -> None:
    dataset = make(source, shuffle=100)
    start = dataset.position
    for number, batch in enumerate(dataset):
        assert dataset.position == batch.position
        if number == 3:
            break
    assert (
        rows(make(source, shuffle=100).resume(dataset.position))
        == rows(make(source, shuffle=100))[4 * 32 :]
    )
    assert rows(make(source, shuffle=100).resume(start)) == rows(make(source, shuffle=100))


@pytest.mark.parametrize(
    "order", [{"shuffle": 64}, {"shuffle": 10_000}, {"shuffle": 1, "cache": True}], ids=str
)
def test_order_is_a_function_of_seed_and_epoch(source: Source, order: dict[str, Any]) -> None:
    dataset = make(source, **order)
    first, second = rows(dataset), rows(dataset)
    assert first != second
    assert rows(dataset.epoch(0)) == first
    assert rows(dataset.epoch(1)) == second
    assert rows(make(source, **order)) == first
    assert rows(make(source, **{**order, "seed": 6})) != first
    assert first != list(range(ROWS))


def test_without_shuffle_rows_keep_their_order(source: Source) -> None:
    assert rows(make(source)) == list(range(ROWS))


def test_a_shuffle_moves_rows_no_further_than_its_buffer(source: Source) -> None:
    moved = [abs(row - place) for place, row in enumerate(rows(make(source, shuffle=50)))]
    assert 10 < max(moved) < 50


def test_a_position_of_another_order_is_refused(source: Source) -> None:
    position = next(iter(make(source, shuffle=64))).position
    for other in ({"shuffle": 65}, {"shuffle": 64, "seed": 1}, {}, {"shuffle": 64, "cache": True}):
        with pytest.raises(ConfigError, match="cannot resume a position of another order"):
            make(source, **other).resume(position)


def test_an_empty_position_is_the_start_and_a_foreign_one_is_refused(source: Source) -> None:
    assert rows(make(source).resume({})) == list(range(ROWS))
    with pytest.raises(ConfigError, match="expected the position of a dataset"):
        make(source).resume({"row": 3})


def test_the_length_is_known_from_the_source_or_after_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,bag,x,label\n" + "1,1,1,1\n" * 70)
    dataset = make(Csv(tmp_path / "a.csv"))
    assert dataset.num_batches is None
    with pytest.raises(TypeError, match="not known before a whole epoch"):
        len(dataset)
    assert len(list(dataset)) == len(dataset) == 3


def test_map_changes_batches_and_keeps_positions(source: Source) -> None:
    dataset = make(source).map(lambda batch: batch[:5]).map(lambda batch: Batch(ids=batch.ids))
    batches = list(dataset)
    assert {batch.num_samples for batch in batches} == {5}
    assert [batch.position for batch in batches] == [batch.position for batch in make(source)]


@pytest.mark.parametrize(
    "order", [{}, {"shuffle": 64}, {"cache": True}, {"cache": True, "shuffle": 1}], ids=str
)
def test_without_labels_the_rows_are_the_same_in_the_same_order(
    source: Source, order: dict[str, Any]
) -> None:
    dataset = make(source, **order)
    for _ in range(2):  # the second time from what the cache kept
        batches = list(dataset.without_labels())
        assert not any(batch.labels for batch in batches)
        assert rows(batches) == rows(dataset)
    assert all(batch.labels for batch in dataset)


def test_without_labels_what_they_hold_leaves_no_row_out() -> None:
    source = Memory({"row": range(4), "bag": range(4), "x": range(4), "label": [0, 1, None, 0]})
    dataset = make(source, on_error="skip", cache=True)
    assert rows(dataset) == [0, 1, 3]
    assert (
        rows(dataset.without_labels())
        == rows(dataset.map(lambda batch: batch).without_labels())
        == [0, 1, 2, 3]
    )
    assert dataset.num_rows == 3
    assert rows(dataset.without_labels().map(lambda batch: batch[:2])) == [0, 1]


class Failing(Source):
    """Yields a batch, then fails."""

    def schema(self) -> pa.Schema:
        return pa.schema([("row", pa.int64())])

    def read(self, position: Any = None, batch_rows: int = 1, plan: Any = None) -> Any:
        yield pa.record_batch({"row": [1]}), Position({"row": 1})
        raise OSError("the disk is on fire")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_of_the_reader_reaches_the_consumer(prefetch: int) -> None:
    batches = iter(Dataset(Failing(), Schema([Id("row")]), 1, prefetch=prefetch))
    assert next(batches).num_samples == 1
    with pytest.raises(OSError, match="on fire"):
        next(batches)


def test_reading_ahead_is_bounded_and_ends_with_its_consumer(source: Source) -> None:
    made: list[int] = []
    before = set(threading.enumerate())
    dataset = make(source, batch_size=1, prefetch=3).map(lambda batch: made.append(1) or batch)
    batches = iter(dataset)
    for handed_out in (1, 2, 3, 4):
        next(batches)
        deadline = time.monotonic() + 30
        while len(made) < handed_out + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # two or three wait in the queue (it is filled again when half is taken), one for room
        assert handed_out + 3 <= len(made) <= handed_out + 4
    (reader,) = set(threading.enumerate()) - before
    batches.close()
    assert not reader.is_alive()


def test_has_next_says_whether_the_next_batch_waits(source: Source) -> None:
    gate = threading.Semaphore(1)
    dataset = make(source, batch_size=ROWS // 2).map(lambda batch: gate.acquire() and batch)
    assert not dataset.has_next
    batches = iter(dataset)
    for _ in range(2):
        next(batches)
        assert not dataset.has_next, "the next batch is still being made"
        gate.release()
        _wait_until(lambda: dataset.has_next)
    next(batches)
    _wait_until(lambda: dataset.has_next)
    assert next(batches, None) is None
    assert not make(source, prefetch=0).has_next


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_true()


def test_leaving_the_loop_early_ends_the_thread(source: Source) -> None:
    before = set(threading.enumerate())
    for _ in make(source):
        break
    assert set(threading.enumerate()) <= before


def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    lines = [f"{i},1,{i}.5,0" for i in range(500)]
    (tmp_path / "good.csv").write_text("\n".join(["row,bag,x,label", *lines]))
    lines[321] = "321,1,,0"
    (tmp_path / "wrong.csv").write_text("\n".join(["row,bag,x,label", *lines]))
    for order in ({}, {"shuffle": 100}, {"batch_size": 7}):
        dataset = make(Csv([tmp_path / "good.csv", tmp_path / "wrong.csv"]), **order)
        with pytest.raises(
            DecodeError,
            match=r"wrong\.csv, line 323: column 'x': expected finite float32 numbers, got a missing value",
        ) as caught:
            list(dataset)
        assert caught.value.row == 323
        assert caught.value.column == "x"


def test_a_bad_row_of_a_slice_is_named_in_its_file(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"x": [float("nan") if i == 77 else i for i in range(100)]}),
        tmp_path / "a.parquet",
    )
    source = Parquet(tmp_path / "a.parquet").slice(50, 90)
    with pytest.raises(DecodeError, match=r"a\.parquet, row 78"):
        list(Dataset(source, Schema([Dense("x")]), 8))


@pytest.mark.parametrize("order", [{}, {"shuffle": 90}, {"cache": True}], ids=str)
def test_bad_rows_are_skipped_counted_and_positions_stay_exact(
    tmp_path: Path, order: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [
        f"{i},{i},{'' if i % 100 == 7 else i},{'bad' if i % 250 == 3 else 0}" for i in range(ROWS)
    ]
    lines.insert(500, "1,2,3")
    (tmp_path / "a.csv").write_text("\n".join(["row,bag,x,label", *lines]))
    good = [i for i in range(ROWS) if i % 100 != 7 and i % 250 != 3]
    dataset = make(Csv(tmp_path / "a.csv"), on_error="skip", **order)
    batches = list(dataset)
    assert sorted(rows(batches)) == good
    assert dataset.skips.counts == {"fields": 1, "value": ROWS - len(good)}
    assert "skipped" in caplog.text
    assert dataset.encoder.stats.rows == len(good)
    resumed = make(Csv(tmp_path / "a.csv"), on_error="skip", **order).resume(batches[4].position)
    assert rows(resumed) == rows(batches[5:])


def test_numbers_are_read_as_numbers_whatever_the_first_rows_look_like(tmp_path: Path) -> None:
    lines = [f"{i},1,{i},0" for i in range(200_000)]
    (tmp_path / "a.csv").write_text("\n".join(["row,bag,x,label", *lines, "5,6,0.25,1"]))
    *_, last = make(Csv(tmp_path / "a.csv"), batch_size=10_000)
    assert last.dense["x"][-1] == 0.25


def test_a_missing_column_is_named_before_anything_is_yielded() -> None:
    with pytest.raises(SchemaError, match=r"columns \['x'\] are missing"):
        next(iter(make(Memory({"row": [1], "bag": [1], "label": [1]}))))


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_missing_column_is_looked_for_among_all_columns_of_the_file(
    tmp_path: Path, ending: str
) -> None:
    """Readers read only what the schema names; the message lists what the file holds."""
    table = pa.table({"click": [1, 0], "user": [1, 2], "item": [3, 4], "price": [0.5, 1.5]})
    path = tmp_path / f"a.{ending}"
    (pacsv.write_csv if ending == "csv" else pq.write_table)(table, path)
    source = Csv(path) if ending == "csv" else Parquet(path)
    schema = Schema([Label("click"), Id("usr"), Id("item")])
    message = r"columns \['usr'\] are missing, got \['click', 'user', 'item', 'price'\]. 'usr': Did you mean 'user'"
    with pytest.raises(SchemaError, match=message):
        list(Dataset(source, schema))
    with pytest.raises(SchemaError, match=r"'y'.*Add them to the data"):  # 'y' is not near 'day'
        list(Dataset(Memory({"y": [1], "u": [1]}), Schema([Label("y"), Id("day")])))
    normalized = Dense("prise", transforms=[Normalize()])
    with pytest.raises(SchemaError, match=r"'price'\]. 'prise': Did you mean 'price'"):
        Schema([Label("click"), normalized]).fit(source)


def test_a_file_with_another_delimiter_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click;user;price\n1;2;3,5\n0;3;4,5\n")
    schema = Schema([Label("click"), Id("user")])
    with pytest.raises(
        SchemaError, match=r"got one column, 'click;user;price'\. Read the file with delimiter=';'"
    ):
        list(Dataset(Csv(tmp_path / "a.csv"), schema))


LIBSVM_LABELS = [1, -1, 1, 0, 3]


def labelled(tmp_path: Path, **arguments: Any) -> Dataset:
    lines = [f"{label},{row}" for row, label in enumerate(LIBSVM_LABELS)]
    (tmp_path / "clicks.csv").write_text("\n".join(["y,user", *lines]))
    dataset = Dataset(
        Csv(tmp_path / "clicks.csv"), Schema([Label("liked", column="y"), Id("user")]), **arguments
    )
    dataset.restrict_labels(["liked"])
    return dataset


def test_a_label_outside_0_to_1_is_a_bad_row_where_the_loss_needs_it(tmp_path: Path) -> None:
    message = r"clicks.csv, line 3: label 'liked' of column 'y': .* needs labels from 0 to 1, got -1. Give Label\('liked', threshold"
    with pytest.raises(DecodeError, match=message) as caught:
        list(labelled(tmp_path))
    assert (caught.value.row, caught.value.column) == (3, "y")
    dataset = labelled(tmp_path, on_error="skip")
    assert [batch.labels["liked"].tolist() for batch in dataset] == [[1, 1, 0]]
    assert dataset.skips.counts == {"value": 2}


def test_labels_that_a_map_brings_into_0_to_1_pass(tmp_path: Path) -> None:
    def halved(batch: Batch) -> Batch:
        return replace(batch, labels={"liked": batch.labels["liked"].clip(0) / 2})

    for arguments, labels in (({"on_error": "skip"}, [0.5, 0, 0.5, 0]), ({}, None)):
        dataset = labelled(tmp_path, **arguments).map(halved)
        dataset.restrict_labels(["liked"])
        if labels is None:
            with pytest.raises(
                DataError, match=r"row 5 of a mapped batch: label 'liked' of column 'y': .* got 1.5"
            ):
                list(dataset)
        else:
            assert [batch.labels["liked"].tolist() for batch in dataset] == [labels]


def test_a_cache_is_read_again_where_labels_are_restricted_later(tmp_path: Path) -> None:
    dataset = labelled(tmp_path, cache=True)
    dataset.restrict_labels([])
    assert len(list(dataset)) == 1
    dataset.restrict_labels(["liked"])
    with pytest.raises(DecodeError, match="got -1"):
        list(dataset)


@pytest.mark.parametrize("order", [{}, {"shuffle": 2}, {"cache": True}], ids=str)
def test_a_positive_that_matches_no_row_is_an_error_with_the_values(order: dict[str, Any]) -> None:
    source = Memory({"bought": ["yes", "no", "no"], "user": [1, 2, 3]})
    dataset = Dataset(source, Schema([Label("bought", positive="Yes"), Id("user")]), 2, **order)
    with pytest.raises(
        DataError,
        match=r"none of 3 rows is positive='Yes', got '(yes|no)', '(yes|no)'. Give one of them",
    ):
        list(dataset)
    dataset.restrict_labels(must_match=False)
    assert sum(batch.num_samples for batch in dataset) == 3
    assert sum(batch.num_samples for batch in dataset.without_labels()) == 3
    matched = Dataset(source, Schema([Label("bought", positive="yes"), Id("user")]), 2, **order)
    assert [len(list(matched)) for _ in range(2)] == [2, 2]
    assert list(Dataset(source.slice(0, 0), matched.schema, **order)) == []


@pytest.mark.parametrize(
    ("unit", "factor", "advice"),
    [
        ("s", 1_000, "Give unit='ms'"),
        ("ms", 1_000, "Give unit='us'"),
        ("us", 1_000, "Give unit='ns'"),
        ("s", 7, "Correct the times"),
    ],
)
def test_times_after_the_year_2200_are_a_wrong_unit(unit: str, factor: int, advice: str) -> None:
    base = {"s": 1, "ms": 1_000, "us": 1_000_000}[unit]
    times = [1_700_000_000 * base * factor + row for row in range(5)]
    schema = Schema([Label("y"), Time("at", unit=unit)])
    source = Memory({"y": [0, 1, 0, 1, 1], "at": times})
    for _ in range(2):
        with pytest.raises(
            SchemaError,
            match=r"time 'at': the median of the first 5 rows is the year .*, got 1.* with unit "
            rf"'{unit}'. {advice}",
        ):
            list(Dataset(source, schema))
    one = Memory({"y": [0, 1, 0], "at": [base, times[0], base]})
    (batch,) = Dataset(one, schema, on_error="skip")  # one wrong clock is not a wrong unit
    assert batch.num_samples == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"shuffle": -1}, "shuffle"),
        ({"on_error": "ignore"}, "on_error"),
        ({"prefetch": 1.5}, "prefetch"),
    ],
)
def test_wrong_arguments_are_named(source: Source, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset.{name}"):
        make(source, **arguments)


def test_an_empty_source_is_an_empty_epoch() -> None:
    empty = Memory(
        pa.table({name: pa.array([], pa.int64()) for name in ("row", "bag", "x", "label")})
    )
    for order in ({}, {"shuffle": 10}, {"cache": True, "shuffle": 1}):
        assert list(make(empty, **order)) == []


def test_a_cached_epoch_is_read_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = type(source).read

    def counted(self: Source, *arguments: Any, **keywords: Any) -> Any:
        reads.append(1)
        return read(self, *arguments, **keywords)

    monkeypatch.setattr(type(source), "read", counted)
    dataset = make(source, shuffle=1, cache=True, prefetch=0)
    first, second = (sum(batch.num_samples for batch in dataset) for _ in range(2))
    assert first == second > 0
    assert len(reads) == 1
