# SPDX-License-Identifier: Apache-2.0
"""Threads that the end of a process does not wait for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """At most `most` at a time; each ends once nothing waits. What hangs on one, as a disk or a
    store does, holds up no exit.

    Example: `DaemonThreads(4, "hotbed-load").submit(models.load, "ranker").result()`
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._running = 0
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """What `work` will have given."""
        future: Future[T] = Future()
        with self._lock:
            if self._running < self._most:
                threading.Thread(target=self._work, daemon=True, name=self._name).start()
                self._running += 1
            self._waiting.append((future, partial(work, *given)))
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, work = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
