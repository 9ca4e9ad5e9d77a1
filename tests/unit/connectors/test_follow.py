# SPDX-License-Identifier: Apache-2.0
"""Follow: each file of a directory once, in an order that is decided once; half-written and changed
files are told.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed import config
from hotbed.connectors import Csv, DeadLetters, Follow, Journal, Live, Memory, ReadPlan, Source
from hotbed.connectors.position import schema_from_text
from hotbed.data import Batch, Dataset, Id, Label, Schema
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row")])


def text(rows: range) -> str:
    return "row,label\n" + "".join(f"{row},{row % 2}\n" for row in rows)


def put(folder: Path, name: str, content: str | bytes) -> None:
    """As a good writer does it: another name first, then a rename."""
    part = folder / f".{name}.part"
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.rename(folder / name)


def make(
    source: Source, batch_size: int = 4, live: Live | None = None, **arguments: Any
) -> Dataset:
    dataset = Dataset(source, SCHEMA, batch_size, **{"prefetch": 0, **arguments})
    dataset.live = live or Live()
    dataset.live = replace(dataset.live, tick_seconds=0.001)
    return dataset


def rows(batches: Any) -> list[list[int]]:
    return [batch.ids["row"].values.tolist() for batch in batches if batch is not None]


def flat(batches: Any) -> list[int]:
    return [row for batch in rows(batches) for row in batch]


def test_files_are_read_once_as_they_come_and_batches_cross_them(tmp_path: Path) -> None:
    items = make(Follow(tmp_path, "*.csv")).stream()
    assert list(islice(items, 3)) == [None] * 3
    put(tmp_path, "b.csv", text(range(3)))
    put(tmp_path, "unread.txt", "nothing")
    assert next(items) is None  # three rows are no batch
    # a name before the last one is a new file like any other
    put(tmp_path, "a.csv", text(range(3, 9)))
    assert rows(islice(items, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(items) is None


def test_hidden_and_unfinished_names_are_not_there_yet(tmp_path: Path) -> None:
    for name in (".a.csv", "b.csv.tmp", "c.csv.partial"):
        (tmp_path / name).write_text(text(range(4)))
    (tmp_path / "folder").mkdir()
    items = make(Follow(tmp_path)).stream()
    assert list(islice(items, 3)) == [None] * 3
    (tmp_path / "b.csv.tmp").rename(tmp_path / "b.csv")
    assert rows([next(items)]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("order", "expected"), [("name", list(range(8))), ("time", [4, 5, 6, 7, 0, 1, 2, 3])]
)
def test_files_that_wait_are_read_by_name_or_by_time(
    tmp_path: Path, order: Any, expected: list[int]
) -> None:
    put(tmp_path, "b.csv", text(range(4, 8)))
    put(tmp_path, "a.csv", text(range(4)))
    os.utime(tmp_path / "b.csv", (1000, 1000))
    assert flat(islice(make(Follow(tmp_path, order=order)).stream(), 2)) == expected


def test_a_file_that_still_changes_is_left_to_settle(tmp_path: Path) -> None:
    clock = [2000.0]
    live = Live(clock=lambda: clock[0])
    put(tmp_path, "a.csv", text(range(4)))
    os.utime(tmp_path / "a.csv", (1990, 1990))
    items = make(Follow(tmp_path, settle_seconds=15), live=live).stream()
    assert next(items) is None
    clock[0] = 2006.0
    assert rows([next(items)]) == [[0, 1, 2, 3]]


def test_formats_are_told_by_the_ending_or_by_a_source(tmp_path: Path) -> None:
    table = pa.table({"row": range(4), "label": [0, 1, 0, 1]})
    pq.write_table(table, tmp_path / "1.parquet")
    (tmp_path / "2.jsonl.gz").write_bytes(
        gzip.compress(
            b"".join(json.dumps({"row": i, "label": i % 2}).encode() + b"\n" for i in range(4, 8))
        )
    )
    put(tmp_path, "3.tsv", text(range(8, 12)).replace(",", "\t"))
    put(tmp_path, "4.csv", text(range(12, 16)))
    assert flat(islice(make(Follow(tmp_path)).stream(), 4)) == list(range(16))
    put(tmp_path, "5.odd", "16|0\n17|1\n18|0\n19|1\n")
    with pytest.raises(ConfigError, match=r"format: unknown ending of a file in .*, got '5.odd'"):
        list(islice(make(Follow(tmp_path)).stream(), 5))
    told = Follow(
        str(tmp_path),
        "*.odd",
        format=Csv("", delimiter="|", header=False, columns=("row", "label")),
    )
    assert flat(islice(make(told).stream(), 1)) == [16, 17, 18, 19]
    assert config.build(config.describe(told), Source) == told


def test_all_files_are_read_with_the_types_of_the_first_also_after_a_resume(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", text(range(4)))
    first = next(make(Follow(tmp_path)).stream())
    assert isinstance(first, Batch)
    put(tmp_path, "b.csv", "row,label\nx1,1\n")
    resumed = make(Follow(tmp_path), 1).resume(first.position or {})
    with pytest.raises(DecodeError, match=r"b.csv, line 2"):
        list(islice(resumed.stream(), 1))
    put(tmp_path, "b.csv", "raw,label\n1,1\n")
    with pytest.raises(SchemaError, match="row"):
        list(islice(make(Follow(tmp_path), 1).resume(first.position or {}).stream(), 1))


def test_a_run_that_dies_again_and_again_gets_the_batches_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    draw, folder = random.Random(3), tmp_path / "in"
    folder.mkdir()
    waiting = {
        f"{draw.random():.6f}.csv": text(range(i * 10, i * 10 + draw.randint(0, 10)))
        for i in range(40)
    }
    total = sum(content.count("\n") - 1 for content in waiting.values())
    journal = Journal(tmp_path / "journal")
    position: dict[str, Any] = {}
    seen: dict[int, list[int]] = {}
    while len(seen) < total // 4:
        dataset = make(Follow(folder), live=Live(journal)).resume(position)
        for item in islice(dataset.stream(), draw.randint(1, 12)):
            if item is None and waiting:
                name = draw.choice(list(waiting))
                put(folder, name, waiting.pop(name))
            if item is not None:
                assert item.position is not None
                found = item.ids["row"].values.tolist()
                assert seen.setdefault(item.position["rows"], found) == found
                position = item.position.to_json() if draw.random() < 0.3 else position
        journal.close()
        journal = Journal(tmp_path / "journal")
    numbers = [row for batch in seen.values() for row in batch]
    assert len(numbers) == len(set(numbers)) == total // 4 * 4


def test_a_file_that_a_checkpoint_has_passed_may_go_and_is_forgotten(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", text(range(4)))
    dataset = make(Follow(tmp_path))
    items = dataset.stream()
    first = next(items)
    assert first is not None
    (tmp_path / "a.csv").unlink()
    assert next(items) is None
    put(tmp_path, "b.csv", text(range(4, 8)))
    second = next(items)
    assert isinstance(second, Batch)
    assert rows([second]) == [[4, 5, 6, 7]]
    assert second.position is not None
    assert set(second.position["source"]["seen"]) == {"b.csv"}
    resumed = make(Follow(tmp_path)).resume(
        json.dumps(first.position.to_json()) if first.position else {}
    )
    assert rows([next(resumed.stream())]) == [[4, 5, 6, 7]]


@pytest.mark.parametrize("change", ["shrinks", "changes", "goes"])
def test_a_file_that_changes_before_it_was_read_is_an_error(tmp_path: Path, change: str) -> None:
    put(tmp_path, "a.csv", text(range(8)))
    journal = Journal()
    first = next(make(Follow(tmp_path), live=Live(journal)).stream())
    assert isinstance(first, Batch)
    if change == "goes":
        (tmp_path / "a.csv").unlink()
    else:
        (tmp_path / "a.csv").write_text(text(range(4) if change == "shrinks" else range(1, 9)))
    said = "it had 42 bytes and it (was removed|has)"
    for kept in (journal, Journal()):
        with pytest.raises(DataError, match=said):
            list(
                islice(
                    make(Follow(tmp_path), live=Live(kept)).resume(first.position or {}).stream(), 1
                )
            )


def test_a_torn_file_is_an_error_or_a_dead_letter_and_reading_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"row": range(100), "label": [0] * 100}), sink)
    put(folder, "a.parquet", bytes(sink.getvalue())[:-20])
    put(folder, "b.csv", text(range(4)))
    with pytest.raises(DecodeError, match=r"a.parquet: not a whole parquet file"):
        next(make(Follow(folder)).stream())
    letters = DeadLetters(tmp_path / "dead.jsonl")
    for _ in range(2):
        dataset = make(Follow(folder), live=Live(dead_letters=letters), on_error="skip")
        assert flat(islice(dataset, 1)) == [0, 1, 2, 3]
    assert letters.counts == {"torn": 1}
    assert json.loads((tmp_path / "dead.jsonl").read_text())["place"] == {
        "file": "a.parquet",
        "row": 1,
    }


def test_a_row_that_does_not_encode_is_a_dead_letter_with_file_and_row(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    put(folder, "a.csv", "row,label\n0,1\n1,\n2,0\n")
    letters = DeadLetters(tmp_path / "dead.jsonl")
    dataset = make(Follow(folder), 2, live=Live(dead_letters=letters), on_error="skip")
    assert flat(islice(dataset, 1)) == [0, 2]
    assert json.loads((tmp_path / "dead.jsonl").read_text())["place"] == {"file": "a.csv", "row": 2}
    with pytest.raises(DecodeError, match=r"in/a.csv, line 3: label 'label'"):
        list(islice(make(Follow(folder), 2), 1))


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="order: unknown value, got 'size'"):
        Follow(tmp_path, order="size")
    with pytest.raises(ConfigError, match="format: not a source of files, got Memory"):
        Follow(tmp_path, format=Memory({"row": [1]}))
    with pytest.raises(DataError, match="no file yet"):
        Follow(tmp_path).schema()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent': cannot follow it, .* Make the directory"):
        next(Follow(tmp_path / "absent", "*.csv").read())


def test_types_are_in_the_journal_before_the_first_row(tmp_path: Path) -> None:
    """Nulls decide no type; the first value does, whatever files say after a restart."""

    def write(name: str, row: pa.Array, label: list[float | None]) -> None:
        pq.write_table(pa.table({"row": row, "label": label}), tmp_path / name)

    write("0.parquet", pa.array([], pa.float64()), [])
    write("1.parquet", pa.array([None], pa.float64()), [0.0])
    write("2.parquet", pa.array([5], pa.int32()), [1.0])
    live = Live(Journal(), tick_seconds=0.0)
    reading = Follow(tmp_path, "*.parquet").read(plan=ReadPlan(live=live))
    kinds: list[pa.DataType] = []
    for batch, position in reading:
        if batch.num_rows:
            decided = schema_from_text(live.journal.get("block", position["block"] - 1)["types"])
            assert decided == schema_from_text(position["schema"])
            kinds.append(decided.field("row").type)
        if len(kinds) == 2:
            break
    assert kinds == [pa.null(), pa.int32()]
    (tmp_path / "1.parquet").unlink()
    write("3.parquet", pa.array([6], pa.int16()), [1.0])
    write("4.parquet", pa.array([7], pa.int64()), [1.0])
    position = {**make(Follow(tmp_path, "*.parquet")).position.state, "source": position.to_json()}
    resumed = make(Follow(tmp_path, "*.parquet"), 1).resume(position).stream()
    assert flat([next(resumed)]) == [6]
    with pytest.raises(SchemaError, match=r"4\.parquet: column 'row' must be int32, .* got int64"):
        list(islice(resumed, 5))
