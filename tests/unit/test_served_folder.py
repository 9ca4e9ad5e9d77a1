# SPDX-License-Identifier: Apache-2.0
"""The served folder: what was loaded is read by any process, whole or not at all; one process
writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

import hotbed as hb
from hotbed.config import describe
from hotbed.embedding.hashing import partition
from hotbed.embedding.snapshot import BATCH_ROWS
from hotbed.errors import ConfigError, FormatError, PersistError, StoreError
from hotbed.persist.container.format import CheckpointWriter, Saved, open_checkpoint
from hotbed.persist.container.manifest import Manifest
from hotbed.serving.stores.mapped import ModelFolder

pytestmark = pytest.mark.core
DIM = 2
SCHEMA = hb.Schema([hb.Label("label"), hb.Id("user", table="t")]).to_json()
GRAPH = {
    "file": "graph.onnx",
    "lookups": [],
    "weights": ["network.w"],
    "dense": [],
    "outputs": ["prediction"],
}
CONFIG = describe(hb.Table("t", DIM, admit=hb.MinCount(2), default=0.5).config)


def write(
    root: Path,
    rows: dict[int, float],
    gone: list[int] | None = None,
    before: Saved | None = None,
    **members: Any,
) -> Saved:
    """A full, or a delta on `before`, in the container of docs/format.md; `counts` by id make the
    column `count`.
    """
    counts, config = members.pop("counts", None), members.pop("config", CONFIG)
    graph = members.pop("graph_bytes", b"a graph")
    with CheckpointWriter(root) as writer:
        given = (("rows", rows), ("removed", gone or []))
        parts = [
            [_part(writer, name, ids, counts, config["dim"])] if ids else [] for name, ids in given
        ]
        writer.write(
            "dense.safetensors", save({"network/w": np.full(3, members["version"], np.float32)})
        )
        if "graph" in members:
            writer.write("graph.onnx", graph)
        entry = {
            "name": "t",
            "config": config,
            "rows": len(rows),
            "scalars": hb.Table("t", DIM).scalars(),
            "candidates": None,
        }
        return writer.commit(
            Manifest.from_json(
                {
                    "kind": "full" if before is None else "delta",
                    "contents": "values",
                    "schema": SCHEMA,
                    "published": 1.5,
                    "chain": [] if before is None else [link.to_json() for link in before.chain],
                    "parent": None if before is None else before.digest,
                    "dense": {"file": "dense.safetensors", "optimizers": {}},
                    "package_version": "0",
                    "model": None,
                    "positions": {},
                    "counters": {},
                    **members,
                    "tables": [{**entry, "parts": parts[0], "removed": parts[1]}],
                }
            )
        )


def _part(
    writer: CheckpointWriter, name: str, ids: Any, counts: dict[int, int] | None, dim: int
) -> dict[str, Any]:
    keys = np.array(sorted(set(ids)), np.int64)
    keys = keys[np.argsort(partition(keys), kind="stable")]
    columns: dict[str, Any] = {"partition": pa.array(partition(keys)), "id": pa.array(keys)}
    if isinstance(ids, dict):
        values = np.repeat(np.array([ids[key] for key in keys.tolist()], np.float32), dim)
        columns["value"] = pa.FixedSizeListArray.from_arrays(pa.array(values), dim)
        if counts is not None:
            columns["count"] = pa.array([counts.get(key, 0) for key in keys.tolist()], pa.uint32())
    file = f"tables/000-t/{name}.arrow"
    writer.write_batches(file, pa.table(columns).to_batches(BATCH_ROWS))
    return {"file": file, "first": 0, "last": 255, "rows": len(keys)}


def read(version: Any, ids: list[int]) -> list[float]:
    rows = version.find({"t": np.array(ids, np.int64)})["t"]
    assert rows.shape == (len(ids), DIM)
    assert (rows[:, 0] == rows[:, 1]).all()
    return [float(one) for one in rows[:, 0]]


ROWS = st.dictionaries(st.integers(-3, 12), st.integers(1, 9).map(float), max_size=8)
STEP = st.tuples(
    st.sampled_from(["delta", "delta", "delta", "full"]),
    ROWS,
    st.lists(st.integers(-3, 12), max_size=5),
    st.booleans(),
    st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ROWS, steps=st.lists(STEP, max_size=8))
def test_served_rows_equal_those_of_the_run_after_any_steps(first: Any, steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, known, asked = Path(folder), dict(first), list(range(-4, 14))
        export = write(root / "export", first, version=0, graph=GRAPH)
        server, before, states = (
            hb.ParameterServer(root / "rows"),
            None,
            {export.digest: dict(first)},
        )
        server.load("m", root / "export")
        for number, (kind, rows, gone, loads, again) in enumerate(steps, 1):
            if before is None or kind == "full":
                known = dict(rows)
                before = write(root / "out", rows, version=number)
            else:
                for one in gone:
                    known.pop(one, None)
                known.update(rows)
                before = write(root / "out", rows, gone, before, version=number)
            states[before.digest] = dict(known)
            if again:
                server = hb.ParameterServer(root / "rows")
            if loads:
                old = server.model("m")
                version = server.load("m", root / "out")
                assert read(version, asked) == [known.get(one, 0.5) for one in asked]
                assert read(server.version("m", old.digest), asked) == [
                    states[old.digest].get(i, 0.5) for i in asked
                ]
                changed = server.changes("m", old.digest, version.digest)
                differ = {
                    one for one in asked if states[old.digest].get(one, 0.5) != known.get(one, 0.5)
                }
                assert changed is None or differ <= set(changed["t"].tolist())
                assert (changed is None) == (old.digest not in version.spec["chain"])
            found = hb.ParameterServer(root / "rows").model("m")  # what another process sees
            assert read(found, asked) == [states[found.digest].get(one, 0.5) for one in asked]
            assert found.digest == server.model("m").digest


@pytest.fixture
def export(tmp_path: Path) -> Path:
    write(
        tmp_path / "export",
        {one: float(one) for one in range(1, 50)},
        version=3,
        graph=GRAPH,
        learned=7.5,
    )
    return tmp_path / "export"


def test_second_start_needs_neither_export_nor_writer(export: Path, tmp_path: Path) -> None:
    first = hb.ParameterServer(tmp_path / "rows")
    first.load("m", export)
    shutil.rmtree(export)
    found = hb.ParameterServer(tmp_path / "rows").model("m")
    assert (found.name, found.version, found.published, found.learned) == ("m", 3, 1.5, 7.5)
    assert found.graph == GRAPH
    assert found.graph_bytes() == b"a graph"
    assert found.schema.to_json() == SCHEMA
    assert [(name, values.tolist()) for name, values in found.weights()] == [
        ("network.w", [3.0, 3.0, 3.0])
    ]
    assert read(found, [1, 49, 50]) == [1.0, 49.0, 0.5]
    with pytest.raises(ConfigError, match="unknown table, got 'x'"):
        found.find({"x": np.array([1])})


def test_start_resumes_with_versions_followed_from_the_same_export(
    export: Path, tmp_path: Path
) -> None:
    hb.ParameterServer(tmp_path / "rows").load("m", export)
    server = hb.ParameterServer(tmp_path / "rows")
    write(tmp_path / "out", {1: 8.0}, version=9)
    assert server.load("m", tmp_path / "out").version == 9
    again = hb.ParameterServer(tmp_path / "rows")
    assert again.load("m", export).version == 9
    assert again.load("m", export).version == 3  # asked for once more, it is what was meant
    write(tmp_path / "other", {1: 8.0}, version=5, graph=GRAPH)
    assert hb.ParameterServer(tmp_path / "rows").load("m", tmp_path / "other").version == 5
    assert hb.ParameterServer(tmp_path / "rows", dtype="int8").load("m", export).version == 3
    # a published full that brings its graph
    write(tmp_path / "full", {1: 8.0}, version=7, graph=GRAPH)
    assert hb.ParameterServer(tmp_path / "rows").load("m", export).version == 3
    assert (
        hb.ParameterServer(tmp_path / "rows").load("m", open_checkpoint(tmp_path / "full")).version
        == 7
    )
    assert hb.ParameterServer(tmp_path / "rows").load("m", export).version == 7


def test_newest_two_versions_can_be_read_and_older_ones_are_an_error(
    export: Path, tmp_path: Path
) -> None:
    server, saved = hb.ParameterServer(tmp_path / "rows"), None
    old = [server.load("m", export)]
    for number in range(4, 7):
        saved = write(tmp_path / "out", {1: float(number)}, [], saved, version=number)
        old.append(server.load("m", tmp_path / "out"))
    assert [read(server.version("m", one.digest), [1]) for one in old[-2:]] == [[5.0], [6.0]]
    with pytest.raises(StoreError, match=f"version {old[1].digest[:12]} is no longer available"):
        server.version("m", old[1].digest)
    assert read(old[0], [1, 2]) == [1.0, 2.0]  # who has it keeps it, graph and all
    assert old[0].graph_bytes() == b"a graph"
    assert next(old[0].weights())[1].tolist() == [3.0, 3.0, 3.0]


def test_several_models_share_a_folder_under_any_names(export: Path, tmp_path: Path) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    names = ["a", "a/b", "..a", "Ö %", "CURRENT"]
    for number, name in enumerate(names):
        write(tmp_path / str(number), {1: float(number)}, version=1, graph=GRAPH)
        server.load(name, tmp_path / str(number))
    other = hb.ParameterServer(tmp_path / "rows")
    assert [read(other.model(name), [1]) for name in names] == [
        [float(number)] for number in range(len(names))
    ]
    server.unload("a/b")
    with pytest.raises(ConfigError, match="'a/b': not loaded"):
        other.model("a/b")
    assert read(server.load("a/b", tmp_path / "1"), [1]) == [1.0]
    for name in ("", ".", ".."):
        with pytest.raises(ConfigError, match="a name that a folder can have"):
            server.load(name, export)


def test_changes_are_the_ids_that_deltas_touched(export: Path, tmp_path: Path) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    start = server.load("m", export)
    full = write(tmp_path / "out", {one: 1.0 for one in range(50)}, version=4)
    versions = [server.load("m", tmp_path / "out")]
    assert server.changes("m", start.digest, versions[0].digest) is None
    saved = full
    for number in range(5, 8):
        saved = write(tmp_path / "out", {number: 2.0}, [number + 20], saved, version=number)
        versions.append(server.load("m", tmp_path / "out"))
    last = versions[-1].digest
    found = [server.changes("m", one.digest, last) for one in versions]
    assert [sorted(one["t"].tolist()) for one in found if one] == [
        [5, 6, 7, 25, 26, 27],
        [6, 7, 26, 27],
        [7, 27],
        [],
    ]
    assert server.changes("m", "0" * 64, last) is None
    with pytest.raises(StoreError, match="is no longer available"):
        server.changes("m", versions[0].digest, versions[1].digest)


def test_changes_over_many_deltas_are_those_since_the_full(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.serving.stores.table_files._REMEMBERED_DELTAS", 2)
    server, saved, versions = hb.ParameterServer(tmp_path / "rows"), None, list[Any]()
    server.load("m", export)
    for number in range(4, 9):
        saved = write(
            tmp_path / "out", {number: 2.0}, [number + 20] if saved else [], saved, version=number
        )
        versions.append(server.load("m", tmp_path / "out"))
    last = versions[-1]
    assert [sorted(last.changed(one.digest)["t"].tolist()) for one in versions[2:]] == [
        [7, 8, 27, 28],
        [8, 28],
        [],
    ]
    for one in versions[:2]:  # all that the full's deltas touched
        assert sorted(last.changed(one.digest)["t"].tolist()) == [5, 6, 7, 8, 25, 26, 27, 28]


def test_a_removed_row_stays_removed_over_later_deltas_until_it_comes_back(
    export: Path, tmp_path: Path
) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    saved = write(tmp_path / "out", dict.fromkeys(range(9), 1.0), version=4)
    found = []
    for rows, gone in [({}, [3, 4]), ({5: 2.0}, []), ({}, [6]), ({3: 7.0}, []), ({}, [3])]:
        saved = write(tmp_path / "out", rows, gone, saved, version=saved.version + 1)
        found.append(read(server.load("m", tmp_path / "out"), [3, 4, 5, 6]))
    assert found == [
        [0.5, 0.5, 1.0, 1.0],
        [0.5, 0.5, 2.0, 1.0],
        [0.5, 0.5, 2.0, 0.5],
        [7.0, 0.5, 2.0, 0.5],
        [0.5, 0.5, 2.0, 0.5],
    ]


def test_reader_that_is_overtaken_reads_the_newest_version(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    real, saved = ModelFolder.open, list[Any]([None])

    def late(folder: ModelFolder, key: str) -> Any:
        monkeypatch.setattr(ModelFolder, "open", real)
        for number in (4, 5, 6):  # between the look at CURRENT and the files that it named
            saved[0] = write(tmp_path / "out", {1: float(number)}, [], saved[0], version=number)
            server.load("m", tmp_path / "out")
        return real(folder, key)

    monkeypatch.setattr(ModelFolder, "open", late)
    assert read(hb.ParameterServer(tmp_path / "rows").model("m"), [1]) == [6.0]


def test_hot_ids_come_by_falling_count(tmp_path: Path, export: Path) -> None:
    counts = {one: one * 7 % 50 for one in range(50)}
    write(
        tmp_path / "counted", {one: 1.0 for one in range(50)}, version=1, graph=GRAPH, counts=counts
    )
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", tmp_path / "counted")
    expected = sorted(counts, key=lambda one: (-counts[one], one))
    assert server.hot("m", "t", 5).tolist() == expected[:5]
    assert hb.ParameterServer(tmp_path / "rows").hot("m", "t", 100).tolist() == expected
    server.load("m", export)
    assert server.hot("m", "t", 5).tolist() == []
    with pytest.raises(ConfigError, match="unknown table, got 'x'"):
        server.hot("m", "x", 5)


WRITE = """
import sys
import hotbed as hb
server = hb.ParameterServer(sys.argv[1])
server.load("m", sys.argv[2])
print("loaded", flush=True)
sys.stdin.read()
"""


def test_second_writing_process_is_rejected_and_may_read(export: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE, tmp_path / "rows", export]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "loaded\n"
        server = hb.ParameterServer(tmp_path / "rows")
        with pytest.raises(
            PersistError, match=f"another process writes it, got process {other.pid}"
        ):
            server.load("m", export)
        with pytest.raises(PersistError, match="another process writes it"):
            server.unload("m")
        assert read(server.model("m"), [7]) == [7.0]
        other.kill()
    assert server.load("m", export).version == 3


def test_torn_foreign_or_escaping_folder_is_rejected_by_name(export: Path, tmp_path: Path) -> None:
    hb.ParameterServer(tmp_path / "rows").load("m", export)
    home = tmp_path / "rows" / "m"
    whole = {path: path.read_bytes() for path in home.iterdir()}
    assert {path.suffix for path in whole} == {"", ".json", ".onnx", ".safetensors", ".rows"}
    for path, data in whole.items():
        damages = [data[: len(data) // 2], b"", b"\0" * len(data), None]
        for damage in (
            damages if path.suffix == ".rows" else [*damages, data[:-1] + bytes([data[-1] ^ 1])]
        ):
            path.unlink() if damage is None else path.write_bytes(damage)
            if path.name == "CURRENT" and damage is None:
                continue
            with pytest.raises(FormatError, match=path.name.replace(".", r"\.")):
                hb.ParameterServer(tmp_path / "rows").model("m")
        path.write_bytes(data)
    assert read(hb.ParameterServer(tmp_path / "rows").model("m"), [7]) == [7.0]


def test_no_name_in_a_version_leads_out_of_its_folder(export: Path, tmp_path: Path) -> None:
    hb.ParameterServer(tmp_path / "rows").load("m", export)
    home = tmp_path / "rows" / "m"
    file = next(home.glob("*.json"))
    spec, kept = json.loads(file.read_text()), next(home.glob("*.rows"))
    secret = tmp_path / "rows" / "secret"
    shutil.copy(kept, secret)
    for name in (
        "../secret",
        str(secret),
        f"{kept.name}/../../secret",
        f"{'0' * 32}-x/../../secret",
        "..",
    ):
        for place in ("layers", "graph"):
            wrong = json.loads(json.dumps(spec))
            if place == "layers":
                wrong["tables"]["t"]["layers"][0]["file"] = name
            else:
                data = secret.read_bytes()
                wrong["files"]["graph"] = {
                    "file": name,
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            text = json.dumps(wrong).encode()
            key = hashlib.sha256(text).hexdigest()
            (home / f"{key[:32]}.json").write_bytes(text)
            (home / "CURRENT").write_text(f"{key}\n")
            with pytest.raises(FormatError, match="a file lies outside of the folder"):
                hb.ParameterServer(tmp_path / "rows").model("m")
    for text in (
        b"[]",
        b"{}",
        b"7",
        json.dumps({**spec, "schema": {"columns": [{"kind": "x"}]}}).encode(),
    ):
        key = hashlib.sha256(text).hexdigest()
        (home / f"{key[:32]}.json").write_bytes(text)
        (home / "CURRENT").write_text(f"{key}\n")
        with pytest.raises(FormatError, match=key[:32]):
            hb.ParameterServer(tmp_path / "rows").model("m")


def test_a_torn_source_is_refused_and_the_version_before_stays(
    export: Path, tmp_path: Path
) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    saved = write(tmp_path / "out", {7: 2.0}, version=4)
    server.load("m", tmp_path / "out")
    write(tmp_path / "out", {7: 3.0}, [8], saved, version=5)
    newest = open_checkpoint(tmp_path / "out").folder
    for name in ("tables/000-t/rows.arrow", "tables/000-t/removed.arrow", "dense.safetensors"):
        path = Path(newest) / name
        data = path.read_bytes()
        path.write_bytes(data[:-9] + b"x" + data[-8:])
        with pytest.raises(FormatError, match=path.name):
            server.load("m", tmp_path / "out")
        assert read(server.model("m"), [7]) == [2.0]
        assert read(hb.ParameterServer(tmp_path / "rows").model("m"), [7]) == [2.0]
        path.write_bytes(data)
    assert read(server.load("m", tmp_path / "out"), [7, 8]) == [3.0, 0.5]
    assert sorted(os.listdir(tmp_path / "rows")) == ["LOCK", "m"]
