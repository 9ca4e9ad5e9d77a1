# SPDX-License-Identifier: Apache-2.0
"""Transforms: what each does to values, nulls and lists, and what fitting learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from hotbed.connectors import Csv, Memory
from hotbed.data import (
    Bucketize,
    Clip,
    Cross,
    Dense,
    Encoder,
    Expression,
    Extract,
    FillMissing,
    Hash,
    Id,
    Log,
    Map,
    Normalize,
    Schema,
    Shift,
    Split,
    TimeOfDay,
    Transform,
)
from hotbed.data.columns import Columns
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core


def ids(values: Any, transforms: Sequence[Transform], **others: Any) -> list[list[int]]:
    batch = Encoder(Schema([Id("x", transforms=transforms)]))(Memory({"x": values, **others}).table)
    found = batch.ids["x"].with_offsets()
    return [
        found.values[a:b].tolist()
        for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)
    ]


def dense(values: Any, *transforms: Transform) -> list[float]:
    found: list[float] = (
        Encoder(Schema([Dense("x", transforms)]))(Memory({"x": values}).table).dense["x"].tolist()
    )
    return found


def xxh(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh64(data, seed=seed).intdigest()


def test_hash_folds_strings_and_integers_into_bins() -> None:
    words = ["a", "b", None, "a long word of more than thirty-two bytes"]
    expected = [[xxh(word.encode(), 7) % 10] if word else [] for word in words]
    assert ids(words, [Hash(bins=10, seed=7)]) == expected
    numbers = [-1, 2**63 - 1, 0]
    raw = [np.int64(number).tobytes() for number in numbers]
    assert ids(numbers, [Hash(bins=1000)]) == [[xxh(data) % 1000] for data in raw]
    assert ids(numbers, [Hash()]) == [[int(np.uint64(xxh(data)).view(np.int64))] for data in raw]


def test_cross_tells_every_combination_apart_and_order_matters() -> None:
    users, hours = [1, 1, 2, 2, None], ["a", "b", "a", "b", "a"]
    crossed = ids(users, [Cross(["hour"])], hour=hours)
    assert len({bag[0] for bag in crossed[:4]}) == 4
    assert crossed[4] == []
    assert ids(hours, [Cross("user")], user=users)[0] != crossed[0]
    assert all(0 <= bag[0] < 3 for bag in ids(users, [Cross(["hour"], bins=3)], hour=hours)[:4])
    with pytest.raises(SchemaError, match="expected columns of single values, got list"):
        ids(users, [Cross(["hour"])], hour=[["a"]] * 5)
    with pytest.raises(SchemaError, match=r"columns \['hour'\] are missing"):
        ids(users, [Cross(["hour"])])


def test_shift_adds_to_whole_numbers_and_wraps_around() -> None:
    assert ids([0, 7, None], [Shift(100)]) == [[100], [107], []]
    assert ids([[1, 2], [], [3]], [Shift(-1)]) == [[0, 1], [], [2]]
    assert ids([2**63 - 1], [Shift(1)]) == [[-(2**63)]]
    assert ids(np.array([2**64 - 1], np.uint64), [Shift(2)]) == [[1]]
    with pytest.raises(SchemaError, match="expected whole numbers, got a column of double"):
        ids([1.5], [Shift(1)])
    with pytest.raises(ConfigError, match=r"shift\.by: must be an integer"):
        Shift(2**63)


def test_bucketize_counts_the_boundaries_reached() -> None:
    assert ids([-5.0, 0.0, 0.5, 1.0, 9.0, None], [Bucketize([0, 1])]) == [
        [0],
        [1],
        [1],
        [2],
        [2],
        [],
    ]
    assert dense([3], Bucketize([1, 2, 3])) == [3.0]


def test_clip_log_and_fill_keep_their_order() -> None:
    values = [-3, None, 10, 10**6]
    got = dense(values, FillMissing(0), Clip(low=0, high=1000), Log())
    assert got == pytest.approx(np.log1p([0, 0, 10, 1000]).tolist(), rel=1e-6)


def test_a_logarithm_that_is_none_is_a_bad_row() -> None:
    for value in (-1.0, -7.0):
        with pytest.raises(DecodeError, match="expected finite float32 numbers, got -inf"):
            dense([1.0, value], Log())


def test_fill_missing_fits_the_column_it_fills() -> None:
    assert dense([1.5, None, float("nan")], FillMissing(2)) == [1.5, 2.0, 2.0]
    assert dense([1, None], FillMissing(0.5)) == [1.0, 0.5]
    assert dense([None, None], FillMissing(1)) == [1.0, 1.0]
    assert ids([5, None], [FillMissing(-1)]) == [[5], [-1]]
    assert ids(["a", None], [FillMissing("b")]) == ids(["a", "b"], [])
    with pytest.raises(SchemaError, match="does not fit a column of int64, got 'b'"):
        ids([5, None], [FillMissing("b")])


def test_split_leaves_out_empty_parts_and_keeps_missing_apart() -> None:
    assert ids(["a|b||", "", None, "b"], [Split("|")]) == ids([["a", "b"], [], None, ["b"]], [])


def test_map_counts_from_one_and_unknown_is_zero() -> None:
    assert ids(["x", "z", None, "y"], [Map(["x", "y"])]) == [[1], [0], [], [2]]
    assert ids([["x", "z"], []], [Map(["x", "y"])]) == [[1, 0], []]
    assert ids([30, 10], [Map([10, 20, 30])]) == [[3], [1]]


def test_extract_reads_the_year_of_a_title() -> None:
    titles = ["Toy Story (1995)", "2001: A Space Odyssey (1968) ", "Untitled", None]
    year = Extract(r"\((\d{4})\)\s*$", number=True)
    assert ids(titles, [year]) == [[1995], [1968], [], []]
    assert ids(titles[:1], [Extract(r"\((\d{4})\)")]) == ids(["1995"], [])


@pytest.mark.parametrize(
    ("part", "expected"),
    [("hour", 13), ("minute", 13 * 60 + 7), ("weekday", 1), ("hour_of_week", 24 + 13)],
)
def test_time_of_day_knows_the_parts_of_a_time(part: str, expected: int) -> None:
    seconds = 1_413_896_829  # Tuesday, 2014-10-21 13:07:09 UTC
    assert ids([seconds, None], [TimeOfDay(part)]) == [[expected], []]
    assert ids(["2014-10-21 13:07:09"], [TimeOfDay(part, unit="iso")]) == [[expected]]
    assert ids([-1], [TimeOfDay("hour")]) == [[23]]


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/St_Johns", "Europe/Berlin"])
def test_time_of_day_reads_the_clocks_of_a_zone_also_in_summer(zone: str) -> None:
    seconds = [*range(1_413_896_829, 1_413_896_829 + 20_000_000, 1_000_003), -7]
    moments = [datetime.fromtimestamp(each, ZoneInfo(zone)) for each in seconds]
    parts = {
        "hour": [moment.hour for moment in moments],
        "minute": [60 * moment.hour + moment.minute for moment in moments],
        "weekday": [moment.weekday() for moment in moments],
        "hour_of_week": [24 * moment.weekday() + moment.hour for moment in moments],
    }
    for part, expected in parts.items():
        assert ids([*seconds, None], [TimeOfDay(part, zone=zone)]) == [
            *([each] for each in expected),
            [],
        ]


def test_text_where_numbers_are_needed_is_one_clear_error() -> None:
    for transform in (Clip(0), Log(), Normalize(0, 1), Bucketize([1])):
        with pytest.raises(
            SchemaError, match="a transform of numbers: expected numbers, got a column of string"
        ):
            dense(["a"], transform)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hash(bins=0), r"hash\.bins: must be at least 1"),
        (lambda: Cross([]), r"cross\.with_: expected at least one column"),
        (lambda: Bucketize(), "expected boundaries or bins, got neither"),
        (lambda: Bucketize([2, 1]), "must rise"),
        (lambda: Bucketize(bins=1), r"bucketize\.bins: must be at least 2, got 1"),
        (lambda: FillMissing(), "expected a value or a statistic, got statistic=None"),
        (lambda: FillMissing(statistic="mode"), "got statistic='mode'"),
        (lambda: TimeOfDay("year"), r"time_of_day\.part: unknown value, got 'year'"),
        (lambda: TimeOfDay(zone="China"), r"time_of_day\.zone: unknown time zone, got 'China'"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "transform", [Normalize(), Bucketize(bins=4), Map(), FillMissing(statistic="mean")]
)
def test_a_transform_that_has_not_learned_says_so(transform: Transform) -> None:
    with pytest.raises(ConfigError, match=r"not fitted.* Call schema\.fit"):
        ids([1, 2], [transform])


def test_fitting_learns_means_quantiles_and_vocabularies() -> None:
    rng = np.random.default_rng(0)
    numbers, words = rng.normal(3, 2, 20_000), rng.choice(list("aaabbc"), 20_000)
    lists = [["x", "y"], ["x"], [], None] * 5_000
    source = Memory(
        {
            "n": numbers,
            "w": words.tolist(),
            "l": lists,
            "gaps": [None, 1.0, 3.0, float("nan")] * 5_000,
        }
    )
    schema = Schema(
        [
            Dense("n", [Normalize()]),
            Dense("filled", [FillMissing(statistic="median"), Normalize()], column="gaps"),
            Id("bucket", transforms=[Bucketize(bins=4)], column="n"),
            Id("w", transforms=[Map(min_count=4_000)]),
            Id("l", transforms=[Map(max_size=1)]),
        ]
    ).fit(source)
    normalize = schema["n"].transforms[0]
    assert (normalize.mean, normalize.std) == pytest.approx((numbers.mean(), numbers.std()))
    assert schema["filled"].transforms[0].value == 2.0
    assert schema["filled"].transforms[1] == Normalize(2.0, pytest.approx(np.std([2, 1, 3, 2])))
    assert schema["bucket"].transforms[0].boundaries == pytest.approx(
        np.quantile(numbers, [0.25, 0.5, 0.75])
    )
    assert schema["w"].transforms[0].vocabulary == ("a", "b")
    assert schema["l"].transforms[0].vocabulary == ("x",)
    assert Schema.from_json(json.dumps(schema.to_json())) == schema
    assert schema.fit(Memory({"n": [0.0]})) == schema


def test_fitting_reads_the_given_range_only() -> None:
    source = Memory({"n": [1.0, 3.0, 1000.0]})
    assert (
        Schema([Dense("n", [Normalize()])]).fit(source.slice(0, 2))["n"].transforms[0].mean == 2.0
    )
    with pytest.raises(DataError, match="no rows"):
        Schema([Dense("n", [Normalize()])]).fit(source.slice(3))


def test_fitted_census_and_criteo_columns_are_used_alike_in_serving(shared_data: Any) -> None:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    source = Csv(
        shared_data / "criteo" / "kaggle_head10001.tsv",
        delimiter="\t",
        header=False,
        columns=names,
        quote=None,
    )
    steps = [FillMissing(0), Clip(low=0), Log(), Normalize()]
    schema = Schema(
        [
            *(Dense(f"I{i}", steps) for i in range(1, 14)),
            Id("C1"),
            Id("C2", transforms=[Map(min_count=3)]),
        ]
    )
    fitted = schema.fit(source)
    values = np.concatenate([Encoder(fitted)(batch).dense["I5"] for batch, _ in source.read()])
    assert abs(values.mean()) < 1e-3
    assert values.std() == pytest.approx(1, abs=1e-3)
    again = Schema.from_json(fitted.to_json())
    batch = next(source.read(batch_rows=100))[0]
    assert (Encoder(again)(batch, labels=False).dense["I5"] == values[:100]).all()


@pytest.mark.parametrize(
    ("learned", "others", "ids"),
    [
        ([True, False, True], [False, None, True], [2, None, 1]),
        ([True, False, True], [0, 1, 7], [2, 1, 0]),
        ([3_000_000_000, 7, -1], np.array([7, -1], np.int32), [2, 1]),
        ([2**64 - 1, 7, 7], np.array([-1, 7], np.int64), [2, 1]),  # the same 64 bits
        ([b"a", b"b", b"b"], ["b", "a", "c"], [1, 2, 0]),
    ],
)
def test_map_learns_words_that_a_file_keeps_and_other_types_find(
    learned: list[Any], others: Any, ids: list[int | None]
) -> None:
    schema = Schema([Id("x", transforms=[Map()])]).fit(Memory({"x": learned}))
    loaded = Schema.from_json(json.dumps(schema.to_json()))
    assert loaded == schema
    (transform,) = loaded.ids[0].transforms
    values = pa.array(others)
    context = Columns(pa.record_batch({"x": values}))
    assert transform.apply(values, context).to_pylist() == ids


@pytest.mark.parametrize("values", [[1.5], [Decimal("1.5")], [date(2024, 1, 1)], [b"\xff"]])
def test_map_refuses_words_that_no_file_keeps(values: list[Any]) -> None:
    with pytest.raises(SchemaError, match=r"column 'x': map: expected .*, got"):
        Schema([Id("x", transforms=[Map()])]).fit(Memory({"x": values}))


def test_fitting_has_no_part_of_rows_that_a_transform_cannot_read() -> None:
    source = Memory({"at": ["3600", "soon", None, "10800"], "n": [1.0, 9.0, 2.0, 3.0]})
    schema = Schema([Dense("at", [TimeOfDay(), Normalize()]), Dense("n", [Normalize()])])
    fitted = schema.fit(source)
    assert fitted["at"].transforms[1].mean == 2.0
    assert fitted["n"].transforms[0].mean == 2.0


MOMENTS = [pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ms", "Europe/Berlin"), pa.date32()]


@pytest.mark.parametrize("kind", MOMENTS, ids=str)
@pytest.mark.parametrize("sql", ["CAST(x AS VARCHAR)", "EXTRACT(year FROM x)"])
def test_expression_names_a_time_beyond_the_calendar(kind: pa.DataType, sql: str) -> None:
    far = {"s": 2**53, "ms": 2**62, "us": 2**63 - 1}[getattr(kind, "unit", "ms")]
    days = pa.array([0, 2**31 - 1], pa.int32())
    rows = pa.table({"x": days.cast(kind) if pa.types.is_date(kind) else pa.array([0, far], kind)})
    schema = Schema([Id("x", transforms=[Expression(sql), Hash(9)])])
    with pytest.raises(DataError, match="years -260,000 to 260,000"):
        Encoder(schema)(rows, labels=False)
    assert Encoder(schema, "skip")(rows, labels=False).num_samples == 1


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.float32()], ids=str)
def test_expression_computes_with_categories_of_narrow_numbers_as_with_numbers(
    kind: pa.DataType,
) -> None:
    schema = Schema([Dense("x", [Expression("x * 3000")])])
    numbers = pa.array([1, 2, 100], kind)
    encoder = Encoder(schema)
    results = []
    for values in (numbers, numbers.dictionary_encode()):
        batch = encoder(pa.table({"x": values}), labels=False)
        results.append(np.asarray(batch.dense["x"]).reshape(-1).tolist())
    assert results == [[3000.0, 6000.0, 300000.0]] * 2


def test_bytes_in_numpy_keep_their_zero_bytes() -> None:
    values = np.array([b"\x00a", b"a\x00b", b"a"])
    rows = Memory({"x": values}).table
    assert rows["x"].to_pylist() == [b"\x00a", b"a\x00b", b"a"]
