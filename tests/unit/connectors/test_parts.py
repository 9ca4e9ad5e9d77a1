# SPDX-License-Identifier: Apache-2.0
"""Parts of damaged sources: each fault belongs to the part with its rows, and is named by its place
in the file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.connectors import (
    Csv,
    Jsonl,
    Libsvm,
    Memory,
    Norm,
    Parquet,
    Raw,
    ReadPlan,
    Skips,
    Source,
)
from hotbed.data import Dataset, Id, Label, Schema
from hotbed.errors import DecodeError

pytestmark = pytest.mark.core
NUMBERS = partial(Csv, columns={"number": "int64"})


def num_rows(source: Source, skips: Skips | None = None) -> int:
    batches = source.read(batch_rows=50, plan=ReadPlan(skips=skips))
    return sum(batch.num_rows for batch, _ in batches)


def write_text(file: Path, head: str, row: str, bad: str) -> None:
    """A quoted line end before the middle, where the format has it, and a bad row near the end."""
    rows = [row.format(number) for number in range(99)]
    file.write_text("\n".join([head, *rows, bad, row.format(100)]) + "\n")


@pytest.mark.parametrize(
    ("name", "kind", "head", "row", "bad"),
    [
        ("a.csv", NUMBERS, 'number,word\n0,"two\nlines"', "{},w", "bad,w"),
        ("b.csv", Csv, "number,word", "{},w", "1,w,more"),
        ("a.jsonl", Jsonl, '{"number": 1}\n', '{{"number": {}}}', '{"number": "bad"}'),
        ("a.svm", Libsvm, "# comment", "1 {}:2", "1 bad"),
    ],
)
def test_bad_row_belongs_to_one_part_and_is_named_by_its_line(
    tmp_path: Path, name: str, kind: Any, head: str, row: str, bad: str
) -> None:
    write_text(tmp_path / name, head, row, bad)
    source = kind(tmp_path / name)
    *others, last = source.parts(4)
    assert sum(map(num_rows, others)) > 60
    with pytest.raises(DecodeError) as of_whole:
        num_rows(source)
    with pytest.raises(DecodeError) as of_part:
        num_rows(last)
    assert str(of_part.value) == str(of_whole.value)
    assert of_part.value.row == of_whole.value.row


def write_parquet(folder: Path, rows: pa.Table) -> Source:
    pq.write_table(rows.select(["label", "id"]), folder / "a.parquet", row_group_size=30)
    return Parquet(folder / "a.parquet")


def write_csv(folder: Path, rows: pa.Table) -> Source:
    lines = [f'{row["label"]},{row["id"]},"a\nb"' for row in rows.to_pylist()]
    (folder / "a.csv").write_text("label,id,word\n" + "\n".join(lines))
    return Csv(folder / "a.csv")


def write_jsonl(folder: Path, rows: pa.Table) -> Source:
    lines = [f'{{"label": {row["label"]}, "id": {row["id"]}}}\n' for row in rows.to_pylist()]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Jsonl(folder / "a.jsonl")


def write_norm(folder: Path, rows: pa.Table) -> Source:
    source = Norm(folder / "a.norm", ["label"], ["id"])
    source.write(Memory(rows))
    return source


def write_raw(folder: Path, rows: pa.Table) -> Source:
    source = Raw(folder / "a.raw", slots={"id": 1})
    source.write(Memory(rows))
    return source


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl, write_norm, write_raw])
def test_value_that_cannot_be_used_is_named_by_its_place_in_the_file(
    tmp_path: Path, write: Any
) -> None:
    labels = [0] * 80 + [7] + [0] * 19
    source = write(tmp_path, pa.table({"label": labels, "id": range(100)}))
    messages: list[str] = []
    for part in [source, *source.parts(3)]:
        dataset = Dataset(part, Schema([Label("label"), Id("id")]), 10, prefetch=0)
        dataset.restrict_labels({"label"})
        try:
            assert len(list(dataset)) == 4
        except DecodeError as error:
            messages.append(str(error))
    assert len(messages) == 2
    assert messages[0] == messages[1]


def test_damaged_row_group_costs_the_rest_of_the_part_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": [f"{number:09}" for number in range(400)]})
    pq.write_table(table, path, row_group_size=100, use_dictionary=False, compression="snappy")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    begin = column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    skips = [Skips() for _ in range(3)]
    assert num_rows(Parquet(path), skips[2]) == 100
    first, second = Parquet(path).parts(2)
    assert [num_rows(first, skips[0]), num_rows(second, skips[1])] == [100, 200]
    assert [skip.counts for skip in skips] == [{"file": 1}, {}, {"file": 1}]


@pytest.mark.parametrize("kind", [Parquet, Norm])
def test_torn_file_is_left_out_once(tmp_path: Path, kind: Any) -> None:
    for number in range(3):
        path = tmp_path / f"{number}.data"
        rows = pa.table({"label": [0.0] * 50, "id": range(50)})
        if kind is Parquet:
            pq.write_table(rows, path)
        else:
            Norm(path, ["label"], ["id"]).write(Memory(rows))
    torn = tmp_path / "1.data"
    torn.write_bytes(torn.read_bytes()[:-100])
    source = kind(str(tmp_path / "*.data"))
    whole, of_parts = Skips(), Skips()
    for count in (1, 2, 30):
        assert sum(num_rows(part, of_parts) for part in source.parts(count)) == num_rows(
            source, whole
        )
        assert of_parts.counts == whole.counts
