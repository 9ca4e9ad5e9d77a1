# SPDX-License-Identifier: Apache-2.0
"""Processes of tests as forks of one process, which has imported what they need: that is most of
what a process costs.

`SERVER` starts `tests/forked.py` at the first call, and keeps it until the session ends.
`ranks_of(task, 3)` imports the file of the task in a fork of it, forks three ranks, calls the task
in each, and returns what each of them returned.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
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
    """A process that has imported torch and Hotbed, and forks a process for each call.

    `cpu_seconds`: what it and its forks have cost so far; 0 while it does not run, because the
    system then counts them among the children of this process.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

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
        try:
            status, result, errors = self._ask((dict(os.environ), os.getcwd(), call))
        except BaseException:
            self._kill()
            raise
        assert status == 0, errors.decode(errors="replace")
        return pickle.loads(result)

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.communicate()
            self._process = None
            self.cpu_seconds = 0.0

    def _ask(self, request: tuple[dict[str, str], str, bytes]) -> tuple[int, bytes, bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_SECONDS)
        assert ready, f"a process of the test has not ended after {LIMIT_SECONDS} s"
        status, result, errors, self.cpu_seconds = pickle.load(self._process.stdout)
        return status, result, errors

    def _kill(self) -> None:
        """End the process and all its forks at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.close()


SERVER = ForkServer()


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
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _perform(request: tuple[dict[str, str], str, bytes]) -> Any:
    """Call the task of a request in its environment and its working directory."""
    environment, folder, call = request
    os.environ.clear()
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    file, name, arguments = pickle.loads(call)
    return _function(file, name)(*arguments)


def _import() -> None:
    """Import what most tasks need."""
    import pandas  # noqa: F401  # Arrow imports it when it is asked for the first array
    import pytest  # noqa: F401
    import rich.progress  # noqa: F401
    import torch

    import hotbed as hb

    _ = hb.RecModel, hb.callbacks.Checkpoint, hb.models.DCNv2, hb.auto
    # the first step of an optimizer imports torch's compiler
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).zero_grad()


def _serve() -> None:
    """Answer each request on stdin: the status of its process, its result, stderr and the costs."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _import()
    gc.freeze()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
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
            answer = (status, result.read(), errors.read(), sum(os.times()[:4]))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
