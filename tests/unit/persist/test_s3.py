# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a real object store: S3's protocol over HTTP, from a server (moto) in a process of
its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import ranks_of
from torch import nn

import hotbed as hb
from hotbed import objects
from hotbed.errors import DataError, FormatError, PersistError, StoreAway
from hotbed.persist.container.format import CheckpointWriter, Saved, open_checkpoint
from hotbed.persist.container.manifest import Manifest
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.persist.state.chain import Replica, compact
from hotbed.persist.state.checkpoint import State, capture, save
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import restore
from hotbed.persist.state.saver import Saver
from hotbed.persist.upkeep.inspect import diff, verify
from hotbed.testing.values import values_digest

pytestmark = pytest.mark.slow


class Server:
    """An S3 server on a free loopback port with a bucket; its objects live in its memory."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-p", self.url.rpartition(":")[2]]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.url, timeout=5).read()
                break
            except OSError:
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        bucket = urllib.request.Request(f"{self.url}/bucket", method="PUT")
        urllib.request.urlopen(bucket, timeout=60).read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let nobody answer; afterwards an empty server does, as if on another machine."""
        self.kill()
        try:
            yield
        finally:
            self.start()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """With the variables by which an S3 client finds it, as a user would set them."""
    running = Server()
    known = {
        "AWS_ENDPOINT_URL": running.url,
        "AWS_ACCESS_KEY_ID": "ann",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setenv(name, value)
        # parts of S3's smallest size
        patch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 << 20})
        yield running
        running.kill()
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{request.node.name}"


def names(url: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.removeprefix(root + "/") for path in fs.find(root)}


class Run:
    """A run with one table that saves a full and then deltas, while it goes on."""

    def __init__(self, url: str, rows: int = 300) -> None:
        self.table, self.saver, self.rows = (
            hb.Table("t", 16, rule=hb.Adagrad(lr=0.1)),
            Saver(url, keep=2),
            rows,
        )
        self.table.track()
        self.step = 0

    def state(self) -> State:
        return State(nn.Linear(2, 1), {"t": self.table}, version=self.step)

    def save(self, *, full: bool = False) -> Saved:
        slots = self.table.find_or_insert(np.arange(self.step * 10, self.step * 10 + self.rows))
        self.table.update(slots, np.full((self.rows, 16), 0.5, np.float32))
        self.table.remove(np.array([self.step * 10], np.int64))
        self.saver.submit(capture(self.state(), changes=not (full or self.saver.needs_full)))
        self.step += 1
        saved = self.saver.wait()
        assert saved is not None
        return saved


def resumed(url: Any) -> hb.Table:
    table = hb.Table("t", 16, rule=hb.Adagrad(lr=0.1))
    restore(open_checkpoint(url), State(nn.Linear(2, 1), {"t": table}))
    return table


def test_a_run_saves_and_resumes(url: str) -> None:
    run = Run(url)
    for step in range(4):
        saved = run.save(full=step == 2)
        assert str(saved.folder) == f"{url}/checkpoint-{step + 1:08d}"
        assert saved.kind == ("full" if step in (0, 2) else "delta")
        for place in (url, saved.folder):
            assert content_digest({"t": resumed(place)}) == content_digest({"t": run.table})
    assert verify(url)["links"] == 2
    assert compact(url) is not None
    assert content_digest({"t": resumed(url)}) == content_digest({"t": run.table})


def test_objects_of_many_parts_are_whole(url: str) -> None:
    run = Run(url, rows=120_000)
    assert run.save().bytes > 3 * (5 << 20)
    verify(url)
    assert content_digest({"t": resumed(url)}) == content_digest({"t": run.table})


def test_published_versions_are_followed(url: str, tmp_path: Path) -> None:
    run, publisher, follower, replica = (
        Run(f"{url}/run"),
        PublishDirectory(f"{url}/out"),
        Follower(f"{url}/out"),
        Replica(),
    )
    assert not list(follower.poll())
    for step in range(3):
        made = publisher.publish(run.save())
        assert made is not None
        assert made.kind == ("delta" if step else "full")
        (reader,) = follower.poll()
        replica.apply(reader)
        assert values_digest(replica.tables) == values_digest({"t": run.table})
    assert not follower.errors


@pytest.mark.parametrize(
    "name", ["MANIFEST.json", "dense.safetensors", "tables/000-t/rows-000-255.arrow"]
)
def test_harmed_objects_are_refused_by_name_and_absent_manifests_passed_over(
    url: str, name: str
) -> None:
    run = Run(url)
    run.save(), run.save()
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/checkpoint-00000002/{name}"
    whole = fs.cat_file(path)
    for harmed in (b"", whole[:-1], whole[:9] + bytes([whole[9] ^ 4]) + whole[10:]):
        fs.pipe_file(path, harmed)
        with pytest.raises(FormatError, match=name):
            verify(url)
    fs.rm_file(path)
    if name == "MANIFEST.json":  # the newest complete one counts
        assert open_checkpoint(url).manifest.version == 0
    else:
        with pytest.raises(FormatError, match=name):
            verify(url)


def test_what_a_writer_that_died_left_is_invisible_and_goes_later(url: str) -> None:
    save(url, State(version=1))
    fs, root = fsspec.core.url_to_fs(url)
    for name in ("CLAIM", "dense.safetensors"):
        fs.pipe_file(f"{root}/checkpoint-00000002/{name}", b"half")
    assert open_checkpoint(url).manifest.version == 1
    assert str(save(url, State(version=3), keep=9).folder).endswith("checkpoint-00000003")
    save(url, State(version=4), keep=9)
    assert not [name for name in names(url) if name.startswith("checkpoint-00000002")]
    assert open_checkpoint(url).manifest.version == 4


def test_the_store_itself_keeps_two_writers_apart(url: str, members: dict[str, Any]) -> None:
    with CheckpointWriter(url) as first, CheckpointWriter(url) as second:
        first.write("dense.safetensors", b"first")
        second.write("dense.safetensors", b"second")
        folders = [str(one.commit(Manifest.from_json(members)).folder) for one in (second, first)]
    assert len(set(folders)) == 2
    assert bytes(open_checkpoint(url).newest_link.read("dense.safetensors")) == b"second"
    with CheckpointWriter(url) as writer:
        fs, root = fsspec.core.url_to_fs(url)
        fs.pipe_file(f"{root}/checkpoint-00000003/MANIFEST.json", b"another's")
        with pytest.raises(PersistError, match="another process wrote it meanwhile"):
            writer.commit(Manifest.from_json(members))


def test_a_save_that_fails_leaves_no_trace(url: str) -> None:
    save(url, State(version=1))
    before = names(url)
    with CheckpointWriter(url) as writer:  # and leaves without commit
        writer.write("dense.safetensors", b"unfinished")
        assert names(url) != before
    assert names(url) == before


def test_a_bucket_that_is_not_there_is_named(server: Server) -> None:
    with pytest.raises(PersistError, match=r"s3://nowhere/model.*: cannot be written"):
        save("s3://nowhere/model", State())
    with pytest.raises(FormatError, match=r"s3://nowhere/model: there is no checkpoint"):
        open_checkpoint("s3://nowhere/model")


def test_a_store_that_is_away_is_told_and_the_next_save_is_a_full(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another client, which asks once
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"max_attempts": 0}}}
    )
    import s3fs.core

    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    monkeypatch.setattr(objects, "WAITS", ())
    run = Run(url)
    first, follower = run.save(), Follower(url)
    with server.away():
        with pytest.raises(PersistError, match=rf"{url}: the store does not answer, got .*onnect"):
            run.save()
        with pytest.raises(StoreAway, match="the store does not answer"):
            open_checkpoint(url)
        assert not list(follower.poll())  # it asks again later
        assert isinstance(follower.errors[-1], StoreAway)
        assert run.saver.needs_full
    assert run.save().kind == first.kind == "full"
    assert len(list(follower.poll())) == 1
    assert content_digest({"t": resumed(url)}) == content_digest({"t": run.table})


def learned(begun: str, saved: list[str]) -> list[str]:
    """Learn on from a state, and save after every two steps; return the places of the states."""
    first = int(begun.rpartition("/")[2]) if begun else 0
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 4, admit=hb.MinCount(2))
    torch.manual_seed(1)
    model = hb.RecModel(hb.models.DCNv2(schema, tables, hidden=(4,)), "bce", "adam", grains=4)
    if begun:
        model.restore(begun)
    for number, where in enumerate(saved, start=first):
        for step in (2 * number, 2 * number + 1):
            users = np.random.default_rng(step).integers(0, 300, 200)
            labels = (users % 2).astype(np.float32)
            model.step(hb.Batch({"user": hb.Ids(users)}, {}, {"y": labels}))
        model.save(where)
    return saved


@pytest.mark.soak
def test_several_processes_write_one_state_that_any_number_of_them_reads(url: str) -> None:
    (one,) = ranks_of(learned, 1, "", [f"{url}/one/{last}" for last in (1, 2, 3)])
    begun = ""
    for ranks, of_one in zip((2, 3, 1), one, strict=True):
        (begun,) = ranks_of(learned, ranks, begun, [of_one.replace("/one/", "/several/")])[0]
        several = open_checkpoint(begun)
        assert len(several.manifest.tables[0].parts) >= ranks
        assert content_digest(several) == content_digest(open_checkpoint(of_one))
        assert verify(begun)["content_digest"] == content_digest(several)


def put_rows(url: str, name: str, first: int = 0) -> None:
    number = np.arange(first, first + 300)
    rows = pa.table({"clicked": number % 2, "user": number % 20})
    with fsspec.open(f"{url}/{name}", "wb") as file:
        pq.write_table(rows, file, row_group_size=50)


def test_rows_of_objects_are_read_and_an_object_that_was_replaced_is_refused(url: str) -> None:
    for day in (1, 2):
        put_rows(url, f"day={day}/rows.parquet", 300 * day)
    source = hb.sources.Parquet(f"{url}/day=*/*.parquet")
    schema = hb.Schema([hb.Label("clicked"), hb.Id("user"), hb.Id("day")])
    data = hb.Dataset(source, schema, batch_size=64)
    batches = list(data)
    assert sum(len(batch.labels["clicked"]) for batch in batches) == 600
    rest = list(data.resume(batches[5].position))
    assert [batch.position for batch in rest] == [batch.position for batch in batches[6:]]
    put_rows(url, "day=2/rows.parquet", 7)
    with pytest.raises(DataError, match=r"day=2/rows\.parquet was replaced since"):
        list(data.resume(batches[5].position))
    with pytest.raises(DataError, match=r"no file to read, got 's3://nobody-has-this/x\.csv'"):
        hb.sources.Csv("s3://nobody-has-this/x.csv").schema()


STOPS = """
import os, signal

class Killed:
    def __init__(self):
        self.steps = 0

    def on_step_end(self, run):
        self.steps += 1
        if os.environ.get("KILL_AT") == str(self.steps):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_killed_job_on_objects_ends_with_the_bits_of_one_that_was_not(
    url: str, tmp_path: Path
) -> None:
    for part in range(3):
        put_rows(url, f"rows-{part}.parquet", 300 * part)
    (tmp_path / "killing.py").write_text(STOPS)
    job = {
        "schema": {
            "columns": [{"kind": "label", "name": "clicked"}, {"kind": "id", "name": "user"}]
        },
        "model": "lr",
        "stream": {"kind": "parquet", "path": f"{url}/rows-*.parquet"},
        "stream_callbacks": ["killing:Killed"],
        "checkpoint": {"every_steps": 2},
        "fit": {"batch_size": 32, "torch_threads": 1},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))

    def online(output: str, kill: str = "") -> int:
        command = [sys.executable, "-m", "hotbed.cli", "online", str(tmp_path / "job.json")]
        environment = {**os.environ, "KILL_AT": kill}
        done = subprocess.run([*command, "--set", f"output={output}"], env=environment)
        return done.returncode

    assert online(f"{url}/whole") == 0
    assert online(f"{url}/killed", "15") == -9
    assert online(f"{url}/killed") == 0
    assert diff(f"{url}/whole/checkpoint", f"{url}/killed/checkpoint")["same"]
