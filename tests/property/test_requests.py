# SPDX-License-Identifier: Apache-2.0
"""A request is encoded and looked up to the very bits of Encoder and Table, however its columns are
given.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.config import describe
from hotbed.connectors.memory import Memory
from hotbed.data.columns import ids_of
from hotbed.data.encode import Encoder
from hotbed.data.fitted import FittedMap
from hotbed.errors import DataError
from hotbed.frozen import FrozenRows, RowDtype, write_rows
from hotbed.serving.request import RequestEncoder
from hotbed.serving.rows import FrozenLookup, ServedTable

pytestmark = pytest.mark.core
t = hb.transforms
WORDS = st.sampled_from(["", "a", "bb", "ü", "a|bb", "7"])
INTEGERS = {
    "int8": (-8, 8),
    "int32": (-40, 40),
    "int64": (-(2**63), 2**63 - 1),
    "uint16": (0, 40),
    "uint64": (0, 2**64 - 1),
}


def column(draw: Any, n: int, kinds: list[str]) -> pa.Array:
    """`n` values of one of `kinds`, with and without nulls."""
    kind = draw(st.sampled_from(kinds))
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        one: Any = st.one_of(st.integers(max(low, -5), min(high, 40)), st.integers(low, high))
        arrow = getattr(pa, kind)()
    elif kind == "bags":
        one, arrow = st.lists(st.integers(-3, 30), max_size=3), pa.list_(pa.int64())
    else:
        one, arrow = {
            "bool": (st.booleans(), pa.bool_()),
            "text": (WORDS, pa.string()),
            "words": (WORDS, pa.dictionary(pa.int8(), pa.string())),
            "float": (st.floats(-1e3, 1e3, width=32), pa.float32()),
            "double": (st.floats(-1e30, 1e30), pa.float64()),
        }[kind]
    if draw(st.integers(0, 3)) == 0:
        one = st.none() | one
    values = draw(st.lists(one, min_size=n, max_size=n))
    return (
        pa.array(values, arrow.value_type).dictionary_encode()
        if kind == "words"
        else pa.array(values, arrow)
    )


KEYS = np.array([0, 3, 40, -5, *ids_of(pa.array(["a", "ü"]), "key")])
MAPS = tempfile.TemporaryDirectory()
PLACES = FittedMap.write(Path(MAPS.name) / "places.rows", KEYS)
RATES = FittedMap.write(Path(MAPS.name) / "rates.rows", KEYS, np.arange(1, 7)[:, None] / 7)
IDS = [*INTEGERS, "bool", "text", "words", "bags"]
NUMBERS = ["int8", "int32", "int64", "uint16", "uint64", "bool", "float", "double"]


@st.composite
def problems(draw: Any) -> tuple[hb.Schema, dict[str, pa.Array], list[str], int]:
    """A schema, raw columns for it, which of them are context, and the number of candidates."""
    n = draw(st.integers(0, 4))
    context = [name for name in ("i0", "i1", "i2", "d0", "d1") if draw(st.integers(0, 2)) == 0]
    raw = {f"i{k}": column(draw, 1 if f"i{k}" in context else n, IDS) for k in range(3)}
    raw |= {f"d{k}": column(draw, 1 if f"d{k}" in context else n, NUMBERS) for k in range(2)}
    columns: list[Any] = []
    for k in range(draw(st.integers(1, 4))):
        kinds = [
            [],
            [],
            [],
            [t.Hash(50)],
            [t.Cross(["i1"])],
            [t.Cross(["d0", "i2"], bins=9)],
            [t.Split("|")],
            [t.Map(fitted=PLACES)],
        ]
        columns.append(
            hb.Id(
                f"f{k}",
                draw(st.sampled_from("ab")),
                draw(st.sampled_from(kinds)),
                draw(st.sampled_from(["sum", "mean", "max", "none"])),
                draw(st.sampled_from(["i0", "i1", "i2"])),
                draw(st.sampled_from([None, None, 0])),
                draw(st.sampled_from([None, None, 2])),
            )
        )
    for k in range(draw(st.integers(0, 3))):
        kinds = [
            [],
            [],
            [t.FillMissing(0.5), t.Clip(-2.0, 9.0)],
            [t.FillMissing(1.0), t.Normalize(1.0, 3.0)],
            [t.Expression("d1 - 2 * d0"), t.FillMissing(0.0)],
        ]
        columns.append(
            hb.Dense(f"x{k}", draw(st.sampled_from(kinds)), draw(st.sampled_from(["d0", "d1"])))
        )
    for k in range(draw(st.integers(0, 2))):
        of_keys = [
            [t.TargetEncode("y", prior=0.5, fitted=RATES)],
            [t.Cross(["i0"]), t.TargetEncode("y", prior=0.25, fitted=RATES)],
            [t.JoinGroupby("d0", "sum", RATES), t.Log()],
            [t.JoinGroupby("d0", "max", RATES), t.FillMissing(-1.0)],
        ]
        name = draw(st.sampled_from(["i0", "i1", "i2"]))
        columns.append(hb.Dense(f"k{k}", draw(st.sampled_from(of_keys)), name))
    return hb.Schema(columns), raw, context, n


def given_as(draw: Any, values: pa.Array) -> Any:
    """The same values as Arrow, a slice of it, NumPy, every other of an array, or a list."""
    way = draw(st.sampled_from(["arrow", "slice", "numpy", "strided", "list"]))
    if way == "slice":
        return pa.concat_arrays([values, values, values]).slice(len(values), len(values))
    plain = (
        not values.null_count
        and not pa.types.is_nested(values.type)
        and not pa.types.is_dictionary(values.type)
    )
    if way in ("numpy", "strided") and plain and not pa.types.is_string(values.type):
        array = values.to_numpy(zero_copy_only=False)
        return np.repeat(array, 2)[::2] if way == "strided" else array
    if (
        way == "list"
        and values.type in (pa.int64(), pa.string(), pa.float64(), pa.bool_())
        and values.null_count < len(values)
    ):
        return values.to_pylist()
    return values


def tables() -> dict[str, hb.Table]:
    found = {
        "a": hb.Table("a", 3, default=0.0),
        "b": hb.Table("b", 2, admit=hb.MinCount(2), default=0.25),
    }
    for table in found.values():
        table.find_or_insert(np.repeat(np.arange(-10, 25), 2))
    return found


TABLES = tables()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedTable]:
    home: Path = tmp_path_factory.mktemp("rows")
    for table in TABLES.values():
        write_rows(home / table.name, table.dim, table.export())
    return {
        name: ServedTable(describe(table.config), [FrozenRows(home / name)])
        for name, table in TABLES.items()
    }


@settings(
    max_examples=3 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(problem=problems(), data=st.data())
@pytest.mark.filterwarnings("ignore:table .* is fed both")
def test_a_request_holds_the_bits_of_the_encoder(
    served: dict[str, ServedTable],
    problem: tuple[hb.Schema, dict[str, pa.Array], list[str], int],
    data: Any,
) -> None:
    schema, raw, context, n = problem
    first = pa.array(np.zeros(n, np.int64))
    asked = {
        name: given_as(data.draw, values) for name, values in raw.items() if name not in context
    }
    asked["unused"] = np.arange(n)
    around = {
        name: raw[name] if data.draw(st.booleans()) else raw[name][0].as_py() for name in context
    }
    once = {
        name: value if isinstance(value, pa.Array) else [value] for name, value in around.items()
    }
    repeated = {
        name: Memory({name: value}).table.column(name).take(first) for name, value in once.items()
    }
    encoder = RequestEncoder(schema)
    try:
        expected = Encoder(schema)(Memory({**asked, **repeated}).table, labels=False)
    except DataError:
        if n:  # no candidates hold no values, so none of a wrong type
            with pytest.raises(DataError):
                encoder(asked, around)
        return
    try:
        found = encoder(asked, around)
    except DataError:  # a context that is wrong is wrong for no candidates as well
        assert n == 0
        return
    assert found.num_samples == n
    assert list(expected.dense) == [column.name for column in schema.dense]
    for name, values in expected.dense.items():
        assert found.dense[name].dtype == np.float32
        ours = found.dense[name]
        assert (np.repeat(ours, n) if len(ours) != n else ours).tobytes() == values.tobytes(), name
    features = [(one.name, str(one.table), one.pooling) for one in schema.ids]
    for name, *_ in features:
        ours = found.ids[name]
        one, ours = (
            expected.ids[name].with_offsets(),
            (hb.Ids(ours) if isinstance(ours, np.ndarray) else ours).with_offsets(),
        )
        if len(ours) != n:
            assert len(ours) == 1, name
            ours = hb.Ids(np.tile(ours.values, n), np.arange(n + 1) * len(ours.values))
        assert ours.values.tolist() == one.values.tolist(), name
        assert ours.offsets.tolist() == one.offsets.tolist(), name
    flat = FrozenLookup(features, served)(found.ids, n).flat
    pooled = [
        pool(expected.ids[name], TABLES[table], pooling)
        for name, table, pooling in features
        if pooling != "none"
    ]
    if pooled:
        assert (flat == np.concatenate(pooled, axis=1)).all()


def pool(ids: hb.Ids, table: hb.Table, pooling: str) -> np.ndarray:
    """As training reads them, written plainly."""
    ids = ids.with_offsets()
    rows = table.lookup(ids.values)
    out = np.zeros((len(ids), table.dim), np.float32)
    for sample, (start, stop) in enumerate(zip(ids.offsets[:-1], ids.offsets[1:], strict=True)):
        if start == stop:
            continue
        if pooling == "max":
            out[sample] = rows[start:stop].max(0)
            continue
        for row in rows[start:stop]:
            out[sample] += row
        if pooling == "mean":
            out[sample] *= np.float32(1) / np.float32(stop - start)
    return out


@pytest.mark.parametrize("dtype", get_args(RowDtype))
def test_one_sample_stands_for_all_whatever_the_rows_are_kept_in(
    dtype: Any, tmp_path: Path
) -> None:
    table = TABLES["a"]
    write_rows(tmp_path / "a", table.dim, table.export(), dtype=dtype)
    served = {"a": ServedTable(describe(table.config), [FrozenRows(tmp_path / "a")])}
    look = FrozenLookup([("once", "a", "mean"), ("each", "a", "sum")], served)
    each = hb.Ids(np.array([3, 99, -10, 4]))
    once = hb.Ids(np.array([1, 2, 77]), np.array([0, 3]))
    flat = look({"once": once, "each": each}, 4).flat
    repeated = hb.Ids(np.tile(once.values, 4), np.arange(5) * 3)
    assert (flat == look({"once": repeated, "each": each}, 4).flat).all()
    assert (flat[:, 3:] == served["a"].find(each.values)[0]).all()
    assert look({"once": once, "each": hb.Ids(np.empty(0, np.int64))}, 0).flat.shape == (0, 6)


@pytest.mark.parametrize("value", [np.uint64(2**63 + 2**39 + 1), np.int64(2**62 + 2**38 + 1)])
def test_a_large_number_is_rounded_as_the_encoder_rounds_it(value: Any) -> None:
    schema = hb.Schema([hb.Dense("x")])
    columns = {"x": np.array([value])}
    expected = Encoder(schema)(Memory(columns).table).dense["x"]
    assert RequestEncoder(schema)(columns).dense["x"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    encoder = RequestEncoder(hb.Schema([hb.Dense("x"), hb.Dense("y")]))
    assert encoder({"x": np.zeros(2), "y": np.ones(2)}).dense["y"].tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="'x'"):
        encoder({"x": np.array([1.0, value]), "y": np.ones(2)})
