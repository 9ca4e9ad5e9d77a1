# SPDX-License-Identifier: Apache-2.0
"""Requests of all clients, gathered into batches: bounded in rows, in waiting and in number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.errors import HotbedError, Overloaded
from hotbed.serving.process import DAY, within
from hotbed.serving.server.bodies import Bounds
from hotbed.serving.server.protocol import Column
from hotbed.serving.session import InferenceSession, Scores

log = logging.getLogger("hotbed.serving")
_ALONE_ROWS = 256  # candidates that are scored on the loop, which hears nobody meanwhile
_ALONE_VALUES = 8192  # values of lists, likewise
_LEAST_BODY_BYTES = 1 << 20
_VALUE_BYTES = 32  # of a body for each candidate and column


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    `batch_rows`: candidates that are scored together, and the most that one request may bring.
    `batch_seconds`: how long the first request of a batch may wait for others; 0 = gather only what
    waits anyway. `queue_rows`: candidates that may wait; what comes on top is refused at once.
    `body_bytes`: of one request; None: 32 bytes for each of `batch_rows` candidates and each column
    of the model, at least 1 MiB. `list_length`: values that a candidate may have in one column.
    """

    batch_rows: int = 4096
    batch_seconds: float = 0.0
    queue_rows: int = 65_536
    body_bytes: int | None = None
    list_length: int = 1024

    def __post_init__(self) -> None:
        within("Limits.batch_rows", self.batch_rows, 1)
        within("Limits.batch_seconds", self.batch_seconds, 0, DAY)
        within("Limits.queue_rows", self.queue_rows, 0)
        within("Limits.body_bytes", self.body_bytes, 1)
        within("Limits.list_length", self.list_length, 1)

    def bounds(self, num_columns: int) -> Bounds:
        """Return how much a request to a model of so many columns may hold."""
        body_bytes = self.body_bytes
        if body_bytes is None:
            body_bytes = max(_LEAST_BODY_BYTES, self.batch_rows * num_columns * _VALUE_BYTES)
        return Bounds(num_columns, self.batch_rows, self.list_length, body_bytes)


class Request:
    """n candidates: `columns` [n], and `context` columns [1] that hold for each of them.

    `future`: on the loop that made the request; gets what `write` makes of the scores, or an error.
    A request whose future is cancelled before it is scored is dropped.
    """

    __slots__ = ("asked", "columns", "context", "future", "num_rows", "write")

    def __init__(
        self,
        num_rows: int,
        columns: Mapping[str, Column],
        context: Mapping[str, Column],
        write: Callable[[Scores], Any],
    ) -> None:
        self.num_rows = num_rows
        self.columns = columns
        self.context = context
        self.write = write
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked = time.perf_counter()

    @property
    def size(self) -> int:
        """Candidates; a request without any counts as one, so that the queue stays bounded."""
        return max(1, self.num_rows)

    @property
    def is_small(self) -> bool:
        """Whether it may be scored on the loop."""
        columns = (*self.columns.values(), *self.context.values())
        lists = [column for column in columns if isinstance(column, pa.LargeListArray)]
        return (
            self.num_rows <= _ALONE_ROWS and sum(len(one.values) for one in lists) <= _ALONE_VALUES
        )

    def settle(self, scores: Scores | Exception) -> None:
        """Tell who asked; on its loop."""
        if self.future.done():
            return
        try:
            if isinstance(scores, Exception):
                raise scores
            self.future.set_result(self.write(scores))
        except Exception as error:
            self.future.set_exception(error)

    def fits(self, other: Request) -> bool:
        """Whether both have the same columns, of the same types."""
        return self._kinds() == other._kinds()

    def _kinds(self) -> set[tuple[str, str]]:
        return {
            (name, column.dtype.str if isinstance(column, np.ndarray) else str(column.type))
            for columns in (self.columns, self.context)
            for name, column in columns.items()
        }

    def spread(self, name: str) -> Column:
        """A column, context repeated for each candidate."""
        if name not in self.context:
            return self.columns[name]
        value = self.context[name]
        if isinstance(value, np.ndarray):
            return np.repeat(value, self.num_rows)
        return value.take(pa.array(np.zeros(self.num_rows, np.int64)))


class Batcher:
    """Scores requests: one that comes alone at once, on the loop; those that come together, or
    while others are scored, on a thread of its own, many at once where many wait.

    `session`: gives the session of the version that is served now; asked once a batch, so that an
    answer never mixes two. `scored`: told of each batch its requests, and when scoring started and
    ended (`time.perf_counter`). `alone`: whether scoring may take the loop's time; not where rows
    are waited for.
    """

    def __init__(
        self,
        session: Callable[[], InferenceSession],
        limits: Limits,
        scored: Callable[[list[Request], float, float], None],
        alone: bool = True,
    ) -> None:
        self._session = session
        self._limits = limits
        self._scored = scored
        self._alone = alone and limits.batch_seconds == 0
        self._come = list[Request]()  # of the loop: what came in this turn of it
        self._busy = False  # of the thread: it scores
        self._waiting = deque[Request]()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hotbed-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Candidates that wait now."""
        return self._rows

    def submit(self, request: Request) -> None:
        """Have a request scored. Raises Overloaded where too many wait."""
        with self._changed:
            if self._closed or self._rows + request.size > max(
                self._limits.queue_rows, request.size
            ):
                why = "the server stops" if self._closed else f"{self._rows} candidates wait"
                raise Overloaded(
                    f"too many requests — received {request.size} candidates while {why} — try "
                    "again later"
                )
            self._rows += request.size
        if not self._come:
            # after all that this turn of the loop reads
            request.future.get_loop().call_soon(self._turn)
        self._come.append(request)

    def close(self) -> None:
        """Score what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _turn(self) -> None:
        """Score what came in this turn of the loop, or have it scored."""
        come = self._come
        self._come = []
        with self._changed:
            alone = self._alone and len(come) == 1 and not self._busy and come[0].is_small
            if not self._closed and (self._waiting or not alone):
                self._waiting.extend(come)
                self._changed.notify()
                return
            self._rows -= sum(request.size for request in come)
        for request in come:
            _settle(self._score([request]))

    def _work(self) -> None:
        while batch := self._next():
            batch = [request for request in batch if not request.future.cancelled()]
            if batch:
                found = self._score(batch)
                loop = batch[0].future.get_loop()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(_settle, found)

    def _next(self) -> list[Request]:
        """Requests that are scored together; none at the end."""
        with self._changed:
            self._busy = False
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            self._busy = True
            batch = [first := self._waiting.popleft()]
            rows = first.size
            until = first.asked + self._limits.batch_seconds
            while rows < self._limits.batch_rows:
                if not self._waiting:
                    left = until - time.perf_counter()
                    if left <= 0 or self._closed or not self._changed.wait(left):
                        break
                    continue
                other = self._waiting[0]
                if rows + other.size > self._limits.batch_rows or not other.fits(first):
                    break
                batch.append(self._waiting.popleft())
                rows += other.size
            self._rows -= rows
            return batch

    def _score(self, batch: list[Request]) -> list[tuple[Request, Scores | Exception]]:
        started = time.perf_counter()
        try:
            found = _scores(self._session(), batch)
        except Exception as error:
            if len(batch) > 1:  # whose fault it was shows when each is alone
                return [one for request in batch for one in self._score([request])]
            if not isinstance(error, HotbedError):
                log.exception("a request could not be scored")
            return [(batch[0], error)]
        self._scored(batch, started, time.perf_counter())
        return list(zip(batch, found, strict=True))


def _settle(found: list[tuple[Request, Scores | Exception]]) -> None:
    for request, scores in found:
        request.settle(scores)


def _scores(session: InferenceSession, batch: list[Request]) -> list[Scores]:
    first = batch[0]
    if len(batch) == 1:
        return [session.ask(first.columns, first.context)]
    names = [*first.columns, *first.context]
    found = session.ask(
        {name: _joined([request.spread(name) for request in batch]) for name in names}
    )
    ends = np.cumsum([request.num_rows for request in batch]).tolist()
    parts = zip([0, *ends], ends, strict=False)
    return [
        Scores(
            found.version,
            {name: values[start:end] for name, values in found.outputs.items()},
            found.late,
        )
        for start, end in parts
    ]


def _joined(columns: list[Column]) -> Column:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return pa.concat_arrays(columns)
