# SPDX-License-Identifier: Apache-2.0
"""Events in the order of their arrival, sorted by key; their columns in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.columns import together
from hotbed.connectors.join.keys import EventKeys
from hotbed.connectors.join.spill import Spill, SpilledArrays, SpilledTable, rows_of
from hotbed.connectors.times import LATEST

SEGMENT_ROWS = 1 << 18
"""Events of a whole segment: smaller ones are merged."""


class Segment:
    """Events that arrived one after another. Only their marks change.

    Args:
        numbers: the number of the first event, or of each one, rising.

    Attributes:
        types: names and types of the columns.
        times: when each event happened, in microseconds.
        kinds: the label of each outcome; None for impressions.
        marks: of an impression the labels that had their outcome, a bit each; of an outcome whether
            it met an impression.
        fresh: marks that were set in this turn; None = none.
        met: the outcomes that set marks in this turn: rows, labels and times.
        is_new: whether the events came in this turn.
    """

    def __init__(
        self,
        table: pa.Table,
        keys: EventKeys,
        times: np.ndarray,
        numbers: int | np.ndarray,
        kinds: np.ndarray | None = None,
        marks: np.ndarray | None = None,
    ) -> None:
        self._table: pa.Table | None = table
        self._table_bytes: int = table.nbytes
        self.types: pa.Schema = table.schema
        self._spilled: SpilledTable | None = None
        self._second: np.ndarray | None = None  # all are 0
        if keys.second.any():
            self._second = keys.second
        self.times = times
        self._numbers = numbers
        self.kinds = kinds
        self.marks = np.zeros(len(times), np.uint8) if marks is None else marks
        self.fresh: np.ndarray | None = None
        self.met: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.is_new = True
        self.earliest = int(times.min())
        self.latest = int(times.max())
        order = np.argsort(keys.first, kind="stable")
        self._order = order.astype(np.uint32)
        self._sorted = keys.first[order]
        self._spilled_index: SpilledArrays | None = None
        self._index_bytes = self.times.nbytes + self._order.nbytes + self._sorted.nbytes
        if self._second is not None:
            self._index_bytes += self._second.nbytes

    def __len__(self) -> int:
        return len(self.times)

    @property
    def keys(self) -> EventKeys:
        """The keys of the events."""
        first = np.empty_like(self._sorted)
        first[self._order] = self._sorted
        second = self._second
        if second is None:
            second = np.zeros(len(self), np.uint64)
        return EventKeys(first, second)

    @property
    def numbers(self) -> np.ndarray:
        """The number of each event."""
        if isinstance(self._numbers, int):
            return np.arange(self._numbers, self._numbers + len(self))
        return self._numbers

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, the index included."""
        num_bytes = self.marks.nbytes
        if self._table is not None:
            num_bytes += self._table_bytes
        if self._spilled_index is None:
            num_bytes += self._index_bytes
        return num_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk."""
        num_bytes = 0
        if self._spilled is not None:
            num_bytes += self._spilled.num_bytes
        if self._spilled_index is not None:
            num_bytes += self._index_bytes
        return num_bytes

    @property
    def is_whole(self) -> bool:
        """Whether it is large enough to lie on the disk."""
        return len(self) > SEGMENT_ROWS // 2

    @property
    def is_in_memory(self) -> bool:
        """Whether the columns of the events are in memory."""
        return self._table is not None

    def table(self) -> pa.Table:
        """Return the columns of the events."""
        table = self._table
        if table is None:
            assert self._spilled is not None
            table = self._spilled.read()
        return table

    def rows(self, rows: np.ndarray) -> pa.Table:
        """Return the columns of some events, rising."""
        if self._table is not None:
            return rows_of(self._table, rows)
        assert self._spilled is not None
        return self._spilled.take(rows)

    def spill(self, spill: Spill) -> None:
        """Move the columns of the events to the disk."""
        assert self._table is not None
        self._spilled = SpilledTable(self._table, spill)
        self._table = None

    @property
    def has_index_in_memory(self) -> bool:
        """Whether times and sorted keys are in memory."""
        return self._spilled_index is None

    def spill_index(self, spill: Spill) -> None:
        """Move times and sorted keys to the disk, where they are read by pages."""
        spilled = SpilledArrays(spill)
        self.times = spilled.put(self.times)
        self._sorted = spilled.put(self._sorted)
        self._order = spilled.put(self._order)
        if self._second is not None:
            self._second = spilled.put(self._second)
        self._spilled_index = spilled

    def overlaps(self, earliest: int, latest: int) -> bool:
        """Return whether events of the segment may lie in a span of times, both ends included."""
        return self.earliest <= latest and self.latest >= earliest

    def pairs(self, keys: EventKeys) -> tuple[np.ndarray, np.ndarray]:
        """Return all pairs of an event here and one of `keys` that are equal, as numbers of rows.

        Args:
            keys: rising by their first number.
        """
        begins = np.searchsorted(self._sorted, keys.first, "left")
        inside = np.minimum(begins, len(self) - 1)
        hits = np.flatnonzero(self._sorted[inside] == keys.first)
        begins = begins[hits]
        counts = np.searchsorted(self._sorted, keys.first[hits], "right") - begins
        queries = np.repeat(hits, counts)
        firsts = np.repeat(begins - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        rows = self._order[firsts + np.arange(len(queries))].astype(np.int64)
        second = keys.second[queries]
        same = second == 0 if self._second is None else second == self._second[rows]
        return rows[same], queries[same]

    def mark(self, rows: np.ndarray, bits: np.ndarray) -> None:
        """Set bits of the marks of some events, which may be named several times."""
        before = self.marks[rows]
        np.bitwise_or.at(self.marks, rows, bits)
        if self.fresh is None:
            self.fresh = np.zeros(len(self), np.uint8)
        np.bitwise_or.at(self.fresh, rows, bits & ~before)

    def first_met(self, rows: np.ndarray, num_labels: int) -> np.ndarray:
        """Return the time of the first outcome in this turn, [labels, rows]; `LATEST` for none."""
        if not self.met:
            return np.full((num_labels, len(rows)), LATEST, np.int64)
        times = np.full((num_labels, len(self)), LATEST, np.int64)
        for met_rows, labels, met_times in self.met:
            np.minimum.at(times, (labels, met_rows), met_times)
        first: np.ndarray = times[:, rows]
        return first


def merged(first: Segment, second: Segment) -> Segment:
    """Return the events of two segments, of which the second follows the first."""
    kinds = None
    if first.kinds is not None and second.kinds is not None:
        kinds = np.concatenate([first.kinds, second.kinds])
    numbers = np.concatenate([first.numbers, second.numbers])
    is_dense = numbers[-1] - numbers[0] + 1 == len(numbers)
    table = together([first.table(), second.table()])
    if len(first) + len(second) > SEGMENT_ROWS // 4:
        table = table.combine_chunks()
    segment = Segment(
        table,
        EventKeys(*(np.concatenate(parts) for parts in zip(first.keys, second.keys, strict=True))),
        np.concatenate([first.times, second.times]),
        int(numbers[0]) if is_dense else numbers,
        kinds,
        np.concatenate([first.marks, second.marks]),
    )
    segment.is_new = False
    return segment


class Segments:
    """Events in the order of their arrival, as segments that grow.

    Attributes:
        count: the number of the next event.
    """

    def __init__(self) -> None:
        self.count = 0
        self._all: list[Segment] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def listed(self) -> list[Segment]:
        """Return the segments of this moment."""
        return list(self._all)

    def add(
        self, table: pa.Table, keys: EventKeys, times: np.ndarray, kinds: np.ndarray | None = None
    ) -> None:
        """Add events; they get the next numbers."""
        self.put(Segment(table, keys, times, self.count, kinds))
        self.count += len(times)

    def put(self, segment: Segment) -> None:
        """Add a segment, whose events have numbers."""
        self._all = [*self._all, segment]

    def settle(self) -> None:
        """End a turn: nothing is fresh or new any more; merge small segments."""
        segments = list(self._all)
        for segment in segments:
            segment.fresh = None
            segment.met = []
            segment.is_new = False
        while len(segments) > 1:
            total = len(segments[-1]) + len(segments[-2])
            are_alike = 2 * len(segments[-1]) > len(segments[-2])
            in_memory = segments[-1].is_in_memory and segments[-2].is_in_memory
            if total > SEGMENT_ROWS or not are_alike or not in_memory:
                break
            segments[-2:] = [merged(segments[-2], segments[-1])]
        self._all = segments

    def drop(self, before: int) -> None:
        """Drop the segments whose events all happened before a time."""
        if any(segment.latest < before for segment in self._all):
            self._all = [segment for segment in self._all if segment.latest >= before]
