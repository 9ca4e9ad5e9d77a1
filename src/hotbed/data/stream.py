# SPDX-License-Identifier: Apache-2.0
"""How the rows of an endless source become batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from hotbed import checks
from hotbed.connectors.live import Live, steady
from hotbed.connectors.position import Position
from hotbed.connectors.source import Source
from hotbed.data.batch import Batch, BatchSlice, changed
from hotbed.data.grains import Cut
from hotbed.data.order import Encoded, place_at
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError


@dataclass(frozen=True)
class Block:
    """The rows of a block of a topic by grain, and the positions of the source around it."""

    grains: Sequence[Batch]
    before: Position
    after: Position


@dataclass(frozen=True)
class StreamCuts:
    """Cuts the rows of an endless source into batches.

    Attributes:
        batch_size: rows of a batch.
        flush_seconds: after this time without a new row, the pending rows become a batch; None =
            never.
        live: the journal and the clock.
    """

    batch_size: int
    flush_seconds: float | None
    live: Live

    def across_blocks(self, chunks: Iterator[Encoded], start: Position) -> Iterator[Cut | None]:
        """Yield batches of rows in their order, and None at ticks.

        A cut in the journal, or a new one after idle time, ends a batch early.
        """
        parts: list[BatchSlice] = []
        skip = int(start["skip"])
        rows = int(start["rows"])  # in batches that were handed out
        pending = 0  # rows in `parts`
        idle_since = None
        place = place_at(None, 0)
        previews: list[Batch] = []  # of ticks, and of the next chunk
        seconds = steady(self.live.clock)
        for chunk, before, after in chunks:
            if skip and _is_past(before, start):
                skip = 0  # the rest of the block, with the rows to skip, was abandoned
            if chunk.previews is not None and not skip:  # else an earlier batch had them
                previews.append(chunk.previews)
            row = min(skip, chunk.num_samples)
            skip = max(0, skip - chunk.num_samples)
            while row < chunk.num_samples:
                room = self._next_cut(rows) - rows - pending
                part = chunk[row : row + room]
                if previews:
                    part = changed(part, {"previews": Batch.concat(previews)})
                    previews = []
                parts.append(BatchSlice.of(part))
                row = row + part.num_samples
                pending = pending + part.num_samples
                place = place_at(before, row)
                if row == chunk.num_samples:
                    place = place_at(after, 0)
                if part.num_samples == room:
                    rows = rows + pending
                    yield Cut([parts], {**place, "rows": rows})
                    parts = []
                    pending = 0
            if chunk.num_samples:
                idle_since = None
                continue
            if idle_since is None:
                idle_since = seconds()
            if pending and self._flushes(rows + pending, after, seconds() - idle_since):
                rows = rows + pending
                yield Cut([parts], {**place, "rows": rows})
                parts = []
                pending = 0
            else:
                yield None
        if parts:
            yield Cut([parts], {**place, "rows": rows + pending})

    def by_blocks(self, blocks: Iterator[Block | None], start: Position) -> Iterator[Cut | None]:
        """Yield the batches of each block, of which each has rows of all grains; None at ticks."""
        emitted = int(start["emitted"])  # batches of the first block
        rows = int(start["rows"])
        for block in blocks:
            if block is None:
                yield None
                continue
            cuts = _runs_of(block.grains, self.batch_size)
            for number in range(emitted, len(cuts)):
                rows += sum(part.num_samples for run in cuts[number] for part in run)
                place = {**place_at(block.before, 0), "emitted": number + 1}
                if number + 1 == len(cuts):
                    place = place_at(block.after, 0)
                yield Cut(cuts[number], {**place, "rows": rows})
            emitted = 0

    def _next_cut(self, rows: int) -> int:
        """Return the row at which the batch after the first `rows` ends, unless a flush ends it."""
        end = rows + self.batch_size
        for cut, _ in self.live.journal.after("cut", rows):
            return min(cut, end)
        return end

    def _flushes(self, end: int, after: Position, idle_seconds: float) -> bool:
        """Return whether the pending rows become a batch now, the one that ends at row `end`.

        They do not while blocks in the journal are still to be read: the run that recorded these
        blocks received them in time.
        """
        if self.flush_seconds is None or idle_seconds < self.flush_seconds:
            return False
        if self.live.journal.last("block") >= after["block"]:
            return False
        return self.live.journal.decide("cut", end, dict, dense=True) is not None


def _runs_of(grains: Sequence[Batch], batch_size: int) -> list[list[list[BatchSlice]]]:
    """Return the runs of each batch of a block; batches without rows are left out.

    Batch j of J takes the rows j n / J to (j + 1) n / J of a grain of n rows. The bounds are
    rounded differently in each grain, so that batches of all grains differ little in their rows.
    """
    num_rows = sum(grain.num_samples for grain in grains)
    num_batches = -(-num_rows // batch_size)
    batches: list[list[list[BatchSlice]]] = []
    for number in range(num_batches):
        runs: list[list[BatchSlice]] = []
        for place, grain in enumerate(grains):
            shift = place * num_batches // len(grains)
            begin, end = (
                (count * grain.num_samples + shift) // num_batches for count in (number, number + 1)
            )
            runs.append([BatchSlice(grain, slice(begin, end))] if begin < end else [])
        if any(runs):
            batches.append(runs)
    return batches


def _is_past(before: Position | None, start: Position) -> bool:
    """Return whether `before` lies in another block than the one where reading began."""
    if before is None or start["source"] is None:
        return False
    return bool(before["block"] != start["source"]["block"])


def without_ticks(items: Generator[Batch | None, None, None]) -> Iterator[Batch]:
    """Yield the batches among items, and close these at the end."""
    with closing(items):
        yield from (batch for batch in items if batch is not None)


def check_stream_arguments(
    source: Source,
    schema: Schema,
    shuffle: int,
    cache: bool,
    flush_seconds: float | None,
    max_ahead_seconds: float | None,
) -> None:
    """Raise ConfigError for arguments of a Dataset that its source or schema cannot serve."""
    if flush_seconds is not None and not source.endless:
        raise ConfigError(
            f"dataset.flush_seconds: the source has an end, got {flush_seconds!r}. Leave it out."
        )
    for name, seconds in (
        ("flush_seconds", flush_seconds),
        ("max_ahead_seconds", max_ahead_seconds),
    ):
        if seconds is not None:
            checks.seconds(f"dataset.{name}", seconds, least=0)
    if source.endless and (shuffle > 1 or cache):
        name = "shuffle"
        if cache:
            name = "cache"
        raise ConfigError(
            f"dataset.{name}: the source is endless, its order is the order of events, got "
            f"{cache or shuffle!r}. Leave it out."
        )
    if max_ahead_seconds is not None and schema.time is None:
        raise ConfigError(
            f"dataset.max_ahead_seconds: events need a time, got {max_ahead_seconds!r} and a "
            "schema without Time. Name the Time column."
        )
