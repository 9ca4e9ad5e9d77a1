# SPDX-License-Identifier: Apache-2.0
"""Rows by partition and id: ranges of partitions, and the rows of a full and its deltas as one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.policy import PARTITIONS


def partition_ranges(rows: int, rows_per_part: int = 1 << 20) -> list[range]:
    """Return equal ranges of the 256 partitions, each with about `rows_per_part` of `rows`."""
    parts = 1
    while parts < PARTITIONS and rows > parts * rows_per_part:
        parts *= 2
    width = PARTITIONS // parts
    return [range(first, first + width) for first in range(0, PARTITIONS, width)]


class RowCuts:
    """Batches in the order of partitions, cut where the reader asks."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._head = next(batches, None)

    def until(self, stop: int) -> pa.RecordBatch | None:
        """Return the rows of partitions below `stop` that were not returned before."""
        pieces = []
        while self._head is not None:
            partitions = self._head.column("partition").to_numpy()
            num_rows = int(np.searchsorted(partitions, stop))
            if num_rows:
                pieces.append(self._head.slice(0, num_rows))
            if num_rows < self._head.num_rows:
                self._head = self._head.slice(num_rows)
                break
            self._head = next(self._batches, None)
        if len(pieces) > 1:
            return pa.concat_batches(pieces)
        return pieces[0] if pieces else None


def sorted_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows in the order of (partition, id)."""
    keys = [batch.column(name).to_numpy() for name in ("id", "partition")]
    return batch.take(pa.array(np.lexsort(keys)))


def merged_rows(
    rows: list[pa.RecordBatch | None], removed: list[pa.RecordBatch | None]
) -> pa.RecordBatch | None:
    """Merge rows of some partitions, a full's first: the newest of each id, unless it was removed
    later.
    """
    decided: NDArray[np.int64] = np.empty(0, np.int64)
    batches = []
    for batch, removed_ids in zip(reversed(rows), reversed(removed), strict=True):
        if batch is not None:
            ids = batch.column("id").to_numpy()
            if len(decided):
                batch = batch.filter(pa.array(~np.isin(ids, decided)))
            batches.append(batch)
            if len(rows) > 1:
                decided = np.union1d(decided, ids)
        if removed_ids is not None:
            decided = np.union1d(decided, removed_ids.column("id").to_numpy())
    if len(batches) < 2:
        return batches[0] if batches else None
    names = batches[0].schema.names
    for batch in batches[1:]:
        names = [name for name in names if name in batch.schema.names]
    return sorted_rows(pa.concat_batches([batch.select(names) for batch in batches]))
