# SPDX-License-Identifier: Apache-2.0
"""Parquet and memory: row groups that are not needed are not read, torn files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.connectors import (
    Concat,
    Csv,
    Follow,
    Join,
    Jsonl,
    Memory,
    Parquet,
    Position,
    ReadPlan,
    Replay,
    Skips,
)
from hotbed.connectors.paths import expand
from hotbed.errors import DataError, DecodeError, SchemaError

pytestmark = pytest.mark.core


def write(file: Path, rows: int = 1000, groups: int = 100) -> Path:
    pq.write_table(
        pa.table({"a": range(rows), "b": [f"w{i}" for i in range(rows)]}),
        file,
        row_group_size=groups,
    )
    return file


def tear(file: Path, at: int) -> Path:
    """Overwrites some bytes in the middle, as a disk might."""
    data = bytearray(file.read_bytes())
    data[at : at + 400] = b"\xff" * 400
    file.write_bytes(bytes(data))
    return file


def values(source: Parquet, plan: ReadPlan | None = None) -> list[int]:
    return [
        v
        for batch, _ in source.read(plan=plan or ReadPlan())
        for v in batch.column("a").to_pylist()
    ]


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet")
    file.write_bytes(file.read_bytes()[:-100])
    for read in (Parquet(file).schema, Parquet(file).num_rows, lambda: values(Parquet(file))):
        with pytest.raises(DecodeError, match=r"a\.parquet: not a whole parquet file") as caught:
            read()
        assert caught.value.file == str(file)


def test_a_torn_page_is_named_with_the_rows_before_it(tmp_path: Path) -> None:
    file = tear(write(tmp_path / "a.parquet", 200_000, 50_000), 800_000)
    with pytest.raises(DecodeError, match=r"a\.parquet: torn or damaged parquet after row \d+"):
        values(Parquet(file))


def test_a_torn_file_is_skipped_counted_and_logged_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("1.parquet", "2.parquet", "3.parquet"):
        write(tmp_path / name)
    (tmp_path / "2.parquet").write_bytes(b"not parquet")
    skips = Skips()
    assert values(Parquet(str(tmp_path / "*.parquet")), ReadPlan(skips=skips)) == [
        *range(1000),
        *range(1000),
    ]
    assert skips.counts == {"file": 1}
    assert "2.parquet" in caplog.text


def test_files_must_agree_on_columns_and_types(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet")
    pq.write_table(
        pa.table({"a": pa.array([7], pa.int32()), "b": ["x"], "c": [1]}), tmp_path / "2.parquet"
    )
    assert values(Parquet([first, tmp_path / "2.parquet"]))[-1] == 7
    pq.write_table(pa.table({"a": ["x"], "b": ["x"]}), tmp_path / "3.parquet")
    with pytest.raises(SchemaError, match=r"3\.parquet: column 'a' must be int64, .* got string"):
        values(Parquet([first, tmp_path / "3.parquet"]))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "4.parquet")
    with pytest.raises(SchemaError, match=r"4\.parquet.*\['b'\]"):
        values(Parquet([first, tmp_path / "4.parquet"]))


def test_census_is_read_whole(shared_data: Path) -> None:
    source = Parquet(shared_data / "census_income_kdd" / "train.parquet")
    assert source.num_rows() == 159_618 == source.count_rows()
    assert "income_50k" in source.schema().names


def test_memory_takes_lists_arrays_and_arrow(tmp_path: Path) -> None:
    columns = {
        "i": np.arange(3),
        "u": [0, 1, 2**64 - 1],
        "m": np.ones((3, 2), np.float32),
        "l": [[1], [], None],
    }
    kinds = {field.name: str(field.type) for field in Memory(columns).schema()}
    assert kinds["u"] == "uint64"
    assert kinds["m"] == "fixed_size_list<item: float>[2]"
    assert (
        Memory(pa.table({"a": [1]})).num_rows()
        == Memory(pa.record_batch({"a": [1]})).num_rows()
        == 1
    )


def test_column_that_appears_twice_is_refused_where_it_is_read(tmp_path: Path) -> None:
    rows = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "b", "a"])
    pq.write_table(rows, tmp_path / "twice.parquet")
    for source in (Memory(rows), Parquet(tmp_path / "twice.parquet")):
        assert next(iter(source.read(plan=ReadPlan(("b",)))))[0].to_pydict() == {"b": [2]}
        with pytest.raises(SchemaError, match=r"the columns \['a'\] appear twice, got \['a', 'b'"):
            list(source.read(plan=ReadPlan(("a",))))


def test_memory_refuses_ragged_and_mixed_columns() -> None:
    with pytest.raises(DataError, match=r"columns differ in length.*'a': 1, 'b': 2"):
        Memory({"a": [1], "b": [1, 2]})
    with pytest.raises(DataError, match="column 'a' is not one Arrow type"):
        Memory({"a": [1, "x"]})
    for values in (None, 3, "text"):
        with pytest.raises(DataError, match=r"column 'a' is not one Arrow type, got .* not a list"):
            Memory({"a": values})
    with pytest.raises(DataError, match=r"column 'a' holds a text that UTF-8 cannot hold"):
        Memory({"a": ["fine", "\udcff"]})


def test_positions_are_small_json_objects() -> None:
    position = list(Memory({"a": [1, 2]}).read())[-1][1]
    assert (
        Position.from_json(json.dumps(position.to_json()))
        == Position.from_json(position)
        == position
    )
    with pytest.raises(DataError, match="a position is a JSON object"):
        Position.from_json("[1]")


def test_a_file_url_is_the_path_after_it(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text("user\n1\n")
    assert expand(f"file://{tmp_path}/b.csv") == [f"{tmp_path}/b.csv"]
    assert expand([f"file://{tmp_path}/*.csv"]) == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    (batch,) = (rows for rows, _ in Csv(f"file://{tmp_path}/a.csv").read())
    assert batch.to_pydict() == {"user": [1]}


def test_globs_follow_no_loops_and_name_each_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of links into the folder the file's own name stays; folders behind other links are read."""
    outside = tmp_path / "outside"
    data = tmp_path / "data"
    for folder in (outside / "deep", data / "day=1", data / ".hidden"):
        folder.mkdir(parents=True)
    files = [data / "a.csv", data / "day=1/b.csv", outside / "deep/c.csv"]
    for file in (*files, data / ".hidden/d.csv"):
        file.write_text("x\n1\n")
    (data / "0_loop").symlink_to(data)
    (data / "day=1/up").symlink_to(data)
    (data / "day=1/0_link.csv").symlink_to(data / "a.csv")
    (data / "0_same_day").symlink_to(data / "day=1")
    (data / "more").symlink_to(outside)
    expected = [str(files[0]), str(files[1]), str(data / "more/deep/c.csv")]
    assert expand(str(data / "**/*.csv")) == expected
    assert expand(data / "**" / "**" / "*.csv") == expected
    assert expand(str(data / "**")) == expected
    assert expand(str(data / "*/*.csv")) == [str(data / "0_loop/a.csv"), str(files[1])]
    assert "each file is read once" in caplog.text
    assert expand([files[0], files[0]]) == [str(files[0])] * 2  # named twice


def test_a_recursive_glob_is_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1]").mkdir()
    (tmp_path / "a[1]/x.csv").write_text("x\n1\n")
    assert expand("**/*.csv") == ["a[1]/x.csv"]
    assert expand("**/a[[]1]/x.csv") == ["a[1]/x.csv"]
    with pytest.raises(DataError, match="matches nothing"):
        expand("b/**/*.csv")


@pytest.mark.parametrize("kind", ["csv", "follow", "join", "concat", "sort", "table", "replay"])
def test_a_column_without_a_value_has_an_open_type_whatever_reads_it(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("user,at,y\n")
    csv = Csv(tmp_path / "a.csv")
    shown = Follow(str(tmp_path))
    source = {
        "csv": csv,
        "follow": shown,
        "join": Join(shown, shown, on="user", within=1, time="at", label="clicked"),
        "concat": Concat([csv, csv]),
        "sort": csv.sort("at"),
        "table": csv.join(Memory({"user": ["a"], "age": [1]}), on="user"),
        "replay": Replay([csv], time="at", unit="s"),
    }[kind]
    columns = source.inferred
    assert columns.names == source.schema().names
    assert columns.field("user").type == pa.null()


FORMATS = {"csv": Csv, "jsonl": Jsonl, "parquet": Parquet}


def day_folders(folder: Path, kind: str, days: list[str], inside: str = "u") -> str:
    """Write a file with the columns `inside` and y into a folder of each day; return the glob."""
    for row, day in enumerate(days):
        file = folder / f"day={day}/a.{kind}"
        file.parent.mkdir(parents=True)
        rows = pa.table({inside: [row], "y": [1]})
        if kind == "parquet":
            pq.write_table(rows, file)
        elif kind == "csv":
            file.write_text(f"{inside},y\n{row},1\n")
        else:
            file.write_text(json.dumps({inside: row, "y": 1}) + "\n")
    return str(folder / "day=*/*")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "days, values",
    [
        (["2024-01-01", "2024-01-02"], ["2024-01-01", "2024-01-02"]),
        (["1", "x%2Fy"], ["1", "x/y"]),
        (["01", "10", "__HIVE_DEFAULT_PARTITION__"], [1, 10, None]),
    ],
)
def test_folders_that_name_a_value_are_a_column(
    kind: str, days: list[str], values: list[object], tmp_path: Path
) -> None:
    source = FORMATS[kind](day_folders(tmp_path, kind, days))
    assert source.schema().names == ["u", "y", "day"]
    for part in (source, Concat([source]), source.slice(0)):
        for columns in (None, ("day",), ("day", "u")):
            batches = [batch for batch, _ in part.read(plan=ReadPlan(columns))]
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert [row["day"] for row in rows] == values
            assert len(rows[0]) == len(columns or "uyd")
    shares = [batch for part in source.parts(2) for batch, _ in part.read()]
    assert [day for batch in shares for day in batch["day"].to_pylist()] == values
    followed = Follow(tmp_path / f"day={days[0]}")
    assert next(b for b, _ in followed.read() if b.num_rows)["day"].to_pylist() == [
        1 if days[0] == "1" else values[0]
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_column_of_a_file_goes_before_that_of_its_folder(kind: str, tmp_path: Path) -> None:
    source = FORMATS[kind](day_folders(tmp_path, kind, ["a", "b"], inside="day"))
    assert source.schema().names == ["day", "y"]
    assert [batch["day"].to_pylist() for batch, _ in source.read()] == [[0], [1]]


def test_file_outside_of_the_folders_of_a_column_is_refused_where_it_is_read(
    tmp_path: Path,
) -> None:
    first = day_folders(tmp_path, "csv", ["1"])
    (tmp_path / "b.csv").write_text("u,y\n1,1\n")
    source = Csv([first, tmp_path / "b.csv"])
    assert len(list(source.read(plan=ReadPlan(("u",))))) == 2
    with pytest.raises(SchemaError, match=r"b\.csv: column 'day' is absent"):
        list(source.read())
