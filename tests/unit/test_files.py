# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, and a folder has one writer."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed
from hotbed.errors import ConfigError, NotWritten, PersistError
from hotbed.files import (
    MARK_FILE,
    FolderLock,
    claim_folder,
    folder_lock_file,
    map_file,
    new_file,
    remove_all,
)
from hotbed.persist.container import store
from hotbed.persist.publish.topic import TopicFeed
from hotbed.serving.stores.mapped import ModelFolder
from hotbed.serving.stores.writing import tidy

pytestmark = pytest.mark.core

SOURCE = Path(hotbed.__file__).parent

# function -> why what it removes or cuts is Hotbed's own
REMOVES = {
    "compat/hugectr/session.py:Session.evaluation": "the two files that the caller names as output",
    "connectors/dead_letters.py:DeadLetters._cut": "a torn last line, behind others or alike",
    "connectors/journal.py:Journal._open": "a torn last line, and files named as partial_path does",
    "connectors/journal.py:Journal._write": "the bytes that it has just appended",
    "files.py:remove_all": "what callers may remove; of a link, the link alone",
    "files.py:new_file": "its own partial file",
    "files.py:FolderLock.__init__": "the number of the process before",
    "persist/publish/topic.py:TopicFeed.__init__": "versions in a folder with a mark",
    "persist/publish/topic.py:TopicFeed.arrivals": "versions that this feed has replaced",
    "persist/publish/topic.py:TopicFeed._finish": "versions in a folder with a mark",
    "persist/upkeep/rollback.py:_cut_letters": "dead letters behind the state that a run returns to",
    "persist/container/store.py:LocalStore.remove": "a folder with a manifest",
    "persist/container/store.py:LocalStore._sweep": "paths named as partial_path does, that nobody holds",
    "persist/container/store.py:_LocalDraft.discard": "its own partial folder",
    "prepare/output/write.py:_Writer.__init__": "a file in the output that is being written",
    "prepare/run.py:new_output": "what is in a folder with a mark, and the mark",
    "prepare/run.py:_write": "a folder in the output that is being written",
    "prepare/stages.py:derive": "a folder in the output that is being written",
    "prepare/stages.py:add_negatives": "a folder in the output that is being written",
    "serving/request_log/folder.py:LogFolder._leave": "an open part without rows",
    "serving/request_log/folder.py:LogFolder._remove_oldest": "parts of a log beyond its bytes",
    "serving/request_log/folder.py:LogFolder._to_parquet": "an open part whose rows are in a closed one",
    "serving/server/endpoints/relay.py:Relay.connected": "the name of a connection in its own folder",
    "serving/stores/fetched_maps.py:FetchedMaps._remove_others": "files in a temporary folder",
    "serving/stores/fetched_maps.py:_open": "a file in a temporary folder",
    "serving/stores/locking.py:_remove": "its own temporary folder",
    "serving/stores/locking.py:remove_abandoned": "folders with a lock of this user that is free",
    "serving/stores/mapped.py:ModelFolder.forget": "the pointer to the newest version",
    "serving/stores/writing.py:tidy": "files that have names of versions",
}
REMOVING = re.compile(
    r"(.*\.)?(rmtree|unlink|rmdir|removedirs|remove_all|truncate_file)|os\.(remove|f?truncate)"
)


def removing_functions(path: Path) -> set[str]:
    """Return the functions of a file that remove or cut files."""
    found: set[str] = set()
    text = path.read_text()
    if not REMOVING.search(text):
        return found

    def visit(node: ast.AST, names: list[str]) -> None:
        for inner in ast.iter_child_nodes(node):
            is_named = isinstance(inner, (ast.FunctionDef, ast.ClassDef))
            if isinstance(inner, ast.Call) and REMOVING.fullmatch(ast.unparse(inner.func)):
                found.add(f"{path.relative_to(SOURCE).as_posix()}:{'.'.join(names)}")
            visit(inner, [*names, inner.name] if is_named else names)  # type: ignore[attr-defined]

    visit(ast.parse(text), [])
    return found


def test_each_function_that_removes_files_is_known_and_says_why_it_may() -> None:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        found |= removing_functions(path)
    assert found == set(REMOVES)


def test_folder_to_be_emptied_is_new_empty_or_marked(tmp_path: Path) -> None:
    claim_folder(tmp_path / "new", "where")
    claim_folder(tmp_path / "new", "where")
    (tmp_path / "empty").mkdir()
    claim_folder(tmp_path / "empty", "where")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"where: .*mine would be emptied, .* got 'a'"):
        claim_folder(tmp_path / "mine", "where")
    with pytest.raises(ConfigError, match=r"where: .*link is a link, got a link to"):
        claim_folder(tmp_path / "link", "where")
    claim_folder(tmp_path / "mine", "where", lambda path: path.name == "a")
    assert (tmp_path / "mine" / MARK_FILE).exists()


def test_removal_does_not_follow_links(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    (folder / "link").symlink_to(tmp_path / "home")
    (folder / "inner" / "link").symlink_to(tmp_path / "home")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    remove_all(folder.iterdir())
    assert not list(folder.iterdir())
    assert (tmp_path / "home" / "thesis").exists()


def test_store_keeps_folders_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-00000001").mkdir()
    (tmp_path / "checkpoint-00000001" / "weights").touch()
    store.LocalStore(tmp_path).remove("checkpoint-00000001")
    assert (tmp_path / "checkpoint-00000001" / "weights").exists()


def test_feed_of_versions_keeps_folders_of_others(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "checkpoint-500").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"TopicFeed\.cache: .* got 'checkpoint-500'"):
        TopicFeed("localhost:1", "clicks", cache)
    assert (cache / "checkpoint-500").exists()
    (cache / "checkpoint-500").rename(cache / "checkpoint-00000500")
    (cache / "checkpoint-00000500" / "MANIFEST.json").touch()  # of a feed of an earlier version
    TopicFeed("localhost:1", "clicks", cache)
    assert [path.name for path in cache.iterdir()] == [MARK_FILE]


def test_served_folder_keeps_files_of_others(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, "clicks")
    folder.path.mkdir()
    own = [f"{'a' * 32}-0.rows", f".x.{'b' * 16}.partial"]
    for name in (*own, "notes.txt", "CURRENT"):
        (folder.path / name).touch()
    tidy(folder, [])
    assert sorted(path.name for path in folder.path.iterdir()) == ["CURRENT", "notes.txt"]


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
    calls.clear()
    with new_file(tmp_path / "file", durable=False) as file:
        file.write(b"data")
        file.flush()
    assert calls == ["replace"]


@pytest.mark.parametrize("data", [b"", b"some bytes", bytes((1 << 20) + 1)])
def test_mapped_bytes_outlive_their_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    mapped = map_file(path)
    path.unlink()
    assert mapped == data


def test_a_small_file_that_is_cut_keeps_the_bytes_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "CURRENT"
    path.write_bytes(b"whole")
    code = """
import sys
from pathlib import Path
from hotbed.files import map_file
path = Path(sys.argv[1])
data = map_file(path)
path.write_bytes(b"")
print(bytes(data))
"""
    command = [sys.executable, "-c", code, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "b'whole'\n")  # a mapped file ends it by SIGBUS


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
