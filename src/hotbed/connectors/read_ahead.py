# SPDX-License-Identifier: Apache-2.0
"""Make items ahead of their consumer on a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Iterator[T], Generic[T]):
    """Yields `items`, of which a thread makes at most `depth` ahead.

    When the items are all made, the thread sleeps until half of them are taken: to wake it for
    each item would cost the consumer more time. `None` items are ticks: one is passed on only if
    nothing else waits. An error among the items is raised at its turn. Call `close` in the end: it
    stops the thread and waits for it.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[T | _End] = deque()
        self._changed = threading.Condition()  # the thread waits for room, or the consumer for more
        self._stopped = False
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="hotbed-read-ahead", daemon=True)
        self._thread.start()

    @property
    def has_next(self) -> bool:
        """Whether the next item, the end or an error can be had without waiting."""
        return bool(self._ready)

    def coming(self, number: int) -> list[T]:
        """Return the next items that are made already, at most `number`; none of them is taken."""
        with self._changed:
            ready = list(islice(self._ready, number))
        return [item for item in ready if not isinstance(item, _End)]

    def deepen(self, depth: int) -> None:
        """Make at least `depth` items ahead from now on."""
        with self._changed:
            if depth > self._depth:
                self._depth = depth
                self._changed.notify()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        with self._changed:
            while not self._ready:
                self._changed.wait()
            item = self._ready.popleft()
            if len(self._ready) <= self._depth // 2:
                self._changed.notify()
        if not isinstance(item, _End):
            return item
        self._ended = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, which closes the items if they are a generator."""
        self._ended = True
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify()
        self._thread.join()

    def _put(self, item: T | _End) -> bool:
        """Add an item when there is room; return False if nobody wants it any longer."""
        with self._changed:
            if item is None and self._ready:
                return not self._stopped
            while len(self._ready) >= self._depth and not self._stopped:
                self._changed.wait()
            if not self._stopped:
                self._ready.append(item)
                self._changed.notify()
            return not self._stopped

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
