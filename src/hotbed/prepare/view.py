# SPDX-License-Identifier: Apache-2.0
"""View: the rows of a partition as every later stage sees them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.plan import ReadPlan
from hotbed.prepare.partitions import Partition

TRAIN = 0
VALID = 1
PARTS = ("train", "valid")
"""Names of the parts, by their numbers."""


@dataclass(frozen=True)
class Rows:
    """Rows of one chunk.

    `chunk`: the number of the chunk in the partition. `columns`: raw and derived columns. `part`:
    the part of each row, uint8 [n]. `places`: the number of each row in its file, int64 [n].
    """

    partition: Partition
    chunk: int
    columns: pa.RecordBatch
    part: NDArray[np.uint8]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def of_part(self, part: int) -> Rows:
        """Return the rows of one part."""
        return self.take(np.flatnonzero(self.part == part))

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Return the rows of these numbers, in this order."""
        if len(rows) == len(self):
            return self
        return Rows(
            self.partition,
            self.chunk,
            self.columns.take(pa.array(rows)),
            self.part[rows],
            self.places[rows],
        )


@dataclass(frozen=True)
class View:
    """Reads a partition: raw columns, derived columns, and the part of each row.

    It can be pickled: a task takes it to where the task runs.

    Args:
        plan: the raw columns to read, and their types.
    """

    plan: ReadPlan = field(default_factory=ReadPlan)

    def rows(self, partition: Partition) -> Iterator[Rows]:
        """Yield the rows of a partition; chunks without rows are left out."""
        for chunk in partition.chunks(self.plan):
            part = np.full(chunk.rows.num_rows, TRAIN, np.uint8)
            yield Rows(
                partition,
                chunk.number,
                chunk.rows,
                part,
                chunk.places,
            )
