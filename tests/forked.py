# SPDX-License-Identifier: Apache-2.0
"""Processes of tests as forks of one process, which has imported what they need: that is most of
what a process costs.

There are two such processes. `SERVER` calls functions of tests: its process has imported torch.
`COMMANDS` runs commands of `hotbed`, as a process that cannot import torch. The first worker of a
run that needs one starts `tests/forked.py` and keeps it until the session ends. It forks a process
for each connection of a worker.

`ranks_of(task, 3)` imports the file of the task in a fork, forks three ranks, calls the task in
each, and returns what each of them returned.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import itertools
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

LIMIT_SECONDS = 500
"""After which a call is given up: longer than any takes, and shorter than the limit of a test."""


class LogLines(logging.Handler):
    """The messages of a logger; `lines`: so far."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class ForkServer:
    """A process that forks one for each connection; all workers of a run share it.

    `cpu_seconds`: what the forks of this worker have cost so far.
    """

    def __init__(self, kind: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        self._kind = kind
        self._address = Path(tempfile.gettempdir(), f"hotbed-{kind}-{run}")
        self._lock = self._address.with_suffix(".lock")
        self._process: subprocess.Popen[bytes] | None = None
        self.cpu_seconds = 0.0

    def connect(self) -> socket.socket:
        """Return a connection to a fork; start the process unless another worker has done so."""
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX)
            if connection.connect_ex(str(self._address)):
                self._address.unlink(missing_ok=True)
                self._start()
                connection.connect(str(self._address))
            return connection

    def close(self) -> None:
        """End the process, if this worker has started it."""
        if self._process is not None:
            self._process.communicate()
            self._process = None
            self._address.unlink(missing_ok=True)
            self._lock.unlink(missing_ok=True)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._kind, str(self._address)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), f"the process of {self._kind} has ended"


class CallServer(ForkServer):
    """Calls functions, each in a process that has imported torch and Hotbed."""

    def __init__(self) -> None:
        super().__init__("calls")
        self._forks: Forks | None = None

    def call(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in a process of its own.

        The process has the environment and the working directory that this one has now.

        Args:
            task: a function at the top of its file.
            arguments: of the task; they are pickled, and so is what it returns.

        Raises:
            AssertionError: the task failed; with all that was written to stderr.
        """
        file = str(sys.modules[task.__module__].__file__)
        call = pickle.dumps((file, task.__name__, arguments))
        if self._forks is None:
            self._forks = Forks(self.connect())
        try:
            answer = self._forks.ask((dict(os.environ), os.getcwd(), call))
        except BaseException:
            self._forks.kill()
            self._forks = None
            raise
        status, result, errors, cpu_seconds = answer
        self.cpu_seconds += cpu_seconds
        assert status == 0, errors.decode(errors="replace")
        return pickle.loads(result)

    def close(self) -> None:
        """End what this worker has started."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None
        super().close()


class Forks:
    """A process that forks one for each call of this worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rwb")
        self._process: int = pickle.load(self._stream)

    def ask(self, request: tuple[dict[str, str], str, bytes]) -> tuple[int, bytes, bytes, float]:
        """Return the status of the process of a call, its result, stderr, and CPU seconds."""
        pickle.dump(request, self._stream)
        self._stream.flush()
        ready, _, _ = select.select([self._connection], [], [], LIMIT_SECONDS)
        assert ready, f"a process of the test has not ended after {LIMIT_SECONDS} s"
        answer: tuple[int, bytes, bytes, float] = pickle.load(self._stream)
        return answer

    def kill(self) -> None:
        """End the process and all its forks at once."""
        os.killpg(self._process, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the process."""
        self._stream.close()
        self._connection.close()


class CommandServer(ForkServer):
    """Starts commands of `hotbed`, each in a process that has imported a server without torch."""

    def __init__(self) -> None:
        super().__init__("commands")

    def start(self, arguments: list[str], before: str = "") -> Command:
        """Start a command.

        The process has the environment and the working directory that this one has now.

        Args:
            arguments: of `hotbed`.
            before: code that the process runs first.
        """
        request = (dict(os.environ), os.getcwd(), before, arguments)
        return Command(self, pickle.dumps(request))

    def run(self, code: str, *arguments: object, expected: int = 0) -> list[str]:
        """Run code, and return the texts that it gives to its function `say`, one a line.

        Args:
            code: what the process runs; it finds the texts of `arguments` in a list of this name.
            arguments: what the code needs.
            expected: the status of the process at its end.
        """
        start = f"""
import sys
arguments = {list(map(str, arguments))}
def say(*values):
    print("said", *values, file=sys.stderr, flush=True)
"""
        process = self.start([], f"{start}{code}\nraise SystemExit")
        with process.stderr as stderr:
            lines = stderr.read().splitlines()
        status = process.wait(LIMIT_SECONDS)
        assert status == expected, "\n".join(lines)
        return [line.removeprefix("said ") for line in lines if line.startswith("said ")]


class Command:
    """A process that runs a command, with the members of `subprocess.Popen` that tests use.

    `stderr`: the text that it writes there.
    """

    def __init__(self, server: ForkServer, request: bytes) -> None:
        self._server = server
        self._connection = server.connect()
        self._stream = self._connection.makefile("rwb")
        read, write = os.pipe()
        socket.send_fds(self._connection, [b"."], [write])
        os.close(write)
        self._stream.write(request)
        self._stream.flush()
        self.stderr = os.fdopen(read)
        self.pid: int = pickle.load(self._stream)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the status of the process, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the status of the process.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            ended, _, _ = select.select([self._connection], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired("hotbed", timeout)
            self.returncode, cpu_seconds = pickle.load(self._stream)
            self._server.cpu_seconds += cpu_seconds
            self._stream.close()
            self._connection.close()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


SERVER = CallServer()
COMMANDS = CommandServer()


def cpu_seconds_of_forks() -> float:
    """Return what the forks of this worker have cost so far."""
    return SERVER.cpu_seconds + COMMANDS.cpu_seconds


def kill_at(passage: int, *names: str) -> None:
    """Kill this process at a passage of functions of `os`: before an even one, after an odd one.

    0: it is not killed.
    """
    passages = itertools.count(1)

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> None:
            is_last = next(passages) == passage
            if is_last and passage % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*arguments, **settings)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in names:
        setattr(os, name, counted(getattr(os, name)))


def ending_signal(task: Callable[[], object]) -> int:
    """Run a task in a fork, and return the signal that ended it; 0 for none."""
    child = os.fork()
    if not child:
        try:
            task()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def ranks_of(
    task: Callable[..., Any], ranks: int, *arguments: Any, host_ranks: int = 1
) -> list[Any]:
    """Call a function of a file on so many ranks; return what it returned on each of them.

    Args:
        task: a function at the top of its file.
        ranks: their number; 1 is a process without others.
        arguments: of the task; they are pickled, and so is what it returns.
        host_ranks: so many believe that they are on one host, and the others on others.
    """
    file = str(sys.modules[task.__module__].__file__)
    sizes = (ranks, host_ranks)
    results: list[Any] = SERVER.call(_ranks, file, task.__name__, sizes, arguments)
    return results


def _ranks(file: str, name: str, sizes: tuple[int, int], arguments: tuple[Any, ...]) -> list[Any]:
    """Fork the ranks, and return what the function returned on each of them."""
    ranks, host_ranks = sizes
    task = _function(file, name)
    if host_ranks > 1:
        from hotbed.parallel import connections
        from hotbed.parallel.hosts import Hosts

        hosts = Hosts.of([rank // host_ranks for rank in range(ranks)])
        vars(connections)["_check_hosts"] = lambda *_: hosts
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with os.fdopen(write, "wb") as result:
                _end(task, arguments, result)
        os.close(write)
        children.append((child, os.fdopen(read, "rb")))
    results = [file.read() for _, file in children]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    assert not any(ends), f"the ranks ended with {ends}"
    return [pickle.loads(result) for result in results]


def _function(file: str, name: str) -> Callable[..., Any]:
    """Import a file of tests, and return a function of it."""
    sys.path[:0] = [str(Path(file).parent), str(Path(__file__).parent)]
    sys.path.append(str(Path(sys.prefix) / "torchrec"))  # see constraints-torchrec.txt
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _end(task: Callable[..., Any], arguments: tuple[Any, ...], result: IO[bytes]) -> NoReturn:
    """Call a task, write what it returns, and end this process."""
    status = 1
    try:
        pickle.dump(task(*arguments), result)
        result.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _enter(environment: dict[str, str], folder: str) -> None:
    """Take on the environment and the working directory of a test."""
    os.environ.clear()
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    tempfile.tempdir = None  # it is another one where TMPDIR is
    os.chdir(folder)


def _perform(request: tuple[dict[str, str], str, bytes]) -> Any:
    """Call the task of a request in its environment and its working directory."""
    environment, folder, call = request
    _enter(environment, folder)
    file, name, arguments = pickle.loads(call)
    return _function(file, name)(*arguments)


def _import_for_calls() -> None:
    """Import what most tasks need."""
    import pandas  # noqa: F401  # Arrow imports it when it is asked for the first array
    import pytest  # noqa: F401
    import rich.progress  # noqa: F401
    import torch
    from read_once import read_tables_once

    import hotbed as hb

    _ = hb.RecModel, hb.callbacks.Checkpoint, hb.models.DCNv2, hb.auto
    # the first step of an optimizer imports torch's compiler
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).zero_grad()
    # the first export imports as much again, and reads the operators that ONNX has
    import torch.onnx._internal.exporter._registration

    read_tables_once()
    example = (torch.zeros(2, 1),)
    torch.onnx.export(
        torch.nn.Linear(1, 1).eval(), example, dynamo=True, optimize=False, verbose=False
    )
    gc.set_threshold(20_000, 20, 20)  # as in conftest.py


def _import_for_commands() -> None:
    """Import what servers need, where torch is not installed."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    import onnxruntime  # noqa: F401
    import typer.main
    from read_once import read_commands_once

    import hotbed.cli.commands
    import hotbed.serving.main
    import hotbed.serving.server.server
    import hotbed.serving.workers.worker

    read_commands_once()
    typer.main.get_command(hotbed.cli.commands.app)


def _listen(kind: str, address: str) -> None:
    """Fork a process for each connection, until stdin ends."""
    start, serve = KINDS[kind]
    ready = os.dup(1)
    os.dup2(2, 1)
    gc.disable()
    start()
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(ready, b"ready\n")
        os.close(ready)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    serve(connection)


def _serve_calls(connection: socket.socket) -> None:
    """Answer each request: the status of its process, its result, stderr and CPU seconds."""
    stream = connection.makefile("rwb")
    pickle.dump(os.getpid(), stream)
    stream.flush()
    counted = 0.0
    while True:
        try:
            request = pickle.load(stream)
        except EOFError:
            return
        with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if not child:
                os.dup2(errors.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _end(_perform, (request,), result)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            result.seek(0)
            errors.seek(0)
            cpu_seconds = sum(os.times()[:4])
            answer = (status, result.read(), errors.read(), cpu_seconds - counted)
            counted = cpu_seconds
        pickle.dump(answer, stream)
        stream.flush()


def _serve_command(connection: socket.socket) -> None:
    """Run the command of a request; answer with the id of its process, then with how it ended."""
    _, (errors,), _, _ = socket.recv_fds(connection, 1, 1)
    stream = connection.makefile("rwb")
    environment, folder, before, arguments = pickle.load(stream)
    process = os.fork()
    if not process:
        stream.close()
        connection.close()
        os.dup2(errors, 2)
        os.close(errors)
        _enter(environment, folder)
        exec(before, {})
        from hotbed.cli.commands import main

        sys.argv = ["hotbed", *arguments]
        main()
        return
    os.close(errors)
    pickle.dump(process, stream)
    stream.flush()
    _, status, usage = os.wait4(process, 0)
    pickle.dump((os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime), stream)
    stream.flush()


KINDS = {
    "calls": (_import_for_calls, _serve_calls),
    "commands": (_import_for_commands, _serve_command),
}

if __name__ == "__main__":
    _listen(*sys.argv[1:])
