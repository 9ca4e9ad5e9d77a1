# SPDX-License-Identifier: Apache-2.0
"""Files of rows give back what was written, newest file first; torn ones are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.config import describe
from hotbed.errors import FormatError, NotWritten, RowShapeError
from hotbed.frozen import FrozenRows, RowDtype, rows_at_once, write_rows
from hotbed.serving.rows import FrozenLookup, ServedTable

pytestmark = pytest.mark.core
DIM = 3
ID = st.one_of(
    st.sampled_from([-1, -2, 0, -(2**63), 2**63 - 1]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 40),
)


def config(**keywords: Any) -> dict[str, Any]:
    plain: dict[str, Any] = describe(hb.Table("t", DIM, **keywords).config)
    return plain


def batch(rows: dict[int, list[float]]) -> pa.RecordBatch:
    values = pa.array([lane for row in rows.values() for lane in row], pa.float32())
    columns = {
        "id": pa.array(list(rows), pa.int64()),
        "value": pa.FixedSizeListArray.from_arrays(values, DIM),
    }
    return pa.record_batch(columns)


def gone(ids: list[int]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"id": pa.array(ids, pa.int64())})]


def test_rows_that_cannot_be_written_are_the_error_that_keeps_the_version_before(
    tmp_path: Path,
) -> None:
    with pytest.raises(NotWritten, match=r"absent/0.rows: cannot be written"):
        write_rows(tmp_path / "absent" / "0.rows", DIM, [batch({1: [0.0] * DIM})])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layers=st.lists(
        st.tuples(st.dictionaries(ID, st.integers(-99, 99)), st.lists(ID, max_size=20)),
        min_size=1,
        max_size=4,
    ),
    asked=st.lists(ID, max_size=30),
    admit=st.booleans(),
)
def test_layers_read_like_a_dict_that_was_updated_in_their_order(
    tmp_path: Path, layers: list[Any], asked: list[int], admit: bool
) -> None:
    known: dict[int, list[float]] = {}
    files = []
    for number, (rows, removed) in enumerate(layers):
        filled = {one: [float(value), 0.5, -1.0] for one, value in rows.items()}
        for one in removed:
            known.pop(one, None)
        known.update(filled)
        path = tmp_path / f"{number}.rows"
        assert write_rows(path, DIM, [batch(filled)], gone(removed)) == len(filled)
        files.insert(0, FrozenRows(path))
    keywords = {"admit": hb.MinCount(2), "default": 0.25} if admit else {}
    table = ServedTable(config(**keywords), files)
    asked = [*asked, *known]
    absent = hb.Table("t", DIM, **keywords).lookup(np.array(asked, np.int64))
    rows, found = table.find(np.array(asked, np.int64))
    expected = [known.get(one, absent[i].tolist()) for i, one in enumerate(asked)]
    assert rows.tolist() == np.array(expected, np.float32).reshape(-1, DIM).tolist()
    assert found.tolist() == [one in known for one in asked]
    alive = set[int]()
    for file in reversed(files):
        held, taken = file.entries()
        alive = alive - set(taken.tolist()) | set(held.tolist())
    assert alive == set(known)
    whole = pa.Table.from_batches(
        list(table.batches(np.array(sorted(alive), np.int64))) or [batch({})]
    ).to_pydict()
    assert dict(zip(whole["id"], whole["value"], strict=True)) == known


def test_a_batch_that_is_copied_in_pieces_reads_as_it_was(tmp_path: Path) -> None:
    num_rows = 2 * rows_at_once(DIM) + 1
    values = np.arange(num_rows * DIM, dtype=np.float32)
    ids = np.arange(num_rows)[::-1].copy()
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values), DIM)
    whole = pa.record_batch({"id": pa.array(ids), "value": lists})
    write_rows(tmp_path / "rows", DIM, [whole])
    table = ServedTable(config(), [FrozenRows(tmp_path / "rows")])
    assert (table.find(ids)[0].ravel() == values).all()
    pieces = list(table.batches(ids))
    assert [piece.num_rows for piece in pieces] == [rows_at_once(DIM), rows_at_once(DIM), 1]
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([whole]))


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 0.0), ("float16", 2e-3), ("int8", 0.5 / 127 * 2.001)]
)
def test_narrow_rows_are_within_their_rounding(
    tmp_path: Path, dtype: RowDtype, error: float
) -> None:
    table = hb.Table("t", DIM, init=hb.Uniform(2.0))
    ids = np.arange(-500, 500)
    table.find_or_insert(ids)
    write_rows(tmp_path / "rows", DIM, table.export(), dtype=dtype)
    rows, found = ServedTable(config(), [FrozenRows(tmp_path / "rows")]).find(ids)
    assert found.all()
    assert np.abs(rows - table.lookup(ids)).max() <= error


def test_a_lookup_gives_the_bits_of_evaluation(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch absent")
    from hotbed.embedding.modules import Feature

    draw = np.random.default_rng(0)
    tables = [hb.Table("a", 4), hb.Table("b", 2, admit=hb.MinCount(2), default=0.5)]
    for table in tables:
        table.find_or_insert(draw.integers(0, 300, 400))
        write_rows(tmp_path / table.name, table.dim, table.export())
    features = [("x", "a", "sum"), ("y", "b", "mean"), ("z", "a", "max"), ("w", "b", "none")]
    lengths = draw.integers(0, 4, (4, 20))
    ids = {}
    for (name, *_), length in zip(features, lengths, strict=True):
        offsets = np.concatenate([[0], np.cumsum(length)])
        weights = draw.random(int(offsets[-1]), np.float32) if name in "xy" else None
        ids[name] = hb.Ids(draw.integers(0, 600, int(offsets[-1])), offsets, weights)
    served = {
        t.name: ServedTable(describe(t.config), [FrozenRows(tmp_path / t.name)]) for t in tables
    }
    flat, sequences, late = FrozenLookup(features, served)(ids, 20)
    assert late == 0
    collection = hb.EmbeddingCollection([Feature(*one) for one in features], tables).eval()
    expected, rest = collection.pool([ids[name] for name, *_ in features])
    assert (flat == expected.detach().numpy()).all()
    assert (sequences[0] == rest[0].detach().numpy()).all()
    assert torch.isfinite(expected).all()


def test_torn_foreign_and_absent_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "user.rows"
    write_rows(path, DIM, [batch({one: [1.0, 2.0, 3.0] for one in range(100)})])
    whole = path.read_bytes()
    for size in [0, 1, 63, 64, 128, len(whole) // 2 // 64 * 64, len(whole) - 64, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"user\.rows"):
            FrozenRows(path)
    for place in range(len(whole) - 64, len(whole)):  # the footer, bit by bit
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(FormatError, match=r"user\.rows"):
            FrozenRows(path)
    with pytest.raises(FormatError, match="nothing"):
        FrozenRows(tmp_path / "nothing")


def test_a_lookup_of_ragged_features_says_which(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", DIM, [batch({1: [1.0, 2.0, 3.0]})])
    lookup = FrozenLookup(
        [("x", "t", "sum")], {"t": ServedTable(config(), [FrozenRows(tmp_path / "rows")])}
    )
    with pytest.raises(RowShapeError, match="'x'"):
        lookup({"x": hb.Ids(np.array([1, 2]))}, 3)
