# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, and a folder has one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.errors import NotWritten, PersistError
from hotbed.files import FolderLock, folder_lock_file, map_file, new_file
from hotbed.persist import store

pytestmark = pytest.mark.core


def test_new_file_appears_when_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with new_file(path) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"
    with new_file(path) as file:
        file.write(b"second")
        assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"second"


def test_new_file_leaves_what_was_there_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail() -> None:
        with new_file(path) as file:
            file.write(b"torn")
            raise KeyError("torn")

    with pytest.raises(KeyError, match="torn"):
        fail()
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"before"


def test_a_refused_write_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = r"file/report.html: cannot be written, got .*File exists.* Free space, correct"
    with (
        pytest.raises(NotWritten, match=message),
        store.new_file(tmp_path / "file" / "report.html") as file,
    ):
        file.write(b"page")


def test_new_file_is_on_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    real_sync = os.fsync
    real_replace = os.replace

    def sync(handle: int) -> None:
        calls.append("sync")
        real_sync(handle)

    def replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"data"
        calls.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with new_file(tmp_path / "file") as file:
        file.write(b"data")
    assert calls == ["sync", "replace", "sync"]  # the last one is of the folder


@pytest.mark.parametrize("data", [b"", b"some bytes"])
def test_mapped_bytes_outlive_their_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    mapped = map_file(path)
    path.unlink()
    assert mapped == data


def test_folder_lock_names_the_process_that_has_it(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from hotbed.files import FolderLock\n"
    code += "FolderLock(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "folder")]
    with FolderLock(tmp_path / "folder"):
        assert folder_lock_file(tmp_path / "folder").read_text() == f"{os.getpid()}\n"
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"another process writes it, got process {os.getpid()}." in second.stderr
        with pytest.raises(PersistError, match="another process writes it"):
            FolderLock(tmp_path / "folder")
    assert subprocess.run(command, check=False).returncode == 0
