# SPDX-License-Identifier: Apache-2.0
"""What a reader asks of a source: columns, types, and how bad rows are treated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from hotbed.connectors.live import Live, SavedRows
from hotbed.connectors.row_groups import RowGroups
from hotbed.connectors.times import LATEST
from hotbed.errors import SchemaError, printable

logger = logging.getLogger("hotbed.connectors")


LIVE_AHEAD_SECONDS = 3600.0
"""How far an event of a live join may lie ahead of the clock."""
DAY = 86_400_000_000
"""Microseconds of a day."""
READ_ROWS = 65_536
"""Default of the rows that `read` yields at once."""


@dataclass
class Skips:
    """Counts of the bad rows and files that a reader skipped because of `on_error="skip"`.

    The first of each kind is logged as a warning, later ones at debug level.
    """

    counts: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def add(self, reason: str, message: str, count: int = 1) -> None:
        """Count `count` bad rows (or one torn file) under `reason`, and log `message`."""
        if reason in self.counts:
            level = logging.DEBUG
        else:
            level = logging.WARNING
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.last = printable(message)
        logger.log(level, "skipped (%s): %s", reason, self.last)

    @property
    def total(self) -> int:
        """All rows and files skipped so far."""
        return sum(self.counts.values())


class BadRow(NamedTuple):
    """A row that cannot be read: its number in its file and its line, from 1, and its content.

    `line` is None where the file has no lines.
    """

    number: int
    content: str | bytes
    line: int | None = None


@dataclass(frozen=True)
class JoinWishes:
    """What a run asks of a join of streams beside samples.

    Args:
        keeps_open: the join keeps what was open at positions that are not released yet, because
            they may be saved.
        previews: it yields each impression when it is accepted, too.
        saved: what was open at the position where reading begins.
        known: it says from when on the labels of each sample could be known.
    """

    keeps_open: bool = False
    previews: bool = False
    saved: SavedRows | None = None
    known: bool = False


NO_WISHES = JoinWishes()


@dataclass(frozen=True)
class ReadPlan:
    """The reader's wishes for a source.

    Args:
        columns: the columns to read (None = all).
        types: types to read text columns as, where the source has no types of its own.
        skips: counts the bad rows and files, which are then skipped. None = the first one raises.
        live: journal, dead letters and clock of an endless source. None = the source makes its
            own, in memory.
        words: text columns that may come as Arrow dictionaries, where the file holds them so.
        aside: called with the rows of a file that are skipped because they cannot be read.
            For a damaged file it gets one row, the first that is lost, with the reason.
        rest: what is left out behind a row that cannot be read, for messages; "" = its file.
        opening: called with the path of each file before it is read.
        opens: a source that ends yields `OPENED` before its first row, too.
        grains: with more than one, a topic deals the messages of each block to the grains, and
            yields after `OPENED` one batch of rows for each, also empty ones. The position
            after the last one lies behind the block, the others lie before it.
        wishes: of a join of streams.
        row_groups: those that the readers of other ranges need, too; None = there are none.
        max_ahead_seconds: events whose time lies further ahead of the clock are left out where a
            newest time decides; None = by the default of the source.
        time: the column and the unit of the schema's `Time`.
    """

    columns: tuple[str, ...] | None = None
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    skips: Skips | None = None
    live: Live | None = None
    words: Sequence[str] = ()
    aside: Callable[[Sequence[BadRow]], None] | None = None
    rest: str = ""
    opening: Callable[[str], None] | None = None
    opens: bool = False
    grains: int = 1
    wishes: JoinWishes = NO_WISHES
    row_groups: RowGroups | None = None
    max_ahead_seconds: float | None = None
    time: tuple[str, str] | None = None

    def latest(self, now: int) -> int:
        """Return the latest time that an event of a stream may have at a time of the clock."""
        seconds = LIVE_AHEAD_SECONDS
        if self.max_ahead_seconds is not None:
            seconds = self.max_ahead_seconds
        return min(LATEST, now + int(seconds * 1e6))

    def latest_recorded(self, now: int) -> int:
        """Return the latest time that a recorded event may have at a time of the clock.

        Without a limit it is the end of the next day (UTC): times without a zone may be local, and
        all readings of a day are alike.
        """
        if self.max_ahead_seconds is not None:
            return self.latest(now)
        return (now // DAY + 2) * DAY - 1

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns `names` that are to be read.

        Raises:
            SchemaError: one of them appears twice.
        """
        present = list(names)
        wanted = present
        if self.columns is not None:
            wanted = [name for name in present if name in self.columns]
        if len(set(wanted)) < len(wanted):
            twice = sorted({name for name in wanted if wanted.count(name) > 1})
            raise SchemaError(
                f"data: the columns {twice} appear twice, got {present}. Rename one of each."
            )
        return wanted

    def leave_out(self, reason: str, message: str, rows: Sequence[BadRow]) -> None:
        """Count bad rows in `skips`, and pass them to `aside`."""
        assert self.skips is not None
        self.skips.add(reason, message, len(rows))
        if self.aside is not None:
            self.aside(rows)


READ_ALL = ReadPlan()
