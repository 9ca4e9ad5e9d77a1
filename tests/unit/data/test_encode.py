# SPDX-License-Identifier: Apache-2.0
"""Encoder: ids lose no bit, missing is an empty bag, bad input is one clear error."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from hotbed.connectors import Memory
from hotbed.data import (
    Batch,
    Cross,
    Dense,
    DisplayPosition,
    Encoder,
    Extract,
    Hash,
    Id,
    Label,
    Map,
    Schema,
    Split,
    Time,
    TimeOfDay,
    Transform,
    Weight,
)
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core


def encode(
    columns: dict[str, object], *roles: object, labels: bool = True, on_error: str = "raise"
) -> Batch:
    return Encoder(Schema(roles), on_error)(Memory(columns).table, labels=labels)


def bags(batch: Batch, name: str) -> list[list[int]]:
    ids = batch.ids[name].with_offsets()
    return [
        ids.values[a:b].tolist() for a, b in zip(ids.offsets[:-1], ids.offsets[1:], strict=True)
    ]


def xxh(text: str) -> int:
    return int(np.uint64(xxhash.xxh64(text.encode()).intdigest()).view(np.int64))


def test_every_integer_is_an_ordinary_id() -> None:
    values = [-1, -2, 0, -(2**63), 2**63 - 1]
    ids = encode({"u": values}, Id("u")).ids["u"]
    assert ids.values.tolist() == values
    assert ids.values.dtype == np.int64
    assert ids.offsets is None


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.bool_()])
def test_narrow_integers_become_int64(kind: pa.DataType) -> None:
    assert encode({"u": pa.array([1, 0, 1]).cast(kind)}, Id("u")).ids["u"].values.tolist() == [
        1,
        0,
        1,
    ]


def test_unsigned_ids_keep_their_64_bits() -> None:
    ids = encode({"u": pa.array([2**64 - 1, 2**63, None], pa.uint64())}, Id("u"))
    assert bags(ids, "u") == [[-1], [-(2**63)], []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_strings_hash_by_xxh64_of_their_bytes(kind: pa.DataType) -> None:
    words = ["ann", "böb", "x" * 100, "ann", None, ""]
    column = pa.array(words, pa.string()).cast(kind)
    for cut in (column, pa.concat_arrays([column.slice(2), column.slice(0, 2)]).slice(1)):
        expected = [[xxh(word)] if word else [] for word in cut.cast(pa.string()).to_pylist()]
        assert bags(encode({"u": cut}, Id("u")), "u") == expected


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_lists_of_views_are_bags_as_polars_gives_them(kind: pa.DataType) -> None:
    rows = [["ann", "böb"], [], None, ["x" * 100]]
    column = pa.array(rows, pa.list_(pa.string())).cast(pa.large_list(kind))
    expected = [[xxh(word) for word in row or []] for row in rows]
    assert bags(encode({"u": column}, Id("u")), "u") == expected


def test_missing_ids_are_empty_bags_and_counted() -> None:
    encoder = Encoder(Schema([Id("u"), Id("l")]))
    table = Memory({"u": [1, None, 3], "l": [[1, 2], None, []]}).table
    batch = encoder(table)
    assert bags(batch, "u") == [[1], [], [3]]
    assert bags(batch, "l") == [[1, 2], [], []]
    encoder(table)
    assert encoder.stats.missing == {"u": 2, "l": 2}
    assert encoder.stats.rows == 6


def test_missing_ids_are_counted_once_though_bad_rows_are_skipped() -> None:
    encoder = Encoder(Schema([Id("u"), Dense("x")]), on_error="skip")
    assert encoder(Memory({"u": [1, None, None], "x": [1.0, 2.0, None]}).table).num_samples == 2
    assert encoder.stats.missing == {"u": 1}


def test_a_column_of_nothing_but_nulls_is_all_empty_bags() -> None:
    assert bags(encode({"u": [None, None], "n": [1, 2]}, Id("u")), "u") == [[], []]


def test_lists_fixed_lists_and_their_slices_are_bags() -> None:
    lists = [[1, 2], [], [3], None, [None, 4]]
    column = pa.array(lists, pa.list_(pa.int64()))
    assert bags(encode({"l": column}, Id("l")), "l") == [[1, 2], [], [3], [], [4]]
    assert bags(encode({"l": column.slice(1, 2)}, Id("l")), "l") == [[], [3]]
    assert bags(encode({"l": column.cast(pa.large_list(pa.int64()))}, Id("l")), "l") == [
        [1, 2],
        [],
        [3],
        [],
        [4],
    ]
    assert bags(encode({"l": np.arange(6).reshape(3, 2)}, Id("l")), "l") == [[0, 1], [2, 3], [4, 5]]


def test_padding_is_no_id_and_long_bags_keep_the_newest() -> None:
    columns = {"l": [[0, 1, 2, 3], [0, 0], [4]], "u": [0, 1, 0]}
    batch = encode(columns, Id("l", padding=0, max_length=2), Id("u", padding=0))
    assert bags(batch, "l") == [[2, 3], [], [4]]
    assert bags(batch, "u") == [[], [1], []]


def test_weights_follow_their_ids() -> None:
    columns = {"i": [[5, 0, 6, 7], [], [8]], "v": [[0.5, 9.0, 1.5, 2.5], [], [3.0]]}
    ids = encode(columns, Id("f", column="i", weights="v", padding=0, max_length=2)).ids["f"]
    assert (ids.values.tolist(), ids.offsets.tolist()) == ([6, 7, 8], [0, 2, 2, 3])
    assert ids.weights.tolist() == [1.5, 2.5, 3.0]
    with pytest.raises(
        DecodeError, match="expected 2 weights in 'v', one for each id, got 1"
    ) as caught:
        encode({"i": [[1], [2, 3]], "v": [[1.0], [1.0]]}, Id("f", column="i", weights="v"))
    assert caught.value.row == 2
    with pytest.raises(DecodeError, match="missing value") as caught:
        encode(
            {"i": [[1], [2, 3], []], "v": [[1.0], [1.0, None], []]},
            Id("f", column="i", weights="v"),
        )
    assert caught.value.row == 2


def test_labels_are_numbers_thresholds_or_a_text() -> None:
    columns = {
        "rating": [3.5, 4.0, 5.0],
        "income": ["50000+.", "- 50000.", "50000+."],
        "clicked": [True, False, True],
    }
    batch = encode(
        columns,
        Label("rating"),
        Label("liked", threshold=4, column="rating"),
        Label("rich", column="income", positive="50000+."),
        Label("clicked"),
    )
    got = {name: values.tolist() for name, values in batch.labels.items()}
    assert got == {
        "rating": [3.5, 4.0, 5.0],
        "liked": [0, 1, 1],
        "rich": [1, 0, 1],
        "clicked": [1, 0, 1],
    }
    assert {values.dtype for values in batch.labels.values()} == {np.dtype(np.float32)}


def test_dense_columns_are_float32_of_any_width() -> None:
    columns = {"a": [1, 2], "b": ["1.5", "-2e3"], "v": [[1, 2, 3], [4, 5, 6]]}
    batch = encode(columns, Dense("a"), Dense("b"), Dense("v", width=3))
    assert batch.dense["b"].tolist() == [1.5, -2000.0]
    assert batch.dense["v"].shape == (2, 3)
    assert {values.dtype for values in batch.dense.values()} == {np.dtype(np.float32)}


def test_arrays_may_be_written_to() -> None:
    """Torch warns about arrays over read-only Arrow buffers."""
    batch = encode({"u": [1, 2], "l": [1.0, 0.0], "t": [1, 2]}, Id("u"), Label("l"), Time("t"))
    for array in (batch.ids["u"].values, batch.labels["l"], batch.time):
        assert array.flags.writeable


@pytest.mark.parametrize(
    ("columns", "role", "message", "row"),
    [
        ({"x": [1.0, None]}, Dense("x"), "missing value. Add FillMissing", 2),
        ({"x": [1.0, float("nan")]}, Dense("x"), "missing value. Add FillMissing", 2),
        ({"x": [1.0, 1e300]}, Dense("x"), r"finite float32 numbers, got 1e\+300", 2),
        ({"x": ["1", "y"]}, Dense("x"), "finite float32 numbers, got 'y'", 2),
        (
            {"x": [[1.0, 2.0], [1.0]]},
            Dense("x", width=2),
            "expected lists of 2 numbers, got a list of 1",
            2,
        ),
        ({"x": [[1.0, 2.0], [1.0, None]]}, Dense("x", width=2), "missing value", 2),
        ({"x": [b"1", b"\xff"]}, Dense("x"), r"finite float32 numbers, got b'\\xff'", 2),
        ({"x": [1, None]}, Label("x"), "missing value. Leave such rows out", 2),
        ({"x": [1.0, float("nan")]}, Label("x"), "missing value. Leave such rows out", 2),
        ({"x": [1.0, float("inf")]}, Label("x"), "finite float32 numbers, got inf", 2),
        ({"x": ["a", "b"]}, Label("x"), "got 'a'. For text labels, give positive='a'", 1),
        ({"x": [1.0, -1.0]}, Weight("x"), "expected weights >= 0, got -1", 2),
        ({"x": [1, None]}, Time("x"), "expected times of unit 's', got None", 2),
        (
            {"x": ["2020-01-01", "soon"]},
            Time("x", unit="iso"),
            "expected times of unit 'iso', got 'soon'",
            2,
        ),
        *(
            ({"x": values}, Id("x", transforms=[TimeOfDay(unit=unit)]), f"'{unit}', got {bad}", 2)
            for values, unit, bad in (
                (["7", "2020-01-01 07:00"], "s", "'2020-01-01 07:00'"),
                (["", "soon"], "s", "'soon'"),
                ([None, "soon"], "iso", "'soon'"),
                (["20010203", "soon"], "%Y%m%d", "'soon'"),
                ([7.0, float("inf")], "s", "inf"),
                ([7, 2**63 - 1], "s", "9223372036854775807"),
                (pa.array([7, 2**31 - 1], pa.int32()).cast(pa.date32()), "s", "2147483647"),
                ([["7", "7"], ["7", "soon"]], "s", "'soon'"),
                (pa.array(["7", "soon"]).dictionary_encode(), "s", "'soon'"),
            )
        ),
    ],
)
def test_a_bad_row_is_named_or_left_out(
    columns: dict[str, object], role: object, message: str, row: int
) -> None:
    with pytest.raises(DecodeError, match=message) as caught:
        encode(columns, role)
    assert (caught.value.row, caught.value.column) == (row, "x")
    encoder = Encoder(Schema([role]), on_error="skip")
    assert encoder(Memory(columns).table).num_samples == 2 - encoder.stats.skips.total
    assert encoder.stats.skips.total > 0


@pytest.mark.parametrize(
    ("columns", "role", "message"),
    [
        ({"y": [1]}, Id("x"), r"columns \['x'\] are missing, got \['y'\]"),
        ({"x": [1.5]}, Id("x"), "expected integers or strings, got a column of double"),
        ({"x": [[1.0]]}, Id("x"), "expected integers or strings, got a column of double"),
        ({"x": [1.0]}, Dense("x", width=3), "expected lists of 3 numbers, got double"),
        ({"x": [pa.scalar(1, pa.timestamp("s"))]}, Dense("x"), "expected numbers, got timestamp"),
        ({"x": [{"a": 1}]}, Dense("x"), "expected numbers, got struct<a: int64>. Transform it"),
        ({"x": [[1]], "w": [1.0]}, Id("x", weights="w"), "weights 'w' must be lists.* got double"),
        ({"x": [1]}, Time("x", unit="iso"), "unit 'iso' does not fit a column of int64"),
        ({"x": [1]}, Id("x", transforms=[Split()]), "expected a column of text, got int64"),
    ],
)
def test_a_wrong_column_is_one_clear_error(
    columns: dict[str, object], role: object, message: str
) -> None:
    for on_error in ("raise", "skip"):
        with pytest.raises(SchemaError, match=message):
            encode(columns, role, on_error=on_error)


def test_a_missing_column_names_the_nearest() -> None:
    with pytest.raises(SchemaError, match="Did you mean 'movieId'"):
        encode({"movieId": [1]}, Id("movie_id"))


SPLIT = {"h": ["22|7", "7"], "i": [22, 7]}
LISTS = {"h": [["22"], ["7"]], "i": [22, 7]}


@pytest.mark.parametrize(
    "columns, of_history, of_item",
    [
        (SPLIT, [Split("|")], []),
        (SPLIT, [Split("|"), Hash(bins=9)], [Hash(bins=9)]),
        (LISTS, [], []),
        (LISTS, [Hash()], [Hash()]),
        ({"h": SPLIT["i"], "i": ["22", "7"]}, [], []),
        ({"h": [True, False], "i": ["1", "0"]}, [], []),
    ],
)
def test_text_and_integers_that_share_a_table_are_refused_with_the_cure(
    columns: Any, of_history: Any, of_item: Any
) -> None:
    features = [
        Id("hist", column="h", table="t", pooling="none", transforms=of_history),
        Id("item", column="i", table="t", transforms=of_item),
    ]
    for order in (features, features[::-1]):
        encoder = Encoder(Schema(order))
        raw = Memory(columns).table
        cure = r"table 't': .* never the same id.*columns=\{'[hi]': 'string'\}.*number=True"
        for _ in range(2):  # of each batch
            with pytest.raises(SchemaError, match=cure):
                encoder(raw)


def test_the_cures_of_text_and_integers_let_them_meet() -> None:
    item = Id("item", column="i", table="t")
    numbers = [Split("|"), Extract("(.*)", number=True)]
    history = Id("hist", column="h", table="t", pooling="none", transforms=numbers)
    batch = Encoder(Schema([item, history]))(Memory(SPLIT).table)
    assert batch.ids["hist"].values.tolist() == [22, 7, 7]
    assert batch.ids["item"].values.tolist() == [22, 7]
    texts = Memory({"h": SPLIT["h"], "i": ["22", "7"]}).table
    history = Id("hist", column="h", table="t", pooling="none", transforms=[Split("|")])
    batch = Encoder(Schema([item, history]))(texts)
    assert batch.ids["hist"].values.tolist()[:2] == batch.ids["item"].values.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode({"a": [1], "b": ["1"]}, Id("a"), Id("b"))


def test_hashes_of_their_own_are_no_mixture() -> None:
    encoder = Encoder(
        Schema(
            [
                Id("a", table="t"),
                Id("b", table="t", transforms=[Cross("a")]),
                Id("c", table="t", transforms=[Hash()]),
            ]
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder(Memory({"a": ["x"], "b": ["y"], "c": ["z"]}).table)


@pytest.mark.filterwarnings("ignore:table 'f' is fed both")
def test_what_columns_held_is_remembered_and_held_to() -> None:
    schema = Schema(
        [
            Label("y"),
            Id("a"),
            Id("b", transforms=[Split("|")]),
            Id("c", transforms=[Cross("d")]),
            Dense("e"),
            Id("f"),
        ]
    )
    encoder = Encoder(schema)
    columns = {"y": [1], "a": [1], "b": ["x|y"], "c": ["q"], "d": [True], "e": [1]}
    encoder(Memory({**columns, "f": pa.array([["u"]])}).table)
    encoder(Memory({**columns, "e": [0.5], "f": pa.array([[7]])}).table)
    held = {"a": "integer", "b": "text", "c": "text", "d": "boolean", "e": "number", "f": "mixed"}
    assert encoder.types == held
    assert encoder.shapes == {**dict.fromkeys("abcde", "value"), "f": "list"}
    known = Schema.from_json(json.dumps(schema.with_types(encoder.types, encoder.shapes).to_json()))
    assert known == schema
    assert (known.types, known.shapes) == (held, encoder.shapes)
    served = Encoder(known)
    row = {**columns, "f": pa.array([["u"]])}
    served(Memory({**row, "e": [2]}).table, labels=False)
    for name, wrong in (("a", ["1"]), ("b", [1]), ("c", [0.5]), ("d", ["true"]), ("e", ["1"])):
        with pytest.raises(
            SchemaError, match=f"column '{name}': it held {held[name]} values in training"
        ):
            served(Memory({**row, name: wrong}).table, labels=False)
    with pytest.raises(
        SchemaError, match="column 'a': it held single values in training, got lists"
    ):
        served(Memory({**row, "a": [[1, 2]]}).table, labels=False)
    served(Memory({**row, "a": pa.array([None]), "f": pa.array([[7]])}).table, labels=False)


def test_places_count_from_the_first_one_and_the_last_stands_for_later_ones() -> None:
    schema = Schema([Label("y"), Dense("x"), DisplayPosition("shown", "rank", first=1, size=3)])
    rows = pa.table({"y": [1] * 5, "x": [0.5] * 5, "rank": [1, 2, 3, 70, None]})
    assert Encoder(schema)(rows).dense["shown"].tolist() == [0, 1, 2, 2, -1]
    assert list(Encoder(schema)(rows.drop(["rank"]), labels=False).dense) == ["x"]
    assert Schema.from_json(schema.to_json()) == schema
    for wrong in (0, 1.5, -3):
        bad = pa.table({"y": [1], "x": [0.5], "rank": [wrong]})
        with pytest.raises(DataError, match="'shown': expected whole numbers from 1 on, got"):
            Encoder(schema)(bad)
    with pytest.raises(ConfigError, match="more than one DisplayPosition"):
        Schema([DisplayPosition("a"), DisplayPosition("b")])


def test_serving_needs_no_labels_weights_or_times() -> None:
    schema = Schema([Label("y"), Weight("w"), Time("t"), Id("u"), Dense("d")])
    full = Memory({"y": [1], "w": [2.0], "t": [3], "u": [4], "d": [5.0]}).table
    encoder = Encoder(schema)
    trained, served = encoder(full), encoder(full.select(["d", "u"]), labels=False)
    assert served.labels == {}
    assert served.weight is None
    assert served.time is None
    assert trained.time.tolist() == [3_000_000]
    assert served.ids["u"].values.tolist() == trained.ids["u"].values.tolist()
    assert served.dense["d"].tolist() == trained.dense["d"].tolist()
    with pytest.raises(SchemaError, match="missing"):
        encoder(full.select(["d", "u"]))


def test_an_empty_batch_and_a_bag_of_a_million_are_encoded() -> None:
    empty = pa.table({"u": pa.array([], pa.string()), "l": pa.array([], pa.list_(pa.int64()))})
    assert Encoder(Schema([Id("u"), Id("l")]))(empty).num_samples == 0
    assert len(encode({"l": [list(range(10**6))]}, Id("l")).ids["l"].values) == 10**6


def test_a_role_must_be_a_role() -> None:
    with pytest.raises(ConfigError, match="schema: expected columns, got 'user'"):
        Schema(["user"])
    assert issubclass(Split, Transform)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Id("x"), ["ann", "", None, "bo"]),
        (Id("x", column="raw"), [7, 2**62, None, -1]),
        (Id("x"), [[1, 2], [], None, [3]]),
        (Id("x", transforms=[Hash(100, seed=3)]), ["ann", "bo"]),
        (Id("x", transforms=[Split("|"), Map(["a", "b"])]), ["a|b", "c", ""]),
        (Id("x", transforms=[Map(["a", "b"])]), pa.array(["b", "z"]).dictionary_encode()),
    ],
)
def test_ids_of_values_are_those_of_encoded_rows(column: Id, values: Any) -> None:
    schema = Schema([column])
    encoded = Encoder(schema)(pa.record_batch({column.source: pa.array(values)}))
    assert schema.ids_of("x", values).tolist() == encoded.ids["x"].values.tolist()


def test_ids_of_other_columns_are_refused() -> None:
    schema = Schema([Dense("d"), Id("x", transforms=[Cross(["y"])])])
    for name in ("d", "x"):
        with pytest.raises(SchemaError, match=f"schema.ids_of: '{name}' must be an id"):
            schema.ids_of(name, [1])
