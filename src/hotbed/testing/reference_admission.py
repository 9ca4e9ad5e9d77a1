# SPDX-License-Identifier: Apache-2.0
"""The admission of `ReferenceTable`: counts of ids without a row, one id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.hashing import GOLDEN, mix64_int, table_key
from hotbed.embedding.policy import (
    PARTITIONS,
    SKETCH_ROWS,
    Admission,
    MinCount,
    Probability,
    SketchLayout,
    counts_once,
    sketch_layout,
)

MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True)
class Candidate:
    """An id without a row: its count, and when it was last seen, by the table's clock."""

    count: int
    last_seen: int


@dataclass
class Generation:
    """One generation of a sketch: cells [4, width], and the time of the newest id in them."""

    cells: NDArray[np.int64]
    newest: int | None = None


class ReferenceSketch:
    """A count-min sketch with conservative update of one partition, the younger generation first.

    Cells end at the largest value of their bits.
    """

    def __init__(self, layout: SketchLayout) -> None:
        self.layout = layout
        self.limit = 2**layout.bits - 1
        self.generations = [self._empty() for _ in range(layout.num_generations)]

    def _empty(self) -> Generation:
        return Generation(np.zeros((SKETCH_ROWS, self.layout.width), np.int64))

    def _columns(self, id: int) -> list[int]:
        hashes = [mix64_int(mix64_int(id) + row * GOLDEN) for row in range(1, SKETCH_ROWS + 1)]
        return [((hash & 0xFFFFFFFF) * self.layout.width) >> 32 for hash in hashes]

    def count(self, id: int) -> int:
        """Return the count of an id, at least the true one or `limit`."""
        rows = range(SKETCH_ROWS)
        columns = self._columns(id)
        return max(int(generation.cells[rows, columns].min()) for generation in self.generations)

    def raise_to(self, id: int, count: int, time: int) -> None:
        young = self.generations[0]
        for row, column in enumerate(self._columns(id)):
            young.cells[row, column] = max(young.cells[row, column], min(count, self.limit))
        young.newest = time if young.newest is None else max(young.newest, time)

    def expire(self, before: int) -> None:
        """Empty generations whose ids were all last seen before `before`; the others age."""
        filled = []
        for generation in self.generations:
            if generation.newest is not None and generation.newest >= before:
                filled.append(generation)
        if len(filled) == 1:
            self.generations = [self._empty(), *filled]
        if not filled:
            self.generations = [self._empty(), self._empty()]


class ReferenceAdmission:
    """Decides which ids get a row, by an exact map or a sketch of counts in each partition.

    Args:
        policy: None admits every id.
        seed: of the table.
        name: the hash of the table's name.
    """

    def __init__(self, policy: Admission | None, seed: int, name: int) -> None:
        self.policy: MinCount | Probability | None = None
        if isinstance(policy, (MinCount, Probability)) and policy.is_on:
            admits_all = isinstance(policy, MinCount) and policy.count == 0
            self.policy = None if admits_all else policy
        self._once = counts_once(policy)
        self._key = table_key(seed, name)
        self._candidates: dict[int, dict[int, Candidate]] = {p: {} for p in range(PARTITIONS)}
        width = 0
        if self.policy is not None:
            width = self.policy.sketch_width
        self._plain = np.zeros((PARTITIONS, 4, width), np.uint32)
        self._layout = sketch_layout(self.policy)
        self._sketches: dict[int, ReferenceSketch] = {}

    @property
    def coefficient(self) -> int:
        """Return how much an occurrence counts."""
        if isinstance(self.policy, MinCount):
            return self.policy.coefficient
        return 1

    def added(self, times: list[int]) -> int:
        """Return how much the occurrences of an id in a batch add to its count."""
        return (1 if self._once else len(times)) * self.coefficient

    def count(self, id: int, times: list[int]) -> Candidate:
        """Count the occurrences of an id without a row in this batch.

        Returns its count so far, and when it was last seen as far as that is known.
        """
        added = self.added(times)
        if self.policy is None:
            return Candidate(added, max(times))
        if self.policy.sketch_width:
            count = self._count_in_plain(id, added, self.policy.sketch_width)
            return Candidate(count, max(times))
        partition = partition_of(id)
        candidates = self._candidates[partition]
        if id not in candidates and partition not in self._sketches:
            self._make_room(partition, candidates)
        if partition in self._sketches:
            sketch = self._sketches[partition]
            count = min(sketch.count(id) + added, MAX_COUNT)
            sketch.raise_to(id, count, max(times))
            return Candidate(count, max(times))
        count = 0
        last_seen = max(times)
        if id in candidates:
            count = candidates[id].count
            last_seen = max(last_seen, candidates[id].last_seen)
        count = min(count + added, MAX_COUNT)
        candidate = Candidate(count, last_seen)
        candidates[id] = candidate
        if self.admits(id, count, len(times)):
            del candidates[id]
        return candidate

    def admits(self, id: int, count: int, occurrences: int) -> bool:
        """Return True if an id of this count, with `occurrences` in the batch, gets a row."""
        if isinstance(self.policy, MinCount):
            return count >= (self.policy.count or 0)
        if isinstance(self.policy, Probability):
            base = mix64_int(self._key ^ mix64_int(id))
            for number in range(count - occurrences + 1, count + 1):
                draw = mix64_int(base + number) >> 11
                if draw * 2.0**-53 < (self.policy.p or 0.0):
                    return True
            return False
        return True

    def expire(self, watermark: int) -> None:
        """Remove the candidates that were not seen for `expire_seconds` or `expire_steps`."""
        if not isinstance(self.policy, MinCount):
            return
        age = self.policy.expire_after
        if age is None:
            return
        for sketch in self._sketches.values():
            sketch.expire(watermark - age + 1)
        for candidates in self._candidates.values():
            for id, candidate in list(candidates.items()):
                if watermark - candidate.last_seen >= age:
                    del candidates[id]

    def export(self) -> Iterator[pa.RecordBatch]:
        """Yield the candidates and the plain sketch, for `load`."""
        columns: dict[str, list[int]] = {"partition": [], "id": [], "count": [], "last_seen": []}
        for partition, candidates in self._candidates.items():
            for id, candidate in candidates.items():
                columns["partition"].append(partition)
                columns["id"].append(id)
                columns["count"].append(candidate.count)
                columns["last_seen"].append(candidate.last_seen)
        arrays = {name: pa.array(values, pa.int64()) for name, values in columns.items()}
        yield pa.RecordBatch.from_pydict(arrays)
        yield pa.RecordBatch.from_pydict({"plain": pa.array(self._plain.reshape(-1), pa.uint32())})

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load batches from `export`."""
        for batch in batches:
            if "plain" in batch.schema.names:
                counters = batch["plain"].to_numpy()
                self._plain = counters.reshape(self._plain.shape).copy()
                continue
            for record in batch.to_pylist():
                candidates = self._candidates[record["partition"]]
                candidates[record["id"]] = Candidate(record["count"], record["last_seen"])

    def _make_room(self, partition: int, candidates: dict[int, Candidate]) -> None:
        """Let one more candidate fit, or begin the sketch of a partition.

        With `max_candidates`, all counts are halved and zeros dropped until it fits.
        """
        assert self.policy is not None
        assert self._layout is not None
        if self.policy.max_candidates is None:
            if len(candidates) >= self._layout.exact_ids:
                self._sketches[partition] = ReferenceSketch(self._layout)
                for id, candidate in sorted(candidates.items()):
                    self._sketches[partition].raise_to(id, candidate.count, candidate.last_seen)
                candidates.clear()
            return
        while len(candidates) >= -(-self.policy.max_candidates // PARTITIONS):
            for id, candidate in list(candidates.items()):
                if candidate.count < 2:
                    del candidates[id]
                else:
                    candidates[id] = Candidate(candidate.count // 2, candidate.last_seen)

    def _count_in_plain(self, id: int, added: int, width: int) -> int:
        hashed = mix64_int(id)
        rows = self._plain[partition_of(id)]
        counts = []
        for number, row in enumerate(rows, start=1):
            column = mix64_int(hashed + number * GOLDEN) & (width - 1)
            count = min(int(row[column]) + added, MAX_COUNT)
            row[column] = count
            counts.append(count)
        return min(counts)


def partition_of(id: int) -> int:
    """Return the partition of one id, see `hashing.partition`."""
    return mix64_int(id) >> 56
