# SPDX-License-Identifier: Apache-2.0
"""The admission of `ReferenceTable`: counts of ids without a row, one id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .hashing import GOLDEN, mix64_int, table_key
from .policy import PARTITIONS, Admission, MinCount, Probability, counts_once

MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True)
class Candidate:
    """An id without a row: its count, and when it was last seen, by the table's clock."""

    count: int
    last_seen: int


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
        self._sketch = np.zeros((PARTITIONS, 4, width), np.uint32)

    @property
    def coefficient(self) -> int:
        """Return how much an occurrence counts."""
        if isinstance(self.policy, MinCount):
            return self.policy.coefficient
        return 1

    def added(self, times: list[int]) -> int:
        """Return how much the occurrences of an id in a batch add to its count."""
        return (1 if self._once else len(times)) * self.coefficient

    def count(self, id: int, times: list[int]) -> int:
        """Count the occurrences of an id without a row in this batch; return its count so far."""
        added = self.added(times)
        if self.policy is None:
            return added
        if self.policy.sketch_width:
            return self._count_in_sketch(id, added, self.policy.sketch_width)
        candidates = self._candidates[partition_of(id)]
        if id not in candidates:
            self._make_room(candidates, -(-self.policy.max_candidates // PARTITIONS))
        count = 0
        last_seen = max(times)
        if id in candidates:
            count = candidates[id].count
            last_seen = max(last_seen, candidates[id].last_seen)
        count = min(count + added, MAX_COUNT)
        candidates[id] = Candidate(count, last_seen)
        if self.admits(id, count, len(times)):
            del candidates[id]
        return count

    def admits(self, id: int, count: int, occurrences: int) -> bool:
        """Return True if an id of this count, with so many occurrences in the batch, gets a row."""
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
        for candidates in self._candidates.values():
            for id, candidate in list(candidates.items()):
                if watermark - candidate.last_seen >= age:
                    del candidates[id]

    def export(self) -> Iterator[pa.RecordBatch]:
        """Yield the candidates and the sketch, for `load`."""
        columns: dict[str, list[int]] = {"partition": [], "id": [], "count": [], "last_seen": []}
        for partition, candidates in self._candidates.items():
            for id, candidate in candidates.items():
                columns["partition"].append(partition)
                columns["id"].append(id)
                columns["count"].append(candidate.count)
                columns["last_seen"].append(candidate.last_seen)
        arrays = {name: pa.array(values, pa.int64()) for name, values in columns.items()}
        yield pa.RecordBatch.from_pydict(arrays)
        yield pa.RecordBatch.from_pydict(
            {"sketch": pa.array(self._sketch.reshape(-1), pa.uint32())}
        )

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load batches from `export`."""
        for batch in batches:
            if "sketch" in batch.schema.names:
                counters = batch["sketch"].to_numpy()
                self._sketch = counters.reshape(self._sketch.shape).copy()
                continue
            for record in batch.to_pylist():
                candidates = self._candidates[record["partition"]]
                candidates[record["id"]] = Candidate(record["count"], record["last_seen"])

    def _make_room(self, candidates: dict[int, Candidate], limit: int) -> None:
        """Halve all counts of a partition, and drop zeros, until one more candidate fits."""
        while len(candidates) >= limit:
            for id, candidate in list(candidates.items()):
                if candidate.count < 2:
                    del candidates[id]
                else:
                    candidates[id] = Candidate(candidate.count // 2, candidate.last_seen)

    def _count_in_sketch(self, id: int, added: int, width: int) -> int:
        hashed = mix64_int(id)
        rows = self._sketch[partition_of(id)]
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
