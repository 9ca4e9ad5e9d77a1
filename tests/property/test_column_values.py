# SPDX-License-Identifier: Apache-2.0
"""Values of columns, whatever their nesting, encoding and type: what is missing, 64-bit integers,
thresholds and SQL names, compared with plain Python.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hotbed.connectors import Csv, Jsonl, Memory, Parquet
from hotbed.data import Dataset, Dense, Encoder, Id, Label, Schema, Transform, Weight
from hotbed.data import transforms as t
from hotbed.errors import ConfigError, DecodeError, SchemaError
from hotbed.serving.protocol.tensors import Tensor
from hotbed.serving.request import RequestEncoder

pytestmark = pytest.mark.core
LEAST = -(2**63)
MOST = 2**63 - 1


def signed(number: int) -> int:
    """Return the int64 of the same 64 bits."""
    return (number - LEAST) % 2**64 + LEAST


def hashed(data: bytes, seed: int = 0) -> int:
    return signed(xxhash.xxh64(data, seed=seed).intdigest())


def bags(values: pa.Array, *transforms: Transform, **others: pa.Array) -> list[list[int]]:
    """Return the ids of each row."""
    columns = pa.table({"x": values, **others})
    ids = Encoder(Schema([Id("x", transforms=transforms)]))(columns).ids["x"].with_offsets()
    pairs = zip(ids.offsets[:-1], ids.offsets[1:], strict=True)
    return [ids.values[begin:end].tolist() for begin, end in pairs]


def numbers(values: pa.Array, *transforms: Transform, width: int = 1) -> list[Any]:
    schema = Schema([Dense("x", transforms, width=width)])
    found: list[Any] = Encoder(schema)(pa.table({"x": values})).dense["x"].tolist()
    return found


# --- what is missing ----------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from([None, "", "a", "b", "a b"]), min_size=1, max_size=12)
OF_TEXT = {
    "id": ([], lambda word: hashed(word.encode())),
    "hash": ([t.Hash(seed=3)], lambda word: hashed(word.encode(), 3)),
    "map": ([t.Map(["b", "a", ""])], lambda word: {"b": 1, "a": 2}.get(word, 0)),
    "extract": ([t.Extract("^(a?)")], lambda word: hashed(b"a") if word[0] == "a" else None),
    "fill": ([t.FillMissing("none")], lambda word: hashed(word.encode())),
    "split": ([t.Split(" "), t.Hash()], None),
}


def text_encodings(words: list[str | None]) -> dict[str, pa.Array]:
    """Return the same column in every encoding of text."""
    plain = pa.array(words, pa.string())
    places = pa.array([None if word is None else word_places[word] for word in words], pa.int8())
    found = {kind: plain.cast(kind) for kind in ("large_string", "string_view", "binary")}
    found["dictionary"] = plain.dictionary_encode()
    found["nulls in the dictionary"] = pa.DictionaryArray.from_arrays(
        places.fill_null(0), pa.array([None, "", "a", "b", "a b"], pa.large_string())
    )
    return found


word_places = {"": 1, "a": 2, "b": 3, "a b": 4}


@pytest.mark.parametrize("kind", OF_TEXT)
@given(words=WORDS)
def test_missing_text_is_the_same_in_every_encoding_and_nesting(
    kind: str, words: list[str | None]
) -> None:
    transforms, of_word = OF_TEXT[kind]
    expected: list[list[int]] = []
    for word in words:
        if kind == "fill":
            ids = [hashed((word or "none").encode())]
        elif kind == "split":
            ids = [hashed(part.encode()) for part in (word or "").split()]
        else:
            ids = [of_word(word)] if word else []
        expected.append([number for number in ids if number is not None])
    plain = pa.array(words, pa.string())
    assert bags(plain, *transforms) == expected
    for encoding, values in text_encodings(words).items():
        if encoding == "binary" and kind in ("split", "fill"):
            continue  # these are refused: they take text
        assert bags(values, *transforms) == expected, encoding
        if kind != "split":
            in_lists = pa.LargeListArray.from_arrays([0, len(words)], values)
            assert bags(in_lists, *transforms) == [[one for bag in expected for one in bag]]


@pytest.mark.parametrize("kind", ["id", "hash", "map", "fill"])
@given(words=WORDS)
def test_missing_text_of_a_request_is_that_of_training(kind: str, words: list[str | None]) -> None:
    """JSON has null; binary tensors and gRPC have empty text alone."""
    transforms, _ = OF_TEXT[kind]
    schema = Schema([Id("x", transforms=transforms)])
    expected = Encoder(schema)(pa.table({"x": pa.array(words, pa.string())})).ids["x"]
    data = b"".join(
        len(word.encode()).to_bytes(4, "little") + word.encode()
        for word in (word or "" for word in words)
    )
    shape = [len(words)]
    forms: list[Any] = [words, Tensor("x", "BYTES", shape, data).column()]
    forms.append(Tensor("x", "BYTES", shape, list(words)).column())
    for form in forms:
        ids = RequestEncoder(schema)({"x": form}).ids["x"]
        assert ids.with_offsets().offsets.tolist() == expected.with_offsets().offsets.tolist()
        assert ids.values.tolist() == expected.values.tolist()


@given(
    values=st.lists(st.sampled_from([None, math.nan, -0.5, 0.0, 1.5, 3.0]), min_size=1, max_size=12)
)
def test_missing_numbers_are_the_same_in_every_float_and_nesting(
    values: list[float | None],
) -> None:
    is_missing = [value is None or math.isnan(value) for value in values]
    filled = [9.0 if missing else value for missing, value in zip(is_missing, values, strict=True)]
    buckets = [
        [] if missing else [int(value >= 1)]
        for missing, value in zip(is_missing, values, strict=True)
    ]
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        column = pa.array(values, kind)
        for encoded in (column, column.cast(pa.float32()).dictionary_encode()):
            assert numbers(encoded, t.FillMissing(9.0)) == filled
            assert bags(encoded, t.Bucketize([1])) == buckets
            assert numbers(encoded, t.Expression("coalesce(x, 9.0)")) == filled
        lists = pa.FixedSizeListArray.from_arrays(column, len(values))
        assert numbers(lists, t.FillMissing(9.0), width=len(values)) == (
            [filled] if len(values) > 1 else filled
        )


def test_missing_text_is_the_same_from_every_source(tmp_path: Path) -> None:
    words = ["a", None, "", "b"]
    (tmp_path / "t.csv").write_text('u,n\na,1\n,2\n"",3\nb,4\n')
    lines = ['{"u": "a", "n": 1}', '{"n": 2}', '{"u": "", "n": 3}', '{"u": "b", "n": 4}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    table = pa.table({"u": pa.array(words), "n": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = [
        Id("plain", column="u"),
        Id("hashed", column="u", transforms=[t.Hash()]),
        Id("mapped", column="u", transforms=[t.Map(["a", ""])]),
        Id("crossed", column="u", transforms=[t.Cross("n")]),
        Id("joined", transforms=[t.Expression("u || '!'")]),
        Id("filled", column="u", transforms=[t.FillMissing("none"), t.Hash()]),
    ]
    schema = Schema(columns)
    batches = []
    for source in (
        Memory(table),
        Csv(str(tmp_path / "t.csv")),
        Jsonl(str(tmp_path / "t.jsonl")),
        Parquet(str(tmp_path / "t.parquet")),
    ):
        blocks = [rows for rows, _ in source.read() if rows.num_rows]
        batches.append(Encoder(schema)(pa.Table.from_batches(blocks)))
    for batch in batches:
        for name, ids in batch.ids.items():
            lengths = [1, 1, 1, 1] if name == "filled" else [1, 0, 0, 1]
            assert ids.lengths().tolist() == lengths
            assert ids.values.tolist() == batches[0].ids[name].values.tolist()


def test_a_missing_label_is_a_bad_row_in_every_encoding() -> None:
    for values in (["yes", ""], ["yes", None]):
        for column in (pa.array(values), pa.array(values).dictionary_encode()):
            with pytest.raises(DecodeError, match="label 'y': expected a value in every row"):
                Encoder(Schema([Label("y", positive="yes")]))(pa.table({"y": column}))


def test_a_schema_saved_before_the_rule_keeps_its_meaning() -> None:
    transforms = {"a": t.Hash(), "b": t.Map(["", "x"]), "c": t.Normalize(5.0, 0.0)}
    columns = [
        Id("a", transforms=[transforms["a"]]),
        Id("b", transforms=[transforms["b"]]),
        Dense("c", [transforms["c"]]),
    ]
    now = Schema(columns)
    saved = now.to_json()
    assert saved.pop("rules") == 2
    before = Schema.from_json(json.dumps(saved))
    assert (before.rules, Schema.from_json(now.to_json()).rules) == (1, 2)
    assert "rules" not in before.to_json()
    assert Schema.from_json(before.with_types({"a": "text"}, {}).to_json()).rules == 1
    rows = {"a": ["", "x"], "b": ["", "x"], "c": [5.0, 7.0]}
    for encode in (Encoder(before), RequestEncoder(before)):
        batch = encode(Memory(rows).table)
        assert batch.ids["a"].values.tolist() == [hashed(b""), hashed(b"x")]
        assert batch.ids["b"].values.tolist() == [1, 2]
        assert batch.dense["c"].tolist() == [0.0, 2.0]
    batch = Encoder(now)(Memory(rows).table)
    assert batch.ids["a"].values.tolist() == [hashed(b"x")]
    assert batch.dense["c"].tolist() == [0.0, 0.0]


# --- 64-bit integers ----------------------------------------------------------------------------

EDGES = [LEAST, LEAST + 1, -1, 0, 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, MOST, 2**63, 2**64 - 1]
INTEGERS = st.one_of(st.sampled_from(EDGES), st.integers(LEAST, 2**64 - 1))


def integer_types(values: list[int]) -> list[pa.DataType]:
    """Return the types of integers that hold all of `values`."""
    found = []
    for bits in (8, 16, 32, 64):
        if all(-(2 ** (bits - 1)) <= value < 2 ** (bits - 1) for value in values):
            found.append(getattr(pa, f"int{bits}")())
        if all(0 <= value < 2**bits for value in values):
            found.append(getattr(pa, f"uint{bits}")())
    return found


def crossed(values: list[int]) -> list[list[int]]:
    """Return the Cross of a column with itself: two rounds of mixing, one for each part."""
    found = []
    for value in values:
        part = hashed(signed(value).to_bytes(8, "little", signed=True)) % 2**64
        mixed = 0
        for _ in range(2):
            mixed = (mixed ^ part) * 0x9E3779B97F4A7C15 % 2**64
            mixed ^= mixed >> 32
        found.append([signed(mixed)])
    return found


@given(
    values=st.lists(INTEGERS, min_size=1, max_size=6),
    edges=st.sets(INTEGERS, min_size=1, max_size=4).map(sorted),
    by=st.integers(LEAST, MOST),
)
def test_transforms_keep_all_64_bits_of_integers(
    values: list[int], edges: list[int], by: int
) -> None:
    low, high = edges[0], edges[-1]
    ids = [signed(value) for value in values]
    number_of = {signed(edge): place for place, edge in reversed(list(enumerate(edges, 1)))}
    raw = [number.to_bytes(8, "little", signed=True) for number in ids]
    expected = {
        (): ids,
        (t.Hash(seed=1),): [hashed(data, 1) for data in raw],
        (t.Shift(by),): [signed(value + by) for value in values],
        (t.Map(edges),): [number_of.get(number, 0) for number in ids],
        (t.Bucketize(edges),): [sum(edge <= value for edge in edges) for value in values],
        (t.Expression("x"),): ids,
        (t.FillMissing(7.0),): ids,
    }
    for kind in integer_types(values):
        column = pa.array(values, kind)
        for encoded in (column, column.dictionary_encode()):
            for transforms, wanted in expected.items():
                assert bags(encoded, *transforms) == [[number] for number in wanted]
            assert bags(encoded, t.Cross(["y"]), y=encoded) == crossed(values)
            lists = pa.LargeListArray.from_arrays([0, len(values)], encoded)
            assert bags(lists, t.Map(edges), t.Shift(1)) == [
                [number_of.get(number, 0) + 1 for number in ids]
            ]
        if kind.bit_width == 64 and all(value in range(*limits(kind)) for value in (low, high)):
            clipped = [[signed(min(max(value, low), high))] for value in values]
            assert bags(column, t.Clip(low, high)) == clipped


def limits(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_unsigned_integer(kind):
        return 0, 2**64
    return LEAST, MOST + 1


@given(values=st.lists(INTEGERS, min_size=1, max_size=6), min_count=st.integers(1, 2))
def test_a_map_learned_from_any_integers_meets_any_others(
    values: list[int], min_count: int
) -> None:
    """The vocabulary of one type, asked by all others: files of later days, and requests."""
    words = sorted(values * 2, key=values.count)
    for learned_from in integer_types(values):
        source = Memory({"x": pa.array(words, learned_from)})
        fitted = Schema([Id("x", transforms=[t.Map(min_count=min_count)])]).fit(source)
        fitted = Schema.from_json(json.dumps(fitted.to_json()))
        own = Encoder(fitted)(source.table).ids["x"].values.tolist()
        places = dict(zip(words, own, strict=True))
        assert sorted(set(places.values())) == list(range(1, len(set(values)) + 1))
        for value in [*values, 5, 2**40 + 7]:
            for kind in integer_types([value]):
                asked = RequestEncoder(fitted)({"x": np.array([value], kind.to_pandas_dtype())})
                assert asked.ids["x"].values.tolist() == [places.get(value, 0)]


def test_a_map_takes_floats_for_the_integers_that_they_equal() -> None:
    """Frames of pandas hold integers with missing values as floats."""
    column = pa.array([7.0, None, 30.0, 7.0, math.nan])
    fitted = Schema([Id("x", transforms=[t.Map()])]).fit(Memory({"x": column}))
    fitted = Schema.from_json(json.dumps(fitted.to_json()))
    assert fitted["x"] == Id("x", transforms=[t.Map([7, 30])])
    assert Encoder(fitted)(Memory({"x": column}).table).ids["x"].lengths().tolist() == [
        1,
        0,
        1,
        1,
        0,
    ]
    assert bags(pa.array([30.0, 7.5, math.inf, 8.0]), t.Map([7, 30])) == [[2], [0], [0], [0]]
    for wrong in (0.5, 2.0**24 + 1):
        with pytest.raises(SchemaError, match="map: expected integers or text, got a column of"):
            Schema([Id("x", transforms=[t.Map()])]).fit(Memory({"x": [7.0, wrong]}))


def test_an_extracted_number_keeps_its_64_bits() -> None:
    texts = ["id 18446744073709551615", "id 7", "none", None]
    pattern = t.Extract(r"(-?\d+)", number=True)
    assert bags(pa.array(texts), pattern) == [[-1], [7], [], []]
    assert bags(pa.array(["-9223372036854775808"]), pattern) == [[LEAST]]
    with pytest.raises(SchemaError, match=r"extract: .* got '-1' and '18446744073709551615'"):
        bags(pa.array(["-1", "18446744073709551615"]), pattern)


@given(values=st.lists(INTEGERS, min_size=1, max_size=4))
def test_expressions_of_unsigned_numbers_are_those_of_signed_ones(values: list[int]) -> None:
    """A file has uint64 where a request has int64; a difference may be negative."""
    exact = [value - 7 for value in values]
    kinds = [kind for kind in integer_types(values) if kind.bit_width == 64]
    for kind in kinds:
        is_signed = kind == pa.int64()
        fits = all(LEAST <= one <= MOST for one in exact) or all(0 <= one < 2**64 for one in exact)
        column = pa.array(values, kind)
        if is_signed or fits:
            assert bags(column, t.Expression("x - 7")) == [[signed(one)] for one in exact]
        else:
            with pytest.raises(SchemaError, match="expected integers of 64 bits"):
                bags(column, t.Expression("x - 7"))


# --- thresholds and weights ---------------------------------------------------------------------

FLOATS = st.floats(-1e300, 1e300) | st.sampled_from([0.1, 0.7, 1e-50, -1e-50, 2.0**53])


@given(value=INTEGERS, distance=st.integers(-2, 2))
def test_a_threshold_compares_integers_as_integers(value: int, distance: int) -> None:
    threshold = value + distance
    schema = Schema([Label("y", threshold=threshold)])
    assert schema == Schema.from_json(json.dumps(schema.to_json()))
    texts = [pa.string()] if LEAST <= value <= MOST else []
    for kind in [*integer_types([value]), pa.decimal128(20), pa.decimal256(40, 3), *texts]:
        typed = str(value) if kind == pa.string() else value
        column = pa.array([Decimal(value) if pa.types.is_decimal(kind) else typed], kind)
        for encoded in (column, column.dictionary_encode()):
            label = Encoder(schema)(pa.table({"y": encoded})).labels["y"]
            assert label.tolist() == [float(value >= threshold)], kind


@given(value=FLOATS, threshold=FLOATS)
def test_a_threshold_compares_floats_in_their_own_type(value: float, threshold: float) -> None:
    schema = Schema([Label("y", threshold=threshold)])
    for kind, own in ((pa.float64(), np.float64), (pa.float32(), np.float32)):
        with np.errstate(over="ignore"):
            stored, least = own(value), own(threshold)
        if np.isfinite(stored):
            label = Encoder(schema)(pa.table({"y": pa.array([stored], kind)})).labels["y"]
            assert label.tolist() == [float(Fraction(float(stored)) >= least)]
    label = Encoder(schema)(pa.table({"y": [repr(value)]})).labels["y"]
    assert label.tolist() == [float(value >= threshold)]


def test_a_threshold_above_2_to_the_53_is_exact_from_text_files(tmp_path: Path) -> None:
    threshold = 1_700_000_000_000_000_001  # nanoseconds
    (tmp_path / "t.csv").write_text(f"y\n{threshold - 1}\n{threshold}\n")
    lines = [f'{{"y": {value}}}' for value in (threshold - 1, threshold)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    schema = Schema([Label("y", threshold=threshold)])
    for source in (Csv(str(tmp_path / "t.csv")), Jsonl(str(tmp_path / "t.jsonl"))):
        (batch,) = Dataset(source, schema, batch_size=2)
        assert batch.labels["y"].tolist() == [0.0, 1.0]


def test_a_weight_below_zero_is_refused_though_float32_would_round_it_to_zero() -> None:
    schema = Schema([Weight("w"), Id("u")])
    with pytest.raises(DecodeError, match="weight 'w': expected weights >= 0, got -1e-50"):
        Encoder(schema)(Memory({"w": [1.0, -1e-50], "u": [1, 2]}).table)


NUMBERS = [Decimal("1.25"), Decimal("-3.50"), None]


@pytest.mark.parametrize(
    "kind",
    [
        pa.decimal128(10, 2),
        pa.decimal256(60, 4),
        pa.float16(),
        pa.float32(),
        pa.dictionary(pa.int8(), pa.decimal128(10, 2)),
        pa.dictionary(pa.int8(), pa.float64()),
    ],
)
def test_transforms_of_numbers_take_every_type_of_numbers(kind: pa.DataType) -> None:
    base = kind.value_type if pa.types.is_dictionary(kind) else kind
    column = pa.array(
        [one if pa.types.is_decimal(base) or one is None else float(one) for one in NUMBERS], base
    )
    if pa.types.is_dictionary(kind):
        column = column.dictionary_encode()
    fill = t.FillMissing(0.0)
    assert numbers(column, fill) == [1.25, -3.5, 0.0]
    assert numbers(column, fill, t.Clip(-1, 1.25)) == [1.25, -1.0, 0.0]
    assert numbers(column, fill, t.Clip(0, None), t.Log()) == pytest.approx(
        np.log1p([1.25, 0, 0]).tolist()
    )
    assert numbers(column, fill, t.Normalize(0.25, 0.5)) == [2.0, -7.5, -0.5]
    assert numbers(column, t.Expression("x + x"), fill) == [2.5, -7.0, 0.0]
    assert bags(column, t.Bucketize([-3.5, 1.25])) == [[2], [1], []]
    for learns in (t.Normalize(), t.Bucketize(bins=2), t.FillMissing(statistic="median")):
        schema = Schema([Dense("x", [learns, fill])]).fit(Memory({"x": column}))
        assert Encoder(schema)(Memory({"x": column}).table).num_samples == 3
    with pytest.raises(SchemaError, match="column 'x': hash: expected strings or integers"):
        bags(column, t.Hash())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1], pa.duration("s")),
        pa.array([1], pa.time64("us")),
        pa.array([1], pa.date32()),
        pa.array([{"a": 1}]),
    ],
)
@pytest.mark.parametrize("transform", [None, t.Clip(0, 1), t.Log(), t.Bucketize([1]), t.Map([1])])
def test_other_types_are_refused_by_name(column: pa.Array, transform: Transform | None) -> None:
    transforms = [] if transform is None else [transform]
    with pytest.raises(SchemaError, match=r"column 'x'.*got"):
        numbers(column, *transforms)


# --- names in SQL -------------------------------------------------------------------------------

WORDS_OF_SQL = """
all and any array as asc between by case cast column count current_date date day desc distinct
else end except exists extract false first floor for from full group having hour in index inner
insert interval into is join key last left like limit local mod month natural not null offset on or
order outer over percent position primary range rank right row rows select session set sum table
then time timestamp to top trim true union unique unnest update user using value values view when
where window with year
"""
KEYWORDS = WORDS_OF_SQL.split()


@pytest.mark.parametrize("name", [*KEYWORDS, "a b", "a.b", 'a"b', "Größe", "price-usd", "1st"])
def test_a_name_of_sql_in_double_quotes_is_a_column(name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    expression = t.Expression(f"{quoted} * 2 + x")
    assert set(expression.inputs()) == {name, "x"}
    schema = Schema([Dense("d", [expression])])
    assert Encoder(schema)(pa.table({name: [1, 4], "x": [3, 5]})).dense["d"].tolist() == [5, 13]


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_name_of_sql_without_quotes_is_a_column_or_refused(name: str) -> None:
    if name in ("true", "false", "null", "current_date"):
        return  # these are values of SQL
    try:
        expression = t.Expression(f"{name} * 2")
    except ConfigError:
        return  # the next test shows the message
    assert list(expression.inputs()) == [name]
    schema = Schema([Dense("d", [expression])])
    assert Encoder(schema)(pa.table({name: [1, 4]})).dense["d"].tolist() == [2, 8]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ('"^a.*$" + b', "as a pattern"),
        ('b + "*"', "as a pattern"),
        ("a --b", "begins a comment"),
        ("a /* b */", "begins a comment"),
        ("order * 2", "in double quotes"),
    ],
)
def test_sql_that_means_something_else_is_refused(sql: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        t.Expression(sql)
