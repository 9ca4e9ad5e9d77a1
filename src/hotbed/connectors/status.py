# SPDX-License-Identifier: Apache-2.0
"""The state of an endless source while it is read; `status_of` asks the reading for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from hotbed.connectors.live import HeldRows
from hotbed.connectors.position import Batches, Position


@dataclass(frozen=True)
class SourceStatus:
    """What a source knows of the rows that it has not yielded yet.

    Args:
        lag: rows that wait at the source; None = unknown.
        waiting: `lag` by partition; for a join, by partition of its impressions. None = the source
            does not know its partitions.
        open_rows: what a join holds open.
        is_reached: whether the source answers; None = it does not say.
    """

    lag: int | None = None
    waiting: Mapping[str, int] | None = None
    open_rows: HeldRows | None = None
    is_reached: bool | None = None


UNKNOWN = SourceStatus()


class SourceReading(Iterator[tuple[pa.RecordBatch, Position]]):
    """The batches of a source, and what it knows while it yields them.

    Args:
        batches: as `Source.read` yields them.
        status: returns what the source knows now.

    Example: `return SourceReading(batches, lambda: SourceStatus(lag=queue.qsize()))`
    """

    def __init__(self, batches: Batches, status: Callable[[], SourceStatus]) -> None:
        self._batches = batches
        self._status = status

    @property
    def status(self) -> SourceStatus:
        """What the source knows now."""
        return self._status()

    def __next__(self) -> tuple[pa.RecordBatch, Position]:
        return next(self._batches)

    def close(self) -> None:
        """End reading; the status stays."""
        end(self._batches)
        last = self._status()
        self._status = lambda: last  # lets go of all else that the reading holds
        self._batches = iter(())


def end(batches: Batches) -> None:
    """End what `Source.read` returned, if it can be ended."""
    if hasattr(batches, "close"):
        batches.close()


@contextmanager
def ended(batches: Batches) -> Iterator[None]:
    """End what `Source.read` returned when the block ends."""
    try:
        yield
    finally:
        end(batches)


def status_of(batches: Batches) -> SourceStatus:
    """Return what a source knows, of what its `read` returned."""
    return batches.status if isinstance(batches, SourceReading) else UNKNOWN
