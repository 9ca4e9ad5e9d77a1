# SPDX-License-Identifier: Apache-2.0
"""Object stores: no rename and no pointer; parts first, the manifest last, the newest complete one
counts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("torch", reason="torch absent")

from torch import nn

import hotbed as hb
from hotbed.errors import ConfigError, FormatError, MissingExtra, PersistError
from hotbed.persist.container.format import CheckpointWriter, Saved, open_checkpoint
from hotbed.persist.container.manifest import Manifest
from hotbed.persist.container.store import LocalStore, ObjectStore, open_store, split
from hotbed.persist.state.chain import compact
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import restore
from hotbed.persist.state.saver import Saver
from hotbed.persist.upkeep.inspect import verify


class Plain(MemoryFileSystem):
    """A store that does not offer exclusive creation, as many that speak S3's protocol do not."""

    protocol = "plain"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **keywords: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        super().pipe_file(path, value, **keywords)


@pytest.fixture(params=["memory", "plain"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    fsspec.register_implementation("plain", Plain, clobber=True)
    yield f"{request.param}://bucket/{request.node.name}"
    MemoryFileSystem.store.clear()
    Plain.store.clear()


def files(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root + "/"): fs.cat_file(path) for path in fs.find(root)}


def run(url: str, steps: int = 3, keep: int = 1) -> tuple[hb.Table, list[Saved]]:
    table, saves = hb.Table("t", 2, rule=hb.Adagrad()), list[Saved]()
    table.track()
    for step in range(steps):
        slots = table.find_or_insert(np.arange(step * 10, step * 10 + 30))
        table.update(slots, np.ones((30, 2), np.float32))
        state = State(nn.Linear(2, 1), {"t": table}, version=step)
        saves.append(write(url, capture(state, step > 0), keep, saves[-1] if saves else None))
    return table, saves


def test_a_chain_in_a_store_is_read_as_one_on_disk(url: str, tmp_path: Path) -> None:
    table, saves = run(url)
    assert str(saves[-1].folder) == f"{url}/checkpoint-00000003"
    for path in (url, saves[-1].folder, url + "/"):
        reader = open_checkpoint(path)
        other = hb.Table("t", 2, rule=hb.Adagrad())
        restore(reader, State(nn.Linear(2, 1), {"t": other}))
        assert content_digest({"t": other}) == content_digest({"t": table})
    assert verify(url)["links"] == 3
    assert compact(url) is not None
    assert content_digest(open_checkpoint(url)) == content_digest(reader)


def test_large_objects_are_read_through_files_that_are_gone_again(
    url: str, tmp_path: Path, monkeypatch: Any
) -> None:
    run(url)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    objects = files(url)
    assert objects
    store = ObjectStore(url, in_memory_bytes=100)
    assert {name: bytes(store.read(name)) for name in objects} == objects
    assert not list(tmp_path.iterdir())


def test_the_manifest_comes_last_and_nothing_is_visible_before(url: str, monkeypatch: Any) -> None:
    save(url, State(version=1))
    made: list[str] = []
    real = ObjectStore.create

    def watching(made_in: ObjectStore, name: str, data: bytes) -> bool:
        made.append(name)
        assert open_checkpoint(url).manifest.version == 1
        return real(made_in, name, data)

    monkeypatch.setattr(ObjectStore, "create", watching)
    save(url, State(nn.Linear(2, 1), version=2), keep=9)
    assert made == ["checkpoint-00000002/CLAIM", "checkpoint-00000002/MANIFEST.json"]
    assert open_checkpoint(url).manifest.version == 2


def test_what_a_writer_that_died_left_is_invisible_and_goes_later(url: str) -> None:
    save(url, State(version=1))
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoint-00000002/CLAIM", b"")
    fs.pipe_file(f"{root}/checkpoint-00000002/dense.safetensors", b"half")
    assert open_checkpoint(url).manifest.version == 1
    assert str(save(url, State(version=3), keep=9).folder).endswith("checkpoint-00000003")
    save(url, State(version=4), keep=9)
    assert not [name for name in files(url) if name.startswith("checkpoint-00000002")]
    assert open_checkpoint(url).manifest.version == 4


def test_a_save_that_fails_leaves_no_trace(url: str) -> None:
    save(url, State(version=1))
    before = files(url)

    def fails() -> None:
        with CheckpointWriter(url) as writer:
            writer.write("dense.safetensors", b"unfinished")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fails()
    assert files(url) == before


def test_two_writers_at_once_never_mix(url: str, members: dict[str, Any]) -> None:
    with CheckpointWriter(url) as first, CheckpointWriter(url) as second:
        first.write("dense.safetensors", b"first")
        second.write("dense.safetensors", b"second")
        folders = [str(one.commit(Manifest.from_json(members)).folder) for one in (second, first)]
    assert len(set(folders)) == 2
    for folder, text in zip(folders, (b"second", b"first"), strict=True):
        assert bytes(open_checkpoint(folder).newest_link.read("dense.safetensors")) == text
    assert (
        bytes(open_checkpoint(url).newest_link.read("dense.safetensors")) == b"second"
    )  # the higher number


def test_a_manifest_is_written_once(url: str, members: dict[str, Any]) -> None:
    with CheckpointWriter(url) as writer:
        fs, root = fsspec.core.url_to_fs(url)
        fs.pipe_file(f"{root}/checkpoint-00000001/MANIFEST.json", b"another's")
        with pytest.raises(PersistError, match="another process wrote it meanwhile"):
            writer.commit(Manifest.from_json(members))


def test_retention_in_a_store_keeps_fulls_with_their_deltas(url: str) -> None:
    table, saves = run(url)
    state = State(nn.Linear(2, 1), {"t": table})
    save(url, state, keep=1)
    assert {name.partition("/")[0] for name in files(url)} == {"checkpoint-00000004"}
    with pytest.raises(PersistError, match="missing or unreadable"):
        write(url, capture(state, changes=True), 1, saves[-1])
    verify(url)


@pytest.mark.parametrize(
    "name", ["MANIFEST.json", "dense.safetensors", "tables/000-t/rows-000-255.arrow"]
)
def test_harmed_objects_are_refused_by_name(url: str, name: str) -> None:
    run(url)
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/checkpoint-00000003/{name}"
    whole = fs.cat_file(path)
    for harmed in (b"", whole[:-1], whole[:9] + bytes([whole[9] ^ 4]) + whole[10:]):
        fs.pipe_file(path, harmed)
        with pytest.raises(FormatError, match=name):
            verify(url)
    fs.rm_file(path)
    if name == "MANIFEST.json":  # that checkpoint is not there any more
        assert open_checkpoint(url).manifest.version == 1
    else:
        with pytest.raises(FormatError, match=name):
            verify(url)


def test_an_empty_store_holds_no_checkpoint(url: str) -> None:
    with pytest.raises(FormatError, match="no checkpoint"):
        open_checkpoint(url)


def test_a_saver_and_a_model_take_urls(url: str) -> None:
    saver = Saver(url)
    saver.submit(capture(State(version=5)))
    saved = saver.wait()
    assert saved is not None
    assert str(saved.folder) == f"{url}/checkpoint-00000001"
    schema = hb.Schema([hb.Label("y"), hb.Id("a")])
    model = hb.RecModel(hb.models.LR(schema, hb.make_tables(schema, dim=1)), "bce", "adam")
    assert model.save(url) == f"{url}/checkpoint-00000002"
    assert isinstance(hb.load(url).network, hb.models.LR)


def test_paths_and_urls_are_told_apart(tmp_path: Path) -> None:
    for where in ("model", "./a:b", tmp_path, f"file://{tmp_path}", "c:/model"):
        assert isinstance(open_store(where), LocalStore), where
    assert split("s3://bucket/model/checkpoint-00000001/") == (
        "s3://bucket/model",
        "checkpoint-00000001",
    )
    assert split(tmp_path / "checkpoint-00000001") == (tmp_path, "checkpoint-00000001")


@pytest.mark.parametrize("where", [None, 3, "", b"model", [], "a\0b"])
def test_path_that_is_none_is_an_error_that_says_so(where: Any) -> None:
    with pytest.raises(ConfigError, match="path: must be a text or a Path, not empty, got"):
        open_store(where)


def test_url_of_an_unknown_kind_is_an_error_that_names_it() -> None:
    with pytest.raises(
        ConfigError, match=r"nosuch://x: fsspec cannot read this URL, got: .*nosuch"
    ):
        open_store("nosuch://x")


def test_a_missing_package_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"hotbed\[object\]"):
        open_store("s3://bucket/model")
