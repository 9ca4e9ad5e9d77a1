# SPDX-License-Identifier: Apache-2.0
"""Requests of all clients, gathered into batches of bounded size, wait and number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from hotbed.errors import HotbedError, NotServed, Overloaded
from hotbed.serving.kept import kept_part
from hotbed.serving.protocol.bodies import ASIDE_BYTES, Bounds, Readers
from hotbed.serving.protocol.inputs import Candidates, ModelInputs
from hotbed.serving.protocol.tensors import ColumnValues
from hotbed.serving.server.access import Trail, being_scored
from hotbed.serving.server.options import ServerLimits
from hotbed.serving.session import InferenceSession, Scores
from hotbed.serving.stores.base import ModelVersion

log = logging.getLogger("hotbed.serving")
T = TypeVar("T")
_LOOP_ROWS = (
    256  # candidates of a request that is scored on the loop, which reads nothing meanwhile
)
_LOOP_VALUES = 8192  # values of its lists
_TEXT_BYTES = 8  # of a value that text may be split into
_LOOP_SECONDS = 0.001  # of several requests that are scored on the loop
_NEWEST_SHARE = 0.1  # of the newest batch in the mean time of a candidate


@dataclass(frozen=True)
class ServedVersion:
    """A version that answers, with all that requests need; replaced as a whole.

    `route`: why it answers, for answers; "" = no rule says so.
    """

    session: InferenceSession
    inputs: ModelInputs
    bounds: Bounds
    since: float = field(default_factory=time.time)
    route: str = ""

    @property
    def version(self) -> ModelVersion:
        """The version: rows and graph."""
        return self.session.model


@dataclass(frozen=True)
class DecodedRequest(Generic[T]):
    """The candidates of a request, and a function that turns their scores into an answer.

    `model` and `version`: as the client names them; "" = any version. `request_id`: the name of the
    request in the log; "" = it is not logged. `trail`: what is noted about it; None = nothing.
    """

    candidates: Candidates
    write: Callable[[Scores], T]
    model: str = ""
    version: str = ""
    request_id: str = ""
    trail: Trail | None = None


class QueuedRequest:
    """Candidates that wait to be scored.

    `size`: their number, and at least 1, so that the queue stays bounded. `most_kept_values`: at
    most how many values of histories the model adds.

    `future` belongs to the loop that made the request. Its result is the answer, or an error: also
    if another version than that of the request scored it. If it is cancelled before the request is
    scored, the request is dropped.
    """

    def __init__(self, decoded: DecodedRequest[Any], most_kept_values: int = 0) -> None:
        self.most_kept_values = most_kept_values
        self.num_rows = decoded.candidates.num_rows
        self.size = max(1, self.num_rows)
        self.columns = decoded.candidates.columns
        self.context = decoded.candidates.context
        self.request_id = decoded.request_id
        self.trail = decoded.trail
        if self.trail is not None:
            self.trail.decoded(self.request_id, self.num_rows)
        self.version = decoded.version
        self._decoded = decoded
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queued = time.perf_counter()

    @property
    def candidates(self) -> Candidates:
        """What the request asks to score."""
        return self._decoded.candidates

    @property
    def is_small(self) -> bool:
        """Whether the request has few candidates and values."""
        return self.num_rows <= _LOOP_ROWS and self.num_values <= _LOOP_VALUES

    @property
    def is_quick(self) -> bool:
        """Whether the request may be scored on the loop."""
        return self.is_small and self.num_values + self.most_kept_values <= _LOOP_VALUES

    @property
    def num_values(self) -> int:
        """About how many values its lists and texts have over all candidates."""
        num_values = sum(map(_values_of, self.columns.values()))
        return num_values + self.num_rows * sum(map(_values_of, self.context.values()))

    def takes(self, scores: Scores) -> bool:
        """Whether the request may be answered with scores of their version."""
        return self._decoded.version in ("", str(scores.version))

    def resolve(self, scores: Scores | Exception) -> None:
        """Set the result of the future, unless it is done; called on its loop."""
        if self.future.done():
            return
        decoded = self._decoded
        try:
            if isinstance(scores, Exception):
                raise scores
            if not self.takes(scores):
                raise NotServed(
                    f"model {decoded.model!r}: version {decoded.version} was replaced, got "
                    f"{scores.version}. Send the request again."
                )
            if self.trail is not None:
                self.trail.version = scores.version
                self.trail.route = scores.route
            self.future.set_result(decoded.write(scores))
        except Exception as error:
            self.future.set_exception(error)

    def fits(self, other: QueuedRequest) -> bool:
        """Whether both have the same columns, of the same types."""
        return self._types() == other._types()

    def _types(self) -> set[tuple[str, str]]:
        types = set()
        for columns in (self.columns, self.context):
            for name, values in columns.items():
                types.add((name, _type_of(values)))
        return types

    def spread(self, name: str) -> ColumnValues:
        """Return a column [n]; context is repeated for each candidate."""
        if name not in self.context:
            return self.columns[name]
        value = self.context[name]
        if isinstance(value, np.ndarray):
            return np.repeat(value, self.num_rows)
        return value.take(pa.array(np.zeros(self.num_rows, np.int64)))


NAMED = "version"
"""Why a version answers a request that names it."""
Decode: TypeAlias = Callable[[ServedVersion], DecodedRequest[T]]
"""Decodes a request for the version that is served."""
Scored: TypeAlias = tuple[QueuedRequest, Scores]
Result: TypeAlias = tuple[QueuedRequest, Scores | Exception]


def _values_of(values: ColumnValues) -> int:
    """Return the number of values of lists, and about how many a text may be split into."""
    if isinstance(values, np.ndarray):
        return 0
    if isinstance(values, pa.LargeListArray):
        return len(values.values)
    return int(values.nbytes) // _TEXT_BYTES


def _type_of(values: ColumnValues) -> str:
    if isinstance(values, np.ndarray):
        return values.dtype.str
    return str(values.type)


class Batcher:
    """Scores requests, alone on the loop or in batches on a thread.

    A single small request is scored at once, on the loop, and so are small requests that arrive
    together if that takes less than a millisecond: to wake a thread takes longer. Others, and
    requests that arrive while others are scored, are scored on a thread. Requests that fit are one
    batch.

    Args:
        served: returns the version that is served now. It is called once for each batch, so that no
            answer mixes two versions.
        limits: size and wait of a batch, and size of the queue.
        readers: threads that decode long requests.
        scored: called after each batch with the version that scored it, its requests and their
            scores, and when scoring started and ended (`time.perf_counter`).
        failed: called with the version that could not score a request.
        choose: returns the queue of a request, if it is another one.
        on_loop: whether requests may be scored on the loop; False if scoring may wait for rows.
    """

    def __init__(
        self,
        served: Callable[[], ServedVersion],
        limits: ServerLimits,
        readers: Readers,
        scored: Callable[[ServedVersion, Sequence[Scored], float, float], None],
        failed: Callable[[ServedVersion], None] = lambda served: None,
        choose: Callable[[QueuedRequest], Batcher | None] = lambda request: None,
        *,
        on_loop: bool = True,
    ) -> None:
        self._served = served
        self._limits = limits
        self._readers = readers
        self._scored = scored
        self._failed = failed
        self._choose = choose
        self._on_loop = on_loop and limits.batch_seconds == 0
        self._arrived = list[QueuedRequest]()  # in this turn of the loop; used by the loop only
        self._busy = False  # whether the thread scores a batch
        self._row_seconds = 0.0  # processor time of a candidate, a mean of the newest batches
        self._waiting = deque[QueuedRequest]()
        self._rows = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hotbed-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Number of candidates that wait now."""
        return self._rows

    def submit(
        self, num_bytes: int, decode: Decode[T], *, is_last: bool = False
    ) -> asyncio.Future[T]:
        """Decode a request, queue it, and return the future of its answer. Called on a loop.

        Args:
            num_bytes: bytes that `decode` decodes. If they are many, it runs on a thread.
            decode: returns the candidates for the version that is served.
            is_last: whether no other request of this turn of the loop follows. Then what has
                arrived is scored now if that is quick, and the future may be done.

        Raises:
            DataError, NotServed: `decode` raised it, or no version is loaded; at once, or as the
                error of the future.
            Overloaded: too many candidates wait, or the server stops; as above.
        """
        if num_bytes > ASIDE_BYTES:
            return asyncio.ensure_future(self._submit_long(num_bytes, decode))
        served = self._served()
        decoded = decode(served)
        request = QueuedRequest(decoded, served.inputs.most_kept_values(decoded.candidates))
        queue = self._choose(request) or self
        queue._admit(request.size)
        queue._arrived.append(request)
        if is_last:
            queue._take_arrived()
        elif len(queue._arrived) == 1:
            # runs after everything that this turn of the loop reads
            request.future.get_loop().call_soon(queue._take_arrived)
        return request.future

    def _admit(self, size: int) -> None:
        """Count candidates that are to wait. Raises Overloaded where there are too many."""
        with self._lock:
            if self._closed:
                raise Overloaded(
                    f"too many requests: the server stops, got {size} candidates. Try again later."
                )
            if self._rows + size > max(self._limits.queue_rows, size):
                raise Overloaded(
                    f"too many requests: {self._rows} candidates wait, got {size} more. "
                    "Try again later."
                )
            self._rows += size

    async def _submit_long(self, num_bytes: int, decode: Decode[T]) -> T:
        decoded = await self._readers.read(num_bytes, lambda: decode(self._served()))
        return await self.submit(0, lambda served: decoded)

    def close(self) -> None:
        """Score the requests that wait, then end the thread."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _take_arrived(self) -> None:
        """Score what is quick here; leave all else to the thread."""
        arrived = self._arrived
        if not arrived:  # the last one of them was known
            return
        self._arrived = []
        with self._lock:
            is_free = self._on_loop and not self._busy and not self._waiting
            if not self._closed and not (is_free and self._is_quick(arrived)):
                self._waiting.extend(arrived)
                self._changed.notify()
                return
            self._rows -= sum([request.size for request in arrived])
        for batch in self._batches(arrived):
            _resolve_all(self._score(batch))

    def _batches(self, arrived: Sequence[QueuedRequest]) -> Iterator[list[QueuedRequest]]:
        """Yield requests in batches of those that fit, in their order."""
        batch = list[QueuedRequest]()
        num_rows = 0
        for request in arrived:
            if batch and not self._may_join(batch[0], num_rows, request):
                yield batch
                batch = []
                num_rows = 0
            batch.append(request)
            num_rows += request.size
        yield batch

    def _is_quick(self, arrived: Sequence[QueuedRequest]) -> bool:
        """Whether requests may be scored on the loop."""
        if len(arrived) == 1:
            return arrived[0].is_quick
        num_rows = sum(request.size for request in arrived)
        is_short = num_rows * self._row_seconds <= _LOOP_SECONDS
        return is_short and all(request.is_quick for request in arrived)

    def _may_join(self, first: QueuedRequest, num_rows: int, following: QueuedRequest) -> bool:
        """Whether a request may join a batch of `num_rows` candidates that begins with `first`."""
        return num_rows + following.size <= self._limits.batch_rows and following.fits(first)

    def _work(self) -> None:
        """Score batches until the end; the function of the thread."""
        while batch := self._next_batch():
            batch = [request for request in batch if not request.future.cancelled()]
            if batch:
                results = self._score(batch)
                loop = batch[0].future.get_loop()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(_resolve_all, results)

    def _next_batch(self) -> list[QueuedRequest]:
        """Wait for requests, and return those of one batch; an empty list at the end."""
        with self._lock:
            self._busy = False
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            self._busy = True
            first = self._waiting.popleft()
            batch = [first]
            num_rows = first.size
            deadline = first.queued + self._limits.batch_seconds
            while num_rows < self._limits.batch_rows and self._wait_until(deadline):
                if not self._may_join(first, num_rows, self._waiting[0]):
                    break
                num_rows += self._waiting[0].size
                batch.append(self._waiting.popleft())
            self._rows -= num_rows
            return batch

    def _wait_until(self, deadline: float) -> bool:
        """Wait for a request, with the lock held; return whether there is one."""
        while not self._waiting:
            seconds = deadline - time.perf_counter()
            if seconds <= 0 or self._closed or not self._changed.wait(seconds):
                return False
        return True

    def _score(self, batch: list[QueuedRequest]) -> Sequence[Result]:
        """Score a batch; if that fails, each request of it by itself."""
        started = time.perf_counter()
        processor_started = time.thread_time()
        served = None
        try:
            served = self._served()
            session = served.session
            waited = started - batch[0].queued  # the first that came
            with being_scored([request.trail for request in batch]):
                if len(batch) == 1:
                    request = batch[0]
                    scores = [session.ask(request.columns, request.context, waited)]
                else:
                    scores = _split(session.ask(_join_requests(batch), waited=waited), batch)
        except Exception as error:
            if len(batch) > 1:  # scored one by one, only the request at fault fails
                return [result for request in batch for result in self._score([request])]
            if not isinstance(error, HotbedError):
                log.exception("a request could not be scored")
            if served is not None:
                self._failed(served)
            return [(batch[0], error)]
        if served.route:
            scores = [
                replace(each, route=NAMED if request.version else served.route)
                for request, each in zip(batch, scores, strict=True)
            ]
        results = list(zip(batch, scores, strict=True))
        self._scored(served, results, started, time.perf_counter())
        seconds = time.thread_time() - processor_started
        row_seconds = seconds / sum([request.size for request in batch])
        self._row_seconds += _NEWEST_SHARE * (row_seconds - self._row_seconds)
        return results


def _resolve_all(results: Sequence[Result]) -> None:
    for request, scores in results:
        request.resolve(scores)


def _join_requests(batch: Sequence[QueuedRequest]) -> dict[str, ColumnValues]:
    """Return the columns of all candidates of a batch."""
    first = batch[0]
    columns = dict[str, ColumnValues]()
    for name in (*first.columns, *first.context):
        parts = [request.spread(name) for request in batch]
        if isinstance(parts[0], np.ndarray):
            columns[name] = np.concatenate(parts)
        else:
            columns[name] = pa.concat_arrays(parts)
    return columns


def _split(scores: Scores, batch: Sequence[QueuedRequest]) -> list[Scores]:
    """Return the scores of each request of a batch."""
    parts: list[Scores] = []
    start = 0
    for request in batch:
        end = start + request.num_rows
        outputs = {name: values[start:end] for name, values in scores.outputs.items()}
        part = kept_part(scores.kept, start, end)
        parts.append(Scores(scores.version, outputs, scores.late, kept=part))
        start = end
    return parts
