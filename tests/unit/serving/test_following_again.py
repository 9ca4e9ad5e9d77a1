# SPDX-License-Identifier: Apache-2.0
"""What a trainer published last is handed on until it is served: after a load, after errors that
pass; and ends in time.
"""

from __future__ import annotations

import http.client
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotbed as hb
from hotbed.errors import PersistError, ServingError
from hotbed.persist.container.store import MANIFEST_FILE
from hotbed.persist.publish import Follower
from hotbed.serving.server.options import Options, RemoteOptions, ServerLimits
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.stores.following import Following
from hotbed.serving.workers.pool import WorkerPool, WorkerProcess
from hotbed.serving.workers.wire import Wire

from .conftest import Process, Running, Trainer, wait_for


class Taking:
    """Follows a folder; `take` fails as often as it is told to."""

    def __init__(self, folder: Path, failures: int = 0) -> None:
        self.taken, self.tries, self.told, self.left = (
            list[int](),
            list[int](),
            list[str](),
            failures,
        )
        self.polls = 0
        self.following = Following(lambda name, error: self.told.append(str(error)))
        self.following.follow("m", lambda: self._counted(Follower(folder)), self._take, 0.01)

    def _counted(self, follower: Follower) -> Follower:
        poll = follower.poll

        def counted() -> Any:
            self.polls += 1
            return poll()

        follower.poll = counted
        return follower

    def _take(self, reader: Any) -> None:
        self.tries.append(reader.manifest.version)
        if self.left:
            self.left -= 1
            raise PersistError("rows: cannot be written — No space left on device")
        self.taken.append(reader.manifest.version)


def followed(trainer: Trainer) -> Models:
    found = Models(hb.ParameterServer())
    found.add("m", trainer.folder / "export")
    found.follow("m", lambda: Follower(trainer.folder / "published"), 0.02)
    return found


def served(models: Models) -> int:
    model = models.named("m")
    return model.current.version.version if model.ready else -1


def test_a_load_of_a_followed_model_comes_back_to_what_was_published_last(trainer: Trainer) -> None:
    models = followed(trainer)
    trainer.publish(0)
    last = trainer.publish(1)
    wait_for(lambda: served(models) == last, "the last version")
    models.load("m")
    wait_for(lambda: served(models) == last, "the last version after a load")
    models.unload("m")
    last = trainer.publish(2)
    models.load("m")
    wait_for(lambda: served(models) == last, "what came while it was unloaded")
    models.unload("m")
    (trainer.folder / "export").rename(trainer.folder / "away")
    with pytest.raises(PersistError):
        models.load("m")
    (trainer.folder / "away").rename(trainer.folder / "export")
    models.load("m")
    wait_for(
        lambda: served(models) == last and not models.named("m").problem,
        "the last version, and no problem",
    )
    models.close()


def test_a_version_that_could_not_be_taken_is_tried_again_and_told_once(trainer: Trainer) -> None:
    version = trainer.publish(0)
    one = Taking(trainer.folder / "published", failures=4)
    wait_for(lambda: one.taken, "it is taken once that is possible")
    wait_for(lambda: one.polls > 40, "more polls")
    one.following.close()
    assert one.taken == [version]
    assert one.tries == 5 * [version]
    assert one.told == ["rows: cannot be written — No space left on device"]


def test_what_is_newer_is_tried_at_once_and_what_failed_before_it_no_more(trainer: Trainer) -> None:
    first = trainer.publish(0)
    one = Taking(trainer.folder / "published", failures=1000)
    wait_for(lambda: one.polls > 40, "it fails on")
    assert 5 <= one.tries.count(first) <= 8  # of 40 polls: the pauses grow
    last = trainer.publish(1)
    one.left = 0
    wait_for(lambda: last in one.taken, "the newer one")
    tried = len(one.tries)
    wait_for(lambda polls=one.polls: one.polls > polls + 10, "more polls")
    one.following.close()
    assert one.taken == [last]
    assert len(one.tries) == tried


def test_a_place_that_cannot_be_read_is_told_once_until_it_can(trainer: Trainer) -> None:
    trainer.publish(0)
    current = trainer.folder / "published" / "CURRENT"
    one = Taking(trainer.folder / "published")
    wait_for(lambda: one.taken, "the first version")
    right = current.read_bytes()
    for times in (1, 2):
        current.write_bytes(b"torn")
        wait_for(lambda polls=one.polls: one.polls > polls + 10, "polls that fail")
        assert len(one.told) == times, one.told
        current.write_bytes(right)
        wait_for(lambda polls=one.polls: one.polls > polls + 10, "polls that do not")
    one.following.close()


def test_what_hangs_is_not_waited_for_longer_than_told() -> None:
    going, hanging = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        going.wait()

    following = Following(lambda name, error: None)
    for name in "ab":
        following.repeat(name, hang, 0.01)
    hanging.wait()
    closing = threading.Thread(target=following.close, args=(0.1,))
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    going.set()
    wait_for(lambda: not any(one.is_alive() for one in following._threads), "they end")


def test_a_load_that_hangs_does_not_hold_up_the_end(exported: Path) -> None:
    running, going, hanging = (
        Running(exported, grpc_port=None),
        threading.Event(),
        threading.Event(),
    )

    def hang() -> Any:
        hanging.set()
        going.wait()
        raise PersistError("the store is back")

    running.models.named("m").find = hang
    connection = http.client.HTTPConnection(running.http, timeout=20)
    connection.request("POST", "/v2/repository/models/m/load")
    assert hanging.wait(20)
    connection.close()
    running.close()
    going.set()


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_published_versions_hang(trainer: Trainer) -> None:
    trainer.publish(0)
    (manifest,) = (trainer.folder / "published").glob(f"checkpoint-*/{MANIFEST_FILE}")
    hangs = f"""
import threading
from hotbed import files
real = files.open_regular
files.open_regular = lambda path: (threading.Event().wait() if str(path) == {str(manifest)!r} else real(path))
"""
    source = ("--watch", trainer.folder / "published")
    server = Process(f"m={trainer.folder / 'export'}", *source, before=hangs)
    assert server.stop() == 0
    assert any("they are abandoned" in line for line in server.lines)


class Side(dict[str, list[Any]]):
    """A worker as far as its parent sees it; what it heard by call."""

    def __init__(self, workers: WorkerPool, number: int) -> None:
        super().__init__(set_wanted=[], set_state=[])
        worker = workers._workers[number - 1]
        ours, theirs = socket.socketpair()
        worker.wire = Wire(ours, workers._calls_of(worker), lambda: None)
        self.going = threading.Event()
        self.going.set()
        calls = {"set_wanted": self._set_wanted, "set_state": self["set_state"].append}
        self.wire, self.end = Wire(theirs, calls, lambda: None), theirs

    def _set_wanted(self, name: str, yes: bool) -> None:
        self.going.wait(20)
        self["set_wanted"].append((name, yes))


@pytest.fixture(params=[60.0])
def workers(exported: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Two workers that may take `request.param` seconds for a load."""
    models = Models(hb.ParameterServer(tmp_path / "rows"))
    models.add("m", exported)
    options = Options(port=0, grpc_port=None, workers=2, rows=str(tmp_path / "rows"))
    remote = RemoteOptions()
    pool = WorkerPool(
        models, {"m": str(exported)}, options, ServerLimits(), remote, load_seconds=request.param
    )
    yield pool
    for listener in pool._sockets:
        listener.close()
    models.close()


def test_a_worker_that_starts_is_told_what_changed_since_it_read_what_to_serve(
    workers: WorkerPool,
) -> None:
    one, two = Side(workers, 1), Side(workers, 2)
    assert one.wire.call("spec")["unloaded"] == []
    one.wire.call("up")
    one.wire.call("unload", "m")
    assert one["set_wanted"] == [("m", False)]
    assert two.wire.call("spec")["unloaded"] == ["m"]
    one.wire.call("load", "m", seconds=60)
    assert one["set_wanted"] == [("m", False), ("m", True)]
    assert two["set_wanted"] == [("m", True)]
    workers._models.named("m").problem = "torn"
    workers._send_state()
    workers._send_state()
    state = {"problems": {"m": "torn"}, "roles": None, "store_token": None}
    assert one["set_state"] == [state]
    two.wire.call("up")
    workers._send_state()
    assert two["set_state"] == [state]


@pytest.mark.parametrize("workers", [0.5], indirect=True)
def test_a_load_fails_that_a_worker_does_not_answer_and_passes_over_one_that_ends(
    workers: WorkerPool,
) -> None:
    one, two = Side(workers, 1), Side(workers, 2)
    for side in (one, two):
        side.wire.call("spec")
        side.wire.call("up")
    two.going.clear()
    with pytest.raises(ServingError, match="worker 2"):
        one.wire.call("load", "m", seconds=60)
    assert one["set_wanted"] == [("m", True)]
    two.end.shutdown(socket.SHUT_RDWR)
    one.wire.call("load", "m", seconds=60)  # what is started in its place reads what to serve
    two.going.set()


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[Any]()

    def popen(*given: Any, **named: Any) -> Any:
        tries.append(given)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", popen)
    with socket.socket() as listener:
        worker = WorkerProcess(1, listener, lambda process: {}, pauses=(0.01,))
        files = len(list(Path("/proc/self/fd").iterdir()))
        worker.thread.start()
        wait_for(lambda: len(tries) > 20, "it is tried again")
        assert worker.failed_to_start
        worker.stop(signal.SIGTERM)
        worker.thread.join(20)
        assert len(list(Path("/proc/self/fd").iterdir())) < files + 10
