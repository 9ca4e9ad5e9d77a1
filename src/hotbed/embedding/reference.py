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

from hotbed.errors import ConfigError, NonFiniteGradient, RowShapeError, TableError, TableFull

from .hashing import mix64_int, name_hash, table_key
from .init import Init, Uniform
from .policy import PARTITIONS, Admission, Eviction, Lfu, Lru, MinCount, Probability, Ttl, evictions
from .rule import Adagrad, Rule
from .table import Frozen
from .tier import Ram, Tier

_GOLDEN = 0x9E3779B97F4A7C15
_MAX_COUNT = (1 << 32) - 1


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
    ) -> None:
        self.name = name
        self.dim = dim
        self.rule = rule or Adagrad()
        self.seed = seed
        self.default = default
        self.admit = admit
        self.init = init or Uniform(0.05)
        self.tier = tier or Ram()
        self.policies = [
            policy
            for policy in evictions(evict)
            if policy.is_on  # type: ignore[attr-defined]
        ]
        self.ttl = next((p.microseconds for p in self.policies if isinstance(p, Ttl)), None)
        self.bound = next((p for p in self.policies if isinstance(p, (Lru, Lfu))), None)
        admits_all = isinstance(admit, MinCount) and admit.count == 0
        self.counting: MinCount | Probability | None = None
        if isinstance(admit, (MinCount, Probability)) and admit.is_on and not admits_all:
            self.counting = admit
        self.keeps_time = self.ttl is not None or isinstance(self.bound, Lru) or admits_all
        self.keeps_count = isinstance(self.bound, Lfu) or admits_all
        self.rows: dict[int, _Row] = {}
        self.ids_of_slots: dict[int, int] = {}
        self.waiting: dict[int, dict[int, tuple[int, int]]] = {p: {} for p in range(PARTITIONS)}
        width = self.counting.sketch_width if self.counting else 0
        self.sketch = np.zeros((PARTITIONS, 4, width), np.uint32)
        self.step = 0
        self.clock = 0
        self.next_slot = 0
        self.watermark: int | None = None
        self.frozen: Frozen = False

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return the slots int64 [n] of ids [n]; -1 without a row."""
        return np.array([self.rows[i].slot if i in self.rows else -1 for i in _ids(ids)], np.int64)

    def find_or_insert(self, ids: ArrayLike, time: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the slots int64 [n] of ids; count new ids and insert those that are admitted.

        `time`: microseconds, one or [n].
        """
        unique = self._occurrences(_ids(ids), time)
        if self.frozen:
            return self._touch_frozen(ids, unique)
        before = copy.deepcopy((self.waiting, self.sketch)) if self.bound else None
        new = {i: self._count(i, times) for i, times in unique.items() if i not in self.rows}
        admitted = {
            i: count for i, count in new.items() if self._is_admitted(i, count, len(unique[i]))
        }
        try:
            self._check_room([i for i in unique if i in self.rows or i in admitted])
        except TableFull:
            if before is not None:
                self.waiting, self.sketch = before
            raise
        self.clock += 1
        for i, times in unique.items():
            if i in self.rows:
                self._touch(self.rows[i], times)
        for i, count in admitted.items():
            self._insert(i, count, unique)
        self._shrink(unique)
        return self.find(ids)

    def _touch_frozen(self, ids: ArrayLike, unique: Mapping[int, list[int]]) -> NDArray[np.int64]:
        if self.frozen == "rows":
            self.clock += 1
            for i, times in unique.items():
                if i in self.rows:
                    self._touch(self.rows[i], times)
            self._shrink(unique)
        return self.find(ids)

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Return the rows of ids, float32 [n, dim].

        An id without a row reads as its initial row, or as `default` if admission is on.
        """
        out = [self.rows[i].value if i in self.rows else self._absent(i) for i in _ids(ids)]
        return np.array(out, np.float32).reshape(len(out), self.dim)

    def gather(self, slots: ArrayLike) -> NDArray[np.float32]:
        """Return the rows float32 [n, dim] of slots [n]; `default` where -1."""
        empty = np.full(self.dim, self.default, np.float32)
        ids = [self.ids_of_slots.get(slot) for slot in _ids(slots)]
        values = [empty if i is None else self.rows[i].value for i in ids]
        return np.array(values, np.float32).reshape(len(ids), self.dim)

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
        summed: dict[int, NDArray[np.float32]] = {}
        for slot, grad in zip(numbers, gradients.astype(np.float32), strict=True):
            i = self.ids_of_slots.get(slot)
            if i is not None:
                summed[i] = summed[i] + grad if i in summed else grad
        for i, grad in summed.items():
            if not np.isfinite(grad).all():
                raise NonFiniteGradient(
                    f"table {self.name!r}: the gradient of id {i} is not finite; nothing was "
                    "updated. Look at the loss.",
                    self.name,
                    i,
                )
        self.step += 1
        zero = np.zeros(self.dim, np.float32)
        stepped: Iterable[int] = summed if self.rule.scope == "touched" else self.rows
        for i in stepped:
            row = self.rows[i]
            grad = summed.get(i, zero)
            w, s = self.rule.reference(row.value[None], row.state[None], grad[None], self.step, lr)
            row.value = w[0].astype(np.float32)
            row.state = s[0].astype(np.float32)

    def evict(self, now: int) -> int:
        """Remove rows and candidates whose time to live is over; return the number of rows removed.

        `now`: microseconds.
        """
        if self.frozen == "all":
            return 0
        if self.watermark is None or self.watermark < now:
            self.watermark = now
        expired = [
            i
            for i, r in self.rows.items()
            if self.ttl is not None and self.watermark - r.last_seen >= self.ttl
        ]
        for i in expired:
            self._remove(i)
        expire = None
        if isinstance(self.counting, MinCount):
            expire = self.counting.expire_microseconds
        if expire is not None:
            for p, waiting in self.waiting.items():
                self.waiting[p] = {
                    i: c for i, c in waiting.items() if self.watermark - c[1] < expire
                }
        return len(expired)

    def export(self, partitions: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield rows as record batches ordered by (partition, id); columns as in docs/format.md."""
        members: dict[int, list[int]] = {}
        for i in sorted(self.rows):
            members.setdefault(_partition(i), []).append(i)
        for p in range(PARTITIONS) if partitions is None else partitions:
            ids = members.get(p, [])
            rows = [self.rows[i] for i in ids]
            columns: dict[str, pa.Array] = {
                "partition": pa.array([p] * len(ids), pa.uint8()),
                "id": pa.array(ids, pa.int64()),
                "value": _lists([r.value for r in rows], self.dim),
            }
            if width := self.rule.state_width(self.dim):
                columns["state"] = _lists([r.state for r in rows], width)
            if self.keeps_time:
                columns["last_seen"] = pa.array([r.last_seen for r in rows], pa.int64())
            if self.keeps_count:
                columns["count"] = pa.array([r.count for r in rows], pa.uint32())
            if isinstance(self.bound, Lfu) and self.bound.half_life_microseconds is not None:
                columns["score"] = pa.array([r.score for r in rows], pa.float64())
            if self.rule.scope != "touched":
                columns["updated"] = pa.array([self.step] * len(ids), pa.uint32())
            if ids or (partitions is None and not members and p == 0):
                yield pa.RecordBatch.from_pydict(columns)

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Insert or overwrite rows from `export`'s batches; a missing column changes nothing."""
        for batch in batches:
            for record in batch.to_pylist():
                i = record["id"]
                value = np.array(record["value"], np.float32)
                if value.shape != (self.dim,):
                    raise RowShapeError(
                        f"table {self.name!r}: column 'value' must hold float32 lists of "
                        f"{self.dim}, got {list(value.shape)}. Give rows of the same dim."
                    )
                if i not in self.rows:
                    self._new_row(i)
                row = self.rows[i]
                row.value = value
                row.last_seen = record.get("last_seen", row.last_seen)
                row.state = np.array(record.get("state", row.state), np.float32)
                row.count = record.get("count", row.count)
                row.score = record.get("score", row.score)

    def scalars(self) -> dict[str, int | None]:
        """Return the table's own state, apart from rows and candidates, as JSON values."""
        return {"step": self.step, "clock": self.clock, "watermark": self.watermark}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.step = scalars["step"]
        self.clock = scalars["clock"]
        self.watermark = scalars["watermark"]

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """Yield the state of the admission policy, for `load_candidates`."""
        flat = [
            (p, i, c, t) for p, waiting in self.waiting.items() for i, (c, t) in waiting.items()
        ]
        names = ["partition", "id", "count", "last_seen"]
        yield pa.RecordBatch.from_pydict(
            {n: pa.array([r[k] for r in flat], pa.int64()) for k, n in enumerate(names)}
        )
        yield pa.RecordBatch.from_pydict({"sketch": pa.array(self.sketch.reshape(-1), pa.uint32())})

    def load_candidates(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            if "sketch" in batch.schema.names:
                self.sketch = batch["sketch"].to_numpy().reshape(self.sketch.shape).copy()
            else:
                for r in batch.to_pylist():
                    self.waiting[r["partition"]][r["id"]] = (r["count"], r["last_seen"])

    def _absent(self, i: int) -> NDArray[np.float32]:
        if self.counting is not None:
            return np.full(self.dim, self.default, np.float32)
        row: NDArray[np.float32] = self.init.rows(self.seed, name_hash(self.name), [i], self.dim)[0]
        return row

    def _occurrences(self, ids: list[int], time: ArrayLike | None) -> dict[int, list[int]]:
        """Return the times of each id's occurrences, ids in the order of their first."""
        if time is None and self.ttl is not None:
            raise ConfigError(
                f"time: table {self.name!r} has a Ttl, got none. Give a time in microseconds."
            )
        if time is None:
            time = self.clock + 1
        times = np.broadcast_to(np.asarray(time, np.int64), (len(ids),))
        unique: dict[int, list[int]] = {}
        for i, moment in zip(ids, times.tolist(), strict=True):
            unique.setdefault(i, []).append(moment)
        return unique

    def _count(self, i: int, times: list[int]) -> int:
        """Count the occurrences of a new id in this batch; return its count so far.

        An occurrence counts `coefficient`.
        """
        if self.counting is None:
            return len(times)
        added = len(times) * self._coefficient()
        if self.counting.sketch_width:
            return self._count_in_sketch(i, added, self.counting.sketch_width)
        waiting = self.waiting[_partition(i)]
        while i not in waiting and len(waiting) >= -(-self.counting.max_candidates // PARTITIONS):
            halved = {j: (c // 2, t) for j, (c, t) in waiting.items() if c >= 2}
            waiting.clear()
            waiting.update(halved)
        count, seen = waiting.get(i, (0, min(times)))
        count = min(count + added, _MAX_COUNT)
        waiting[i] = (count, max(seen, *times))
        if self._is_admitted(i, count, len(times)):
            del waiting[i]
        return count

    def _count_in_sketch(self, i: int, added: int, width: int) -> int:
        h = mix64_int(i)
        p = _partition(i)
        counts = []
        for k in range(4):
            column = mix64_int(h + (k + 1) * _GOLDEN) & (width - 1)
            count = min(int(self.sketch[p, k, column]) + added, _MAX_COUNT)
            self.sketch[p, k, column] = count
            counts.append(count)
        return min(counts)

    def _coefficient(self) -> int:
        """Return how much an occurrence counts."""
        if isinstance(self.counting, MinCount):
            return self.counting.coefficient
        return 1

    def _is_admitted(self, i: int, count: int, occurrences: int) -> bool:
        if isinstance(self.counting, MinCount):
            return count >= (self.counting.count or 0)
        if isinstance(self.counting, Probability):
            base = mix64_int(table_key(self.seed, name_hash(self.name)) ^ mix64_int(i))
            draws = [mix64_int(base + k) >> 11 for k in range(count - occurrences + 1, count + 1)]
            return any(draw * 2.0**-53 < (self.counting.p or 0.0) for draw in draws)
        return True

    def _cap(self) -> int | None:
        return None if self.bound is None else self.bound.rows_a_partition

    def _check_room(self, ids: list[int]) -> None:
        cap = self._cap()
        if cap is not None and len(ids) > cap * PARTITIONS:
            raise TableFull(
                f"table {self.name!r}: a batch may use {cap * PARTITIONS} rows, got {len(ids)}. "
                "Raise max_rows or make the batch smaller."
            )

    def _touch(self, row: _Row, times: list[int]) -> None:
        row.last_seen = max(row.last_seen, *times)
        row.count = min(row.count + len(times) * self._coefficient(), _MAX_COUNT)
        self._warm(row, times)

    def _warm(self, row: _Row, times: list[int]) -> None:
        if not isinstance(self.bound, Lfu):
            return
        half_life = self.bound.half_life_microseconds
        if half_life is not None:
            for time in times:
                row.score = float(np.logaddexp2(row.score, time / half_life))

    def _insert(self, i: int, count: int, batch: Mapping[int, list[int]]) -> None:
        row = self._new_row(i)
        row.last_seen = max(batch[i])
        row.count = count
        self._warm(row, batch[i])

    def _shrink(self, batch: Mapping[int, list[int]]) -> None:
        """Remove rows until every partition has its quota, or only rows that the batch uses."""
        cap = self._cap()
        if cap is None:
            return
        members: dict[int, list[int]] = {}
        for i in self.rows:
            members.setdefault(_partition(i), []).append(i)
        for ids in members.values():
            idle = [i for i in ids if i not in batch]
            idle.sort(key=lambda i: (self._worth(self.rows[i]), i))
            for i in idle[: max(0, len(ids) - cap)]:
                self._remove(i)

    def _worth(self, row: _Row) -> float:
        if isinstance(self.bound, Lru):
            return row.last_seen
        if isinstance(self.bound, Lfu) and self.bound.half_life_microseconds is None:
            return row.count
        return row.score

    def _new_row(self, i: int) -> _Row:
        value = self.init.rows(self.seed, name_hash(self.name), [i], self.dim)[0]
        row = _Row(self.next_slot, value, self.rule.initial_state(self.dim), 0, 0, -np.inf)
        self.rows[i] = row
        self.ids_of_slots[row.slot] = i
        self.next_slot += 1
        return row

    def _remove(self, i: int) -> None:
        del self.ids_of_slots[self.rows.pop(i).slot]


def _ids(ids: ArrayLike) -> list[int]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise RowShapeError(
            f"ids: must be integers of shape [n], got {array.dtype} {list(array.shape)}. "
            "Give int64 [n]."
        )
    return [int(i) for i in array.astype(np.int64)]


def _partition(i: int) -> int:
    return mix64_int(i) >> 56


def _lists(rows: list[NDArray[np.float32]], width: int) -> pa.Array:
    flat = np.concatenate(rows) if rows else np.zeros(0, np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), width)
