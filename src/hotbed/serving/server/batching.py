# SPDX-License-Identifier: Apache-2.0
"""Requests of all clients, gathered into batches: bounded in rows, in waiting and in number."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import HotbedError, Overloaded
from hotbed.serving.session import InferenceSession

log = logging.getLogger("hotbed.serving")


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    `batch_rows`: candidates that are scored together, and the most that one request may bring. `batch_seconds`: how long
    the first request of a batch may wait for others; 0 = gather only what waits anyway. `queue_rows`: candidates that may
    wait; what comes on top is refused at once. `body_bytes`: of one request.
    """

    batch_rows: int = 4096
    batch_seconds: float = 0.0
    queue_rows: int = 65_536
    body_bytes: int = 16 << 20


@dataclass(frozen=True)
class Answer:
    """Predictions, float32 [n] by output, all of one `version` of a model."""

    version: int
    outputs: Mapping[str, NDArray[np.float32]]


@dataclass
class Request:
    """Columns of n candidates, `context` columns with one value each, and who is told: `done` gets an Answer or an error, once,
    on another thread. A request that is `cancelled` before it is scored is dropped."""

    columns: pa.RecordBatch
    context: Mapping[str, pa.Array]
    done: Callable[[Answer | Exception], None]
    cancelled: bool = False
    asked: float = field(default_factory=time.perf_counter)

    @property
    def num_rows(self) -> int:
        """Candidates; a request without any counts as one, so that the queue stays bounded."""
        return max(1, int(self.columns.num_rows))

    def fits(self, other: Request) -> bool:
        """Whether both have the same columns, of the same types."""
        if self.context.keys() == other.context.keys() and self.columns.schema.equals(other.columns.schema):
            return all(value.type == other.context[name].type for name, value in self.context.items())
        return self._kinds() == other._kinds()

    def _kinds(self) -> set[tuple[str, str]]:
        found = {
            (name, str(kind)) for name, kind in zip(self.columns.schema.names, self.columns.schema.types, strict=True)
        }
        return found | {(name, str(value.type)) for name, value in self.context.items()}

    def spread(self, names: list[str]) -> list[pa.Array]:
        """The columns by name, context repeated for each candidate."""
        first = pa.array(np.zeros(self.columns.num_rows, np.int64))
        return [self.context[name].take(first) if name in self.context else self.columns.column(name) for name in names]


class Batcher:
    """Scores requests on a thread of its own, many at once where many wait.

    `session`: gives the session of the version that is served now; asked once a batch, so that an answer never mixes two.
    `scored`: told of each batch its requests, rows and seconds.
    """

    def __init__(
        self, session: Callable[[], InferenceSession], limits: Limits, scored: Callable[[int, int, float], None]
    ) -> None:
        self._session, self._limits, self._scored = session, limits, scored
        self._waiting, self._rows = deque[Request](), 0
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="hotbed-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Candidates that wait now."""
        return self._rows

    def submit(self, request: Request) -> None:
        """Have a request scored. Raises Overloaded where too many wait."""
        with self._changed:
            if self._closed or self._rows + request.num_rows > max(self._limits.queue_rows, request.num_rows):
                why = "the server stops" if self._closed else f"{self._rows} candidates wait"
                raise Overloaded(
                    f"too many requests — received {request.num_rows} candidates while {why} — try again later"
                )
            self._rows += request.num_rows
            self._waiting.append(request)
            self._changed.notify()

    def close(self) -> None:
        """Score what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            batch = [request for request in batch if not request.cancelled]
            if batch:
                self._score(batch)

    def _next(self) -> list[Request]:
        """Requests that are scored together; none at the end."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            batch, rows = [first := self._waiting.popleft()], first.num_rows
            until = first.asked + self._limits.batch_seconds
            while rows < self._limits.batch_rows:
                if not self._waiting:
                    left = until - time.perf_counter()
                    if left <= 0 or self._closed or not self._changed.wait(left):
                        break
                    continue
                other = self._waiting[0]
                if rows + other.num_rows > self._limits.batch_rows or not other.fits(first):
                    break
                batch.append(self._waiting.popleft())
                rows += other.num_rows
            self._rows -= rows
            return batch

    def _score(self, batch: list[Request]) -> None:
        started, session = time.perf_counter(), self._session()
        try:
            found = _scores(session, batch)
        except Exception as error:
            if len(batch) > 1:  # whose fault it was shows when each is alone
                for request in batch:
                    self._score([request])
                return
            if not isinstance(error, HotbedError):
                log.exception("a request could not be scored")
            batch[0].done(error)
            return
        version, start = session.model.version, 0
        self._scored(len(batch), sum(request.columns.num_rows for request in batch), time.perf_counter() - started)
        for request in batch:
            end = start + request.columns.num_rows
            request.done(Answer(version, {name: values[start:end] for name, values in found.items()}))
            start = end


def _scores(session: InferenceSession, batch: list[Request]) -> Mapping[str, NDArray[np.float32]]:
    first = batch[0]
    if len(batch) == 1:
        found = session.predict(first.columns, {name: value[0].as_py() for name, value in first.context.items()})
    else:
        names = sorted({*first.columns.schema.names, *first.context})
        columns = zip(*(request.spread(names) for request in batch), strict=True)
        found = session.predict(pa.RecordBatch.from_arrays([pa.concat_arrays(column) for column in columns], names))
    return found if isinstance(found, dict) else {session.model.graph["outputs"][0]: found}
