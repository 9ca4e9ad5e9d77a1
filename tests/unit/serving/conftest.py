# SPDX-License-Identifier: Apache-2.0
"""A small trained model, and a server of it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from forked import COMMANDS

import hotbed as hb
from hotbed.errors import ServingError
from hotbed.persist.publish import PublishDirectory, Publisher
from hotbed.persist.state.checkpoint import capture
from hotbed.persist.state.saver import Saver
from hotbed.serving.request_log.rescoring import rescore
from hotbed.serving.server.options import LogOptions, Options, ServerLimits
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.server import Server


def draw(n: int, seed: int) -> dict[str, Any]:
    """Raw columns of n candidates."""
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, 60, n),
        "item": [f"i{one}" for one in rng.integers(0, 90, n)],
        "genres": [
            "|".join(f"g{one}" for one in rng.integers(0, 9, rng.integers(1, 4))) for _ in range(n)
        ],
        "price": (rng.random(n) * 100).astype(np.float32),
    }


def train() -> hb.RecModel:
    """The same bits each time."""
    torch.manual_seed(0)
    data = {**draw(400, 0), "label": np.random.default_rng(0).integers(0, 2, 400)}
    schema = hb.Schema(
        [
            hb.Label("label"),
            hb.Id("user"),
            hb.Id("item"),
            hb.Id("genres", transforms=[hb.transforms.Split("|")], pooling="mean"),
            hb.Dense("price", transforms=[hb.transforms.Normalize()]),
        ]
    ).fit(hb.sources.Memory(data))
    model = hb.RecModel(
        hb.models.DNN(schema, hb.make_tables(schema, dim=4)), "bce", hb.Adam(lr=0.01), {"auc"}
    )
    model.fit(hb.Dataset(hb.sources.Memory(data), schema, 64), progress=False)
    return model


@pytest.fixture(scope="session")
def model() -> hb.RecModel:
    return train()


@pytest.fixture(scope="session")
def exported(model: hb.RecModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "export"
    model.export(path)
    return path


@pytest.fixture(scope="session")
def session(exported: Path) -> hb.InferenceSession:
    """What every way to ask is compared with."""
    return hb.InferenceSession(hb.ParameterServer().load("m", exported))


def check_logged(exported: Path, folder: Path, requests: Sequence[tuple[Any, Any]]) -> None:
    """Serve a model with a log, ask it, and score what was logged again, to the same bits.

    Args:
        exported: the model.
        folder: of the log.
        requests: columns and context of each request; clients ask them at the same time.
    """
    logs = LogOptions(str(folder), log_flush_seconds=0.02, log_part_seconds=0.1)
    models = Models(hb.ParameterServer(), logs=logs)
    models.add("m", exported)
    running = Running(exported, models=models)

    def ask(number: int) -> None:
        columns, context = requests[number]
        with hb.Client(f"http://{running.http}") as client:
            client.ask("m", columns, context)

    at_once(ask, len(requests))
    running.close()
    session = hb.InferenceSession(exported)
    versions = rescore(hb.sources.RequestLog(folder / "m", follow=False), session)
    assert [(each.requests, each.different) for each in versions] == [(len(requests), 0)]


PATIENCE_SECONDS = 60
"""After which a test gives up: much longer than anything takes, also on a busy machine."""


def at_once(work: Callable[[int], object], n: int) -> None:
    """Call `work` with 0 to n - 1, each on a thread of its own, and wait for all."""
    with at_it(*(partial(work, number) for number in range(n))):
        pass


@contextmanager
def at_it(*works: Callable[[], object]) -> Iterator[None]:
    """Threads, one for each of `works`; at the end of the block they are waited for."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@contextmanager
def again_and_again(*works: Callable[[], object]) -> Iterator[None]:
    """Threads that call each of `works` 50 times a second at most until the end of the block."""
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not stop.wait(0.02):
            work()

    with at_it(*(partial(repeat, work) for work in works)):
        try:
            yield
        finally:
            stop.set()


def make_certificate(folder: Path) -> tuple[str, str]:
    """PEM files of a certificate for 127.0.0.1, and of its key."""
    cert, key = str(folder / "cert"), str(folder / "key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *name, *files], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


class OnThread:
    """A server that runs on a thread until it is closed."""

    def __init__(self, server: Any) -> None:
        self._served, self.thread = server, threading.Thread(target=server.run, daemon=True)
        self.thread.start()
        assert server.started.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self._served.stop()
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()


class Running(OnThread):
    """A server on free ports, on a thread."""

    def __init__(
        self,
        exported: Path,
        limits: ServerLimits | None = None,
        models: Models | None = None,
        **options: Any,
    ) -> None:
        self.models = models or Models(hb.ParameterServer(), limits)
        if models is None:
            self.models.add("m", exported)
        self.server = Server(
            self.models, Options(port=0, **{"grpc_port": 0, "drain_seconds": 0, **options})
        )
        super().__init__(self.server)
        self.http = f"127.0.0.1:{self.server.port}"
        self.grpc = f"127.0.0.1:{self.server.grpc_port}"


@pytest.fixture(scope="module")
def running(exported: Path) -> Iterator[Running]:
    found = Running(exported)
    yield found
    found.close()


def wait_for(found: Any, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask until something is found; an answer that takes long is asked for less often."""
    began = time.monotonic()
    until = began + seconds
    while not found():
        asked = time.monotonic()
        assert asked < until, what
        time.sleep(min(max(0.05, 2 * (asked - began)), 1))
        began = time.monotonic()


def flushed_requests(log: Path) -> Iterator[dict[str, Any]]:
    """Requests of open parts of a log, up to the last flush."""
    for part in log.glob(".open-*"):
        with (
            suppress(pa.ArrowInvalid, OSError),  # a batch is being written, or the part was closed
            pa.ipc.open_stream(part.read_bytes()) as stream,
        ):
            for batch in stream:
                yield from batch.to_pylist()


def damage_rows(rows: Path) -> None:
    """Change the first bytes of each row of the tables of model `m`."""
    for path in (rows / "m").glob("*.rows"):
        with open(path, "r+b") as file:  # in place: servers have it mapped, and must not see it cut
            data = bytearray(file.read())
            for place in range(3, len(data) // 3, 16):
                data[place] ^= 0x40
            file.seek(0)
            file.write(data)


class Trainer:
    """Learns and publishes, full first, then deltas; knows what each version scores."""

    def __init__(self, folder: Path, exported: Path) -> None:
        self.model, self.saver, self.folder = train(), Saver(folder / "run"), folder
        self.publisher: Publisher = PublishDirectory(folder / "published")
        for table in self.model.tables.values():
            table.track()
        shutil.copytree(exported, folder / "export")  # of a model with the same bits
        self.asked = draw(30, 99)
        self.scores = {self.model.counters["steps"]: self.predict()}

    def predict(self) -> Any:
        data = hb.sources.Memory({**self.asked, "label": np.zeros(30)})
        return self.model.predict(hb.Dataset(data, self.model.schema, 30))

    def publish(self, seed: int, full: bool = False) -> int:
        data = {**draw(100, seed), "label": np.random.default_rng(seed).integers(0, 2, 100)}
        self.model.fit(hb.Dataset(hb.sources.Memory(data), self.model.schema, 50), progress=False)
        self.scores[self.model.counters["steps"]] = self.predict()
        self.saver.submit(capture(self.model.state(), changes=not (full or self.saver.needs_full)))
        saved = self.saver.wait()
        assert saved is not None
        assert self.publisher.publish(saved) is not None
        return int(self.model.counters["steps"])

    @property
    def newest(self) -> Path:
        """The folder that was published last."""
        return max((self.folder / "published").glob("checkpoint-*"))

    def tear(self) -> str:
        """Cut short the largest file of what was published last; its name."""
        part = max(self.newest.rglob("*.arrow"), key=lambda path: path.stat().st_size)
        part.write_bytes(part.read_bytes()[:-7])
        return part.name


@pytest.fixture
def trainer(tmp_path: Path, exported: Path) -> Trainer:
    return Trainer(tmp_path, exported)


class Spawned:
    """A verb of `hotbed` in a process without torch; killed at the end of its test, should it
    still be there. `before`: code that it runs first.
    """

    started: ClassVar = list["Spawned"]()

    def __init__(self, *arguments: Any, before: str = "") -> None:
        self.process = COMMANDS.start([str(argument) for argument in arguments], before)
        self.lines = list[str]()
        self.reader = threading.Thread(target=lambda: list(self._stderr()))
        self.started.append(self)

    def find(self, pattern: str) -> re.Match[str]:
        """The first line that says so; the rest are gathered in `lines` from then on."""
        for line in self._stderr():
            if found := re.search(pattern, line):
                self.reader.start()
                return found
        raise AssertionError("".join(self.lines))

    def _stderr(self) -> Iterator[str]:
        for line in self.process.stderr:
            self.lines.append(line)
            yield line

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        code = self.process.wait(PATIENCE_SECONDS)
        if self.reader.ident is not None:
            self.reader.join()
        self.process.stderr.close()
        return code

    @classmethod
    def stop_all(cls) -> None:
        """Kill those that still run, and close the pipes also of those that ended by themselves."""
        while cls.started:
            cls.started.pop().stop(signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_process_stays(_leaves_no_trace: None) -> Iterator[None]:
    yield
    Spawned.stop_all()


class Process(Spawned):
    """`hotbed serve` on free ports."""

    def __init__(self, *arguments: Any, before: str = "") -> None:
        ports = ("--http-port", "0", "--grpc-port", "0")
        super().__init__("serve", *arguments, *ports, before=before)
        found = self.find(r"listening on port (\d+), gRPC (\d+)")
        self.http, self.grpc = f"127.0.0.1:{found.group(1)}", f"127.0.0.1:{found.group(2)}"


class Workers(Process):
    """`hotbed serve` with two workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, "--set", "workers=2")
        wait_for(lambda: any("2 workers listening" in line for line in self.lines), "all are up")

    @property
    def children(self) -> list[int]:
        found: list[int] = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found += map(int, (thread / "children").read_text().split())
        return sorted(found)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Of whichever worker takes the connection."""
        connection = http.client.HTTPConnection(self.http, timeout=PATIENCE_SECONDS)
        connection.request(method, path)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def told(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@contextmanager
def paused(processes: Sequence[int]) -> Iterator[None]:
    """Processes that take no connection until the end of the block."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


NEVER_TAKEN = ("refused", "reset", "broken pipe")  # words of errors of a connection


def stopped_under_load(server: Process, columns: Any, expected: Any) -> None:
    """SIGTERM while clients ask: whatever was asked is answered, and the server ends well."""
    answered, broken = [0], list[str]()

    def ask() -> None:
        # a connection each: what is refused was never taken
        with hb.Client(f"http://{server.http}") as client:
            try:
                assert np.abs(client.predict("m", columns) - expected).max() < 1e-6
                answered[0] += 1
            except ServingError as error:
                if not any(word in str(error).lower() for word in NEVER_TAKEN):
                    broken.append(str(error))

    with again_and_again(*[ask] * 4):
        wait_for(lambda: answered[0] > 50, "the load runs")
        before = answered[0]
        code = server.stop()
    assert code == 0, server.lines
    assert answered[0] > before, "it answered while it drained"
    assert not broken


class Held(Spawned):
    """`hotbed parameter-server`."""

    def __init__(self, folder: Path, *arguments: Any, port: int = 0) -> None:
        super().__init__("parameter-server", *arguments, "--rows", folder, "--port", port)
        self.port = int(self.find(r"parameter server on port (\d+)").group(1))

    def told(self, text: str) -> bool:
        return any(text in line for line in self.lines)
