# SPDX-License-Identifier: Apache-2.0
"""The parent of several processes that answer at the same ports: it loads, follows and restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

from hotbed.errors import ConfigError, HotbedError, ServingError
from hotbed.serving.process import open_listener
from hotbed.serving.server.meters import combine_statuses
from hotbed.serving.server.options import NO_LOGS, LogOptions, Options, RemoteOptions, ServerLimits
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.scoring.routed import LocalRules
from hotbed.serving.stores.base import RoutesInForce
from hotbed.serving.stores.following import hanging
from hotbed.serving.stores.opening import is_remote
from hotbed.serving.threads import DaemonThreads
from hotbed.serving.workers.metrics import merge_metrics
from hotbed.serving.workers.wire import ANSWER_SECONDS, ProcessGone, Wire
from hotbed.serving.workers.worker import LOAD_SECONDS, WorkerState

log = logging.getLogger("hotbed.serving")
_CHECK_SECONDS = 0.2  # between checks of the state that workers are sent
_CHANGE_SECONDS = 60.0  # for another load of a model to end
_LAST_SECONDS = 60.0  # for workers to finish the requests under way
_SHORT_RUN_SECONDS = 10.0
_CODE = "from hotbed.serving.workers.worker import main; main()"


class WorkerProcess:
    """A worker as its parent sees it: a process that is started again whenever it ends.

    Attributes:
        number: its number, from 1 on.
        starts: how often it was started.
        wire: calls to the process; None before the first start.
        configured: set while the process knows which models are unloaded.
        up: set while it answers.
        failed_to_start: whether a process ended before it answered.
        state: the state that it was sent last.

    Args:
        number: its number.
        listener: the socket at which all workers listen.
        calls: the calls that the process may make, by name.
        pauses: seconds before a restart, by the number of short runs before it.
    """

    def __init__(
        self,
        number: int,
        listener: socket.socket,
        calls: Callable[[WorkerProcess], Mapping[str, Callable[..., Any]]],
        pauses: Sequence[float] = (0.1, 0.5, 2.0, 5.0),
    ) -> None:
        self.number = number
        self.starts = 0
        self.wire: Wire | None = None
        self.configured = threading.Event()
        self.up = threading.Event()
        self.failed_to_start = False
        self.state: WorkerState | None = None
        self._listener = listener
        self._pauses = pauses
        self._calls = calls(self)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._keep_running, daemon=True, name=f"hotbed-worker-{number}"
        )

    def stop(self, how: signal.Signals) -> None:
        """Send a signal to the process, and do not start it again."""
        self._stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)

    def _keep_running(self) -> None:
        """Run one process after another; the function of the thread."""
        short_runs = 0
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                code = self._run_process()
            # no process, socket or thread can be had just now
            except (OSError, RuntimeError) as error:
                log.error("worker %d: %s", self.number, error)
                code = os.EX_OSERR
            if not self.up.is_set():
                self.failed_to_start = True
            self.configured.clear()
            self.up.clear()
            self.state = None
            if self._stopped.is_set():
                return
            if time.monotonic() - started < _SHORT_RUN_SECONDS:
                short_runs += 1
            else:
                short_runs = 0
            log.error("worker %d ended with %d; it is started again", self.number, code)
            self._stopped.wait(self._pauses[min(short_runs, len(self._pauses) - 1)])

    def _run_process(self) -> int:
        """Start a process, wait for its end, and return its exit code."""
        our_end, worker_end = socket.socketpair()
        inherited = (worker_end.fileno(), self._listener.fileno())
        with worker_end, contextlib.ExitStack() as on_error:
            on_error.callback(our_end.close)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
            )
            self.starts += 1
            on_error.callback(self._process.kill)
            self.wire = Wire(our_end, self._calls, lambda: None)
            on_error.pop_all()
        if self._stopped.is_set():  # stopped while the process was started
            self.stop(signal.SIGTERM)
        return self._process.wait()


class WorkerPool:
    """A server of several processes.

    `run` blocks. SIGTERM and SIGINT end it, once all workers have drained.

    Args:
        models: the models of this process. It loads and follows them, into the folder
            `options.rows` that workers map.
        sources: all models of the server, by name. Each worker reaches those at grpc:// itself.
        options: where to listen, and the number of workers.
        limits: the load that each worker accepts.
        remote: how workers reach parameter servers.
        logs: the log of requests.
        load_seconds: how long a worker may take to load or unload a model.

    Raises:
        ConfigError: it cannot listen, a file is wrong, or workers cannot start.
    """

    def __init__(
        self,
        models: Models,
        sources: Mapping[str, str],
        options: Options,
        limits: ServerLimits,
        remote: RemoteOptions,
        logs: LogOptions = NO_LOGS,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._models = models
        self._load_seconds = load_seconds
        self._sources = dict(sources)
        self._drain_seconds = options.drain_seconds
        self._roles = options.roles()
        self._store_token = remote.token()
        listener = open_listener(options.host, options.port)
        self._sockets = [listener]
        self.port: int = listener.getsockname()[1]
        self.grpc_port: int | None = None
        if options.grpc_port is not None:
            reserved = _reserve_port(options.host, options.grpc_port)
            self._sockets.append(reserved)
            self.grpc_port = reserved.getsockname()[1]
        self._spec = {
            "options": {**asdict(options), "grpc_port": self.grpc_port},
            "limits": asdict(limits),
            "remote": asdict(remote),
            "logs": asdict(logs),
            "models": self._sources,
        }
        self._stop = threading.Event()
        self._unloaded = set[str]()
        self._state = self._new_state()
        self._changing = {name: threading.Lock() for name in sources}
        numbers = range(1, options.workers + 1)
        self._workers = [WorkerProcess(number, listener, self._calls_of) for number in numbers]

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
            while not self._stop.wait(_CHECK_SECONDS):
                self._send_state()
        finally:
            self._end()

    def _wait_until_up(self) -> None:
        for worker in self._workers:
            while not worker.up.wait(0.05) and not self._stop.is_set():
                if worker.failed_to_start:
                    raise ConfigError(
                        f"serve: worker {worker.number} cannot start, it ended before it answered. "
                        "Its log lines say why."
                    )

    def _send_state(self) -> None:
        """Let every worker report the problems of models that this process loads, and know tokens.

        Only this process reads files of tokens, so that all workers have the same ones, also
        those that start while the file is wrong.
        """
        self._state = self._new_state()
        workers = [worker for worker in self._workers if worker.up.is_set()]
        if all(worker.state == self._state for worker in workers):
            return
        for number in self._ask_all("set_state", self._state):
            self._workers[number - 1].state = self._state

    def _new_state(self) -> WorkerState:
        return {
            "problems": {model.name: model.own_problem for model in self._models},
            "roles": None if self._roles is None else self._roles.content(),
            "store_token": None if self._store_token is None else self._store_token(),
        }

    def _end(self) -> None:
        self._models.stopping = True
        log.info("draining")
        for worker in self._workers:
            worker.stop(signal.SIGTERM)
        if self._stop.is_set():
            time.sleep(self._drain_seconds)
        for listener in self._sockets:  # connections are refused from here on
            listener.close()
        deadline = time.monotonic() + _LAST_SECONDS
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            worker.stop(signal.SIGKILL)
            worker.thread.join(ANSWER_SECONDS)
        self._models.close()
        log.info("stopped")

    # Workers call these.

    def _calls_of(self, worker: WorkerProcess) -> dict[str, Callable[..., Any]]:
        """Return the calls that a worker may make, by name."""
        return {
            "spec": partial(self._configure, worker),
            "up": worker.up.set,
            "load": self._load,
            "unload": self._unload,
            "metrics": self._metrics,
            "status": self._status,
        }

    def _configure(self, worker: WorkerProcess) -> dict[str, Any]:
        """Return what a worker needs to start. It is sent the changes from here on."""
        worker.configured.set()
        return {
            **self._spec,
            "number": worker.number,
            "unloaded": sorted(self._unloaded),
            "state": self._state,
        }

    def _load(self, name: str) -> None:
        with self._change(name):
            if not is_remote(self._sources[name]):
                self._models.load(name)
            self._unloaded.discard(name)
            self.call_all("set_wanted", name, True)

    def _unload(self, name: str) -> None:
        with self._change(name):
            self._unloaded.add(name)
            self.call_all("set_wanted", name, False)
            if not is_remote(self._sources[name]):
                self._models.unload(name)

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Hold the lock of loads and unloads of a model."""
        lock = self._changing[name]
        if not lock.acquire(timeout=_CHANGE_SECONDS):
            raise hanging("another load", _CHANGE_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _metrics(self) -> str:
        """Return the metrics of all processes, the same for each worker that asks."""
        texts = {"parent": self._models.meters.text().decode()}
        for number, text in sorted(self._ask_all("metrics").items()):
            texts[str(number)] = text
        starts = {str(worker.number): worker.starts for worker in self._workers}
        return merge_metrics(texts, starts)

    def _status(self) -> dict[str, Any]:
        """Return the status of all processes together."""
        statuses = self._ask_all("status")
        workers = [
            {"number": worker.number, "up": worker.number in statuses, "starts": worker.starts}
            for worker in self._workers
        ]
        models = combine_statuses([*statuses.values(), self._models.status()])
        return {"workers": workers, "models": models}

    # Calls to workers.

    def _ask_all(self, call: str, *arguments: Any) -> dict[int, Any]:
        """Return the answer of each worker that is up and answers, by its number."""
        answers = dict[int, Any]()
        workers = [worker for worker in self._workers if worker.up.is_set()]
        for worker, answer in self._start_calls(workers, ANSWER_SECONDS, call, *arguments):
            try:
                answers[worker.number] = answer.result()
            except HotbedError as error:
                log.warning("worker %d: %s", worker.number, error)
        return answers

    def call_all(self, call: str, *arguments: Any) -> None:
        """Call every worker, and wait for all of them.

        A worker that ends meanwhile starts with the change that the call makes.

        Raises:
            HotbedError: a worker raised it; ServingError if one does not answer.
        """
        errors = list[HotbedError]()
        workers = [worker for worker in self._workers if worker.configured.is_set()]
        calls = self._start_calls(workers, self._load_seconds, call, *arguments)
        for worker, answer in calls:
            try:
                answer.result()
            except ProcessGone as error:
                log.warning("worker %d: %s", worker.number, error)
                if isinstance(error.__cause__, TimeoutError):
                    errors.append(ServingError(f"worker {worker.number}: {error}"))
            except HotbedError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _start_calls(
        self, workers: Sequence[WorkerProcess], seconds: float, call: str, *arguments: Any
    ) -> list[tuple[WorkerProcess, Future[Any]]]:
        """Call several workers at the same time."""
        threads = DaemonThreads(len(self._workers), "hotbed-ask")
        started = []
        for worker in workers:
            if worker.wire is not None:
                ask = partial(worker.wire.call, call, *arguments, seconds=seconds)
                started.append((worker, threads.submit(ask)))
        return started


class PoolRules:
    """The rules of the models of a parent and its workers. See `RoutedProcesses`.

    Args:
        local: those of the parent, which writes the versions.
        pool: the workers.
    """

    def __init__(self, local: LocalRules, pool: WorkerPool) -> None:
        self._local = local
        self._pool = pool
        self.in_force = local.in_force
        self.is_answering = local.is_answering
        self.newest = local.newest
        self.digests = local.digests
        self.is_damaged = local.is_damaged
        self.obtain = local.obtain
        self.note_problem = local.note_problem  # workers are sent it

    def prepare(self, name: str, keys: Collection[str]) -> None:
        """Warm up the versions of a rule in all processes."""
        self._local.prepare(name, keys)
        self._pool.call_all("prepare", name, sorted(set(keys)))

    def put_in_force(self, name: str, routes: RoutesInForce) -> None:
        """Write a rule, and have all processes answer by it.

        A worker that does not answer reads the rule at its next look, or when it starts.
        """
        self._local.write(name, routes)
        try:
            self._pool.call_all("look", name)
        except HotbedError as error:
            log.warning("model %s: %s", name, error)
        self._local.look_at(name)


def _reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket at the gRPC port that workers share.

    It is bound, so that no other process takes the port, and it never listens.
    """
    if port:  # another server's workers would share the port
        open_listener(host, port).close()
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"serve: cannot listen at {host}:{port}, got {error}. Give a free port, or 0."
        ) from error
    return reserved
