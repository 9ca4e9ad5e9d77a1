# SPDX-License-Identifier: Apache-2.0
"""Make items ahead of their consumer on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def run_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield `items`, of which a thread makes at most `depth` ahead.

    Closing the generator stops the thread and waits for it. `None` items are ticks: one is passed
    on only if nothing else waits.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        if item is None and not ready.empty():
            return not stop.is_set()
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    break
            put(_End())
        except BaseException as error:  # handed to the consumer, which raises it
            put(_End(error))
        finally:
            if isinstance(items, Generator):
                items.close()

    thread = threading.Thread(target=work, name="hotbed-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        while not ready.empty():  # so that a producer that waits for room stops at once
            ready.get_nowait()
        thread.join()


class _End:
    """The last item of the queue: the iterator ended, with `error` if it raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
