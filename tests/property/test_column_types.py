# SPDX-License-Identifier: Apache-2.0
"""Parts of a source whose types differ: right, or an error that names part, column and types.

Every source reads two or three parts whose column `x` has any types. The rows are those of a plain
reference, or there is an error. A column `unused` of other types is never compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hotbed.connectors import (
    Arrow,
    Concat,
    Csv,
    Decoder,
    Follow,
    Journal,
    Json,
    Jsonl,
    Live,
    Memory,
    Parquet,
    Position,
    Prepared,
    ReadPlan,
    Replay,
    Source,
)
from hotbed.connectors.messages import decode_messages, wanted_types
from hotbed.connectors.position import Batches
from hotbed.connectors.prepared import WORKFLOW_FILE, WORKFLOW_FORMAT, sealed
from hotbed.connectors.text import delimited, lines
from hotbed.errors import DataError, SchemaError

pytestmark = pytest.mark.core

PLAN = ReadPlan(columns=("x",))
UNUSED = [pa.array(["a"]), pa.array([1]), pa.array([[True]]), pa.array([None])]

# --- values of every type -------------------------------------------------------------------------

INTEGERS = (*(getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)),)
FLOATS = [0.0, -1.5, 2.0, 2.0**53, math.inf, math.nan, 3e38]
TEXTS = ["", "7", "007", "a", "\u00e4\U0001f600"]
EXTREMES: dict[pa.DataType, Sequence[Any]] = {
    pa.bool_(): [True, False],
    pa.float16(): [0.0, -1.5, math.inf],
    pa.float32(): [np.float32(value).item() for value in FLOATS],
    pa.float64(): [*FLOATS, 1e300, 0.1],
    pa.decimal128(5, 2): [Decimal("1.50"), Decimal("-999.99")],
    pa.decimal128(38, 0): [Decimal(10**38 - 1)],
    pa.date32(): [date(1, 1, 1), date(2024, 2, 29)],
    pa.date64(): [date(1970, 1, 1)],
    pa.time32("s"): [1],
    pa.time64("us"): [86_399_999_999],
    pa.duration("s"): [timedelta(seconds=1)],
    pa.duration("us"): [timedelta(days=-1)],
    pa.binary(2): [b"ab"],
}
EXTREMES |= {
    kind: [np.iinfo(kind.to_pandas_dtype()).min, 0, 7, np.iinfo(kind.to_pandas_dtype()).max]
    for kind in INTEGERS
}
EXTREMES |= {kind: TEXTS for kind in (pa.string(), pa.large_string(), pa.string_view())}
EXTREMES |= {kind: [b"", b"7", b"\xff"] for kind in (pa.binary(), pa.large_binary())}
EXTREMES |= {
    pa.timestamp(unit, zone): [0, 1_700_000_000, -(2**61)]
    for unit in ("s", "us", "ns")
    for zone in (None, "UTC", "Asia/Shanghai")
}
WORDS = (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.int64()))


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_null(kind):
        return st.none()
    if pa.types.is_dictionary(kind):
        return values_of(kind.value_type)
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({f.name: values_of(f.type) for f in kind})
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return st.none() | st.lists(values_of(kind.value_type), min_size=size, max_size=size)
    if hasattr(kind, "value_type"):
        return st.none() | st.lists(values_of(kind.value_type), max_size=3)
    return st.none() | st.sampled_from(EXTREMES[kind])


FLAT = st.sampled_from([*EXTREMES, *WORDS, pa.null()])
TYPES = st.one_of(
    FLAT,
    FLAT.map(pa.list_),
    FLAT.map(pa.large_list),
    FLAT.map(lambda kind: pa.list_(kind, 2)),
    FLAT.map(lambda kind: pa.list_(pa.list_(kind))),
    FLAT.map(lambda kind: pa.struct([("f", kind)])),
)


@st.composite
def parts(draw: st.DrawFn) -> list[pa.Array]:
    """Two or three parts of a column; now and then they have types that meet, or no values."""
    arrays: list[pa.Array] = []
    first = draw(TYPES)
    for _ in range(draw(st.integers(2, 3))):
        kind = draw(st.just(first) | TYPES | st.sampled_from(near(first)))
        values = draw(st.lists(values_of(kind), max_size=3))
        arrays.append(pa.array(values, kind))
    return arrays


def near(kind: pa.DataType) -> list[pa.DataType]:
    """Return types of the same family, which often meet."""
    families = [
        INTEGERS,
        (pa.float16(), pa.float32(), pa.float64(), pa.int16()),
        (pa.string(), pa.large_string(), pa.string_view(), WORDS[0]),
        [kind for kind in EXTREMES if pa.types.is_timestamp(kind)],
    ]
    for family in families:
        if kind in family:
            return [*family, pa.null()]
        if [kind] == [pa.list_(member) for member in family if pa.list_(member) == kind]:
            return [pa.large_list(member) for member in family]
    return [pa.null(), kind]


# --- the plain reference --------------------------------------------------------------------------


def facts(array: pa.Array) -> list[Any]:
    """Return the values of an array as plain facts, in which only equal values are equal."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return facts(array.dictionary_decode())
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return [None if row is None else facts(row) for row in map(_items, array)]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        columns = [facts(column) for column in array.flatten()]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        valid = array.is_valid().to_pylist()
        return [row if is_valid else None for row, is_valid in zip(rows, valid, strict=True)]
    if pa.types.is_date64(kind):
        return facts(array.cast(pa.date32()))
    if pa.types.is_temporal(kind):
        factor = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[getattr(kind, "unit", "s")]
        counts = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
        tag = str(kind)[:4]  # of the family: date, time, dura
        if pa.types.is_timestamp(kind):
            tag = "local" if kind.tz is None else "UTC"
        return [None if count is None else (tag, count * factor) for count in counts]
    return [fact(value) for value in array.to_pylist()]


def _items(row: pa.Scalar) -> pa.Array | None:
    return row.values if row.is_valid else None


def fact(value: Any) -> Any:
    """Return a plain value as (kind, value); numbers as exact fractions."""
    if value is None:
        return None
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, (int, float, np.floating)):
        number = float(value) if isinstance(value, np.floating) else value
        return ("number", Fraction(number) if math.isfinite(number) else str(number))
    return (type(value).__name__, value)


Take = Callable[[pa.Array], list[Any]]
"""Returns the values of a column, as facts or as Python has them."""


def read(batches: Batches, of: Take = facts, name: str = "x") -> list[Any]:
    return [row for batch, _ in batches for row in of(batch.column(name))]


def attempt(read_all: Callable[[], list[Any]]) -> tuple[list[Any], DataError | None]:
    """Return the rows, or the error with which they are refused."""
    try:
        return read_all(), None
    except DataError as error:
        return [], error


def column(source: Source) -> list[Any]:
    return read(source.read(plan=PLAN), in_python)


def in_python(column: pa.Array) -> list[Any]:
    return list(column.to_pylist())


# --- typed parts ----------------------------------------------------------------------------------


def tables(arrays: Sequence[pa.Array]) -> list[pa.Table]:
    made: list[pa.Table] = []
    for number, array in enumerate(arrays):
        unused = (
            pa.concat_arrays([UNUSED[number]] * len(array)) if len(array) else UNUSED[number][:0]
        )
        made.append(pa.table({"x": array, "unused": unused, "t": pa.array([number] * len(array))}))
    return made


def files(folder: Path, arrays: Sequence[pa.Array]) -> list[str]:
    paths: list[str] = []
    for number, table in enumerate(tables(arrays)):
        for old in folder.glob(f"{number}*.parquet"):
            old.unlink()
        paths.append(str(folder / f"{number}.parquet"))
        try:
            pq.write_table(table, paths[-1], row_group_size=2)
        except pa.ArrowException:
            reject()  # Parquet has no views, nor all times
    return paths


def from_parquet(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    return read(Parquet(files(folder, arrays)).read(plan=PLAN))


def from_prepared(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    entries = [
        {
            "file": Path(file).name,
            "bytes": Path(file).stat().st_size,
            "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        }
        for file in files(folder, arrays)
    ]
    workflow = {"format": WORKFLOW_FORMAT, "parts": {"train": {"rows": 0, "files": entries}}}
    (folder / WORKFLOW_FILE).write_text(json.dumps(sealed(workflow)))
    return read(Prepared(str(folder)).read(plan=PLAN))


def from_concat(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    return read(Concat([Memory(table) for table in tables(arrays)]).read(plan=PLAN))


def from_replay(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    return read(Replay([Memory(table) for table in tables(arrays)], time="t").read(plan=PLAN))


def followed(folder: Path, pattern: str, count: int, of: Take = facts) -> list[Any]:
    """Return the rows of a followed folder, which are the same after any restart."""
    live = Live(Journal(), tick_seconds=0.0)
    plan = ReadPlan(columns=("x",), live=live)
    source = Follow(folder, pattern)

    def rows(position: Position | None, plan: ReadPlan) -> tuple[list[Any], list[Any]]:
        values: list[Any] = []
        places: list[Any] = []
        for batch, after in source.read(position, 2, plan):
            if batch.num_rows:
                values += of(batch.column("x"))
                places.append((after, len(values)))
            elif after["file"] is None and len(values) >= count - done:
                return values, places
        raise AssertionError

    done = 0
    whole, places = rows(None, plan)
    assert repr(rows(None, plan)[0]) == repr(whole)  # by the journal
    for position, done in places[:2]:
        assert repr(rows(position, ReadPlan(columns=("x",)))[0]) == repr(whole[done:])
    return whole


def from_follow(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    files(folder, arrays)
    for extra in range(len(arrays), 4):
        (folder / f"{extra}.parquet").unlink(missing_ok=True)
    return followed(folder, "*.parquet", sum(map(len, arrays)))


def decoded(decoder: Decoder, messages: Sequence[bytes], of: Take = facts) -> list[Any]:
    """Return the rows of messages, each a block of its own."""
    rows: list[Any] = []
    types = ""
    for message in messages:
        schema, types = wanted_types(decoder, [message], PLAN, types)
        batches, _, errors = decode_messages(decoder, [message], schema)
        for error in errors.values():  # with its partition and offset, it becomes a DecodeError
            raise SchemaError(str(error)) from error
        for batch in batches:
            rows += of(batch.column("x"))
    return rows


def from_messages(folder: Path, arrays: Sequence[pa.Array]) -> list[Any]:
    messages: list[bytes] = []
    for table in tables(arrays):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        messages.append(sink.getvalue().to_pybytes())
    return decoded(Arrow(), messages)


TYPED: list[Callable[[Path, Sequence[pa.Array]], list[Any]]] = [
    from_parquet,
    from_prepared,
    from_concat,
    from_replay,
    from_follow,
    from_messages,
]
FINITE = TYPED[:4]


@pytest.mark.parametrize("source", TYPED)
def test_lists_that_are_all_empty_are_read(
    source: Callable[[Path, Sequence[pa.Array]], list[Any]], tmp_path: Path
) -> None:
    kind = pa.list_(pa.null())
    arrays = [pa.array([], kind), pa.array([[]], kind), pa.array([None, []], kind)]
    assert source(tmp_path, arrays) == [value for array in arrays for value in facts(array)]


@pytest.mark.parametrize("source", TYPED)
def test_parts_of_two_types_are_right_or_refused(
    source: Callable[[Path, Sequence[pa.Array]], list[Any]], tmp_path: Path
) -> None:
    @settings(max_examples=settings.default.max_examples // (4 if source is from_prepared else 1))
    @given(parts())
    def holds(arrays: list[pa.Array]) -> None:
        expected = [value for array in arrays for value in facts(array)]
        rows, refusal = attempt(lambda: source(tmp_path, arrays))
        if refusal is None:
            assert rows == expected
        else:
            assert isinstance(refusal, SchemaError)
            assert "'x'" in str(refusal)
            assert len({array.type for array in arrays}) > 1

    holds()


MEET = [
    (pa.array([1], pa.int32()), pa.array([2**62], pa.int64())),
    (pa.array([200], pa.uint8()), pa.array([-1], pa.int8())),
    (pa.array([1.5], pa.float32()), pa.array([0.1], pa.float64())),
    (pa.array(["a"]).dictionary_encode(), pa.array(["b"], pa.large_string())),
    (pa.array([1], pa.timestamp("s")), pa.array([1], pa.timestamp("us"))),
    (pa.array([Decimal("1.5")]), pa.array([Decimal("100.25")])),
    (pa.array([], pa.float64()), pa.array([2**53 + 1], pa.int64())),
    (pa.array([None], pa.float64()), pa.array(["a"])),
    (pa.array([None], pa.null()), pa.array([True])),
    (pa.array([[], [None]], pa.list_(pa.null())), pa.array([[1]], pa.large_list(pa.int16()))),
    (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), pa.array([[3]], pa.list_(pa.int64()))),
    (pa.array([{"f": 1}], pa.struct([("f", pa.int8())])), pa.array([{"f": 2**40}])),
]


@pytest.mark.parametrize("source", FINITE)
def test_stated_types_meet_in_either_order(
    source: Callable[[Path, Sequence[pa.Array]], list[Any]], tmp_path: Path
) -> None:
    for pair in MEET:
        for arrays in (pair, pair[::-1]):
            expected = [value for array in arrays for value in facts(array)]
            assert source(tmp_path, arrays) == expected


@pytest.mark.parametrize("source", [from_follow, from_messages])
def test_first_values_of_a_stream_decide_its_types(
    source: Callable[[Path, Sequence[pa.Array]], list[Any]], tmp_path: Path
) -> None:
    """A narrower type widens to them, and nulls decide nothing; a wider one is refused."""
    for narrow, wide in [MEET[0], *MEET[2:]]:  # the other pair meets in a third type
        expected = facts(wide) + facts(narrow)
        assert source(tmp_path, [wide, narrow]) == expected
        if narrow.null_count == len(narrow):
            assert source(tmp_path, [narrow, wide]) == facts(narrow) + facts(wide)
    first, later = MEET[0]
    with pytest.raises(SchemaError, match=r"column 'x' must be int32, .* got int64"):
        source(tmp_path, [first, later])


@given(parts())
def test_keys_of_two_types_join_right_or_are_refused(arrays: list[pa.Array]) -> None:
    left, side = arrays[:2]
    places = {}
    for place, key in enumerate(facts(side)):
        if key is not None and key != ("number", "nan"):  # neither is equal to itself
            places.setdefault(repr(key), place)
    kept = sorted(places.values())
    side = pa.concat_arrays([side[:0], *(side.slice(place, 1) for place in kept)])
    expected = [places.get(repr(key)) for key in facts(left)]
    table = pa.table({"x": side, "place": pa.array(kept, pa.int64())})
    source = Memory(pa.table({"x": left})).join(Memory(table), on="x")
    rows, refusal = attempt(lambda: read(source.read(), in_python, "place"))
    if refusal is None:
        assert rows == expected
    else:
        assert isinstance(refusal, SchemaError)
        assert "join: the key 'x'" in str(refusal)


# --- text -----------------------------------------------------------------------------------------

WORDS_OF_CSV = "7 -3 007 -0 +5 0x10 1.5 2.0 1e5 a true 2024-01-02 nan 9223372036854775808"
FIELDS = st.sampled_from([*WORDS_OF_CSV.split(), "", " 7", str(2**64 - 1), str(10**20)])
COLUMNS_OF_TEXT = st.lists(st.lists(FIELDS, max_size=4), min_size=2, max_size=3)


def is_right_text(value: Any, text: str) -> bool:
    """Return whether a value is what a field of a csv file says."""
    if text == "":
        return value is None
    if isinstance(value, float):
        return value == float(text) or (math.isnan(value) and text == "nan")
    return str(value) == text


@pytest.mark.parametrize("how", ["files", "blocks", "followed"])
def test_csv_parts_are_right_or_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value changes its id because of the part that it is in: 007 is never 7."""
    monkeypatch.setattr(delimited, "SAMPLE_BYTES", 24)

    @given(COLUMNS_OF_TEXT)
    def holds(columns: list[list[str]]) -> None:
        if how == "blocks":
            columns = [[text for fields in columns for text in fields]]
        for old in tmp_path.glob("*.csv"):
            old.unlink()
        paths = [str(tmp_path / f"{number}.csv") for number in range(len(columns))]
        for path, fields in zip(paths, columns, strict=True):
            rows = [f"{number},{text}\n" for number, text in enumerate(fields)]
            Path(path).write_text("n,x\n" + "".join(rows))
        texts = [text for fields in columns for text in fields]
        if how == "followed":
            read_all = partial(followed, tmp_path, "*.csv", len(texts), in_python)
        else:
            read_all = partial(column, Csv(paths))
        values, refusal = attempt(read_all)
        if refusal is None:
            assert len(values) == len(texts)
            assert all(map(is_right_text, values, texts)), (values, texts)
        else:
            assert "'x'" in str(refusal)

    holds()


LEAVES = st.sampled_from(
    [None, 7, -1, 2**63, 2**53 + 1, 1.5, 2.0, 1e300, "007", "a", "2024-01-02", True, False]
)
OBJECTS = st.lists(
    st.lists(LEAVES | st.lists(LEAVES, max_size=2) | st.just([[7]]), max_size=3),
    min_size=2,
    max_size=3,
)


def is_right_json(value: Any, said: Any) -> bool:
    """Return whether a value is what JSON says; numbers of a float column are the nearest float."""
    if isinstance(said, list) and isinstance(value, list):
        return len(value) == len(said) and all(map(is_right_json, value, said))
    if isinstance(said, bool) or isinstance(value, bool) or said is None or isinstance(said, str):
        return type(value) is type(said) and value == said
    if isinstance(value, float):
        return value == float(said)
    return type(value) is type(said) and value == said


@pytest.mark.parametrize("how", ["files", "blocks", "followed", "messages"])
def test_json_parts_are_right_or_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 24)

    @given(OBJECTS)
    def holds(columns: list[list[Any]]) -> None:
        if how == "blocks":
            columns = [[value for objects in columns for value in objects]]
        for old in tmp_path.glob("*.jsonl"):
            old.unlink()
        paths = [str(tmp_path / f"{number}.jsonl") for number in range(len(columns))]
        said = [value for objects in columns for value in objects]
        texts = [[json.dumps({"x": value}) for value in objects] for objects in columns]
        for path, rows in zip(paths, texts, strict=True):
            Path(path).write_text("".join(f"{text}\n" for text in rows))
        if how == "followed":
            read_all = partial(followed, tmp_path, "*.jsonl", len(said), in_python)
        elif how == "messages":
            messages = [text.encode() for lines in texts for text in lines]
            read_all = partial(decoded, Json(), messages, in_python)
        else:
            read_all = partial(column, Jsonl(paths))
        values, refusal = attempt(read_all)
        if refusal is None:
            assert len(values) == len(said)
            assert all(map(is_right_json, values, said)), (values, said)
        else:
            assert "'x'" in str(refusal) or "/x" in str(refusal) or not said

    holds()
