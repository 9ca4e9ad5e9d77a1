# SPDX-License-Identifier: Apache-2.0
"""What a run gives an endless source, and the rows that a join holds open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.journal import Journal


class SavedRows(Protocol):
    """What a join holds open at a position, as it is saved."""

    @property
    def opened(self) -> Mapping[str, int]:
        """The number of rows that each log ever had."""
        ...

    @property
    def oldest(self) -> int:
        """The earliest time of an event that is still needed, in microseconds."""
        ...

    def batches(self, log: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a log that are still needed."""
        ...


class HeldRows(Protocol):
    """The rows that a join holds open while it is read."""

    def saved_at(self, state: Mapping[str, Any], since: Mapping[str, int] | None) -> SavedRows:
        """Return what was open at a position.

        Args:
            state: the position.
            since: `opened` of an earlier position, whose rows are left out; None = all rows.
        """
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """What the join counted so far, by name."""
        ...

    @property
    def watermark(self) -> int:
        """The watermark of the last turn, in microseconds."""
        ...

    @property
    def newest(self) -> Callable[[], Sequence[Mapping[str, int]]]:
        """Returns the newest event times by input and partition."""
        ...

    def levels(self) -> Mapping[str, int]:
        """Return how much is open now, and the bytes that it takes."""
        ...

    def release(self, state: Mapping[str, Any]) -> None:
        """Note that nobody will ask for a position before this one."""
        ...


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock of the seconds since now that stands still when `clock` is set back."""
    last = clock()
    seconds = 0.0

    def read() -> float:
        nonlocal last, seconds
        now = clock()
        seconds += max(0.0, now - last)
        last = now
        return seconds

    return read


@dataclass(frozen=True)
class Live:
    """What a run gives an endless source: where decisions and bad rows go, and the clock.

    Args:
        journal: the decisions.
        dead_letters: the rows that could not be read.
        tick_seconds: the source yields at least this often, so that its reader can stop.
        clock: returns seconds since 1970; tests replace it.
        decode: decodes the messages of topics on several processes, as `decode_messages` does
            here; None = they are decoded here.

    Example: `dataset.live = Live(Journal("run/journal"))` before the first batch is read.
    """

    journal: Journal = field(default_factory=Journal)
    dead_letters: DeadLetters = field(default_factory=DeadLetters)
    tick_seconds: float = 0.2
    clock: Callable[[], float] = time.time
    decode: Callable[[Any, Sequence[bytes], pa.Schema], Any] | None = None

    def now(self) -> int:
        """Return the clock in microseconds since 1970."""
        return int(self.clock() * 1e6)
