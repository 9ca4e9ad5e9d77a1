# SPDX-License-Identifier: Apache-2.0
"""The impressions that are open and the outcomes that are held, and their labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.events import TurnEvents, repeated
from hotbed.connectors.join.matches import Matches
from hotbed.connectors.join.rules import Decided, Impressions, JoinRule
from hotbed.connectors.join.segment import Segment, Segments
from hotbed.connectors.join.spill import Spill
from hotbed.connectors.join.states import OpenLogs
from hotbed.connectors.times import EARLIEST
from hotbed.memory import return_free_memory

MATCHED = np.uint8(1)
COUNTS = ("impressions", "repeated", "late", "outcomes", "outcomes_repeated", "unmatched", "future")
"""What a join counts: impressions that were accepted, that came again, that came too late; outcomes
that were accepted, that came again, that met no impression; events ahead of the clock."""


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


@dataclass(frozen=True)
class TurnResult:
    """What a turn decides.

    Attributes:
        samples: columns of the impressions that become samples, in the order of their arrival.
        labels: theirs, [labels, samples].
        is_first: whether this is the first sample of the impression.
        numbers: of the impressions.
        known: from when on the labels of each sample could be known, if that is wanted.
        unmatched: columns of outcomes that will never meet an impression, if they are wanted.
        accepted: columns of the impressions that came in this turn, if they are wanted.
        first: the number of the first one of these.
    """

    samples: Sequence[pa.Table]
    labels: np.ndarray
    is_first: np.ndarray
    numbers: np.ndarray
    known: np.ndarray
    unmatched: Sequence[pa.Table]
    accepted: Sequence[pa.Table]
    first: int


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
        returns_unmatched: whether turns return the outcomes that met no impression.
        returns_accepted: whether turns return the impressions that came in them.
        returns_known: whether turns return from when on labels could be known.
        newest: returns the newest event times by input and partition.
    """

    windows: JoinWindows
    rule: JoinRule
    spill: Spill
    watermark: int = EARLIEST
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    keeps: bool = False
    returns_unmatched: bool = False
    returns_accepted: bool = False
    returns_known: bool = False
    newest: Callable[[], Sequence[Mapping[str, int]]] = field(default=tuple)

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

    def levels(self) -> dict[str, int]:
        """Return how much is open now, and the bytes that it takes; any thread may ask."""
        oldest = self.oldest
        levels = {}
        for name, log in (("open_impressions", self.impressions), ("held_outcomes", self.outcomes)):
            levels[name] = sum(int((segment.times >= oldest).sum()) for segment in log.listed())
        return {**levels, "memory_bytes": self.memory_bytes, "spilled_bytes": self.disk_bytes}

    # --- a turn

    def add_impressions(self, events: TurnEvents) -> tuple[np.ndarray, np.ndarray]:
        """Add impressions; return the rows of those that came too late, and that came again."""
        is_late = events.times < self.oldest
        in_time = np.flatnonzero(~is_late)
        rows = in_time[self._new(self.impressions, events.take(in_time))]
        self.counts["late"] += int(is_late.sum())
        self.counts["repeated"] += len(is_late) - int(is_late.sum()) - len(rows)
        self.counts["impressions"] += len(rows)
        if len(rows):
            new = events.take(rows)
            self.impressions.add(new.table, new.keys, new.times)
            *_, segment = self.impressions
            for outcomes in self.outcomes:
                self._match(segment, outcomes)
        return np.flatnonzero(is_late), np.setdiff1d(in_time, rows, assume_unique=True)

    def add_outcomes(self, events: TurnEvents) -> np.ndarray:
        """Add outcomes; return the rows of those that came too late to meet an impression."""
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
        return np.flatnonzero(is_late)

    def end_turn(self, watermark: int) -> TurnResult:
        """Raise the watermark; return what is decided then."""
        before = self.watermark
        self.watermark = max(before, watermark)
        tables: list[pa.Table] = []
        labels = [np.zeros((len(self._last_windows), 0))]
        is_first = [np.zeros(0, bool)]
        numbers = [np.zeros(0, np.int64)]
        moments = [np.zeros(0, np.int64)]
        new = [segment for segment in self.impressions if segment.is_new]
        accepted = [segment.table() for segment in new if self.returns_accepted]
        first = self.impressions.count - sum(map(len, new))
        for segment in self.impressions:
            decided = self._decide(segment, before)
            if decided is not None and len(decided.rows):
                tables.append(segment.rows(decided.rows))
                labels.append(decided.labels)
                is_first.append(decided.is_first)
                numbers.append(segment.numbers[decided.rows])
                if self.returns_known:
                    moments.append(self._known(segment, decided))
        unmatched = self._end_unmatched(before)
        self.impressions.settle()
        self.outcomes.settle()
        self._drop()
        self._spill()
        return TurnResult(
            tables,
            np.concatenate(labels, axis=1),
            np.concatenate(is_first),
            np.concatenate(numbers),
            np.concatenate(moments),
            unmatched,
            accepted,
            first,
        )

    def _new(self, segments: Segments, events: TurnEvents) -> np.ndarray:
        """Return the rows of events that neither are in `segments` nor come twice here."""
        count = len(events.times)
        if not count:
            return np.zeros(0, np.int64)
        kinds = events.kinds
        order = np.argsort(events.keys.first, kind="stable")
        is_repeated = repeated(events, order)
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
            if self.returns_known:
                impressions.met.append((rows, kinds[is_met], outcomes.times[others]))
            outcomes.mark(others, np.full(len(others), MATCHED))

    def _decide(self, segment: Segment, before: int) -> Decided | None:
        """Return the impressions of a segment that become samples; None for none."""
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
        closed = [segment.times < begin for begin, _ in bounds]
        closes = [(segment.times >= begin) & (segment.times < end) for begin, end in bounds]
        impressions = Impressions(
            (segment.marks >> bits & 1).astype(bool),
            (fresh >> bits & 1).astype(bool),
            np.array(closes),
            np.array(closed),
        )
        return self.rule.decide(impressions)

    def _known(self, segment: Segment, decided: Decided) -> np.ndarray:
        """Return from when on the labels of decided impressions could be known."""
        windows = np.array(self._last_windows)[:, None] + self.windows.lateness
        ends = segment.times[decided.rows] + windows
        met = segment.first_met(decided.rows, len(self._last_windows))
        return self.rule.known(decided, ends, met)

    def _end_unmatched(self, before: int) -> list[pa.Table]:
        """Count the outcomes that are not held any more and met no impression.

        Returns:
            Their columns, if they are wanted.
        """
        begin = self.cutoff(before)
        tables: list[pa.Table] = []
        for segment in self.outcomes:
            if segment.fresh is not None:
                is_met = segment.fresh > 0
                self.matches.add(segment.numbers[is_met], segment.times[is_met])
            if segment.earliest < self.oldest and segment.latest >= begin:
                is_over = (segment.times >= begin) & (segment.times < self.oldest)
                rows = np.flatnonzero(is_over & (segment.marks == 0))
                self.counts["unmatched"] += len(rows)
                if self.returns_unmatched and len(rows):
                    tables.append(segment.rows(rows))
        return tables

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
        num_bytes: list[int] = [segment.memory_bytes for segment in segments]
        return self.matches.memory_bytes + sum(num_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk."""
        segments = [*self.impressions, *self.outcomes]
        num_bytes: list[int] = [segment.disk_bytes for segment in segments]
        return self.matches.disk_bytes + sum(num_bytes)

    @property
    def is_full(self) -> bool:
        """Whether neither memory nor disk have room for another turn."""
        limit = self.spill.disk_bytes
        return limit is not None and self.disk_bytes >= limit and self._excess() > 0

    def _excess(self) -> int:
        """Return the bytes above the budget, with room for merging the segments that grow."""
        segments = [*self.impressions, *self.outcomes]
        growing: list[int] = [segment.memory_bytes for segment in segments if not segment.is_whole]
        return self.memory_bytes + sum(growing) - self.spill.memory_bytes

    def _spill(self) -> None:
        """Move whole segments to the disk, as long as memory is short: columns, then keys.

        Columns of impressions go first: nothing needs them before their samples.
        """
        if self._excess() <= 0:
            return
        disk_bytes = self.disk_bytes
        logs = (self.impressions, self.outcomes)
        whole = [[segment for segment in log if segment.is_whole] for log in logs]
        for segments in whole:
            for segment in reversed(segments):
                if segment.is_in_memory and self._is_short():
                    segment.spill(self.spill)
        for segments in whole:
            for segment in reversed(segments):
                if segment.has_index_in_memory and self._is_short():
                    segment.spill_index(self.spill)
        if self._is_short():
            self.matches.spill(self.spill)
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
        self.counts = {**self.counts, **state["counts"]}
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
