# SPDX-License-Identifier: Apache-2.0
"""A table too simple to be wrong: the verbs of `hb.Table` over one dict, a row at a time.

Users find it as `hotbed.testing.ReferenceTable`; the native core is tested against it.
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

from .init import Init, Uniform, mix64_int, name_hash, table_key
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
    """`hb.Table` as one dict from id to row: same arguments, verbs and errors, far slower; float32
    rows in `Ram` only.

    `scope="catch_up"` is done as "all", whose bits it must have. Slots are never reused.

    Example: `t = ReferenceTable("user", 4); t.update(t.find_or_insert([7, -1]), np.ones((2, 4),
        np.float32))`
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
        self.policies = [policy for policy in evictions(evict) if policy.is_on]  # type: ignore[attr-defined]
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
        self.step = self.clock = self.next_slot = 0
        self.watermark: int | None = None
        self.frozen: Frozen = False

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Slots int64 [n] of ids [n]; -1 without a row."""
        return np.array([self.rows[i].slot if i in self.rows else -1 for i in _ids(ids)], np.int64)

    def find_or_insert(self, ids: ArrayLike, time: ArrayLike | None = None) -> NDArray[np.int64]:
        """Slots int64 [n]; new ids are counted and, if admitted, inserted. `time`: microseconds,
        one or [n].
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
        """Rows float32 [n, dim]; an id without one reads as its initial row, or `default` where
        admission is on.
        """
        out = [self.rows[i].value if i in self.rows else self._absent(i) for i in _ids(ids)]
        return np.array(out, np.float32).reshape(len(out), self.dim)

    def gather(self, slots: ArrayLike) -> NDArray[np.float32]:
        """Rows float32 [n, dim] of slots [n]; `default` where -1."""
        empty = np.full(self.dim, self.default, np.float32)
        at = [self.ids_of_slots.get(s) for s in _ids(slots)]
        return np.array(
            [empty if i is None else self.rows[i].value for i in at], np.float32
        ).reshape(len(at), self.dim)

    def update(self, slots: ArrayLike, grads: ArrayLike, lr: float | None = None) -> None:
        """Sums the gradients float32 [n, dim] of each row in order, then applies the rule once;
        slot -1 is skipped.
        """
        if self.frozen:
            raise TableError(f"table {self.name!r}: it is frozen")
        given = np.asarray(grads)
        at = _ids(slots)
        if given.shape != (len(at), self.dim) or given.dtype.kind != "f":
            raise RowShapeError(
                f"grads: {given.dtype} {given.shape} — give float32 [{len(at)}, {self.dim}]"
            )
        summed: dict[int, NDArray[np.float32]] = {}
        for slot, grad in zip(at, given.astype(np.float32), strict=True):
            i = self.ids_of_slots.get(slot)
            if i is not None:
                summed[i] = summed[i] + grad if i in summed else grad
        for i, grad in summed.items():
            if not np.isfinite(grad).all():
                raise NonFiniteGradient(
                    f"gradient of id {i} in table {self.name!r} is not finite", self.name, i
                )
        self.step += 1
        zero = np.zeros(self.dim, np.float32)
        for i in summed if self.rule.scope == "touched" else self.rows:
            row = self.rows[i]
            w, s = self.rule.reference(
                row.value[None],
                row.state[None],
                summed.get(i, zero)[None],
                self.step,
                self.rule.lr if lr is None else lr,
            )
            row.value = w[0].astype(np.float32)
            row.state = s[0].astype(np.float32)

    def evict(self, now: int) -> int:
        """Removes rows whose time to live is over and forgets candidates past theirs; number of
        rows removed.
        """
        if self.frozen == "all":
            return 0
        self.watermark = now if self.watermark is None else max(self.watermark, now)
        expired = [
            i
            for i, r in self.rows.items()
            if self.ttl is not None and self.watermark - r.last_seen >= self.ttl
        ]
        for i in expired:
            self._remove(i)
        expire = self.counting.expire_microseconds if isinstance(self.counting, MinCount) else None
        if expire is not None:
            for p, waiting in self.waiting.items():
                self.waiting[p] = {
                    i: c for i, c in waiting.items() if self.watermark - c[1] < expire
                }
        return len(expired)

    def export(self, partitions: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Rows as record batches ordered by (partition, id); see docs/format.md for the columns."""
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
        """Inserts or overwrites rows from `export`'s batches; a column that is missing changes
        nothing.
        """
        for batch in batches:
            for record in batch.to_pylist():
                i = record["id"]
                value = np.array(record["value"], np.float32)
                if value.shape != (self.dim,):
                    raise RowShapeError(
                        f"value: {value.shape} — table {self.name!r} takes [{self.dim}]"
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
        """What a table knows apart from its rows and candidates, as JSON."""
        return {"step": self.step, "clock": self.clock, "watermark": self.watermark}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.step = scalars["step"]
        self.clock = scalars["clock"]
        self.watermark = scalars["watermark"]

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """State of the admission policy, for `load_candidates`."""
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
        """Times of each id's occurrences, ids in the order of their first."""
        if time is None and self.ttl is not None:
            raise ConfigError(
                f"time: table {self.name!r} has a Ttl — received none — give a time in microseconds"
            )
        times = np.broadcast_to(
            np.asarray(self.clock + 1 if time is None else time, np.int64), (len(ids),)
        )
        unique: dict[int, list[int]] = {}
        for i, at in zip(ids, times.tolist(), strict=True):
            unique.setdefault(i, []).append(at)
        return unique

    def _count(self, i: int, times: list[int]) -> int:
        """Occurrences of a new id so far, those of this batch included, times the coefficient."""
        if self.counting is None:
            return len(times)
        added = len(times) * (
            self.counting.coefficient if isinstance(self.counting, MinCount) else 1
        )
        if self.counting.sketch_width:
            h = mix64_int(i)
            p = _partition(i)
            at = [
                mix64_int(h + (k + 1) * _GOLDEN) & (self.counting.sketch_width - 1)
                for k in range(4)
            ]
            for k in range(4):
                self.sketch[p, k, at[k]] = min(int(self.sketch[p, k, at[k]]) + added, _MAX_COUNT)
            return min(int(self.sketch[p, k, at[k]]) for k in range(4))
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
                f"table {self.name!r}: a batch uses {len(ids)} rows, it may keep {cap * PARTITIONS}"
            )

    def _touch(self, row: _Row, times: list[int]) -> None:
        row.last_seen = max(row.last_seen, *times)
        coefficient = self.counting.coefficient if isinstance(self.counting, MinCount) else 1
        row.count = min(row.count + len(times) * coefficient, _MAX_COUNT)
        self._warm(row, times)

    def _warm(self, row: _Row, times: list[int]) -> None:
        half_life = self.bound.half_life_microseconds if isinstance(self.bound, Lfu) else None
        if half_life is not None:
            for at in times:
                row.score = float(np.logaddexp2(row.score, at / half_life))

    def _insert(self, i: int, count: int, batch: Mapping[int, list[int]]) -> None:
        row = self._new_row(i)
        row.last_seen = max(batch[i])
        row.count = count
        self._warm(row, batch[i])

    def _shrink(self, batch: Mapping[int, list[int]]) -> None:
        """Take every partition back to its quota, as far as rows that the batch does not use allow."""
        cap = self._cap()
        members: dict[int, list[int]] = {}
        for i in self.rows if cap is not None else ():
            members.setdefault(_partition(i), []).append(i)
        for here in members.values():
            idle = sorted(
                (i for i in here if i not in batch), key=lambda i: (self._worth(self.rows[i]), i)
            )
            for i in idle[: max(0, len(here) - (cap or 0))]:
                self._remove(i)

    def _worth(self, row: _Row) -> float:
        if isinstance(self.bound, Lru):
            return row.last_seen
        return (
            row.count
            if isinstance(self.bound, Lfu) and self.bound.half_life_microseconds is None
            else row.score
        )

    def _new_row(self, i: int) -> _Row:
        value = self.init.rows(self.seed, name_hash(self.name), [i], self.dim)[0]
        row = _Row(self.next_slot, value, self.rule.initial_state(self.dim), 0, 0, -np.inf)
        self.rows[i], self.ids_of_slots[row.slot] = row, i
        self.next_slot += 1
        return row

    def _remove(self, i: int) -> None:
        del self.ids_of_slots[self.rows.pop(i).slot]


def _ids(ids: ArrayLike) -> list[int]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise RowShapeError(f"ids: {array.dtype} {array.shape} — give int64 [n]")
    return [int(i) for i in array.astype(np.int64)]


def _partition(i: int) -> int:
    return mix64_int(i) >> 56


def _lists(rows: list[NDArray[np.float32]], width: int) -> pa.Array:
    flat = np.concatenate(rows) if rows else np.zeros(0, np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), width)
