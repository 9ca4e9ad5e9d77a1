# SPDX-License-Identifier: Apache-2.0
"""Several processes that answer at the same ports: a parent that loads and follows, and workers
that map what it wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

from hotbed.errors import ConfigError, HotbedError, ServingError
from hotbed.serving.parameter_server import ParameterServer
from hotbed.serving.process import Elsewhere, JsonLines
from hotbed.serving.server.batching import Limits
from hotbed.serving.server.http import Options, Server, listen
from hotbed.serving.server.meters import together
from hotbed.serving.server.models import Models, is_remote
from hotbed.serving.threads import DaemonThreads
from hotbed.serving.wire import ANSWER_SECONDS, Gone, Wire

log = logging.getLogger("hotbed.serving")
_LOOK_SECONDS = 0.2  # between looks at CURRENT, and at what went wrong in the parent
_LOAD_SECONDS = 3600.0
_LAST_SECONDS = 60.0
_PAUSES = (0.1, 0.5, 2.0, 5.0)  # before a worker is started again, by how often it ended soon
_SOON_SECONDS = 10.0
_SAMPLE = re.compile(r"(?P<name>\w+)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_CODE = "from hotbed.serving.server.workers import work; work()"


# --- the parent -----------------------------------------------------------------------------------


class _Worker:
    """A worker as its parent sees it: started again whenever it ends, until it is told to stop.

    `informed`: it has read which models are unloaded; `up`: it answers; `told`: what it was told of
    problems.
    """

    def __init__(self, number: int, workers: Workers) -> None:
        self.number = number
        self._workers = workers
        self.starts = 0
        self.informed = threading.Event()
        self.up = threading.Event()
        self.never_came_up = False
        self.told: Mapping[str, str] | None = None
        self.wire: Wire | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._keep, daemon=True, name=f"hotbed-worker-{number}"
        )

    def stop(self, how: signal.Signals) -> None:
        self._stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)

    def _keep(self) -> None:
        soon = 0
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                code = self._run()
            # no process, socket or thread can be had just now
            except (OSError, RuntimeError) as error:
                log.error("worker %d: %s", self.number, error)
                code = os.EX_OSERR
            self.never_came_up = self.never_came_up or not self.up.is_set()
            self.informed.clear()
            self.up.clear()
            self.told = None
            if not self._stopped.is_set():
                soon = soon + 1 if time.monotonic() - began < _SOON_SECONDS else 0
                log.error("worker %d ended with %d; it is started again", self.number, code)
                self._stopped.wait(_PAUSES[min(soon, len(_PAUSES) - 1)])

    def _run(self) -> int:
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), self._workers.listener.fileno())
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
            )
            self.starts += 1
            undo.callback(self._process.kill)
            self.wire = Wire(ours, self._workers.calls(self), lambda: None)
            undo.pop_all()
        if self._stopped.is_set():  # told while it was started
            self.stop(signal.SIGTERM)
        return self._process.wait()


class Workers:
    """A server of several processes. `models`: loaded and followed here, into the folder
    `options.rows` that workers map; `served`: all models of the server, by name where they come
    from; those at grpc:// each worker reaches by itself.

    `run` blocks, and ends on SIGTERM and SIGINT once all workers have drained. Raises ConfigError
    where it cannot listen or workers cannot start.
    """

    def __init__(
        self,
        models: Models,
        served: Mapping[str, str],
        options: Options,
        limits: Limits,
        elsewhere: Elsewhere,
    ) -> None:
        self._models = models
        self._served = dict(served)
        self.listener = listen(options.host, options.port)
        self._held = (
            None if options.grpc_port is None else _reserve(options.host, options.grpc_port)
        )
        grpc_port = None if self._held is None else self._held.getsockname()[1]
        self._spec = {
            "options": {**asdict(options), "grpc_port": grpc_port},
            "limits": asdict(limits),
            "elsewhere": asdict(elsewhere),
        }
        self.port: int = self.listener.getsockname()[1]
        self.grpc_port: int | None = grpc_port
        self._drain_seconds = options.drain_seconds
        self._stop = threading.Event()
        self._unloaded = set[str]()
        self._told = dict[str, str]()
        self._changing = {name: threading.Lock() for name in served}
        self._workers = [_Worker(number, self) for number in range(1, options.workers + 1)]

    def run(self) -> None:
        """Serve until stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        for worker in self._workers:
            worker.thread.start()
        try:
            self._wait_until_up()
            log.info(
                "%d workers listening on port %d, gRPC %s",
                len(self._workers),
                self.port,
                self.grpc_port or "off",
            )
            while not self._stop.wait(_LOOK_SECONDS):
                self._tell()
        finally:
            self._end()

    def calls(self, worker: _Worker) -> dict[str, Callable[..., Any]]:
        """What a worker may ask for."""

        def spec() -> dict[str, Any]:
            worker.informed.set()  # what changes from here on, it is told
            return {
                **self._spec,
                "number": worker.number,
                "models": self._served,
                "unloaded": sorted(self._unloaded),
                "told": self._told,
            }

        return {
            "spec": spec,
            "up": worker.up.set,
            "load": self._load,
            "unload": self._unload,
            "metrics": self._metrics,
            "status": self._status,
        }

    def _wait_until_up(self) -> None:
        for worker in self._workers:
            while not worker.up.wait(0.05) and not self._stop.is_set():
                if worker.never_came_up:
                    raise ConfigError(
                        f"serve: worker {worker.number} cannot start — received its end — its log "
                        "lines say why"
                    )

    def _tell(self) -> None:
        """Workers tell what went wrong here, too."""
        told = {model.name: model.problem for model in self._models}
        if any(worker.up.is_set() and worker.told != told for worker in self._workers):
            self._told = told
            for number in self._ask_all("told", told):
                self._workers[number - 1].told = told

    def _load(self, name: str) -> None:
        with self._changing[name]:
            if not is_remote(self._served[name]):
                self._models.load(name)
            self._unloaded.discard(name)
            self._change_all(name, True)

    def _unload(self, name: str) -> None:
        with self._changing[name]:
            self._unloaded.add(name)
            self._change_all(name, False)
            if not is_remote(self._served[name]):
                self._models.unload(name)

    def _ask_all(self, call: str, *given: Any) -> dict[int, Any]:
        """What each worker that is up answers."""

        found = dict[int, Any]()
        for worker, answer in self._at_once(
            [one for one in self._workers if one.up.is_set()], call, *given
        ):
            try:
                found[worker.number] = answer.result()
            except HotbedError as error:
                log.warning("worker %d: %s", worker.number, error)
        return found

    def _change_all(self, name: str, wanted: bool) -> None:
        """Have every worker serve a model, or not, also those that start; one that ends meanwhile
        starts with it done.

        Raises what it raised there, ServingError for one that does not answer.
        """
        wrong = list[HotbedError]()
        informed = [one for one in self._workers if one.informed.is_set()]
        for worker, answer in self._at_once(
            informed, "wanted", name, wanted, seconds=_LOAD_SECONDS
        ):
            try:
                answer.result()
            except Gone as error:
                log.warning("worker %d: %s", worker.number, error)
                if isinstance(error.__cause__, TimeoutError):
                    wrong.append(ServingError(f"worker {worker.number}: {error}"))
            except HotbedError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]

    def _at_once(
        self, workers: Sequence[_Worker], call: str, *given: Any, seconds: float = ANSWER_SECONDS
    ) -> list[tuple[_Worker, Future[Any]]]:
        threads = DaemonThreads(len(self._workers), "hotbed-ask")
        return [
            (worker, threads.submit(partial(worker.wire.call, call, *given, seconds=seconds)))
            for worker in workers
            if worker.wire is not None
        ]

    def _metrics(self) -> str:
        """Of all processes, each sample with its worker; the same whoever is asked."""
        texts = {str(number): text for number, text in self._ask_all("metrics").items()}
        merged = _merged(
            {"parent": self._models.meters.text().decode(), **dict(sorted(texts.items()))}
        )
        lines = [
            "# HELP hotbed_worker_starts_total How often a worker was started",
            "# TYPE hotbed_worker_starts_total counter",
            *(
                f'hotbed_worker_starts_total{{worker="{one.number}"}} {one.starts}'
                for one in self._workers
            ),
            "# HELP hotbed_worker_up Whether a worker answers",
            "# TYPE hotbed_worker_up gauge",
            *(
                f'hotbed_worker_up{{worker="{one.number}"}} {int(str(one.number) in texts)}'
                for one in self._workers
            ),
        ]
        return merged + "\n".join(lines) + "\n"

    def _status(self) -> dict[str, Any]:
        """Of all processes together."""
        found = self._ask_all("status")
        workers = [
            {"number": one.number, "up": one.number in found, "starts": one.starts}
            for one in self._workers
        ]
        return {"workers": workers, "models": together([*found.values(), self._models.status()])}

    def _end(self) -> None:
        self._models.stopping = True
        log.info("draining")
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        if self._stop.is_set():
            time.sleep(self._drain_seconds)
        self.listener.close()  # who connects from here on is refused
        if self._held is not None:
            self._held.close()
        until = time.monotonic() + _LAST_SECONDS
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
            worker.stop(signal.SIGKILL)
            worker.thread.join(ANSWER_SECONDS)
        self._models.close()
        log.info("stopped")


def _reserve(host: str, port: int) -> socket.socket:
    """A port that workers share for gRPC: bound, so that nobody else takes it, and never listened
    at.
    """
    # else another server's workers would share it with ours
    listen(host, port).close() if port else None
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"serve: cannot listen — received {host}:{port}, {error} — give a free port, or 0"
        ) from error
    return held


def _merged(texts: Mapping[str, str]) -> str:
    """Metrics of several processes in the text format of Prometheus, each sample with the label
    `worker`.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for worker, text in texts.items():
        head = list[str]()
        samples = list[str]()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                head, samples = families.setdefault(line.split()[2], ([], []))
            if line.startswith("#"):
                head += [line] if len(head) < 2 else []
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [f'worker="{worker}"', sample["labels"]]))
                samples.append(f"{sample['name']}{{{labels}}} {sample['value']}")
    return "".join(f"{line}\n" for head, samples in families.values() for line in [*head, *samples])


# --- a worker -------------------------------------------------------------------------------------


class _Parent:
    """What a worker leaves to its parent."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number

    def load(self, name: str) -> None:
        """Returns once every worker serves what was loaded."""
        self._wire.call("load", name, seconds=_LOAD_SECONDS)

    def unload(self, name: str) -> None:
        self._wire.call("unload", name, seconds=_LOAD_SECONDS)

    def metrics(self) -> bytes:
        """Of all workers."""
        return str(self._wire.call("metrics", seconds=2 * ANSWER_SECONDS)).encode()

    def status(self) -> dict[str, Any]:
        """Of all workers, and which one was asked."""
        return {"worker": self._number, **self._wire.call("status", seconds=2 * ANSWER_SECONDS)}


class _Work:
    """A worker: what `Workers` starts, with the numbers of two inherited sockets as arguments."""

    def __init__(self, end: socket.socket, listener: socket.socket) -> None:
        self._ready = threading.Event()
        self._alone = threading.Event()
        self._server: Server | None = None
        calls: dict[str, Callable[..., Any]] = {}
        calls |= {
            "wanted": self._want,
            "told": self._told,
            "metrics": self._metrics,
            "status": self._status,
        }
        self._wire = Wire(end, calls, self._orphaned)
        spec = self._wire.call("spec")
        logging.basicConfig(level=logging.INFO, handlers=[JsonLines(spec["number"])])
        logging.captureWarnings(True)
        options = Options(**spec["options"])
        elsewhere = Elsewhere(**spec["elsewhere"])
        store = ParameterServer(options.rows, options.dtype)
        limits = Limits(**spec["limits"])
        self._models = Models(store, limits, elsewhere.reach, elsewhere.cache())
        self._models.parent = _Parent(self._wire, spec["number"])
        for name, source in spec["models"].items():
            if is_remote(source):
                self._models.add(name, source)
            else:
                self._models.watch(name, partial(store.model, name), _LOOK_SECONDS)
            if name in spec["unloaded"]:
                self._set(name, False)
        self._server = Server(self._models, options, listener)
        self._ready.set()
        self._told(spec["told"])

    def run(self) -> None:
        """Answer until told to stop, or the parent is gone, whose ports the next one wants."""
        assert self._server is not None
        threading.Thread(target=self._report, args=(self._server,), daemon=True).start()
        if not self._alone.is_set():
            self._server.run()

    def _report(self, server: Server) -> None:
        server.started.wait()
        self._wire.call("up")
        if self._alone.is_set():
            server.stop()

    def _want(self, name: str, yes: bool) -> None:
        self._ready.wait(_LOAD_SECONDS)
        self._set(name, yes)

    def _set(self, name: str, yes: bool) -> None:
        model = self._models.named(name)
        model.wanted = yes
        model.look()

    def _told(self, problems: Mapping[str, str]) -> None:
        self._ready.wait(ANSWER_SECONDS)
        for name, problem in problems.items():
            self._models.named(name).outside = problem

    def _metrics(self) -> str:
        self._ready.wait(ANSWER_SECONDS)
        return self._models.meters.text().decode()

    def _status(self) -> list[dict[str, Any]]:
        self._ready.wait(ANSWER_SECONDS)
        return self._models.status()

    def _orphaned(self) -> None:
        self._alone.set()
        if self._server is not None:
            self._server.stop()


def work() -> None:
    """The main function of a worker."""
    _Work(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3])).run()
