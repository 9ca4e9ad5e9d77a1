# SPDX-License-Identifier: Apache-2.0
"""Make items ahead of their consumer on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Iterator[T], Generic[T]):
    """Yields `items`, of which a thread makes at most `depth` ahead.

    `None` items are ticks: one is passed on only if nothing else waits. An error among the items is
    raised at its turn. Call `close` in the end: it stops the thread and waits for it.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[T | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="hotbed-read-ahead", daemon=True)
        self._thread.start()

    @property
    def has_next(self) -> bool:
        """Whether the next item, the end or an error can be had without waiting."""
        return not self._ready.empty()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._ready.get()
        if not isinstance(item, _End):
            return item
        self._ended = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, which closes the items if they are a generator."""
        self._ended = True
        self._stop.set()
        while not self._ready.empty():  # so that a producer that waits for room stops at once
            self._ready.get_nowait()
        self._thread.join()

    def _put(self, item: T | _End) -> bool:
        if item is None and not self._ready.empty():
            return not self._stop.is_set()
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
            self._put(_End())
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(_End(error))
        finally:
            if isinstance(self._items, Generator):
                self._items.close()


class _End:
    """The last item of the queue: the items ended, with `error` if one was raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
