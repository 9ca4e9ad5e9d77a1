# SPDX-License-Identifier: Apache-2.0
"""Infer requests as raw bytes: measured before anything is decoded, decoded a slice at a time.

The native splitter takes the values of all tensors out of a request. The head that is left is
short and decoded first; names, shapes and counts are checked with it. Only then are values
decoded, `SLICE` at a time: threads that wait for the interpreter get it in between.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic_core import from_json

from hotbed import _core
from hotbed.errors import DataError, Overloaded
from hotbed.serving.threads import DaemonThreads

SLICE = 4096  # values decoded at a time
ASIDE_BYTES = 64 << 10  # longer requests are read on a thread
_HEAD_BYTES = 64 << 10  # of a head
_INPUT_BYTES = 1 << 10  # on top for each input
_READS = 2  # long requests that are read at the same time
_WAITING = 64  # that wait, or are read
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """How much a request may hold.

    `inputs`: tensors. `rows`: candidates. `list_length`: values of a candidate in one column.
    `body_bytes`: of the request.
    """

    inputs: int = 1024
    rows: int = 4096
    list_length: int = 1024
    body_bytes: int = 1 << 20

    @property
    def head_bytes(self) -> int:
        """Of a request without the values of its tensors."""
        return _HEAD_BYTES + self.inputs * _INPUT_BYTES


class Undecoded(ABC):
    """Values of a tensor that are not decoded yet. `entries`: how many there are; of nested lists
    an empty one counts as one."""

    __slots__ = ()
    entries: int

    @abstractmethod
    def slices(self) -> Iterable[Any]:
        """Decode the values, at most about `SLICE` at a time. Raises DataError for wrong ones."""


class Part(NamedTuple):
    """Where values of input number `input` lie. `cuts`: commas at which they can be divided."""

    input: int
    start: int
    end: int
    entries: int
    cuts: Sequence[int]


class JsonValues(Undecoded):
    """A JSON value, which is `part` of `body`."""

    __slots__ = ("_body", "_part", "entries")

    def __init__(self, body: bytes, part: Part) -> None:
        self.entries = part.entries
        self._body = body
        self._part = part

    def slices(self) -> Iterable[Any]:
        part = self._part
        if not part.cuts:
            return (read_json(self._body[part.start : part.end]),)
        begins = [part.start + 1, *(cut + 1 for cut in part.cuts)]
        ends = [*part.cuts, part.end - 1]
        places = zip(begins, ends, strict=True)
        return (read_json(b"[%b]" % self._body[begin:end]) for begin, end in places)


@dataclass(frozen=True)
class Divided:
    """A request whose head is short enough. `parts`: values; `raw`: raw contents of gRPC."""

    head: bytes
    parts: Sequence[Part]
    raw: Sequence[Part]


def divide_json(body: bytes, bounds: Bounds) -> Divided:
    """Divide a request in JSON; its head has the number of a part in the place of each `data`.

    Raises DataError for more inputs or a longer head than `bounds` allow.
    """
    return _divided(_core.split_json(body, bounds.inputs, bounds.head_bytes, SLICE), bounds)


def divide_message(message: bytes, bounds: Bounds) -> Divided:
    """As `divide_json`, of a ModelInferRequest; its head is such a message, without contents.

    Raises DataError for other bytes, too.
    """
    try:
        split = _core.split_message(message, bounds.inputs, bounds.head_bytes, SLICE)
    except ValueError as error:
        raise DataError(
            f"the request: expected a ModelInferRequest, got {len(message)} other bytes. "
            "Send the message as protobuf wrote it, without compression or a frame."
        ) from error
    return _divided(split, bounds)


def _divided(split: tuple[Any, ...], bounds: Bounds) -> Divided:
    head, num_inputs, parts, raw = split
    if max(num_inputs, len(raw)) > bounds.inputs:
        raise DataError(
            f"inputs: expected at most {bounds.inputs}, the columns of the model, got more. "
            "Send each column of the model once, and no others."
        )
    if head is None:
        raise DataError(
            f"the request: expected at most {bounds.head_bytes} bytes beside the values of its "
            "tensors, got more. Send names, shapes and parameters of the model's inputs only."
        )
    return Divided(head, list(map(Part._make, parts)), list(map(Part._make, raw)))


def read_json(text: bytes) -> Any:
    """A JSON value. Raises DataError for anything else."""
    try:
        return from_json(text)
    except ValueError as error:
        problem = f"the body is not JSON — {error}"
        raise DataError(f"{problem} — send what the protocol asks for") from error


class Readers:
    """Threads for requests that take long to read, so that the loop answers others meanwhile."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(_READS, "hotbed-read")
        self._waiting = 0

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` makes of a request of `size` bytes; of a long one on a thread.

        Raises Overloaded where too many long ones wait.
        """
        if size <= ASIDE_BYTES:
            return work()
        if self._waiting >= _WAITING:
            raise Overloaded(
                f"too many long requests — received one of {size} bytes "
                f"while {self._waiting} wait to be read — try again later"
            )
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(work))
        finally:
            self._waiting -= 1
