# SPDX-License-Identifier: Apache-2.0
"""One input of a join: pieces of rows, with the place after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from hotbed.connectors.journal import Journal
from hotbed.connectors.live import Live
from hotbed.connectors.position import OPENED, PLACE, Position, partitions_of
from hotbed.connectors.read_plan import READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.status import SourceStatus, end, status_of
from hotbed.errors import DecodeError, SchemaError

INPUT_TICK_SECONDS = 0.01
"""How long an input without rows is waited for, before the next one is asked."""


class InputJournal(Journal):
    """The decisions of one input, in the journal of the join: its topics end in its number."""

    def __init__(self, journal: Journal, number: int) -> None:
        super().__init__()
        self._whole = journal
        self._suffix = f".{number}"

    def get(self, topic: str, number: int) -> dict[str, Any] | None:
        return self._whole.get(topic + self._suffix, number)

    def last(self, topic: str) -> int:
        return self._whole.last(topic + self._suffix)

    def append(self, topic: str, number: int, value: Mapping[str, Any]) -> None:
        self._whole.append(topic + self._suffix, number, value)

    def revise(self, topic: str, number: int, value: Mapping[str, Any]) -> None:
        self._whole.revise(topic + self._suffix, number, value)

    def after(self, topic: str, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._whole.after(topic + self._suffix, number)


def live_of(live: Live, number: int) -> Live:
    """Return what the join gives an input, where it was given `live` itself."""
    return Live(
        InputJournal(live.journal, number),
        live.dead_letters,
        min(live.tick_seconds, INPUT_TICK_SECONDS),
        clock=live.clock,
        decode=live.decode,
    )


@dataclass
class _Part:
    """Rows that were read; reading that resumes from `before` yields them first."""

    rows: pa.RecordBatch
    before: Position | None
    after: Position
    used: int = 0

    @cached_property
    def lanes(self) -> set[str]:
        """The partitions that they come from."""
        if PLACE not in self.rows.schema.names:
            return {""}
        places = self.rows.column(PLACE)
        if places.type.get_field_index("partition") < 0:
            return {""}
        partitions = places.field("partition").unique().to_pylist()
        return {"" if partition is None else str(partition) for partition in partitions}


class Input:
    """One input of a join, and its rows that were read and are not in a turn yet.

    Attributes:
        source: the input.
        live: what the source is given.
        ended: whether there are no more rows than those at hand.
        row: rows in turns so far.
        has_begun_here: whether this reading began before its first row.
    """

    def __init__(self, source: Source, state: Mapping[str, Any], plan: ReadPlan) -> None:
        self.source = source
        self.live = plan.live or Live()
        self.ended = False
        self.row: int = state.get("row", 0)
        self.has_begun_here = not self.row
        self._skip: int = state.get("skip", 0)  # rows to pass over
        self._before: Position | None = None  # reading from here yields the next rows first
        if state.get("source") is not None:
            self._before = Position.from_json(state["source"])
        self._taken = (self._before, self._skip)
        self._last_taken: Position | None = None  # in the block of the rows that were taken last
        self._parts = deque[_Part]()
        self._items = source.read(self._before, READ_ROWS, replace(plan, opens=True))

    def close(self) -> None:
        """End reading."""
        end(self._items)

    def state(self, *, decided: bool = False) -> dict[str, Any]:
        """Return the place after the rows that turns took.

        "source": a position; "skip": rows to pass over after it; "row": rows before the place.

        Args:
            decided: the place holds the decision about the rows at hand. Without it, it does not
                depend on what was read ahead.
        """
        before, skip = self._place(decided=decided)
        source = None
        if before is not None:
            source = before.to_json()
        return {"source": source, "skip": skip, "row": self.row}

    def _place(self, *, decided: bool = False) -> tuple[Position | None, int]:
        if self._parts and (decided or self._parts[0].used):
            return self._parts[0].before, self._parts[0].used
        return self._taken

    @property
    def lanes(self) -> list[str]:
        """The partitions of the source that were known when the last turn of it was decided."""
        before, _ = self._place()
        return [] if before is None else partitions_of(before.state)

    @property
    def num_rows(self) -> int:
        """Rows at hand."""
        return sum(part.rows.num_rows - part.used for part in self._parts)

    @property
    def status(self) -> SourceStatus:
        """What the source knows now."""
        return status_of(self._items)

    def is_quiet(self, lane: str) -> bool:
        """Return whether a partition is known to have no more rows for now; "" = the source."""
        waiting = self.status.waiting
        if waiting is None:
            return not self._parts and self.status.lag == 0
        if not lane:
            return bool(waiting) and not self._parts and not any(waiting.values())
        return waiting.get(lane) == 0 and not any(lane in part.lanes for part in self._parts)

    @property
    def next_rows(self) -> int:
        """Rows of the next turn: those that one reading gave, at most 65,536."""
        if not self._parts:
            return 0
        count: int = self._parts[0].rows.num_rows - self._parts[0].used
        return min(count, READ_ROWS)

    @property
    def block(self) -> int:
        """The block of the next rows, which are at hand; 0 for a source without blocks."""
        return _block_of(self._parts[0].before)

    def rest_of(self, block: int) -> int | None:
        """Return the rows of a block that are at hand; None: more of it may follow."""
        if _block_of(self._before) <= block:
            return None
        count: int = 0
        for part in self._parts:
            if _block_of(part.before) == block:
                count += part.rows.num_rows - part.used
        return count

    def note_failure(self) -> None:
        """Record in the journal that the block of the rows that were taken last has bad rows.

        Its file may then be corrected.
        """
        self._note_failure(self._last_taken)

    def _note_failure(self, before: Position | None) -> None:
        if self.source.endless and before is not None:
            self.live.journal.amend("block", int(before["block"]), {"failed": True})

    def poll(self) -> None:
        """Read once: rows, or nothing for now."""
        try:
            item = next(self._items, None)
            while item is not None and item[0] is OPENED:  # its rows follow
                self._before = item[1]
                item = next(self._items, None)
        except (DecodeError, SchemaError):
            self._note_failure(self._before)
            raise
        if item is None:
            self.ended = True
            return
        rows, position = item
        if rows.num_rows:
            used = min(self._skip, rows.num_rows)
            self._skip -= used
            if used < rows.num_rows:
                self._parts.append(_Part(rows, self._before, position, used))
        self._before = position

    def take(self, count: int) -> pa.Table:
        """Return the next rows, which are at hand."""
        batches: list[pa.RecordBatch] = []
        self.row += count
        while count:
            part = self._parts[0]
            batch = part.rows.slice(part.used, count)
            part.used += batch.num_rows
            self._last_taken = part.before
            count -= batch.num_rows
            batches.append(batch)
            if part.used == part.rows.num_rows:
                self._taken = (part.after, 0)
                self._parts.popleft()
        return pa.Table.from_batches(batches)


def _block_of(position: Position | None) -> int:
    """Return the block that a position lies in; 0 at the start and without blocks."""
    return 0 if position is None else int(position.state.get("block", 0))
