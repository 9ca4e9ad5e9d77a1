# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch: encoded chunks in their order, or buffers of them permuted.

Each buffer has places from which reading resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotbed.connectors.position import Position
from hotbed.connectors.read_plan import READ_ROWS
from hotbed.connectors.source import Source
from hotbed.data.batch import Batch
from hotbed.data.columns import SegmentColumn
from hotbed.errors import DataError

Encoded = tuple[Batch, Position | None, Position]
"""Encoded rows, and the source's position before and after them.

No rows are a tick of an endless source.
"""


@dataclass(frozen=True)
class Buffer:
    """Rows in the order of emission, and the reader's places before and after them."""

    rows: Batch
    before: dict[str, Any]
    after: dict[str, Any]
    permuted: bool = False

    def place(self, emitted: int) -> dict[str, Any]:
        """Return the place of a reader that has handed out `emitted` of the rows."""
        if emitted == self.rows.num_samples:
            return self.after
        # The whole buffer is read and permuted again, and the emitted rows are skipped.
        if self.permuted:
            return {**self.before, "emitted": emitted}
        return {**self.before, "skip": self.before["skip"] + emitted}


def place_at(source: Position | None, skip: int, buffer: int = 0) -> dict[str, Any]:
    """Return a reader's place: `skip` encoded rows after the position `source`.

    The place is at the start of the shuffle buffer number `buffer`.
    """
    state = None
    if source is not None:
        state = dict(source.state)
    return {"source": state, "skip": skip, "buffer": buffer, "emitted": 0}


def source_position(place: Mapping[str, Any] | Position) -> Position | None:
    """Return the position of the source in a reader's place; None = its start."""
    state = place["source"]
    return None if state is None else Position.from_json(state)


def unshuffled(chunks: Iterator[Encoded], skip: int) -> Iterator[Buffer]:
    """Yield the chunks in their order, without the first `skip` rows."""
    for rows, before, after in chunks:
        if skip < rows.num_samples:
            rest = rows
            if skip:
                rest = rows[skip:]
            yield Buffer(rest, place_at(before, skip), place_at(after, 0))
        skip = max(0, skip - rows.num_samples)
    _require_rows(skip)


def _require_rows(missing: int) -> None:
    """Raise DataError if a source ended before a place, `missing` rows before it."""
    if missing > 0:
        raise DataError(
            f"position: the source has {missing:,} rows fewer than were read before it. Give the "
            "source that the position was written for, or begin without it."
        )


@dataclass(frozen=True)
class CachedRows:
    """All rows of an epoch, encoded, which later epochs take from memory.

    Attributes:
        lanes: the rows of each grain, or of the whole source; none before the first reading.
        segments: the columns whose segments the rows have.
    """

    lanes: Sequence[Buffer] = ()
    segments: Sequence[SegmentColumn] = ()

    @classmethod
    def read(
        cls, lanes: Iterable[tuple[Source, Iterator[Encoded]]], segments: Sequence[SegmentColumn]
    ) -> CachedRows:
        """Read all rows of each lane; `lanes`: the source of each, and its encoded chunks."""
        return cls([_all_rows(source, chunks) for source, chunks in lanes], segments)

    def has(self, num_lanes: int, segments: Sequence[SegmentColumn]) -> bool:
        """Return whether the rows of these lanes were read, with these segments."""
        return len(self.lanes) == num_lanes and self.segments == segments

    def without_labels(self) -> CachedRows:
        """Return the same rows without labels and weights."""
        lanes = [
            replace(lane, rows=replace(lane.rows, labels={}, weight=None)) for lane in self.lanes
        ]
        return replace(self, lanes=lanes)


def _all_rows(source: Source, chunks: Iterator[Encoded]) -> Buffer:
    """Return the rows of a source as one buffer."""
    every = list(chunks)
    begin = None
    rows = Batch(num_samples=0)
    if every:
        _, begin, _ = every[0]
        if begin is not None:  # they are counted through the whole source
            begin = Position.of(source, begin.state)
        rows = Batch.concat([chunk for chunk, _, _ in every])
    return Buffer(rows, place_at(begin, 0), place_at(begin, rows.num_samples))


def cached(lane: Buffer, order: np.ndarray | None, skip: int) -> Iterator[Buffer]:
    """Yield the rows of a lane, which are all in memory, without the first `skip` ones.

    `order`: of the rows; None = their own.
    """
    count = lane.rows.num_samples
    _require_rows(skip - count)
    for begin in range(skip, count, READ_ROWS):
        end = min(begin + READ_ROWS, count)
        part = lane.rows[begin:end] if order is None else lane.rows.take(order[begin:end])
        yield Buffer(part, {**lane.before, "skip": begin}, {**lane.before, "skip": end})


@dataclass(frozen=True)
class ShuffledBuffers:
    """Cuts chunks into buffers of `size` rows, each permuted by (seed, epoch, its number).

    The first buffer is shorter by a random part, so that buffers of different epochs do not hold
    the same rows. `grain`: the number of the grain whose rows these are, which permutes them, too;
    None = they are those of a whole source.
    """

    size: int
    seed: int
    epoch: int
    grain: int | None = None

    def buffers(self, chunks: Iterator[Encoded], index: int, skip: int) -> Iterator[Buffer]:
        """Yield the buffers from number `index` on, without the first `skip` rows of `chunks`."""
        pending: list[Encoded] = []
        num_pending = -skip
        for chunk in chunks:
            pending.append(chunk)
            num_pending += chunk[0].num_samples
            while num_pending >= (size := self._rows(index)):
                buffer, skip = self._permuted(pending, skip, size, index)
                yield buffer
                index = index + 1
                num_pending = num_pending - size
        _require_rows(-num_pending)
        if num_pending > 0:
            yield self._permuted(pending, skip, num_pending, index)[0]

    def _permuted(
        self, pending: list[Encoded], skip: int, size: int, index: int
    ) -> tuple[Buffer, int]:
        """Return the next `size` rows of `pending` after `skip`, permuted, and the new skip.

        Chunks that are used up are removed from `pending`.
        """
        while skip >= pending[0][0].num_samples:
            skip -= pending.pop(0)[0].num_samples
        before = place_at(pending[0][1], skip, index)
        parts: list[Batch] = []
        need = size
        while True:
            rows = pending[0][0]
            num_rows = min(need, rows.num_samples - skip)
            parts.append(rows[skip : skip + num_rows])
            need = need - num_rows
            skip = skip + num_rows
            if need == 0:
                break
            pending.pop(0)
            skip = 0
        rows, chunk_begin, chunk_end = pending[0]
        if skip == rows.num_samples:
            after = place_at(chunk_end, 0, index + 1)
        else:
            after = place_at(chunk_begin, skip, index + 1)
        order = random_of((self.seed, self.epoch, index), self.grain).permutation(size)
        return Buffer(Batch.concat(parts).take(order), before, after, permuted=True), skip

    def _rows(self, index: int) -> int:
        if index:
            return self.size
        random = random_of((self.seed, self.epoch), self.grain)
        least = self.size // 2 + 1
        return int(random.integers(least, self.size + 1))


def random_of(key: tuple[int, ...], grain: int | None) -> np.random.Generator:
    """Return the generator of a key, and of a grain; `grain` as in `ShuffledBuffers`."""
    if grain is not None:
        key = (*key, 1 + grain)  # a zero at the end of a key changes nothing
    return np.random.default_rng(key)
