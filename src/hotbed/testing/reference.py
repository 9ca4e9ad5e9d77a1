# SPDX-License-Identifier: Apache-2.0
"""A table that is easy to check: the verbs of `hb.Table` over one dict, a row at a time.

Its public name is `hotbed.testing.ReferenceTable`; tests compare the native core with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from hotbed.embedding.hashing import name_hash
from hotbed.embedding.init import Init, Uniform
from hotbed.embedding.policy import (
    PARTITIONS,
    Admission,
    Eviction,
    Lfu,
    Lru,
    MinCount,
    Ttl,
    clock_of,
    evictions,
)
from hotbed.embedding.rule import Adagrad, Rule
from hotbed.embedding.table import REASONS, Frozen
from hotbed.embedding.tier import Ram, Tier
from hotbed.errors import ConfigError, NonFiniteGradient, RowShapeError, TableError, TableFull
from hotbed.testing.reference_admission import (
    MAX_COUNT,
    Candidate,
    ReferenceAdmission,
    partition_of,
)


@dataclass
class _Row:
    slot: int
    value: NDArray[np.float32]
    state: NDArray[np.float32]
    last_seen: int
    count: int
    score: float


class ReferenceTable:
    """`hb.Table` as one dict from id to row: same arguments, verbs and errors, far slower.

    Rows are float32 and lie in `Ram`. `scope="catch_up"` is computed as "all", whose bits it must
    have. Slots are never reused.

    Example:
        >>> table = ReferenceTable("user", 4)
        >>> table.update(table.find_or_insert([7, -1]), np.ones((2, 4), np.float32))
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        rule: Rule | None = None,
        admit: Admission | None = None,
        evict: Eviction | Sequence[Eviction] | None = None,
        tier: Tier | None = None,
        init: Init | None = None,
        default: float = 0.0,
        seed: int = 0,
        always_default: bool = False,
    ) -> None:
        self.name = name
        self.dim = dim
        self.rule = rule or Adagrad()
        self.seed = seed
        self.default = default
        self.always_default = always_default
        self.admit = admit
        self.init = init or Uniform(0.05)
        self.tier = tier or Ram()
        self.ttl: int | None = None
        self.bound: Lru | Lfu | None = None
        self.policies: list[Ttl | Lru | Lfu] = []
        for policy in evictions(evict):
            assert isinstance(policy, (Ttl, Lru, Lfu))
            if not policy.is_on:
                continue
            self.policies.append(policy)
            if isinstance(policy, Ttl):
                self.ttl = policy.duration
            else:
                self.bound = policy
        self.clock = clock_of(f"table {name!r}", admit, self.policies)
        self.name_hash = name_hash(name)
        self.admission = ReferenceAdmission(admit, seed, self.name_hash)
        counts_all = isinstance(admit, MinCount) and admit.count == 0
        self.keeps_time = self.ttl is not None or isinstance(self.bound, Lru) or counts_all
        self.keeps_count = isinstance(self.bound, Lfu) or counts_all
        self.rows: dict[int, _Row] = {}
        self.ids_of_slots: dict[int, int] = {}
        self.step = 0
        self.calls = 0
        self.next_slot = 0
        self.watermark: int | None = None
        self.frozen: Frozen = False
        self.evicted = dict.fromkeys(REASONS, 0)
        """Rows that were evicted, by reason; none restarts, since expired rows go at once."""

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return the slots int64 [n] of ids [n]; -1 without a row."""
        slots = []
        for id in _ids(ids):
            row = self.rows.get(id)
            slots.append(-1 if row is None else row.slot)
        return np.array(slots, np.int64)

    def find_or_insert(self, ids: ArrayLike, time: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the slots int64 [n] of ids; count new ids and insert those that are admitted.

        `time`: microseconds, one or [n]; a table that counts steps does not use it.
        """
        times_of = self._occurrences(_ids(ids), time)
        if self.frozen == "all":
            return self.find(ids)
        admitted: dict[int, Candidate] = {}
        if not self.frozen:
            admitted = self._admitted(times_of)
        self.calls += 1
        for id, times in times_of.items():
            if id in self.rows:
                self._touch(self.rows[id], times)
        for id, candidate in admitted.items():
            self._insert(id, candidate, times_of[id])
        self._shrink(times_of)
        return self.find(ids)

    def _admitted(self, times_of: Mapping[int, list[int]]) -> dict[int, Candidate]:
        """Count the new ids of a batch; return those that get a row, with counts and times.

        Raises:
            TableFull: the batch would use more rows than the table may keep; nothing has changed.
        """
        before = None
        if self.bound is not None:
            before = copy.deepcopy(self.admission)
        admitted = {}
        num_rows = 0
        for id, times in times_of.items():
            if id in self.rows:
                num_rows += 1
                continue
            candidate = self.admission.count(id, times)
            if self.admission.admits(id, candidate.count, len(times)):
                admitted[id] = candidate
                num_rows += 1
        if self.bound is not None and before is not None:
            max_rows = _quota(self.bound) * PARTITIONS
            if num_rows > max_rows:
                self.admission = before
                raise TableFull(
                    f"table {self.name!r}: a batch may use {max_rows} rows, got {num_rows}. "
                    "Raise max_rows or make the batch smaller."
                )
        return admitted

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Return the rows of ids, float32 [n, dim].

        An id without a row reads as its initial row, or as `default` if admission is on.
        """
        values = []
        for id in _ids(ids):
            row = self.rows.get(id)
            values.append(self._absent(id) if row is None else row.value)
        return np.array(values, np.float32).reshape(len(values), self.dim)

    def gather(self, slots: ArrayLike) -> NDArray[np.float32]:
        """Return the rows float32 [n, dim] of slots [n]; `default` where -1."""
        values = []
        for slot in _ids(slots):
            id = self.ids_of_slots.get(slot)
            if id is None:
                values.append(np.full(self.dim, self.default, np.float32))
            else:
                values.append(self.rows[id].value)
        return np.array(values, np.float32).reshape(len(values), self.dim)

    def update(self, slots: ArrayLike, grads: ArrayLike, lr: float | None = None) -> None:
        """Sum the gradients float32 [n, dim] of each row in order, then apply the rule once a row.

        Slot -1 is skipped.
        """
        if self.frozen:
            raise TableError(
                f"table {self.name!r}: a frozen table takes no update. Set frozen to False first."
            )
        gradients = np.asarray(grads)
        numbers = _ids(slots)
        if gradients.shape != (len(numbers), self.dim) or gradients.dtype.kind != "f":
            raise RowShapeError(
                f"table {self.name!r}: gradients must be float32 [{len(numbers)}, {self.dim}], got "
                f"{gradients.dtype} {list(gradients.shape)}. Convert them."
            )
        sums: dict[int, NDArray[np.float32]] = {}
        for slot, grad in zip(numbers, gradients.astype(np.float32), strict=True):
            id = self.ids_of_slots.get(slot)
            if id is None:
                continue
            if id in sums:
                sums[id] = sums[id] + grad
            else:
                sums[id] = grad
        for id, grad in sums.items():
            if not np.isfinite(grad).all():
                raise NonFiniteGradient(
                    f"table {self.name!r}: the gradient of id {id} is not finite; nothing was "
                    "updated. Look at the loss.",
                    self.name,
                    id,
                )
        self.step += 1
        zero = np.zeros(self.dim, np.float32)
        stepped: Iterable[int] = sums if self.rule.scope == "touched" else self.rows
        for id in stepped:
            row = self.rows[id]
            grad = sums.get(id, zero)
            value, state = self.rule.reference(
                row.value[None], row.state[None], grad[None], self.step, lr
            )
            row.value = value[0].astype(np.float32)
            row.state = state[0].astype(np.float32)

    def evict(self, now: int | None = None) -> int:
        """Remove rows and candidates whose time to live is over; return the number of rows removed.

        `now`: microseconds; a table that counts steps takes its own step instead.
        """
        if self.frozen == "all":
            return 0
        if self.clock == "steps":
            now = self.step
        if now is None:
            raise ConfigError(f"table {self.name!r}: evict needs a time, got None. Give `now`.")
        if self.watermark is None or self.watermark < now:
            self.watermark = now
        expired = []
        for id, row in self.rows.items():
            if self.ttl is not None and self.watermark - row.last_seen >= self.ttl:
                expired.append(id)
        for id in expired:
            self._evict(id, "expired")
        self.admission.expire(self.watermark)
        return len(expired)

    def remove(self, ids: ArrayLike) -> int:
        """Remove the rows of ids [n], as an eviction does, and return their number."""
        ids_with_row = [id for id in dict.fromkeys(_ids(ids)) if id in self.rows]
        for id in ids_with_row:
            self._evict(id, "removed")
        return len(ids_with_row)

    def export(self, partitions: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield rows as record batches ordered by (partition, id); columns as in docs/format.md."""
        members = _by_partition(sorted(self.rows))
        for partition in range(PARTITIONS) if partitions is None else partitions:
            ids = members.get(partition, [])
            empty_table = partitions is None and not members and partition == 0
            if ids or empty_table:
                yield self._record_batch(partition, ids)

    def _record_batch(self, partition: int, ids: list[int]) -> pa.RecordBatch:
        rows = [self.rows[id] for id in ids]
        columns: dict[str, pa.Array] = {
            "partition": pa.array([partition] * len(ids), pa.uint8()),
            "id": pa.array(ids, pa.int64()),
            "value": _lists([row.value for row in rows], self.dim),
        }
        width = self.rule.state_width(self.dim)
        if width:
            columns["state"] = _lists([row.state for row in rows], width)
        if self.keeps_time:
            columns["last_seen"] = pa.array([row.last_seen for row in rows], pa.int64())
        if self.keeps_count:
            columns["count"] = pa.array([row.count for row in rows], pa.uint32())
        if isinstance(self.bound, Lfu) and self.bound.half_life_microseconds is not None:
            columns["score"] = pa.array([row.score for row in rows], pa.float64())
        if self.rule.scope != "touched":
            columns["updated"] = pa.array([self.step] * len(ids), pa.uint32())
        return pa.RecordBatch.from_pydict(columns)

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Insert or overwrite rows from `export`'s batches; a missing column changes nothing."""
        for batch in batches:
            for record in batch.to_pylist():
                value = np.array(record["value"], np.float32)
                if value.shape != (self.dim,):
                    raise RowShapeError(
                        f"table {self.name!r}: column 'value' must hold float32 lists of "
                        f"{self.dim}, got {list(value.shape)}. Give rows of the same dim."
                    )
                row = self.rows.get(record["id"])
                if row is None:
                    row = self._new_row(record["id"])
                row.value = value
                row.last_seen = record.get("last_seen", row.last_seen)
                row.state = np.array(record.get("state", row.state), np.float32)
                row.count = record.get("count", row.count)
                row.score = record.get("score", row.score)

    def scalars(self) -> dict[str, int | None]:
        """Return the table's own state, apart from rows and candidates, as JSON values."""
        return {"step": self.step, "calls": self.calls, "watermark": self.watermark}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.step = scalars["step"]
        self.calls = scalars["calls"]
        self.watermark = scalars["watermark"]

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """Yield the state of the admission policy, for `load_candidates`."""
        return self.admission.export()

    def load_candidates(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load batches from `candidates`."""
        self.admission.load(batches)

    def _absent(self, id: int) -> NDArray[np.float32]:
        if self.admission.policy is not None or self.always_default:
            return np.full(self.dim, self.default, np.float32)
        return self._initial_row(id)

    def _initial_row(self, id: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self.init.rows(self.seed, self.name_hash, [id], self.dim)[0]
        return row

    def _occurrences(self, ids: list[int], time: ArrayLike | None) -> dict[int, list[int]]:
        """Return the times of each id's occurrences, ids in the order of their first."""
        if self.clock == "steps":
            time = self.step + 1
        if time is None and self.ttl is not None:
            raise ConfigError(
                f"time: table {self.name!r} has a Ttl, got none. Give a time in microseconds."
            )
        if time is None:
            time = self.calls + 1
        times = np.broadcast_to(np.asarray(time, np.int64), (len(ids),))
        times_of: dict[int, list[int]] = {}
        for id, moment in zip(ids, times.tolist(), strict=True):
            times_of.setdefault(id, []).append(moment)
        return times_of

    def _touch(self, row: _Row, times: list[int]) -> None:
        added = self.admission.added(times)
        row.last_seen = max(row.last_seen, *times)
        row.count = min(row.count + added, MAX_COUNT)
        self._warm(row, times)

    def _warm(self, row: _Row, times: list[int]) -> None:
        if not isinstance(self.bound, Lfu):
            return
        half_life = self.bound.half_life_microseconds
        if half_life is None:
            return
        for time in times:
            row.score = float(np.logaddexp2(row.score, time / half_life))

    def _insert(self, id: int, candidate: Candidate, times: list[int]) -> None:
        row = self._new_row(id)
        row.last_seen = candidate.last_seen
        row.count = candidate.count
        self._warm(row, times)

    def _shrink(self, batch: Mapping[int, list[int]]) -> None:
        """Remove rows until every partition has its quota, or only rows that the batch uses."""
        if self.bound is None:
            return
        quota = _quota(self.bound)
        for ids in _by_partition(self.rows).values():
            idle = [id for id in ids if id not in batch]
            idle.sort(key=lambda id: (self._worth(self.rows[id]), id))
            excess = max(0, len(ids) - quota)
            for id in idle[:excess]:
                self._evict(id, "over_cap")

    def _worth(self, row: _Row) -> float:
        if isinstance(self.bound, Lru):
            return row.last_seen
        if isinstance(self.bound, Lfu) and self.bound.half_life_microseconds is None:
            return row.count
        return row.score

    def _new_row(self, id: int) -> _Row:
        row = _Row(
            slot=self.next_slot,
            value=self._initial_row(id),
            state=self.rule.initial_state(self.dim),
            last_seen=0,
            count=0,
            score=-np.inf,
        )
        self.rows[id] = row
        self.ids_of_slots[row.slot] = id
        self.next_slot += 1
        return row

    def _evict(self, id: int, reason: str) -> None:
        self.evicted[reason] += 1
        row = self.rows.pop(id)
        del self.ids_of_slots[row.slot]


def _quota(bound: Lru | Lfu) -> int:
    """Return how many rows a partition keeps."""
    quota = bound.rows_a_partition
    assert quota is not None, "the policy is on"
    return quota


def _by_partition(ids: Iterable[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for id in ids:
        members.setdefault(partition_of(id), []).append(id)
    return members


def _ids(ids: ArrayLike) -> list[int]:
    array = np.asarray(ids)
    is_integer = array.dtype.kind in "iu" or array.size == 0
    if array.ndim != 1 or not is_integer:
        raise RowShapeError(
            f"ids: must be integers of shape [n], got {array.dtype} {list(array.shape)}. "
            "Give int64 [n]."
        )
    ids_of_array: list[int] = array.astype(np.int64).tolist()
    return ids_of_array


def _lists(rows: list[NDArray[np.float32]], width: int) -> pa.Array:
    values = np.zeros(0, np.float32)
    if rows:
        values = np.concatenate(rows)
    return pa.FixedSizeListArray.from_arrays(pa.array(values, pa.float32()), width)
