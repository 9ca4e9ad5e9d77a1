# SPDX-License-Identifier: Apache-2.0
"""Fitted maps against plain dicts, and the transforms that read them."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed import config
from hotbed.connectors import Memory
from hotbed.data import (
    Dense,
    Encoder,
    Expression,
    FillMissing,
    Id,
    JoinGroupby,
    Label,
    Map,
    Schema,
    TargetEncode,
    Transform,
)
from hotbed.data.columns import ids_of
from hotbed.data.fitted import FittedMap
from hotbed.errors import ConfigError, FormatError, SchemaError

pytestmark = pytest.mark.core
KEYS = st.integers(-(2**63), 2**63 - 1)


def encoded(schema: Schema, **columns: Any) -> Any:
    return Encoder(schema)(Memory(columns).table, labels=False)


def dense(values: Any, *transforms: Transform, **others: Any) -> list[float]:
    batch = encoded(Schema([Dense("x", transforms)]), x=values, **others)
    numbers: list[float] = batch.dense["x"].tolist()
    return numbers


def keys_of(values: Any) -> np.ndarray:
    return ids_of(pa.array(values), "key")


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(KEYS, unique=True, max_size=300),
    others=st.lists(KEYS, max_size=50),
    width=st.integers(0, 3),
)
def test_map_gives_slots_and_values_of_a_dict(
    tmp_path_factory: Any, keys: list[int], others: list[int], width: int
) -> None:
    values = np.random.default_rng(0).random((len(keys), width), np.float32)
    path = tmp_path_factory.mktemp("maps") / "some.rows"
    written = FittedMap.write(path, np.array(keys, np.int64), values if width else None)
    fitted = FittedMap(path, written.digest)
    slots = {key: slot for slot, key in enumerate(keys)}
    asked = [*others, *keys]
    got = fitted.slots(np.array(asked, np.int64))
    assert got.tolist() == [slots.get(key, -1) for key in asked]
    rows = fitted.values(got)
    assert rows.shape == (len(asked), width)
    for key, row in zip(asked, rows, strict=True):
        expected = values[slots[key]] if key in slots else [math.nan] * width
        np.testing.assert_array_equal(row, expected)
    assert fitted.keys().tolist() == keys
    assert (len(fitted), fitted.width) == (len(keys), width)


def test_same_keys_and_values_give_the_same_file(tmp_path: Path) -> None:
    keys = np.arange(1000)[::-1] * 7
    one = FittedMap.write(tmp_path / "one.rows", keys, keys[:, None] / 3)
    two = FittedMap.write(tmp_path / "two.rows", keys, keys[:, None] / 3)
    assert one == two
    assert one.path != two.path


def test_missing_or_changed_map_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.rows"
    digest = FittedMap.write(path, np.array([1, 2])).digest
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"some\.rows: the fitted map changed"):
        FittedMap(path, digest).slots(np.array([1]))
    path.unlink()
    with pytest.raises(FormatError, match=r"some\.rows: the fitted map cannot be read"):
        FittedMap(path, digest).slots(np.array([1]))


def test_slot_beyond_the_last_row_is_an_error(tmp_path: Path) -> None:
    fitted = FittedMap.write(tmp_path / "some.rows", np.array([1, 2]), [[0.5], [1.5]])
    with pytest.raises(IndexError):
        fitted.values(np.array([2]))


def test_map_goes_to_other_processes_by_its_path(tmp_path: Path) -> None:
    fitted = FittedMap.write(tmp_path / "some.rows", np.array([5, 3]))
    fitted.slots(np.array([5]))
    assert pickle.loads(pickle.dumps(fitted)).slots(np.array([3])).tolist() == [1]


@pytest.mark.parametrize(
    ("words", "unknown"), [(["ann", "bob", "cy", "dan"], "zoe"), ([7, -1, 3, 0], 8)]
)
def test_fitted_vocabulary_equals_the_one_in_the_schema(
    tmp_path: Path, words: list[Any], unknown: Any
) -> None:
    fitted = FittedMap.write(tmp_path / "words.rows", keys_of(words))
    values = [words[2], unknown, None, words[0], words[3]]
    rows = [encoded(Schema([Id("x", transforms=[t])]), x=values) for t in (Map(words), fit(fitted))]
    for batch in rows:
        np.testing.assert_array_equal(batch.ids["x"].values, [3, 0, 1, 4])
        np.testing.assert_array_equal(batch.ids["x"].offsets, [0, 1, 2, 2, 3, 4])
    lists = [[words[1], unknown], [], [words[0], words[0]]]
    bags = encoded(Schema([Id("x", transforms=[fit(fitted)])]), x=lists).ids["x"]
    np.testing.assert_array_equal(bags.values, [2, 0, 1, 1])


def fit(fitted: FittedMap) -> Map:
    return Map(fitted=fitted)


def test_target_encoding_of_unknown_and_missing_keys_is_the_prior(tmp_path: Path) -> None:
    rates = FittedMap.write(tmp_path / "r.rows", keys_of(["ann", "bob"]), [[0.25], [0.75]])
    encode = TargetEncode("clicked", prior=0.125, fitted=rates)
    assert dense(["bob", "zoe", None, "ann"], encode) == [0.75, 0.125, 0.125, 0.25]
    assert dense([None], encode) == [0.125]
    of_zero = FittedMap.write(tmp_path / "z.rows", np.array([0, 1]), [[0.25], [0.75]])
    encode = TargetEncode("clicked", prior=0.125, fitted=of_zero)
    assert dense([0, None, 1], encode) == [0.25, 0.125, 0.75]


@pytest.mark.parametrize("statistic", ["mean", "sum", "std", "min", "max", "count"])
def test_statistic_of_unknown_and_missing_keys(tmp_path: Path, statistic: Any) -> None:
    values = [[2.0], [math.nan if statistic == "std" else 4.0]]  # one row has no deviation
    fitted = FittedMap.write(tmp_path / "s.rows", keys_of([10, 20]), values)
    join = JoinGroupby("price", statistic, fitted)
    absent = 0.0 if statistic in ("sum", "count") else -1.0
    transforms = [join] if statistic in ("sum", "count") else [join, FillMissing(-1.0)]
    of_20 = -1.0 if statistic == "std" else 4.0
    assert dense([20, 30, None, 10], *transforms) == [of_20, absent, absent, 2.0]


def test_statistic_that_may_be_missing_must_be_filled() -> None:
    with pytest.raises(ConfigError, match="dense 'x': keys that training did not have"):
        Dense("x", [JoinGroupby("price", "std")])
    with pytest.raises(ConfigError, match="fill_missing"):
        Dense("x", [FillMissing(0.0), JoinGroupby("price", "mean")])
    Dense("x", [JoinGroupby("price", "count")])


def test_transforms_of_keys_take_single_values_and_must_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_encode: .* Run hotbed prepare"):
        dense([1], TargetEncode("clicked"))
    with pytest.raises(ConfigError, match=r"join_groupby: .* Run hotbed prepare"):
        dense([1], JoinGroupby("price", "count"))
    schema = Schema([Label("clicked"), Dense("x", [TargetEncode("clicked")])])
    with pytest.raises(ConfigError, match=r"target_encode: Schema\.fit cannot learn it"):
        schema.fit(Memory({"x": [1], "clicked": [1]}))
    rates = FittedMap.write(tmp_path / "r.rows", np.array([1]), [[0.5]])
    with pytest.raises(SchemaError, match="single values"):
        dense([[1, 2]], TargetEncode("clicked", prior=0.5, fitted=rates))


def test_expression_computes_with_raw_columns() -> None:
    total = Dense("total", [Expression("price * quantity")])
    assert total.source == "price"
    batch = encoded(Schema([total]), price=[2.0, 0.5], quantity=[3, 4])
    assert batch.dense["total"].tolist() == [6.0, 2.0]
    device = Id("device", transforms=[Expression("lower(os) || ' ' || \"os version\"")])
    batch = encoded(Schema([device]), os=["iOS", None], **{"os version": ["17", "18"]})
    assert batch.ids["device"].values.tolist() == keys_of(["ios 17"]).tolist()


def test_expression_of_narrow_numbers_does_not_overflow() -> None:
    schema = Schema([Dense("x", [Expression("a * b")])])
    narrow = {"a": np.array([100, -100], np.int8), "b": np.array([100, 100], np.int8)}
    assert encoded(schema, **narrow).dense["x"].tolist() == [10_000, -10_000]


@pytest.mark.parametrize(
    "sql",
    [
        "sum(price)",
        "price - AVG (price) OVER ()",
        "1 + 1",
        "price +",
        "lag(price) over (order by t)",
    ],
)
def test_expression_of_many_rows_or_without_a_column_is_refused(sql: str) -> None:
    with pytest.raises(ConfigError, match=r"expression\.sql"):
        Expression(sql)


def test_expression_may_name_columns_and_texts_like_functions() -> None:
    assert Expression("\"sum(price)\" + max || ' over '").inputs() == ("sum(price)", "max")


def test_expression_that_does_not_fit_its_columns_names_itself() -> None:
    with pytest.raises(SchemaError, match="expression 'upper\\(x\\) \\+ 1'"):
        dense([1.5], Expression("upper(x) + 1"))


def test_fitted_schema_is_written_and_read(tmp_path: Path) -> None:
    words = FittedMap.write(tmp_path / "words.rows", keys_of(["ann"]))
    rates = FittedMap.write(tmp_path / "rates.rows", keys_of(["ann"]), [[0.1]])
    schema = Schema(
        [
            Label("clicked"),
            Id("user", transforms=[Map(joint="people", min_count=2, fitted=words)]),
            Id("friend", transforms=[Map(joint="people", fitted=words)]),
            Dense("rate", [TargetEncode("clicked", prior=1 / 3, fitted=rates)], column="user"),
            Dense("both", [Expression("a + b"), FillMissing(0.0)]),
        ]
    )
    again = Schema.from_json(json.dumps(schema.to_json()))
    assert again == schema
    assert again.maps == [words, rates]
    assert [fitted.path for fitted in again.maps] == [words.path, rates.path]
    moved = schema.with_maps({words.digest: tmp_path / "elsewhere.rows"})
    assert moved == schema
    assert [fitted.path.name for fitted in moved.maps] == ["elsewhere.rows", "rates.rows"]
    assert config.describe(moved)["columns"][1]["transforms"][0]["fitted"]["digest"] == words.digest


def test_map_has_one_vocabulary(tmp_path: Path) -> None:
    fitted = FittedMap.write(tmp_path / "words.rows", np.array([1]))
    with pytest.raises(ConfigError, match="map: vocabulary and fitted exclude each other"):
        Map(["a"], fitted=fitted)
