# SPDX-License-Identifier: Apache-2.0
"""The container: complete or invisible; every flipped bit, torn or missing file refused by its
name.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from hotbed.errors import FormatError, PersistError, VersionError
from hotbed.persist.container.format import CheckpointWriter, Reader, open_checkpoint
from hotbed.persist.container.manifest import Manifest
from hotbed.persist.container.retention import retain
from hotbed.persist.container.row_order import partition_ranges
from hotbed.persist.container.store import CURRENT_FILE, MANIFEST_FILE, open_store
from hotbed.persist.state.tables import table_folder

MANIFEST = Manifest.from_json(
    {
        "package_version": "0",
        "kind": "full",
        "version": 0,
        "parent": None,
        "model": None,
        "schema": None,
        "positions": {},
        "counters": {},
        "dense": None,
        "tables": [],
    }
)


def write(root: Path, text: bytes = b"some bytes") -> Path:
    with CheckpointWriter(root) as writer:
        writer.write("dense.safetensors", text)
        batch = pa.record_batch({"id": pa.array([1, -1, 2**63 - 1], pa.int64())})
        assert writer.write_batches("tables/000-user/rows-000-255.arrow", iter([batch, batch])) == 6
        assert writer.write_batches("tables/000-user/candidates.arrow", iter([])) == 0
        return Path(writer.commit(MANIFEST).folder)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for path in (tmp_path, folder):
        reader = open_checkpoint(path)
        reader.verify()
        assert reader.folder == str(folder)
        assert bytes(reader.newest_link.read("dense.safetensors")) == b"some bytes"
        ids = [
            batch.column("id").to_pylist()
            for batch in reader.newest_link.batches("tables/000-user/rows-000-255.arrow")
        ]
        assert ids == [[1, -1, 2**63 - 1]] * 2
        assert reader.manifest.kind == "full"


def test_a_second_save_becomes_current_and_the_first_stays_until_retention(tmp_path: Path) -> None:
    first, second = write(tmp_path), write(tmp_path, b"newer")
    assert bytes(open_checkpoint(tmp_path).newest_link.read("dense.safetensors")) == b"newer"
    assert bytes(open_checkpoint(first).newest_link.read("dense.safetensors")) == b"some bytes"
    third = write(tmp_path)
    retain(open_store(tmp_path), keep=2)
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    assert open_checkpoint(tmp_path).folder == str(third)


def check_all(path: Path) -> Reader:
    reader = open_checkpoint(path)
    reader.verify()
    return reader


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_anywhere_is_refused_and_names_the_file(tmp_path: Path, seed: int) -> None:
    write(tmp_path)
    draw = random.Random(seed)
    path = draw.choice(files(tmp_path))
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises((FormatError, VersionError)) as caught:
        check_all(tmp_path)
    assert path.name in str(caught.value)


def test_a_torn_file_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path)
    whole = {path: path.read_bytes() for path in files(tmp_path)}
    for path, data in whole.items():
        for length in {0, 1, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:length])
            with pytest.raises(FormatError, match=path.name):
                check_all(tmp_path)
        path.write_bytes(data)
    check_all(tmp_path)


def test_a_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for path in files(folder):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(FormatError, match=path.name):
            check_all(tmp_path)
        path.write_bytes(data)
    (tmp_path / CURRENT_FILE).unlink()
    with pytest.raises(FormatError, match="no checkpoint"):
        check_all(tmp_path)


def test_files_of_two_checkpoints_cannot_be_mixed(tmp_path: Path) -> None:
    first = write(tmp_path, b"same size!")
    second = write(tmp_path, b"SAME SIZE!")
    (second / MANIFEST_FILE).write_bytes((first / MANIFEST_FILE).read_bytes())
    with pytest.raises(FormatError, match="CURRENT points to another manifest"):
        check_all(tmp_path)


def test_a_save_that_fails_leaves_the_earlier_state_current_and_no_trace(tmp_path: Path) -> None:
    folder = write(tmp_path)
    before = files(tmp_path)

    def fails() -> None:
        with CheckpointWriter(tmp_path) as writer:
            writer.write("dense.safetensors", b"unfinished")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fails()
    assert files(tmp_path) == before
    assert open_checkpoint(tmp_path).folder == str(folder)


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from hotbed.persist.container.format import CheckpointWriter
with CheckpointWriter(sys.argv[1]) as writer:
    writer.write("dense.safetensors", b"unfinished")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert (
        subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode
        == -signal.SIGKILL
    )
    assert [path.name[-8:] for path in tmp_path.iterdir()] == [".partial"]
    (tmp_path / ".CURRENT.0123456789abcdef.partial").write_text("torn")
    old = (
        tmp_path / ".CURRENT.fedcba9876543210.partial",
        tmp_path / ".checkpoint-00000007.4711.partial",
    )
    old[0].write_text("torn")
    old[1].mkdir()
    os.utime(old[0], (0, 0))
    write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".CURRENT.0123456789abcdef.partial",
        "CURRENT",
        "checkpoint-00000001",
    ]


def test_of_two_that_write_at_once_one_is_refused_and_neither_is_torn(tmp_path: Path) -> None:
    """In one process, or in two that cannot see each other's numbers, as containers that share a
    volume.
    """
    write(tmp_path)
    with CheckpointWriter(tmp_path) as first:
        first.write("tables.arrow", b"first")
        with CheckpointWriter(tmp_path) as second:
            second.write("dense.safetensors", b"second")
            first.write("dense.safetensors", b"first")
            first.commit(MANIFEST)
            with pytest.raises(PersistError, match="another process wrote it meanwhile"):
                second.commit(MANIFEST)
    newest = open_checkpoint(tmp_path)
    newest.verify()
    assert {bytes(newest.newest_link.read(name)) for name in newest.manifest.files} == {b"first"}
    assert not list(tmp_path.glob(".*"))


def test_another_format_version_is_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.persist.container.manifest.FLOATS_VERSION", 7)
    write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(VersionError, match="format version 7"):
        open_checkpoint(tmp_path)


def test_a_path_that_leaves_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.write("file", b"")
        writer.files["../../secret"] = writer.files["file"]
        writer.commit(MANIFEST)
    with pytest.raises(FormatError, match="outside of the checkpoint"):
        open_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PersistError, match="cannot be written"):
        CheckpointWriter(tmp_path / "file" / "model")


def test_table_folders_are_safe_and_distinct_for_any_name() -> None:
    names = ["user", "item/colour", "..", "", "ä" * 300, "a" * 300]
    folders = [table_folder(number, name) for number, name in enumerate(names)]
    assert len(set(folders)) == len(names)
    assert all(
        folder.count("/") == 1 and len(folder) < 130 and folder.isascii() for folder in folders
    )


@pytest.mark.parametrize("rows", [0, 1, 1 << 20, 5 << 20, 1 << 40])
def test_parts_cover_every_partition_once(rows: int) -> None:
    spans = partition_ranges(rows)
    assert [partition for span in spans for partition in span] == list(range(256))


def test_the_manifest_is_plain_json_with_the_members_of_the_document(tmp_path: Path) -> None:
    manifest = json.loads((write(tmp_path) / MANIFEST_FILE).read_text())
    assert manifest["format"] == "hotbed.checkpoint"
    assert manifest["format_version"] == 2
    assert list(manifest)[-1] == "digest"
    assert set(manifest["files"]) == {"dense.safetensors", "tables/000-user/rows-000-255.arrow"}
