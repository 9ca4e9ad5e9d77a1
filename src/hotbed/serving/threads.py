# SPDX-License-Identifier: Apache-2.0
"""Run work in threads that the end of a process does not wait for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """A pool of threads, each of which ends when no work waits.

    Work that hangs, as on a disk or a store, does not delay the exit of the process.

    Args:
        most: the most threads at a time.
        name: name of the threads.

    Example: `DaemonThreads(4, "hotbed-load").submit(models.load, "ranker").result()`
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._num_running = 0
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `work` in a thread, and return the future of its result."""
        future: Future[T] = Future()
        with self._lock:
            if self._num_running < self._most:
                threading.Thread(target=self._run, daemon=True, name=self._name).start()
                self._num_running += 1
            self._waiting.append((future, partial(work, *arguments)))
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_running -= 1
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
