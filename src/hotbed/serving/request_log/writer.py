# SPDX-License-Identifier: Apache-2.0
"""The queue of answered requests and the thread that writes them."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pyarrow as pa

from hotbed.errors import HotbedError
from hotbed.serving.request_log.records import (
    WHOLE,
    Anonymity,
    AnsweredRequest,
    alike_requests,
    records_of,
)

log = logging.getLogger("hotbed.serving")
_REQUESTS_AT_ONCE = 512
_CRC_VALUES = 1 << 32
_PREFIX_BYTES = 6
_CLOSE_SECONDS = 10.0


class LogSink(Protocol):
    """Where the rows of a log go."""

    def append(self, rows: pa.RecordBatch) -> None:
        """Write rows. Raises OSError or HotbedError if they are lost."""

    def rotate(self, most_bytes: int | None) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedPart:
    """The share of requests that a log holds, what of them it does not, and its bytes."""

    sample: float
    anonymity: Anonymity
    most_bytes: int | None = None  # None: those of the sink


class RequestLogWriter:
    """Writes the answered requests of a model on a thread of its own.

    An answer never waits for it: if the queue is full or the sink fails, requests are dropped and
    counted, and the next record says how many.

    Args:
        model: name of the model.
        open_sink: opens the sink, on the thread; called again after an error.
        sample: the share of requests that is written, chosen by a hash of the request's id.
        queue_bytes: how much memory requests that wait may keep.
        flush_seconds: how long a request waits at most before it is written.
        anonymity: what the log does not hold.

    Attributes:
        logged, dropped: number of requests.
    """

    def __init__(
        self,
        model: str,
        open_sink: Callable[[], LogSink],
        *,
        sample: float = 1.0,
        queue_bytes: int = 64 << 20,
        flush_seconds: float = 1.0,
        anonymity: Anonymity = WHOLE,
    ) -> None:
        self._model = model
        self._open_sink = open_sink
        self._sink: LogSink | None = None
        self._queue_bytes = queue_bytes
        self._flush_seconds = flush_seconds
        self._settings = LoggedPart(sample, anonymity)
        self._part = self._settings
        self._queue = deque[tuple[AnsweredRequest, int]]()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._problem = ""
        self.logged = 0
        self.dropped = 0
        self._untold = 0  # dropped requests that no record counts yet
        self._thread = threading.Thread(target=self._work, name="hotbed-log", daemon=True)
        self._thread.start()

    def wants(self, request_id: str) -> bool:
        """Return whether a request is in the sample."""
        return in_sample(request_id, self._part.sample)

    def restrict(
        self,
        sample: float | None,
        omit: Sequence[str],
        hash: Sequence[str],
        most_bytes: int | None = None,
    ) -> None:
        """Log another share of the requests from now on; None = as at the start.

        Args:
            sample: the share.
            omit, hash: columns that are left out or hashed beside those at the start.
            most_bytes: of the closed parts.
        """
        share = self._settings.sample if sample is None else sample
        self._part = LoggedPart(share, self._settings.anonymity.stricter(omit, hash), most_bytes)

    def add(self, request: AnsweredRequest) -> None:
        """Queue a request, or drop and count it; one without candidates has no rows."""
        if not request.num_rows:
            return
        request.anonymity = self._part.anonymity
        num_bytes = request.num_bytes
        with self._lock:
            if self._closed or self._queued_bytes + num_bytes > self._queue_bytes:
                self._drop(1)
                return
            self._queued_bytes += num_bytes
            self._queue.append((request, num_bytes))
            is_full = 2 * self._queued_bytes > self._queue_bytes
        if is_full:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, and end the thread. A sink that hangs is abandoned."""
        with self._lock:
            self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _drop(self, num_requests: int) -> None:
        self.dropped += num_requests
        self._untold += num_requests

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(self._flush_seconds)
            self._wake.clear()
            self._write_queue()
            self._try("rotated", lambda sink: sink.rotate(self._part.most_bytes))
        self._write_queue()
        self._try("closed", lambda sink: sink.close())

    def _write_queue(self) -> None:
        while batch := self._next_batch():
            self._write(batch)

    def _next_batch(self) -> list[AnsweredRequest]:
        """Return requests that wait, the first of which counts those that were dropped."""
        batch = list[AnsweredRequest]()
        with self._lock:
            while self._queue and len(batch) < _REQUESTS_AT_ONCE:
                request, num_bytes = self._queue.popleft()
                self._queued_bytes -= num_bytes
                batch.append(request)
            if batch:
                batch[0].dropped = self._untold
                self._untold = 0
        return batch

    def _write(self, batch: Sequence[AnsweredRequest]) -> None:
        for alike in alike_requests(batch):
            write = partial(self._append, alike)
            if self._try("written", write):
                self.logged += len(alike)
                continue
            with self._lock:
                self._drop(len(alike))
                self._untold += sum(request.dropped for request in alike)

    def _append(self, alike: Sequence[AnsweredRequest], sink: LogSink) -> None:
        sink.append(records_of(self._model, alike))

    def _try(self, what: str, act: Callable[[LogSink], None]) -> bool:
        """Act on the sink, and return whether that went well; a problem is logged once."""
        try:
            self._sink = self._sink or self._open_sink()
            act(self._sink)
        except Exception as error:  # the thread goes on
            if str(error) != self._problem:
                is_known = isinstance(error, (OSError, HotbedError))
                log.error(
                    "model %s: the request log cannot be %s, requests are dropped and counted: %s",
                    self._model,
                    what,
                    error,
                    exc_info=None if is_known else error,
                )
            self._problem = str(error)
            return False
        if self._problem and what == "written":
            log.info("model %s: the request log is written again", self._model)
            self._problem = ""
        return True


def in_sample(request_id: str, share: float) -> bool:
    """Return whether a request is in a share of all of them, the same one in each log."""
    return zlib.crc32(request_id.encode()) < share * _CRC_VALUES


class RequestIds:
    """Names requests.

    Attributes:
        is_logging: whether a log needs a name for each of them.
    """

    def __init__(self, *, is_logging: bool) -> None:
        self.is_logging = is_logging
        self._prefix = secrets.token_hex(_PREFIX_BYTES)  # no other process has it
        self._numbers = itertools.count()

    def name(self, header: str, body: str) -> str:
        """Return the name in the header of a request; "" = it has none.

        A log takes the name in its body instead, or a new one.
        """
        if not self.is_logging:
            return header
        return header or body or f"{self._prefix}-{next(self._numbers):x}"
