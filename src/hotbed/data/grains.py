# SPDX-License-Identifier: Apache-2.0
"""Grains: the runs of samples of each batch, and which rows of a source belong to which grain."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.row_groups import RowGroups
from hotbed.connectors.source import Source
from hotbed.data.batch import Batch, BatchSlice, Ids, changed, joined
from hotbed.data.order import Buffer, Encoded, unshuffled
from hotbed.data.schema import Schema
from hotbed.errors import DataError, DecodeError

MOST_GRAINS = 8
"""Of a step whose grains nobody has chosen."""
RowRuns = Iterable[Sequence[range]]
"""Runs of neighbouring ranges of numbers of rows."""
LEAST_SAMPLES = 512
"""Of such a grain: below, the calls of its passes cost more than they compute."""


def grains_for(batch_size: int) -> int:
    """Return how many grains suit a batch: a power of two up to 8, of 512 samples each or more."""
    grains = MOST_GRAINS
    while grains > 1 and batch_size < LEAST_SAMPLES * grains:
        grains //= 2
    return grains


@dataclass(frozen=True)
class Cut:
    """The rows of a batch, and the reader's place after them.

    Attributes:
        runs: the parts of each grain; of a batch that its source does not divide, one run.
        place: members of the position after the batch.
    """

    runs: Sequence[Sequence[BatchSlice]]
    place: dict[str, Any]


class Lane:
    """The rows of a grain, or of a whole source, in their order: each batch takes the next ones.

    Attributes:
        place: where the reader is, after the rows that were taken.
    """

    def __init__(self, buffers: Iterator[Buffer], place: dict[str, Any]) -> None:
        self.place = place
        self._buffers = buffers
        self._buffer: Buffer | None = None
        self._row = int(place["emitted"])  # of the buffer

    def take(self, count: int) -> list[BatchSlice]:
        """Return the next `count` rows, in parts; fewer at the end."""
        parts: list[BatchSlice] = []
        while count and self.has_rows():
            assert self._buffer is not None
            rows = self._buffer.rows
            first = self._row
            self._row = min(first + count, rows.num_samples)
            parts.append(BatchSlice(rows, slice(first, self._row)))
            count -= self._row - first
            self.place = self._buffer.place(self._row)
        return parts

    def has_rows(self) -> bool:
        """Return whether there is a next row; it is read if there is."""
        while self._buffer is None or self._row == self._buffer.rows.num_samples:
            if self._buffer is not None:
                self._row = 0
            self._buffer = next(self._buffers, None)
            if self._buffer is None:
                return False
        return True


def shares(num_rows: int, grains: int) -> list[int]:
    """Return how many of `num_rows` rows belong to each grain; they differ by one at most.

    The share of a grain never falls with the number of rows. So batches of which each takes the
    next rows of all grains end at once in all of them.
    """
    return [(num_rows + grain) // grains for grain in range(grains)]


def ranges_of(source: Source, grains: int) -> list[Source]:
    """Return the rows of each grain: ranges of the source, one after another."""
    try:
        num_rows = source.num_rows()
    except DecodeError:  # reading the rows reports the damage
        num_rows = None
    if not num_rows:
        return source.parts(grains)
    ends = accumulate(shares(num_rows, grains), initial=0)
    bounds = [Fraction(end, num_rows) for end in ends]
    return [source.share(begin, end) for begin, end in pairwise(bounds)]


def cut_epoch(
    lanes: Sequence[Lane], batch_size: int, batch: int, *, drop_last: bool
) -> Iterator[Cut]:
    """Yield the batches of an epoch from number `batch` on: of each grain its next rows.

    A grain that has ended has no rows in the batches that follow. `drop_last` leaves out a last
    batch of fewer than `batch_size` rows.
    """
    grains = len(lanes)
    begins = shares(batch * batch_size, grains)
    while True:
        batch += 1
        ends = shares(batch * batch_size, grains)
        runs = [
            lane.take(end - begin) for lane, begin, end in zip(lanes, begins, ends, strict=True)
        ]
        begins = ends
        num_rows = sum(part.num_samples for run in runs for part in run)
        if num_rows < batch_size:
            has_more = any([lane.has_rows() for lane in lanes])  # all are read to their ends
            if not has_more and (drop_last or not num_rows):
                return
        if num_rows:
            yield Cut(runs, _place_of(lanes, batch))


def cut_runs(
    source: Source,
    runs: RowRuns,
    encoded: Callable[[Source], Iterator[Encoded]],
    start: dict[str, Any],
) -> Generator[Batch, None, None]:
    """Yield ranges of rows of a source, each as a batch; see `Dataset.epoch`.

    Args:
        source: that is divisible.
        runs: of neighbouring ranges.
        encoded: returns the encoded chunks of a part of the source.
        start: the place before its first row.

    Raises:
        DataError: the source has fewer rows.
    """
    num_rows = source.num_rows()
    assert num_rows, "the number of rows is known"
    for run in runs:
        part = source.share(Fraction(run[0].start, num_rows), Fraction(run[-1].stop, num_rows))
        lane = Lane(unshuffled(encoded(part), 0), start)
        for rows in run:
            slices = lane.take(len(rows))
            num_read = sum(each.num_samples for each in slices)
            if num_read < len(rows):
                raise DataError(
                    f"{type(source).__name__}: rows {rows.start:,} to {rows.stop:,} are not all "
                    f"there, got {num_read:,} of them. Read data that does not change."
                )
            yield joined(slices)


def _place_of(lanes: Sequence[Lane], batch: int) -> dict[str, Any]:
    if len(lanes) == 1:
        return lanes[0].place
    return {"batch": batch, "grains": [lane.place for lane in lanes]}


@dataclass
class Tally:
    """How far the lanes of an epoch have been read.

    Attributes:
        lanes: their number.
        has_begun: whether one of them has begun to read.
        num_rows: rows of the lanes that have ended.
        is_whole: whether those that have ended were read from their starts, and all rows are in
            lanes.
    """

    lanes: int
    has_begun: bool = False
    num_rows: int = 0
    is_whole: bool = True
    _num_ended: int = 0
    _row_groups: RowGroups = field(default_factory=RowGroups)

    def plan(self, plan: ReadPlan) -> ReadPlan:
        """Return a plan by which lanes, if there are several, decode a row group once."""
        return replace(plan, row_groups=self._row_groups) if self.lanes > 1 else plan

    def ended(self, num_rows: int, *, whole: bool) -> bool:
        """Count a lane that has ended; return whether all have, each read from its start."""
        self.num_rows += num_rows
        self._num_ended += 1
        self.is_whole = self.is_whole and whole
        return self.is_whole and self._num_ended == self.lanes


def ends_of(runs: Sequence[Sequence[BatchSlice]]) -> tuple[int, ...]:
    """Return the number of the sample before which the run of each grain ends."""
    return tuple(accumulate(sum(part.num_samples for part in run) for run in runs))


def shared_batch(runs: Sequence[Sequence[BatchSlice]], own: range, schema: Schema) -> Batch:
    """Return the batch of these runs, of which other ranks have the features of other grains.

    Args:
        runs: the parts of each grain; those that are not `own` have no features.
        own: the grains of this rank.
        schema: of the rows.
    """
    outcomes = joined([part for run in runs for part in run], features=False)
    whole = changed(outcomes, {"grain_ends": ends_of(runs)})
    own_runs = [run if grain in own else () for grain, run in enumerate(runs)]
    parts = [part for run in own_runs for part in run] or [BatchSlice.of(_no_rows(schema))]
    return changed(joined(parts), {"grain_ends": ends_of(own_runs), "whole": whole})


def failed_batch(schema: Schema, grains: int) -> Batch:
    """Return a batch without rows, for a step that ends with the error of reading it."""
    ends = (0,) * grains
    whole = Batch(num_samples=0, grain_ends=ends)
    return changed(_no_rows(schema), {"grain_ends": ends, "whole": whole})


def _no_rows(schema: Schema) -> Batch:
    ids = {column.name: Ids(np.empty(0, np.int64)) for column in schema.ids}
    dense = {
        column.name: np.empty(0 if column.width == 1 else (0, column.width), np.float32)
        for column in schema.dense
    }
    time = None if schema.time is None else np.empty(0, np.int64)
    return Batch(ids, dense, time=time, num_samples=0)
