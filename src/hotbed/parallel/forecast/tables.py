# SPDX-License-Identifier: Apache-2.0
"""Predict what a table takes: memory, room on a disk, and rows that a step reads from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.footprint import FRAME_BYTES, HEAD_BYTES, PLACE_BYTES, SPACE
from hotbed.embedding.policy import PARTITIONS
from hotbed.parallel.dense import LINE

CHUNK = 16
"""Rows that a partition takes at a time."""
HUGE_PAGE = 2 << 20
ENTRIES = 5
"""Ids in a bucket of the index, a line of memory."""
WAITING_ENTRIES = 3
"""Ids that wait for admission, in such a bucket."""
MOST_LOAD = 0.74
GROWTH = 1.5
GAPS = 1.2
"""Memory of an index beside its bytes: blocks that it has outgrown leave gaps."""
PART_ROWS = 1 << 19
"""The most rows of a part of a table on a disk."""
PART_BYTES = 512 << 10
"""Memory of such a part, for rows that are being written."""
_HALVINGS = 60

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LookupRates:
    """How often the ids of a table are looked up.

    Attributes:
        batches: of an epoch.
        lookups: of an id in an epoch, [k].
        ids: how many ids have each of these numbers, [k].
    """

    batches: float
    lookups: Floats
    ids: Floats

    @staticmethod
    def of(counts: NDArray[np.int64], scale: float, batches: float, rows: float) -> LookupRates:
        """Return that of ids that were counted in some batches.

        Ids that were seen once stand for all others: the table has `rows` ids in the end, and those
        lookups are spread over all that were not seen twice.

        Args:
            counts: of each id that was remembered, [n].
            scale: how many ids each of these stands for.
            batches: that were counted.
            rows: of the table.
        """
        seen, num_ids = np.unique(counts[counts > 1], return_counts=True)
        once = float((counts == 1).sum()) * scale
        others = max(rows - float(num_ids.sum()) * scale, once)
        lookups = [*seen.tolist(), once / others] if once else seen.tolist()
        ids = [*(num_ids * scale).tolist(), others] if once else (num_ids * scale).tolist()
        return LookupRates(batches, np.array(lookups, np.float64), np.array(ids, np.float64))

    def misses(self, ram_rows: float) -> float:
        """Return about how many rows a batch looks up that are not in memory.

        It lies halfway between a cache of the rows used last and one of the most popular rows:
        SIEVE was within 10 % of this. Ids that are new are counted as if their rows were read.
        """
        if ram_rows >= self.ids.sum():
            return 0.0
        wanted = self.ids * -np.expm1(-self.lookups / self.batches)
        # the lookups of an id lie anywhere in an epoch, after which they come again
        left = 1 - self._batches_in_memory(ram_rows) / self.batches
        by_recency = (wanted * left ** np.maximum(self.lookups - 1, 0)).sum()
        order = np.argsort(-self.lookups)
        ids = self.ids[order]
        in_memory = np.clip(ram_rows - (np.cumsum(ids) - ids), 0, ids)
        by_popularity = (wanted[order] * (1 - in_memory / ids)).sum()
        return float((by_recency + by_popularity) / 2)

    def _batches_in_memory(self, ram_rows: float) -> float:
        """Return after how many batches a row that is not used leaves memory."""
        least = 0.0
        most = self.batches
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            used = (self.ids * (1 - (1 - middle / self.batches) ** self.lookups)).sum()
            if used < ram_rows:
                least = middle
            else:
                most = middle
        return least


@dataclass(frozen=True, eq=False)
class OnDisk:
    """A table on `hb.Ssd`, as the plan sees it.

    Attributes:
        ram_rows: that each process has in memory.
        row_bytes: of values and optimizer state.
        ledger_bytes: of an id, that its rule and its policies keep in memory.
        popularity: of its ids.
    """

    ram_rows: int
    row_bytes: int
    ledger_bytes: int
    popularity: LookupRates

    def memory(self, rows: Floats) -> Floats:
        """Return the bytes of these rows in processes, without their index."""
        parts = np.exp2(np.ceil(np.log2(np.maximum(rows / PART_ROWS, 1))))
        in_memory = np.minimum(rows, self.ram_rows) * (self.row_bytes + FRAME_BYTES)
        memory: Floats = (
            rows * (PLACE_BYTES + self.ledger_bytes)
            + in_memory
            + np.minimum(parts, PARTITIONS) * PART_BYTES
        )
        return memory

    def disk(self, rows: Floats) -> Floats:
        """Return the bytes of these rows on the disk."""
        return rows * (self.row_bytes + HEAD_BYTES) * SPACE


@dataclass(frozen=True, eq=False)
class TableFacts:
    """A table as the plan sees it.

    Attributes:
        name: of the table; it decides which partitions lie on which rank.
        dim: floats of a row on the wire.
        row_bytes: of a row in memory, with optimizer state and policies.
        words: of 8 bytes, that a question about an id takes: the id, its time, its score.
        counted: whether questions have counts, two in a word.
        capped: whether rows are counted on all ranks before one changes.
        rows: expected in each partition, [256].
        waiting: ids that wait for admission in each partition, [256].
        on_disk: what `hb.Ssd` takes; None = all rows lie in memory.
        is_kept: whether it has rows of histories, which owners send to all ranks unasked.
        begun: of older rows of histories: how many keys get their first one in a step.
    """

    name: str
    dim: int
    row_bytes: int
    words: int
    counted: bool
    capped: bool
    rows: Floats
    waiting: Floats
    on_disk: OnDisk | None = None
    is_kept: bool = False
    begun: float = 0.0

    def memory(self, owners: NDArray[np.uint8], ranks: int) -> Floats:
        """Return the bytes of rows, index and waiting ids on each rank; `owners`: as it says."""
        if self.on_disk is None:
            rows = self._slab_bytes(owners, ranks)
        else:
            rows = self.on_disk.memory(self._rows_of_ranks(owners, ranks))
        memory: Floats = rows + GAPS * np.bincount(owners, self._index_bytes, ranks)
        return memory

    def disk(self, owners: NDArray[np.uint8], ranks: int) -> Floats:
        """Return the bytes of the rows of each rank on its disk."""
        if self.on_disk is None:
            return np.zeros(ranks)
        return self.on_disk.disk(self._rows_of_ranks(owners, ranks))

    def reads(self, ranks: int) -> float:
        """Return how many rows each of several ranks reads from its disk in a step, about."""
        if self.on_disk is None:
            return 0.0
        return self.on_disk.popularity.misses(self.on_disk.ram_rows * ranks) / ranks

    def _rows_of_ranks(self, owners: NDArray[np.uint8], ranks: int) -> Floats:
        rows: Floats = np.bincount(owners, self.rows, ranks).astype(np.float64)
        return rows

    def _slab_bytes(self, owners: NDArray[np.uint8], ranks: int) -> Floats:
        """Return the bytes of the rows of each rank, all in memory.

        Rows of a small table take their bytes, others slabs on huge pages.
        """
        slots = np.bincount(owners, np.ceil(self.rows / CHUNK) * CHUNK, ranks)
        num_bytes = slots * self.row_bytes
        slab = (1 << (-(-HUGE_PAGE // self.row_bytes) - 1).bit_length()) * self.row_bytes
        slabs = np.ceil(num_bytes / slab) * slab
        return np.where(num_bytes < HUGE_PAGE / 8, num_bytes, slabs)

    def memory_of_all(self) -> float:
        """Return the bytes of the table in one process."""
        return float(self.memory(np.zeros(PARTITIONS, np.uint8), 1)[0])

    @cached_property
    def _index_bytes(self) -> Floats:
        waiting = index_bytes(np.ceil(self.waiting), WAITING_ENTRIES)
        return index_bytes(np.ceil(self.rows), ENTRIES) + waiting


def index_bytes(entries: Floats, per_bucket: int) -> Floats:
    """Return the bytes of the index of each partition, [256], with these numbers of entries.

    It grows by half when it is full, and each partition at another size, as in
    csrc/core/bucket_map.cpp.
    """
    phase = np.array([int(f"{partition:08b}"[::-1], 2) for partition in range(PARTITIONS)])
    buckets = np.zeros(PARTITIONS)
    for level in range(64):
        full = np.maximum(1, np.floor(buckets * per_bucket * MOST_LOAD))
        full[buckets == 0] = 0
        if (full >= entries).all():
            break
        larger = np.ceil(GROWTH ** (level + phase / PARTITIONS))
        buckets = np.where(full < entries, larger, buckets)
    return buckets * LINE
