# SPDX-License-Identifier: Apache-2.0
"""Requests of all clients, gathered into batches of bounded size, wait and number."""

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

from hotbed import checks
from hotbed.errors import HotbedError, Overloaded
from hotbed.serving.process import DAY
from hotbed.serving.server.bodies import Bounds
from hotbed.serving.server.protocol import Column
from hotbed.serving.session import InferenceSession, Scores

log = logging.getLogger("hotbed.serving")
_ALONE_ROWS = 256  # candidates that are scored on the loop, which reads nothing meanwhile
_ALONE_VALUES = 8192  # values of lists that are scored on the loop
_LEAST_BODY_BYTES = 1 << 20
_VALUE_BYTES = 32  # bytes of a body for each candidate and column


@dataclass(frozen=True)
class Limits:
    """The load that a server accepts.

    Args:
        batch_rows: Candidates that are scored together, and the most of one request.
        batch_seconds: How long the first request of a batch may wait for others; 0 = batch only
            requests that already wait.
        queue_rows: Candidates that may wait; a request beyond that is rejected at once.
        body_bytes: The largest body of a request. None = 32 bytes for each of `batch_rows`
            candidates and each column of the model, at least 1 MiB.
        list_length: Values that a candidate may have in one column.
    """

    batch_rows: int = 4096
    batch_seconds: float = 0.0
    queue_rows: int = 65_536
    body_bytes: int | None = None
    list_length: int = 1024

    def __post_init__(self) -> None:
        checks.at_least("Limits.batch_rows", self.batch_rows, 1)
        checks.between("Limits.batch_seconds", self.batch_seconds, 0, DAY)
        checks.at_least("Limits.queue_rows", self.queue_rows, 0)
        checks.at_least("Limits.body_bytes", self.body_bytes, 1)
        checks.at_least("Limits.list_length", self.list_length, 1)

    def bounds(self, num_columns: int) -> Bounds:
        """Return the bounds of a request to a model of `num_columns` columns."""
        body_bytes = self.body_bytes
        if body_bytes is None:
            body_bytes = max(_LEAST_BODY_BYTES, self.batch_rows * num_columns * _VALUE_BYTES)
        return Bounds(num_columns, self.batch_rows, self.list_length, body_bytes)


class Request:
    """n candidates: `columns` [n], and `context` columns [1] that hold for each of them.

    `future` belongs to the loop that made the request. Its result is `write(scores)`, or an error.
    If it is cancelled before the request is scored, the request is dropped.
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
        """Number of candidates; at least 1, so that the queue stays bounded."""
        return max(1, self.num_rows)

    @property
    def is_small(self) -> bool:
        """Whether the request may be scored on the loop."""
        columns = (*self.columns.values(), *self.context.values())
        lists = [column for column in columns if isinstance(column, pa.LargeListArray)]
        num_values = sum(len(column.values) for column in lists)
        return self.num_rows <= _ALONE_ROWS and num_values <= _ALONE_VALUES

    def settle(self, scores: Scores | Exception) -> None:
        """Set the result of the future, unless it is done; called on its loop."""
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
            (name, _kind(column))
            for columns in (self.columns, self.context)
            for name, column in columns.items()
        }

    def spread(self, name: str) -> Column:
        """Return a column [n]; context is repeated for each candidate."""
        if name not in self.context:
            return self.columns[name]
        value = self.context[name]
        if isinstance(value, np.ndarray):
            return np.repeat(value, self.num_rows)
        return value.take(pa.array(np.zeros(self.num_rows, np.int64)))


def _kind(column: Column) -> str:
    if isinstance(column, np.ndarray):
        return column.dtype.str
    return str(column.type)


class Batcher:
    """Scores requests, alone on the loop or in batches on a thread.

    A single small request is scored at once, on the loop. Requests that arrive together, or while
    others are scored, are scored on a thread, as one batch if they fit.

    Args:
        session: Returns the session of the version that is served now. It is called once for each
            batch, so that no answer mixes two versions.
        limits: Size and wait of a batch, and size of the queue.
        scored: Called after each batch with its requests, and when scoring started and ended
            (`time.perf_counter`).
        alone: Whether requests may be scored on the loop; False if scoring may wait for rows.
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
        self._arrived = list[Request]()  # in this turn of the loop; used by the loop only
        self._busy = False  # whether the thread scores a batch
        self._waiting = deque[Request]()
        self._rows = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hotbed-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Number of candidates that wait now."""
        return self._rows

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Overloaded if too many candidates wait, or the server stops."""
        most = max(self._limits.queue_rows, request.size)
        with self._changed:
            if self._closed:
                raise Overloaded(
                    f"too many requests: the server stops, got {request.size} candidates. "
                    "Try again later."
                )
            if self._rows + request.size > most:
                raise Overloaded(
                    f"too many requests: {self._rows} candidates wait, got {request.size} more. "
                    "Try again later."
                )
            self._rows += request.size
        if not self._arrived:
            # runs after everything that this turn of the loop reads
            request.future.get_loop().call_soon(self._turn)
        self._arrived.append(request)

    def close(self) -> None:
        """Score the requests that wait, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _turn(self) -> None:
        """Score a single small request here; leave all others to the thread."""
        arrived = self._arrived
        self._arrived = []
        with self._changed:
            alone = self._alone and len(arrived) == 1 and not self._busy and arrived[0].is_small
            if not self._closed and (self._waiting or not alone):
                self._waiting.extend(arrived)
                self._changed.notify()
                return
            self._rows -= sum(request.size for request in arrived)
        for request in arrived:
            _settle(self._score([request]))

    def _work(self) -> None:
        while batch := self._next():
            batch = [request for request in batch if not request.future.cancelled()]
            if batch:
                results = self._score(batch)
                loop = batch[0].future.get_loop()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(_settle, results)

    def _next(self) -> list[Request]:
        """Wait for requests, and return those of one batch; an empty list at the end."""
        with self._changed:
            self._busy = False
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            self._busy = True
            first = self._waiting.popleft()
            batch = [first]
            rows = first.size
            deadline = first.asked + self._limits.batch_seconds
            while rows < self._limits.batch_rows:
                if not self._waiting:
                    left = deadline - time.perf_counter()
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
            scores = _scores(self._session(), batch)
        except Exception as error:
            if len(batch) > 1:  # scored one by one, only the request at fault fails
                return [result for request in batch for result in self._score([request])]
            if not isinstance(error, HotbedError):
                log.exception("a request could not be scored")
            return [(batch[0], error)]
        self._scored(batch, started, time.perf_counter())
        return list(zip(batch, scores, strict=True))


def _settle(results: list[tuple[Request, Scores | Exception]]) -> None:
    for request, scores in results:
        request.settle(scores)


def _scores(session: InferenceSession, batch: list[Request]) -> list[Scores]:
    first = batch[0]
    if len(batch) == 1:
        return [session.ask(first.columns, first.context)]
    names = [*first.columns, *first.context]
    scores = session.ask(
        {name: _joined([request.spread(name) for request in batch]) for name in names}
    )
    ends = np.cumsum([request.num_rows for request in batch]).tolist()
    parts = zip([0, *ends], ends, strict=False)
    return [
        Scores(
            scores.version,
            {name: values[start:end] for name, values in scores.outputs.items()},
            scores.late,
        )
        for start, end in parts
    ]


def _joined(columns: list[Column]) -> Column:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return pa.concat_arrays(columns)
