# SPDX-License-Identifier: Apache-2.0
"""Slices, orders and joins of sources."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest

from hotbed import config
from hotbed.connectors import Csv, Memory, ReadPlan, Source
from hotbed.errors import ConfigError, DataError, SchemaError

pytestmark = pytest.mark.core
EVENTS = Memory({"item": [3, 1, 2, 9, 1], "time": [50, 10, 30, 40, 30], "n": [0, 1, 2, 3, 4]})
ITEMS = Memory({"item": [1, 2, 3], "title": ["one", "two", "three"]})


def column(source: Source, name: str) -> list[object]:
    return [
        value for batch, _ in source.read(batch_rows=2) for value in batch.column(name).to_pylist()
    ]


def test_slices_count_rows_or_fractions() -> None:
    assert column(EVENTS.slice(1, 3), "n") == [1, 2]
    assert column(EVENTS.slice(3), "n") == [3, 4]
    assert column(EVENTS.slice(0.0, 0.4), "n") == [0, 1]
    assert column(EVENTS.slice(0.4, 1.0), "n") == column(EVENTS.slice(0.4), "n") == [2, 3, 4]
    assert column(EVENTS.slice(2, 100), "n") == [2, 3, 4]
    assert column(EVENTS.slice(7), "n") == []
    assert [
        EVENTS.slice(0.0, 0.4).num_rows(),
        EVENTS.slice(2, 100).num_rows(),
        EVENTS.slice(7).num_rows(),
    ] == [2, 3, 0]


def test_neighbouring_fractions_share_no_row_and_miss_none() -> None:
    source = Memory({"n": list(range(997))})
    edges = [i / 13 for i in range(14)]
    parts = [column(source.slice(a, b), "n") for a, b in itertools.pairwise(edges)]
    assert [row for part in parts for row in part] == list(range(997))


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (0.5, 1.5), (0, -3)])
def test_slices_outside_are_refused(start: float, stop: float | None) -> None:
    with pytest.raises(
        ConfigError, match=r"st(art|op): must be .* Give a row number from 0 on, or a fraction"
    ):
        EVENTS.slice(start, stop)


def test_sorting_keeps_the_order_of_ties() -> None:
    assert column(EVENTS.sort("time"), "n") == [1, 2, 4, 3, 0]
    with pytest.raises(SchemaError, match="no column 'when' to sort by"):
        column(EVENTS.sort("when"), "n")


def test_a_join_keeps_every_row_in_order_and_adds_columns() -> None:
    joined = EVENTS.join(ITEMS, on="item")
    assert joined.schema().names == ["item", "time", "n", "title"]
    assert column(joined, "n") == [0, 1, 2, 3, 4]
    assert column(joined, "title") == ["three", "one", "two", None, "one"]


def test_a_join_reads_keys_that_nobody_asked_for() -> None:
    joined = EVENTS.join(ITEMS, on="item")
    batches = [batch for batch, _ in joined.read(plan=ReadPlan(columns=("title",)))]
    assert [batch.schema.names for batch in batches] == [["title"]]


def test_a_join_may_have_keys_of_other_names_in_its_table() -> None:
    views = Memory({"sku_id": [3, 1, 2, 3], "day": [1, 1, 1, 2]})
    facts = Memory({"id": [1, 3, 3], "date": [1, 1, 2], "comments": [10, 30, 40]})
    joined = views.join(facts, on=["sku_id", "day"], table_on=["id", "date"])
    assert joined.schema().names == ["sku_id", "day", "comments"]
    rows = [row for batch, _ in joined.read() for row in batch.to_pylist()]
    assert [row["comments"] for row in rows] == [30, 10, None, 40]
    with pytest.raises(
        ConfigError, match=r"join: expected as many keys of the table .* table_on='id'"
    ):
        views.join(facts, on=["sku_id", "day"], table_on="id")
    with pytest.raises(DataError, match=r"keys \['id'\] of the side table must be unique"):
        next(views.join(facts, on="sku_id", table_on="id").read())


def test_a_join_may_have_several_keys() -> None:
    side = Memory({"item": [1, 1], "time": [10, 30], "seen": ["a", "b"]})
    assert column(EVENTS.join(side, on=["item", "time"]), "seen") == [None, "a", None, None, "b"]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([1, None, None]),
        pa.array(["a", "", None]),
        pa.array(["a", "", ""]).dictionary_encode(),
        pa.array([b"a", b"", b""], pa.binary_view()),
        pa.array([1.0, float("nan"), float("nan")]),
    ],
    ids=["null", "text", "dictionary", "bytes", "nan"],
)
def test_a_key_that_is_missing_is_equal_to_no_other(keys: pa.Array) -> None:
    rows = Memory(pa.table({"key": keys, "other": [1, 1, 1]}))
    side = Memory(pa.table({"key": keys, "other": [1, 1, 1], "x": [1, 2, 3]}))
    assert column(rows.join(side, on=["other", "key"]), "x") == [1, None, None]
    side = Memory(pa.table({"key": keys, "x": [1, 2, 3]}))
    assert column(rows.join(side, on="key"), "x") == [1, None, None]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_both_zeros_are_one_key(kind: pa.DataType) -> None:
    rows = Memory(pa.table({"key": pa.array([0.0, -0.0, 1.0]).cast(kind)}))
    side = pa.table({"key": pa.array([-0.0, 1.0, 0.0]).cast(kind), "x": [1, 2, 3]})
    assert column(rows.join(Memory(side[:2]), on="key"), "x") == [1, 1, 2]
    with pytest.raises(DataError, match="1 rows that repeat one"):
        column(rows.join(Memory(side), on="key"), "x")


def test_a_join_refuses_what_is_ambiguous() -> None:
    with pytest.raises(DataError, match="must be unique, got 1 rows that repeat one"):
        column(EVENTS.join(Memory({"item": [1, 1], "x": [1, 2]}), on="item"), "x")
    with pytest.raises(SchemaError, match="both sides have a column 'n'"):
        EVENTS.join(Memory({"item": [1], "n": [1]}), on="item").schema()
    with pytest.raises(
        SchemaError, match=r"the table has no key column 'item', got columns .* with `table_on`"
    ):
        EVENTS.join(Memory({"n": [1]}), on="item").schema()


def test_derived_sources_are_built_from_their_configuration() -> None:
    source = Csv("r.csv").join(Csv("m.csv"), on="movieId").sort("timestamp").slice(0.0, 0.8)
    assert config.build(config.describe(source), Source) == source


def test_movielens_joins_titles_and_sorts_by_time(shared_data: Path) -> None:
    folder = shared_data / "ml_latest_small"
    events = (
        Csv(folder / "ratings.csv").join(Csv(folder / "movies.csv"), on="movieId").sort("timestamp")
    )
    times = column(events, "timestamp")
    assert len(times) == 100_836
    assert times == sorted(times)
    assert None not in column(events, "title")


def test_a_join_of_keys_that_cannot_meet_is_one_clear_error() -> None:
    with pytest.raises(
        SchemaError, match="join: the key 'item' is string in the source, got int64"
    ):
        column(Memory({"item": ["a"]}).join(ITEMS, on="item"), "title")
