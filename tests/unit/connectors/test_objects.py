# SPDX-License-Identifier: Apache-2.0
"""Files in object stores are read as local ones are: the same rows, positions and refusals."""

from __future__ import annotations

import gzip
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import hotbed as hb
from hotbed import objects
from hotbed.cli.commands import app
from hotbed.connectors import Source
from hotbed.connectors.files import FileSource
from hotbed.connectors.row_groups import RowGroups
from hotbed.errors import ConfigError, DataError, StoreAway
from hotbed.job.drafting.draft import draft
from hotbed.objects import Identity, ObjectFile, matches
from hotbed.prepare import Preparation, prepare


class Store(MemoryFileSystem):
    """A store that counts its requests, fails and refuses on demand."""

    protocol = "kept"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[Exception]] = []
    before: ClassVar[Callable[[str], None]] = staticmethod(lambda path: None)
    fetched: ClassVar[list[tuple[str, int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).replace("kept:", "memory:", 1)))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        Store.fetched.append((path, start, end))
        Store.before(path)
        if Store.failures:
            raise Store.failures.pop()
        return bytes(super().cat_file(path, start=start, end=end, **kwargs))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if Store.failures and "info" in str(Store.failures[-1]):
            raise Store.failures.pop()
        return dict(super().info(path, **kwargs))


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    fsspec.register_implementation("kept", Store, clobber=True)
    yield
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    Store.failures.clear()
    Store.fetched.clear()
    Store.before = staticmethod(lambda path: None)


def put(name: str, data: bytes) -> str:
    Store().pipe_file(f"/bucket/{name}", data)
    return f"kept://bucket/{name}"


def parquet(first: int = 0, rows: int = 100, group: int = 20) -> bytes:
    number = np.arange(first, first + rows)
    table = pa.table({"n": number, "t": [f"text {n % 7}" for n in number], "x": number / 4})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=group)
    return sink.getvalue()


CSV = "n,t\n" + "".join(f'{n},"a ""b"" {n % 3}"\n' for n in range(100))
JSONL = "".join(f'{{"n": {n}, "t": ["a", "b{n}"]}}\n' for n in range(100))
SVM = "".join(f"{n % 2} {n}:1 {n + 1}:0.5\n" for n in range(100))
FORMATS: dict[str, tuple[type[FileSource], bytes]] = {
    "rows.parquet": (hb.sources.Parquet, parquet()),
    "rows.csv": (hb.sources.Csv, CSV.encode()),
    "rows.csv.gz": (hb.sources.Csv, gzip.compress(CSV.encode())),
    "rows.jsonl": (hb.sources.Jsonl, JSONL.encode()),
    "rows.svm": (hb.sources.Libsvm, SVM.encode()),
}


def rows_of(source: Source, position: Any = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch, _ in source.read(position, 16):
        rows += batch.to_pylist()
    return rows


@pytest.mark.parametrize("name", FORMATS)
def test_objects_have_the_rows_parts_and_positions_of_local_files(
    name: str, tmp_path: Path
) -> None:
    kind, data = FORMATS[name]
    for day in (1, 2):
        put(f"log/day={day}/{name}", data)
        local = tmp_path / f"day={day}"
        local.mkdir()
        (local / name).write_bytes(data)
    here = kind(str(tmp_path / "day=*" / name))
    there = kind(f"kept://bucket/log/day=*/{name}")
    assert there.files() == [f"kept://bucket/log/day={day}/{name}" for day in (1, 2)]
    assert there.schema() == here.schema()
    assert there.schema().names[-1] == "day"
    expected = rows_of(here)
    assert rows_of(there) == expected
    assert len(expected) == 200
    assert there.num_rows() == here.num_rows()
    assert [row for part in there.parts(3) for row in rows_of(part)] == expected
    assert rows_of(there.slice(0.3, 0.8)) == rows_of(here.slice(0.3, 0.8))
    batches = list(there.read(None, 16))
    done = sum(batch.num_rows for batch, _ in batches[:8])
    assert rows_of(there, batches[7][1]) == expected[done:]


def test_only_the_columns_that_are_asked_for_are_fetched_the_next_group_ahead() -> None:
    rng = np.random.default_rng(0)
    table = pa.table({name: rng.random(400_000) for name in "abc"})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=100_000, compression=None, use_dictionary=False)
    url = put("wide.parquet", sink.getvalue())
    source = hb.sources.Parquet(url)
    source.schema()
    Store.fetched.clear()
    several = threading.Event()
    at_once = []

    def wait(path: str) -> None:
        at_once.append(path)
        if len(at_once) == 2:
            several.set()
        several.wait(10)  # the first group is not answered before the second one is asked for

    Store.before = staticmethod(wait)
    columns = hb.sources.ReadPlan(columns=("b",))
    read = pa.Table.from_batches([batch for batch, _ in source.read(None, 50_000, columns)])
    assert read.column("b").to_pylist() == table.column("b").to_pylist()
    assert several.is_set()
    assert sum(end - start for _, start, end in Store.fetched) < 1.1 * 8 * 400_000


def test_text_is_fetched_in_pieces_and_ahead() -> None:
    data = bytes(range(256)) * (5 << 12)
    url = put("text", data)
    with ObjectFile(url, ahead=True) as file:
        assert file.read(10) == data[:10]
        file.seek(3_000_000)
        assert file.read(2_000_000) == data[3_000_000:5_000_000]
        file.seek(-5, io.SEEK_END)
        assert file.read() == data[-5:]
        assert file.read(1) == b""
    assert len(Store.fetched) <= 3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_object_that_is_replaced_is_refused_while_it_is_read_and_at_a_resume(
    name: str, on_error: Any
) -> None:
    kind, data = FORMATS[name]
    url = put(name, data)
    source = kind(url)
    skips = hb.sources.Skips() if on_error == "skip" else None
    batches = source.read(None, 16, hb.sources.ReadPlan(skips=skips))
    _, position = next(batches)
    put(name, data + b"\n")
    with pytest.raises(DataError, match=rf"position: {url} was replaced since"):
        next(source.read(position, 16))
    put(name, data)
    identity = Identity.of(url)
    opened = ObjectFile(url)
    put(name, data + b"\n")
    assert identity != Identity.of(url)
    with pytest.raises(DataError, match=rf"{url}: the object was replaced while it was read"):
        opened.read()


def test_replaced_object_ends_a_reading_also_where_bad_rows_are_skipped() -> None:
    url = put("rows.parquet", parquet())
    source = hb.sources.Parquet(url)
    source.schema()
    Store.before = staticmethod(lambda path: put("rows.parquet", parquet(7)) and None)
    rows = source.read(None, 16, hb.sources.ReadPlan(skips=hb.sources.Skips()))
    with pytest.raises(DataError, match="was replaced while it was read"):
        list(rows)


def test_grains_of_an_epoch_read_one_content_of_an_object() -> None:
    url = put("rows.parquet", parquet(rows=200))
    schema = hb.Schema([hb.Id("n"), hb.Dense("x")])
    data = hb.Dataset(hb.sources.Parquet(url), schema, batch_size=40, prefetch=0)
    data.divide(4)
    expected = [batch.ids["n"].values.tolist() for batch in data]
    assert [batch.ids["n"].values.tolist() for batch in data] == expected
    plan = hb.sources.ReadPlan(row_groups=RowGroups())
    next(data.source.read(None, 16, plan))
    put("rows.parquet", parquet(7, rows=200))
    with pytest.raises(DataError, match="was replaced while it was read"):
        next(data.source.read(None, 16, plan))


@pytest.mark.parametrize("name", FORMATS)
def test_failures_that_pass_cost_no_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "WAITS", (0.01, 0.02))
    kind, data = FORMATS[name]
    source = kind(put(name, data))
    expected = rows_of(source)
    Store.failures[:] = [OSError("503"), TimeoutError("slow")]
    assert rows_of(source) == expected
    assert not Store.failures


def test_store_that_stays_away_or_refuses_is_no_damaged_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = hb.sources.Parquet(put("rows.parquet", parquet()))
    source.schema()
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    skipping = hb.sources.ReadPlan(skips=hb.sources.Skips())
    for error in (OSError("503"), PermissionError("Forbidden")):
        Store.failures[:] = [error] * 100
        with pytest.raises(StoreAway, match=rf"rows\.parquet: the store does not answer.*{error}"):
            list(source.read(None, 16, skipping))
    assert waits == sorted(waits[:4]) * (len(waits) // 4)
    Store.failures[:] = [PermissionError("info Forbidden")] * 9
    with pytest.raises(StoreAway, match="info Forbidden"):
        hb.sources.Csv("kept://bucket/rows.csv").files()


def test_absent_objects_and_unknown_stores_are_errors_with_their_url() -> None:
    for url in ("kept://bucket/none.csv", "kept://bucket/*.csv", "kept://other/x"):
        with pytest.raises(DataError, match=rf"no file to read, got '{url}'".replace("*", r"\*")):
            hb.sources.Csv(url).schema()
    with pytest.raises(ConfigError, match=r"nosuch://b/x\.csv: fsspec cannot read this URL"):
        hb.sources.Csv("nosuch://b/x.csv").files()
    with pytest.raises(ConfigError, match=r"Follow\.directory: must be a local folder, got 'kept:"):
        hb.sources.Follow("kept://bucket/incoming")
    for source in (hb.sources.Parquet("kept://b/x"), hb.sources.Norm("kept://b/x", slots=["n"])):
        with pytest.raises(ConfigError, match=r"path: must be a local path, got 'kept://b/x'"):
            source.write(hb.sources.Memory({"n": [1], "label": [1.0]}))
    put("a.csv", b"n\n1\n")
    assert matches("kept://bucket/[ab].csv") == ["kept://bucket/a.csv"]


def test_ranks_compare_objects_by_their_identity() -> None:
    pytest.importorskip("torch", reason="torch absent")
    from hotbed.training.share_out import identity_of

    source = hb.sources.Csv(put("rows.csv", b"n\n1\n"))
    before = identity_of(source)
    assert before == identity_of(source)
    put("rows.csv", b"n\n2\n")
    assert before != identity_of(source)


def test_damaged_object_is_skipped_as_a_damaged_file_is() -> None:
    put("log/a.parquet", parquet())
    put("log/b.parquet", parquet()[:-20])
    source = hb.sources.Parquet("kept://bucket/log/*.parquet")
    skips = hb.sources.Skips()
    rows = [batch.num_rows for batch, _ in source.read(None, 16, hb.sources.ReadPlan(skips=skips))]
    assert sum(rows) == 100
    assert skips.total == 1


def test_objects_are_drafted_and_prepared_and_one_that_changes_meanwhile_is_refused(
    tmp_path: Path,
) -> None:
    lines = [f"{n % 2},{n % 9},{n % 5}" for n in range(400)]
    url = put("events.csv", ("clicked,user,item\n" + "\n".join(lines)).encode())
    assert f"path: {url}" in draft(url, "clicked").replace('"', "")
    written = CliRunner().invoke(app, ["init", url, "--out", str(tmp_path / "job.yaml")])
    assert written.exit_code == 0, written.output
    schema = hb.Schema([hb.Label("clicked"), hb.Id("user", transforms=[hb.transforms.Map()])])
    job = Preparation(hb.sources.Csv(url), schema, output=str(tmp_path / "prepared"))
    prepare(job)
    assert len(rows_of(hb.sources.Prepared(str(tmp_path / "prepared")))) == 400
    changed = Preparation(hb.sources.Csv(url), schema, output=str(tmp_path / "other"))

    def replace(stage: Any) -> None:
        if stage.name != "inputs":
            put("events.csv", b"clicked,user,item\n1,1,1\n")

    with pytest.raises(DataError, match=r"events\.csv: .*(changed while|replaced)"):
        prepare(changed, report=replace)
