# SPDX-License-Identifier: Apache-2.0
"""Files of a served folder that rot, or that another program changes, are found, named and written
anew; their rows are in no later file, and in no cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotbed as hb
from hotbed.cli.commands import main
from hotbed.errors import FormatError
from hotbed.persist.container.format import open_checkpoint
from hotbed.serving.cache import EmbeddingCache
from hotbed.serving.server.endpoints.rows_service import RowsServer
from hotbed.serving.server.options import RowsOptions
from hotbed.serving.stores.mapped import MappedVersion
from hotbed.serving.stores.verifying import verify_served

from .serving.conftest import OnThread
from .test_served_folder import DIM, GRAPH, read, write

pytestmark = pytest.mark.core
IDS = list(range(60))
FIRST = {each: float(each) for each in range(1, 50)}


class Served:
    """A folder of rows that holds a full and two deltas on it, from `source`, and their rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "source"
        counts = dict.fromkeys(FIRST, 3)
        full = write(self.source, FIRST, version=3, graph=GRAPH, counts=counts)
        one = write(self.source, {1: 70.0}, [2], full, version=4)
        self.deltas = [full, one, write(self.source, {3: 80.0}, [], one, version=5)]
        self.rows = FIRST | {1: 70.0, 2: 0.5, 3: 80.0}
        self.server = self.started()
        self.server.load("m", open_checkpoint(self.source))

    def started(self) -> hb.ParameterServer:
        """As another process would."""
        return hb.ParameterServer(self.root / "rows")

    def path(self, pattern: str) -> Path:
        (path,) = (self.root / "rows" / "m").glob(pattern)
        return path

    def is_right(self, version: MappedVersion) -> bool:
        return read(version, IDS) == [self.rows.get(each, 0.5) for each in IDS]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def flip(path: Path) -> None:
    """Change a bit in each of the first rows."""
    data = bytearray(path.read_bytes())
    for place in range(3, min(len(data), 48), 4 * DIM):
        data[place] ^= 0x40
    path.write_bytes(data)


def flip_index(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 0x40
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # a file that was mapped and is cut ends the process
    path.write_bytes(data[: len(data) // 2])


def other_version(path: Path) -> None:
    """The rows of another version, whose file is whole and as long."""
    rows = {each: value + 1 for each, value in FIRST.items()}
    other = path.parents[2] / "other"
    write(other, rows, version=3, graph=GRAPH)
    hb.ParameterServer(other / "rows").load("m", other)
    (found,) = (other / "rows" / "m").glob("*.rows")
    path.write_bytes(found.read_bytes())


FULL, OVERLAY = "{0}-000-t.float32.rows", "{2}-000-t.float32.rows"
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (FULL, flip, "start"),
    (FULL, flip, "load"),
    (FULL, flip, "delta"),
    (FULL, flip_index, "load"),
    (FULL, cut, "start"),
    (FULL, cut, "load"),
    (FULL, Path.unlink, "delta"),
    (FULL, other_version, "start"),
    (OVERLAY, flip, "start"),
    (OVERLAY, flip, "delta"),
    (OVERLAY, Path.unlink, "load"),
    ("{0}-000-t.hot", flip, "load"),
    ("{2}-000-t.changed", flip, "start"),
]


def pattern_of(served: Served, pattern: str) -> str:
    return pattern.format(*(saved.digest[:32] for saved in served.deltas))


@pytest.mark.parametrize(("pattern", "damage", "when"), DAMAGES)
def test_damaged_file_is_named_and_written_anew(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    damage: Callable[[Path], None],
    when: str,
) -> None:
    """By the next start, by a load, and by a delta after a check."""
    path = served.path(pattern_of(served, pattern))
    whole = path.read_bytes()
    damage(path)
    server = served.started() if when == "start" else served.server
    reader = open_checkpoint(served.source)
    if when == "delta":
        assert server.check("m") == {path.name}
        write(served.source, {4: 90.0}, [], served.deltas[-1], version=6)
        served.rows[4] = 90.0
        reader = open_checkpoint(served.source)
    with caplog.at_level(logging.WARNING):
        version = server.load("m", served.source if when == "load" else reader)
    assert served.is_right(version)
    assert served.is_right(served.started().model("m"))
    assert path.name not in version.files() or path.read_bytes() == whole
    was_refused = when == "start" and damage in (cut, Path.unlink)  # so nobody has read it
    assert version.mended == (when != "delta" and not was_refused)
    assert path.name in caplog.text or when == "delta"
    assert server.check("m") == served.started().damaged("m") == set()
    assert verify_served(served.root / "rows")["models"] == {"m": version.version}


@pytest.mark.parametrize("pattern", [FULL, OVERLAY])
def test_rows_of_a_damaged_file_are_in_no_later_one(served: Served, pattern: str) -> None:
    """A delta comes before the next check; the one after that check mends the full."""
    flip(served.path(pattern_of(served, pattern)))
    saved = write(served.source, {4: 90.0}, [], served.deltas[-1], version=6)
    served.rows[4] = 90.0
    version = served.server.load("m", open_checkpoint(served.source))
    if pattern == FULL:
        assert served.server.check("m")
        write(served.source, {5: 91.0}, [], saved, version=7)
        served.rows[5] = 91.0
        version = served.server.load("m", open_checkpoint(served.source))
    assert served.is_right(version)
    assert not served.server.check("m")


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("CURRENT", flip),
        ("*.json", Path.unlink),
        ("*.json", flip),
        ("{0}.onnx", cut),
        ("{2}.safetensors", flip),
    ],
)
def test_damaged_record_graph_or_weights_are_mended_by_a_start(
    served: Served, pattern: str, damage: Callable[[Path], None]
) -> None:
    path = served.path(pattern_of(served, pattern))
    damage(path)
    with pytest.raises(FormatError, match=path.name):
        verify_served(served.root / "rows")
    assert served.is_right(served.started().load("m", open_checkpoint(served.source)))
    assert served.is_right(served.started().model("m"))


def test_files_that_a_later_version_removed_are_not_damaged(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MappedVersion.damaged

    def slow(version: MappedVersion, *arguments: Any) -> set[str]:
        monkeypatch.setattr(MappedVersion, "damaged", real)
        saved = served.deltas[-1]
        for number in (6, 7, 8):
            saved = write(served.source, {4: number}, [], saved, version=number)
            served.server.load("m", open_checkpoint(served.source))
        return real(version, *arguments)

    monkeypatch.setattr(MappedVersion, "damaged", slow)
    assert served.server.check("m") == set()


def test_folder_of_an_earlier_release_is_served_and_its_next_version_has_digests(
    served: Served,
) -> None:
    """Rows had no digest, and versions did not count how often they were mended."""
    home = served.root / "rows" / "m"
    spec = dict(served.server.model("m").spec)
    del spec["mended"]
    for layer in spec["tables"]["t"]["layers"]:
        del layer["xxh3"]
    text = json.dumps(spec).encode()
    key = hashlib.sha256(text).hexdigest()
    (home / f"{key[:32]}.json").write_bytes(text)
    (home / "CURRENT").write_text(f"{key}\n")
    server = served.started()
    assert verify_served(served.root / "rows")["unchecked"] == 2
    assert served.is_right(server.load("m", open_checkpoint(served.source)))
    assert server.model("m").mended == 0
    write(served.source, {4: 90.0}, [], served.deltas[-1], version=6)
    served.rows[4] = 90.0
    assert served.is_right(server.load("m", open_checkpoint(served.source)))
    assert verify_served(served.root / "rows")["unchecked"] == 0


def found(cache: EmbeddingCache, version: Any) -> list[float]:
    ids = np.array(IDS)
    rows = cache.lookup(version, [("t", "t", "sum")])({"t": ids}, len(ids)).flat
    return [float(row[0]) for row in rows.reshape(len(ids), -1)]


@pytest.mark.parametrize("is_remote", [False, True])
def test_cache_drops_what_it_read_of_a_damaged_file(served: Served, is_remote: bool) -> None:
    """Also that of a server that reads from a parameter server, which mends the file by itself."""
    rows = RowsServer(served.server, ["m"], RowsOptions(port=0))
    running = OnThread(rows)
    try:
        store: Any = served.server
        if is_remote:
            store = hb.ParameterServer.connect(f"grpc://127.0.0.1:{rows.port}")
        cache = EmbeddingCache(store, "m", 1 << 20, preload=0, deadline_seconds=None)
        flip(served.path(pattern_of(served, FULL)))
        expected = [served.rows.get(each, 0.5) for each in IDS]
        assert found(cache, store.model("m")) != expected
        assert rows.check("m", lambda: True)
        rows.load_from("m", str(served.source), is_followed=True)
        assert not rows.check("m", lambda: True)
        version = store.model("m")
        assert version.mended == 1
        assert found(cache, version) == expected
        assert store.model("m") is version
        store.close()
    finally:
        running.close()


def test_verify_knows_folders_of_rows_and_names_the_damaged_file(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.server.load("n/2", served.source)
    served.server.load("gone", served.source)
    served.server.unload("gone")
    (served.root / "rows" / "m" / "somebody's").write_text("foreign")

    def verify(folder: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["hotbed", "verify", str(served.root / folder)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((output.out + output.err).split())

    code, text = verify("rows")
    assert code == 0
    assert "served rows, gone unloaded, m version 5, n/2 version 5" in text
    assert verify("rows/m")[0] == 0
    path = served.path(pattern_of(served, OVERLAY))
    flip(path)
    for folder in ("rows", "rows/m"):
        code, text = verify(folder)
        assert code == 2
        assert path.name in text.replace(" ", "")
    assert verify("rows/n%2F2")[0] == 0
