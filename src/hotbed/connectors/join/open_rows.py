# SPDX-License-Identifier: Apache-2.0
"""The impressions that are open and the outcomes that are held, and their labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.keys import EventKeys
from hotbed.connectors.join.places import written, written_types
from hotbed.connectors.join.rules import Impressions, JoinRule
from hotbed.connectors.join.segment import Segment, Segments
from hotbed.connectors.join.spill import Spill
from hotbed.connectors.times import EARLIEST
from hotbed.memory import return_free_memory

NUMBER = "\0number"
TIME = "\0time"
KIND = "\0kind"
MATCHED = np.uint8(1)
COUNTS = ("impressions", "repeated", "late", "outcomes", "outcomes_repeated", "unmatched")
"""What a join counts: impressions that were accepted, that came again, that came too late; outcomes
that were accepted, that came again, that met no impression."""


@dataclass(frozen=True)
class JoinWindows:
    """The windows of a join, in microseconds.

    Attributes:
        labels: of each label.
        lateness: how long after its end a window closes.
    """

    labels: Sequence[int]
    lateness: int

    @property
    def longest(self) -> int:
        """How long after its time an event may matter."""
        return max(self.labels) + self.lateness


@dataclass
class TurnEvents:
    """Events of one input in a turn: columns, keys, times, and the labels of outcomes."""

    table: pa.Table
    keys: EventKeys
    times: np.ndarray
    kinds: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> TurnEvents:
        """Return some of the events."""
        kinds = None
        if self.kinds is not None:
            kinds = self.kinds[rows]
        table = rows_of(self.table, rows)
        return TurnEvents(table, self.keys.take(rows), self.times[rows], kinds)


@dataclass
class OpenRows:
    """Impressions whose windows are open, and outcomes that an impression may still meet.

    A turn adds events, and then ends with a new watermark. Nothing but labels changes: what is open
    at a position follows from the numbers and the watermark in it.

    Attributes:
        windows: of the join.
        rule: of the join.
        spill: what lies on the disk.
        watermark: of the last turn.
        counts: by the names of `COUNTS`.
        keeps: rows are kept, also if they closed, until `release` was called.
    """

    windows: JoinWindows
    rule: JoinRule
    spill: Spill
    watermark: int = EARLIEST
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    keeps: bool = False

    def __post_init__(self) -> None:
        self.impressions = Segments()
        self.outcomes = Segments()
        self.matches = Matches()
        self._last_windows = self.rule.last_windows(self.windows.labels)
        self._released = EARLIEST

    @property
    def oldest(self) -> int:
        """The earliest time of an event that may still matter."""
        return self.cutoff(self.watermark)

    def cutoff(self, watermark: int) -> int:
        """Return the earliest time of an event that matters at a watermark."""
        return max(EARLIEST, watermark - self.windows.longest)

    # --- a turn

    def add_impressions(self, events: TurnEvents) -> np.ndarray:
        """Add impressions; return the rows of those that came too late."""
        is_late = events.times < self.oldest
        rows = np.flatnonzero(~is_late)
        rows = rows[self._new(self.impressions, events.take(rows))]
        self.counts["late"] += int(is_late.sum())
        self.counts["repeated"] += len(is_late) - int(is_late.sum()) - len(rows)
        self.counts["impressions"] += len(rows)
        if len(rows):
            new = events.take(rows)
            self.impressions.add(new.table, new.keys, new.times)
            *_, segment = self.impressions
            for outcomes in self.outcomes:
                self._match(segment, outcomes)
        return np.flatnonzero(is_late)

    def add_outcomes(self, events: TurnEvents) -> None:
        """Add outcomes."""
        is_late = events.times < self.oldest
        rows = np.flatnonzero(~is_late)
        new_rows = rows[self._new(self.outcomes, events.take(rows))]
        self.counts["unmatched"] += int(is_late.sum())
        self.counts["outcomes_repeated"] += len(rows) - len(new_rows)
        self.counts["outcomes"] += len(new_rows)
        if len(new_rows):
            new = events.take(new_rows)
            self.outcomes.add(new.table, new.keys, new.times, new.kinds)
            *_, segment = self.outcomes
            for impressions in self.impressions:
                self._match(impressions, segment)

    def end_turn(self, watermark: int) -> tuple[list[pa.Table], np.ndarray]:
        """Raise the watermark; return the samples that are decided, and their labels.

        Returns:
            The impressions in the order of their arrival; and labels, [labels, impressions].
        """
        before = self.watermark
        self.watermark = max(before, watermark)
        tables: list[pa.Table] = []
        labels = [np.zeros((len(self._last_windows), 0))]
        for segment in self.impressions:
            decided = self._decide(segment, before)
            if decided is not None and len(decided[0]):
                rows, values = decided
                tables.append(rows_of(segment.load(), rows))
                labels.append(values)
        self._count_unmatched(before)
        self.impressions.settle()
        self.outcomes.settle()
        self._drop()
        self._spill()
        return tables, np.concatenate(labels, axis=1)

    def _new(self, segments: Segments, events: TurnEvents) -> np.ndarray:
        """Return the rows of events that neither are in `segments` nor come twice here."""
        count = len(events.times)
        if not count:
            return np.zeros(0, np.int64)
        kinds = events.kinds
        order = np.argsort(events.keys.first, kind="stable")
        is_repeated = _repeated(events, order)
        rising = events.keys.take(order)
        earliest = int(events.times.min())
        latest = int(events.times.max())
        for segment in segments:
            if segment.overlaps(earliest, latest):
                rows, queries = segment.pairs(rising)
                queries = order[queries]
                is_equal = segment.times[rows] == events.times[queries]
                if kinds is not None and segment.kinds is not None:
                    is_equal &= segment.kinds[rows] == kinds[queries]
                is_repeated[queries[is_equal]] = True
        return np.flatnonzero(~is_repeated)

    def _match(self, impressions: Segment, outcomes: Segment) -> None:
        """Mark the impressions of a segment that have an outcome in another, and these outcomes."""
        longest = max(self.windows.labels)
        if not impressions.overlaps(outcomes.earliest - longest, outcomes.latest):
            return
        assert outcomes.kinds is not None
        if len(outcomes) < len(impressions):
            order = np.argsort(outcomes.keys.first, kind="stable")
            rows, queries = impressions.pairs(outcomes.keys.take(order))
            others = order[queries]
        else:
            order = np.argsort(impressions.keys.first, kind="stable")
            others, queries = outcomes.pairs(impressions.keys.take(order))
            rows = order[queries]
        kinds = outcomes.kinds[others]
        times = impressions.times[rows]
        after = outcomes.times[others] - times
        is_met = (after >= 0) & (after <= np.asarray(self.windows.labels)[kinds])
        if not impressions.is_new:
            ends = [window + self.windows.lateness for window in self._last_windows]
            begins = [max(EARLIEST, self.watermark - end) for end in ends]
            is_met &= times >= np.asarray(begins)[kinds]
        is_met &= times >= self.oldest
        rows = rows[is_met]
        others = others[is_met]
        if len(rows):
            impressions.mark(rows, np.left_shift(np.uint8(1), kinds[is_met]))
            outcomes.mark(others, np.full(len(others), MATCHED))

    def _decide(self, segment: Segment, before: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rows of a segment that become samples, and their labels; None for none."""
        if segment.is_new:
            before = EARLIEST
        bounds: list[tuple[int, int]] = []
        is_due = segment.fresh is not None
        for window in self._last_windows:
            end = window + self.windows.lateness
            begin = max(EARLIEST, before - end)
            bounds.append((begin, max(EARLIEST, self.watermark - end)))
            is_due |= segment.earliest < bounds[-1][1] and segment.latest >= begin
        if not is_due:
            return None
        bits = np.arange(len(bounds), dtype=np.uint8)[:, None]
        fresh = segment.fresh
        if fresh is None:
            fresh = np.zeros(len(segment), np.uint8)
        closes = [(segment.times >= begin) & (segment.times < end) for begin, end in bounds]
        impressions = Impressions(
            (segment.marks >> bits & 1).astype(bool),
            (fresh >> bits & 1).astype(bool),
            np.array(closes),
        )
        return self.rule.decide(impressions)

    def _count_unmatched(self, before: int) -> None:
        """Count the outcomes that are not held any more and met no impression."""
        begin = self.cutoff(before)
        for segment in self.outcomes:
            if segment.fresh is not None:
                is_met = segment.fresh > 0
                self.matches.add(segment.numbers[is_met], segment.times[is_met])
            if segment.earliest < self.oldest and segment.latest >= begin:
                is_over = (segment.times >= begin) & (segment.times < self.oldest)
                self.counts["unmatched"] += int((is_over & (segment.marks == 0)).sum())

    def _drop(self) -> None:
        oldest = self.oldest
        if self.keeps:
            oldest = min(oldest, self.cutoff(self._released))
        self.impressions.drop(oldest)
        self.outcomes.drop(oldest)
        self.matches.drop(oldest)

    # --- memory

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        segments = [*self.impressions, *self.outcomes]
        return sum(segment.memory_bytes for segment in segments)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk."""
        segments = [*self.impressions, *self.outcomes]
        return sum(segment.disk_bytes for segment in segments)

    @property
    def is_full(self) -> bool:
        """Whether neither memory nor disk have room for another turn."""
        limit = self.spill.disk_bytes
        return limit is not None and self.disk_bytes >= limit and self._excess() > 0

    def _excess(self) -> int:
        return self.memory_bytes - self.spill.memory_bytes

    def _spill(self) -> None:
        """Move whole segments to the disk, as long as memory is short: columns, then keys."""
        if self._excess() <= 0:
            return
        whole = [segment for segment in self.impressions if segment.is_whole]
        disk_bytes = self.disk_bytes
        for segment in reversed(whole):
            if segment.is_in_memory and self._is_short():
                segment.spill(self.spill)
        for segment in reversed(whole):
            if segment.has_index_in_memory and self._is_short():
                segment.spill_index(self.spill)
        if self.disk_bytes > disk_bytes:
            return_free_memory()

    def _is_short(self) -> bool:
        """Whether memory is short and the disk has room."""
        limit = self.spill.disk_bytes
        return self._excess() > 0 and (limit is None or self.disk_bytes < limit)

    # --- states

    def release(self, state: Mapping[str, Any]) -> None:
        """Note that nobody will ask for a position before this one."""
        self._released = max(self._released, state["watermark"])

    def saved_at(self, state: Mapping[str, Any], since: Mapping[str, int] | None) -> OpenLogs:
        """Return what was open at a position.

        Args:
            state: the position.
            since: `opened` of an earlier position, whose rows are left out; None = all rows.
        """
        opened: Mapping[str, int] = state["opened"]
        first = since or dict.fromkeys(opened, 0)
        return OpenLogs(
            self.impressions.listed(),
            self.outcomes.listed(),
            self.matches.between(first["matches"], opened["matches"]),
            self.cutoff(state["watermark"]),
            opened,
            first,
        )

    @property
    def opened(self) -> dict[str, int]:
        """How many impressions, outcomes and outcomes with an impression there were so far."""
        return {
            "impressions": self.impressions.count,
            "outcomes": self.outcomes.count,
            "matches": self.matches.count,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a position, after the events that were open there were put back."""
        self.watermark = state["watermark"]
        self.counts = dict(state["counts"])
        for impressions in self.impressions:
            for outcomes in self.outcomes:
                self._match(impressions, outcomes)
        numbers, _ = self.matches.between(0, self.matches.count)
        for segment in self.outcomes:
            segment.marks[:] = np.isin(segment.numbers, numbers)
        self.impressions.count = state["opened"]["impressions"]
        self.outcomes.count = state["opened"]["outcomes"]
        self.impressions.settle()
        self.outcomes.settle()
        self._spill()


class Matches:
    """The outcomes that met an impression, in the order in which they did: numbers and times.

    Attributes:
        count: of all so far.
    """

    def __init__(self) -> None:
        self.count = 0
        # the number of outcomes before the chunks, and the chunks; another thread reads both
        self._rest: tuple[int, list[np.ndarray]] = (0, [])

    def add(self, numbers: np.ndarray, times: np.ndarray) -> None:
        """Add the outcomes of a turn."""
        if len(numbers):
            first, chunks = self._rest
            self._rest = (first, [*chunks, np.stack([numbers, times])])
            self.count += len(numbers)

    def put(self, numbers: np.ndarray, times: np.ndarray, count: int) -> None:
        """Take over the outcomes of a state, the last ones of `count`."""
        self._rest = (count - len(numbers), [np.stack([numbers, times])])
        self.count = count

    def drop(self, before: int) -> None:
        """Drop the first chunks whose outcomes all happened before a time."""
        first, chunks = self._rest
        while chunks and chunks[0][1].max(initial=EARLIEST) < before:
            first += chunks[0].shape[1]
            chunks = chunks[1:]
        self._rest = (first, chunks)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return outcomes `begin` to `end` of all so far that are left, [2, outcomes]."""
        first, chunks = self._rest
        rest = np.concatenate([np.zeros((2, 0), np.int64), *chunks], axis=1)
        return rest[:, max(0, begin - first) : max(0, end - first)]


@dataclass(frozen=True)
class OpenLogs:
    """What was open at a position, from another position on.

    Attributes:
        impressions: the segments of that moment.
        outcomes: the same of outcomes.
        matches: numbers and times of the outcomes that met an impression.
        oldest: the earliest time of an event that matters.
        opened: of the position.
        since: of the other one.
    """

    impressions: Sequence[Segment]
    outcomes: Sequence[Segment]
    matches: np.ndarray
    oldest: int
    opened: Mapping[str, int]
    since: Mapping[str, int]

    def batches(self, log: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a log that are still needed; of one without rows nothing."""
        if log == "matches":
            numbers, times = self.matches[:, self.matches[1] >= self.oldest]
            if len(numbers):
                columns = [pa.array(numbers), pa.array(times)]
                yield pa.RecordBatch.from_arrays(columns, names=[NUMBER, TIME])
            return
        segments = self.impressions
        if log == "outcomes":
            segments = self.outcomes
        chosen: list[tuple[Segment, np.ndarray]] = []
        for segment in segments:
            numbers = segment.numbers
            is_open = (numbers >= self.since[log]) & (numbers < self.opened[log])
            rows = np.flatnonzero(is_open & (segment.times >= self.oldest))
            if len(rows):
                chosen.append((segment, rows))
        if not chosen:
            return
        schemas = [written_types(segment.types) for segment, _ in chosen]
        schema = pa.unify_schemas(schemas, promote_options="default")
        for segment, rows in chosen:
            table = written(rows_of(segment.table(), rows)).cast(schema)
            table = table.append_column(NUMBER, pa.array(segment.numbers[rows]))
            table = table.append_column(TIME, pa.array(segment.times[rows]))
            if segment.kinds is not None:
                table = table.append_column(KIND, pa.array(segment.kinds[rows]))
            yield from table.combine_chunks().to_batches()


def _repeated(events: TurnEvents, order: np.ndarray) -> np.ndarray:
    """Return which events are equal to one before them; `order` sorts their first keys."""
    is_repeated = np.zeros(len(order), bool)
    ordered = events.keys.first[order]
    is_same = ordered[1:] == ordered[:-1]
    if not is_same.any():
        return is_repeated
    has_equal = np.zeros(len(order), bool)
    has_equal[1:] = is_same
    has_equal[:-1] |= is_same
    rows = np.sort(order[has_equal])
    fields = [events.keys.first[rows], events.keys.second[rows], events.times[rows]]
    if events.kinds is not None:
        fields.append(events.kinds[rows])
    places = np.lexsort([rows, *fields])
    is_equal = np.ones(len(rows) - 1, bool)
    for values in fields:
        is_equal &= values[places][1:] == values[places][:-1]
    is_repeated[rows[places[1:][is_equal]]] = True
    return is_repeated


def rows_of(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Return some rows of a table, rising; without copying where they follow one another."""
    if not len(rows):
        return table.slice(0, 0)
    first = int(rows[0])
    count = int(rows[-1]) - first + 1
    if count == len(rows):
        return table.slice(first, count)
    return table.take(pa.array(rows))
