# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test as forks of one process, which has imported what they need: that is most of what
a rank costs.

`ranks_of(task, 3)` starts `tests/forked.py`, which imports the file of the task, forks three ranks,
calls the task in each, and returns what each of them returned.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class LogLines(logging.Handler):
    """The messages of a logger; `lines`: so far."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def ranks_of(task: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call a function of a file on so many ranks; return what it returned on each of them.

    Args:
        task: a function at the top of its file.
        ranks: their number; 1 is a process without others.
        arguments: of the task; they are pickled, and so is what it returns.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    file = sys.modules[task.__module__].__file__
    call = pickle.dumps((str(file), task.__name__, ranks, port, arguments))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=call,
        env=environment,
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    results: list[Any] = pickle.loads(done.stdout)
    return results


def _rank(rank: int, ranks: int, port: str, work: Callable[[], Any], results: int) -> None:
    """Be a rank: call its work, write what it returns, and end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.dup2(2, 1)
    status = 1
    try:
        with os.fdopen(results, "wb") as file:
            pickle.dump(work(), file)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _main() -> int:
    file, name, ranks, port, arguments = pickle.load(sys.stdin.buffer)
    sys.path[:0] = [str(Path(file).parent), str(Path(__file__).parent)]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    task = getattr(module, name)
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _rank(rank, ranks, port, lambda: task(*arguments), write)
        os.close(write)
        children.append((child, os.fdopen(read, "rb")))
    written = [file.read() for _, file in children]
    status = 0
    for child, _ in children:
        _, ended = os.waitpid(child, 0)
        status = status or os.waitstatus_to_exitcode(ended)
    if not status:
        sys.stdout.buffer.write(pickle.dumps([pickle.loads(one) for one in written]))
    return status


if __name__ == "__main__":
    sys.exit(_main())
