# SPDX-License-Identifier: Apache-2.0
"""What writing a version may meet: a disk that fills up, a kill; and what it takes: some bytes a
row, for a while.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as hb
from hotbed.config import describe
from hotbed.errors import ConfigError, PersistError

from .test_served_folder import GRAPH, export, read, write

__all__ = ["export"]  # a fixture

pytestmark = pytest.mark.core
ROWS = 100_000
WIDE = 64

MEASURE = """
import json, re, sys, threading
from pathlib import Path
import hotbed as hb
from hotbed.persist.container.format import open_folder, open_store

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def watch(done, seen):
    while not done.wait(0.001):
        seen.append(anonymous())

def load(server, state):
    done, seen = threading.Event(), [anonymous()]
    thread = threading.Thread(target=watch, args=(done, seen))
    thread.start()
    server.load("m", state)
    done.set()
    thread.join()
    return max(seen) - seen[0], anonymous() - seen[0]

for source in sys.argv[2:]:
    server = hb.ParameterServer(f"{sys.argv[1]}/{Path(source).name}")
    store = open_store(source)
    sizes = [load(server, open_folder(store, folder)) for folder in store.folders()]
print(json.dumps(sizes))
"""


def write_versions(root: Path, num_rows: int) -> Path:
    """Write a full, two deltas that change a half of the rows each, and another full."""
    config = describe(hb.Table("t", WIDE).config)
    rows = dict.fromkeys(range(num_rows), 1.0)
    halves = [dict.fromkeys(range(first, num_rows, 2), 2.0) for first in (0, 1)]
    saved = write(root, rows, version=1, graph=GRAPH, config=config, counts=rows)
    for version, half in enumerate(halves, 2):
        saved = write(root, half, [], saved, version=version, config=config, counts=half)
    write(root, rows, version=4, config=config, counts=rows)
    return root


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_takes_the_same_memory_a_row_for_each_dim(tmp_path: Path) -> None:
    small = write_versions(tmp_path / "small", 10)  # what a first load imports is not counted
    large = write_versions(tmp_path / "large", ROWS)
    command = [sys.executable, "-c", MEASURE, tmp_path / "rows", small, large]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (first, _), (delta, _), (next_delta, _), (second, kept) = json.loads(output)
    values = 4 * WIDE * ROWS
    assert max(first, second) < values * 3 / 4  # buffers, ids and one batch take 8 to 14 MB
    assert kept < 30 * ROWS
    assert max(delta, next_delta) < values


@pytest.mark.parametrize("limit", [40, 4000])
def test_a_disk_that_fills_up_leaves_the_version_before(
    export: Path, tmp_path: Path, limit: int
) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    write(tmp_path / "out", {one: 2.0 for one in range(1000)}, version=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond it fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(PersistError, match="Free space, correct the rights, or choose another"):
            server.load("m", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert server.model("m").version == 3
    server = hb.ParameterServer(tmp_path / "rows")
    assert read(server.model("m"), [7]) == [7.0]
    assert read(server.load("m", tmp_path / "out"), [7]) == [2.0]
    assert not list((tmp_path / "rows" / "m").glob(".*"))


def test_a_version_that_is_not_accepted_is_never_the_newest_and_leaves_nothing(
    export: Path, tmp_path: Path
) -> None:
    def refuse(version: object) -> None:
        raise ConfigError("a graph of the future")

    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    write(tmp_path / "new", {7: 2.0}, version=4)
    server.load("m", tmp_path / "new", lambda version: None)
    files = set((tmp_path / "rows").rglob("*"))
    write(
        tmp_path / "out",
        {7: 3.0},
        version=5,
        graph={**GRAPH, "dense": ["x"]},
        graph_bytes=b"another graph",
    )
    with pytest.raises(ConfigError, match="of the future"):
        server.load("m", tmp_path / "out", refuse)
    assert set((tmp_path / "rows").rglob("*")) == files
    for there in (server, hb.ParameterServer(tmp_path / "rows")):  # this process, and the next one
        assert read(there.model("m"), [7]) == [2.0]
    server.load("m", tmp_path / "out", lambda version: None)
    assert read(server.model("m"), [7]) == [3.0]


def test_a_writer_that_is_killed_leaves_a_whole_version(export: Path, tmp_path: Path) -> None:
    code = """
import os, sys
import hotbed as hb
hb.ParameterServer
def die(folder, places):
    real = os.replace
    def replace(*names):
        nonlocal places
        places -= 1
        if places < 0:
            os._exit(9)
        real(*names)
    os.replace = replace
    hb.ParameterServer(folder).load("m", sys.argv[1])
    os._exit(0)
for places, folder in enumerate(sys.argv[2:]):
    os.fork() or die(folder, places)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    folders = [tmp_path / f"rows{places}" for places in range(5)]  # for each file of a version
    for folder in folders:
        hb.ParameterServer(folder).load("m", export)
    write(tmp_path / "out", {one: 2.0 for one in range(100)}, version=4)
    command = [sys.executable, "-c", code, tmp_path / "out", *folders]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    codes = list(map(int, done.stdout.split()))
    assert set(codes) == {0, 9}
    assert codes == sorted(codes, reverse=True)
    for folder, returncode in zip(folders, codes, strict=True):
        version = hb.ParameterServer(folder).model("m")
        expected = (3, [7.0]) if returncode == 9 else (4, [2.0])
        assert (version.version, read(version, [7])) == expected
        hb.ParameterServer(folder).load("m", tmp_path / "out")
        assert not list((folder / "m").glob(".*"))


def test_file_that_cannot_be_removed_does_not_stop_a_load(export: Path, tmp_path: Path) -> None:
    server = hb.ParameterServer(tmp_path / "rows")
    server.load("m", export)
    (tmp_path / "rows" / "m" / "somebody's").mkdir()
    write(tmp_path / "out", {7: 2.0}, version=4)
    assert read(server.load("m", tmp_path / "out"), [7]) == [2.0]
    assert (tmp_path / "rows" / "m" / "somebody's").exists()


def test_a_torn_list_of_changed_ids_costs_a_cache_its_rows_and_no_more(
    export: Path, tmp_path: Path
) -> None:
    server, saved = hb.ParameterServer(tmp_path / "rows"), None
    server.load("m", export)
    for version in (4, 5):
        saved = write(tmp_path / "out", {7: float(version)}, before=saved, version=version)
        newest = server.load("m", tmp_path / "out")
    changed = next((tmp_path / "rows" / "m").glob("*.changed"))
    since = newest.spec["chain"][0]
    assert [ids.tolist() for ids in (newest.changed(since) or {}).values()] == [[7]]
    changed.write_bytes(bytes(reversed(changed.read_bytes())))
    assert newest.changed(since) is None
