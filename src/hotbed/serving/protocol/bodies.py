# SPDX-License-Identifier: Apache-2.0
"""Infer requests as raw bytes: measured before anything is decoded, decoded a slice at a time.

The native splitter takes the values of all tensors out of a request. The remaining head is short
and is decoded first; names, shapes and counts are checked with it. Only then are values decoded,
`SLICE` at a time: between slices, other threads get the interpreter.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from hotbed import _core
from hotbed.errors import DataError, Overloaded
from hotbed.serving.threads import DaemonThreads

SLICE = 4096  # values decoded at a time
ASIDE_BYTES = 64 << 10  # longer requests are read on a thread
_HEAD_BYTES = 64 << 10  # the longest head without inputs
_INPUT_BYTES = 1 << 10  # added for each input
_READS = 2  # long requests that are read at the same time
_WAITING = 64  # long requests that wait or are read
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The most that a request may hold.

    Args:
        inputs: number of tensors.
        rows: number of candidates.
        list_length: values of a candidate in one column.
        body_bytes: size of the body.
    """

    inputs: int = 1024
    rows: int = 4096
    list_length: int = 1024
    body_bytes: int = 1 << 20

    @property
    def head_bytes(self) -> int:
        """The size of a request without the values of its tensors."""
        return _HEAD_BYTES + self.inputs * _INPUT_BYTES


class Undecoded(ABC):
    """Values of a tensor that are not decoded yet.

    `entries`: number of values; in nested lists, an empty list counts as one.
    """

    __slots__ = ()
    entries: int

    @abstractmethod
    def slices(self) -> Iterable[Any]:
        """Decode the values, about `SLICE` at a time. Raises DataError for wrong values."""


class ValueSpan(NamedTuple):
    """The place of values of input number `input`. `cuts`: commas at which they can be split."""

    input: int
    start: int
    end: int
    entries: int
    cuts: Sequence[int]


class JsonValues(Undecoded):
    """The JSON value at `span` of `body`."""

    __slots__ = ("_body", "_span", "entries")

    def __init__(self, body: bytes, span: ValueSpan) -> None:
        self.entries = span.entries
        self._body = body
        self._span = span

    @property
    def has_booleans(self) -> bool:
        """Whether `true` or `false` stands among the values. In text it may mean something else."""
        start = self._span.start
        end = self._span.end
        find = self._body.find
        return find(b"true", start, end) >= 0 or find(b"false", start, end) >= 0

    def integers(self) -> NDArray[np.int64] | None:
        """Return a flat list of whole numbers; None if the values are something else."""
        span = self._span
        return _core.json_integers(self._body, span.start, span.end, span.entries)

    def slices(self) -> Iterable[Any]:
        span = self._span
        if not span.cuts:
            return (read_json(self._body[span.start : span.end], span.start),)
        begins = [span.start + 1, *(cut + 1 for cut in span.cuts)]
        ends = [*span.cuts, span.end - 1]
        places = zip(begins, ends, strict=True)
        return (read_json(b"[%b]" % self._body[begin:end], begin) for begin, end in places)


@dataclass(frozen=True)
class DividedRequest:
    """A request with its values taken out.

    Attributes:
        head: the request without its values.
        spans: the places of typed values.
        raw_sizes: the bytes of each of the raw contents of gRPC.
        raw: the raw contents, one after the other.
    """

    head: bytes
    spans: Sequence[ValueSpan]
    raw_sizes: Sequence[int] = ()
    raw: bytes = b""


def divide_json(body: bytes, bounds: Bounds) -> DividedRequest:
    """Take the values out of a request in JSON.

    In the head, each `data` is replaced by the number of its span.

    Raises:
        DataError: the request has more inputs or a longer head than `bounds` allow.
    """
    head, num_inputs, places = _core.split_json(body, bounds.inputs, bounds.head_bytes, SLICE)
    _check_head(head, num_inputs, bounds)
    return DividedRequest(head, [ValueSpan(*place) for place in places])


def divide_message(message: bytes, bounds: Bounds) -> DividedRequest:
    """Take the values out of a ModelInferRequest; the head is such a message without contents.

    Raises:
        DataError: `message` is not a ModelInferRequest, or it has more inputs or a longer head than
            `bounds` allow.
    """
    try:
        split = _core.split_message(message, bounds.inputs, bounds.head_bytes, SLICE)
    except ValueError as error:
        raise DataError(
            f"the request: expected a ModelInferRequest, got {len(message)} other bytes. "
            "Send the message as protobuf wrote it, without compression or a frame."
        ) from error
    head, num_inputs, places, raw_sizes, raw = split
    _check_head(head, max(num_inputs, len(raw_sizes)), bounds)
    return DividedRequest(head, [ValueSpan(*place) for place in places], raw_sizes, raw)


def _check_head(head: bytes | None, num_inputs: int, bounds: Bounds) -> None:
    """Raise DataError if a request has more inputs or a longer head than `bounds` allow."""
    if num_inputs > bounds.inputs:
        raise DataError(
            f"inputs: expected at most {bounds.inputs}, the columns of the model, got more. "
            "Send each column of the model once, and no others."
        )
    if head is None:
        raise DataError(
            f"the request: expected at most {bounds.head_bytes} bytes beside the values of its "
            "tensors, got more. Send names, shapes and parameters of the model's inputs only."
        )


def read_json(text: bytes, start: int | None = None) -> Any:
    """Return the JSON value in `text`. Raises DataError for other text.

    `start`: the place of `text` in its body; None = it is the body.
    """
    try:
        return from_json(text)
    except ValueError as error:
        place = "" if start is None else f" in the values that begin at byte {start}"
        raise DataError(
            f"the body is not JSON: {error}{place}. Send what the Open Inference Protocol "
            "specifies."
        ) from error


class Readers:
    """Threads that read long requests, so that the loop answers others meanwhile."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(_READS, "hotbed-read")
        self._waiting = 0

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads a request of `size` bytes.

        `work` runs on a thread if the request is longer than `ASIDE_BYTES`.

        Raises:
            Overloaded: too many long requests wait.
        """
        if size <= ASIDE_BYTES:
            return work()
        if self._waiting >= _WAITING:
            raise Overloaded(
                f"too many long requests: {self._waiting} wait to be read, got another of {size} "
                "bytes. Try again later."
            )
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(work))
        finally:
            self._waiting -= 1
