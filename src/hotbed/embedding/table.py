# SPDX-License-Identifier: Apache-2.0
"""Table: id -> slot -> row, a rule that updates rows, and policies that admit and evict them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import _core, checks
from hotbed._core import Answer as Answer
from hotbed._core import MapQueue as MapQueue
from hotbed._core import MapTask as MapTask
from hotbed._core import Question as Question
from hotbed._core import Step as Step
from hotbed._core import read_ahead as read_ahead
from hotbed.data.batch import as_ids
from hotbed.errors import ConfigError, NonFiniteGradient, PersistError, RowShapeError, TableError

from . import hashing, waiting
from .dates import NEVER as NEVER
from .dates import check_clock, checked_times, take_times
from .init import Init, Uniform
from .native import native_table, unpicklable
from .policy import (
    PARTITIONS,
    Admission,
    Clock,
    Eviction,
    Lfu,
    MinCount,
    Ttl,
    admission_fields,
    clock_of,
    evictions,
    kept_columns,
)
from .rule import Adagrad, Ftrl, Rule
from .snapshot import (
    Owned,
    Snapshot,
    Spread,
    by_partition,
    empty_batch,
    flat_rows,
    owned_rows,
    row_batch,
    with_dtype,
)
from .tier import Ram, Tier

Dtype = Literal["float32", "bfloat16", "float16", "int32"]
Frozen = Literal[False, "rows", "all"]
FROZEN: tuple[Frozen, ...] = (False, "rows", "all")
DTYPES = ("float32", "bfloat16", "float16", "int32")
MAX_DIM = 2**20
REASONS = ("expired", "over_cap", "removed", "restarted")
"""Why rows are evicted, in the order of the native core; see `Table.stats`."""
log = logging.getLogger("hotbed")


class Table:
    """An embedding table that grows with new ids and removes stale ones.

    Ids are any int64 (a NumPy, Arrow or DLPack buffer of integers; uint64 is reinterpreted);
    results are NumPy arrays.

    Args:
        name: seeds the initial rows together with `seed` and the id.
        dim: lanes of a row, 1 to 2**20.
        rule: how a step changes a row (default: `Adagrad()`).
        admit: which ids get a row (default: every id).
        evict: which rows are removed, a policy or a list (default: none).
        tier: where rows lie, `Ram()` or `Ssd(path, ram_rows)`; results do not depend on it.
        init: the initial row (default: `Uniform()`).
        default: the value of each lane of an id without a row if admission is on. Without
            admission, such an id reads as its initial row, or as `default` with `always_default`.
        seed: a 64-bit integer.
        dtype: storage of the values, float32, bfloat16 or float16. State stays float32; rounding is
            stochastic. "int32": whole numbers, which a model keeps of histories and no rule
            changes; arrays of floats have their bits.
        capacity: rows that you expect, a hint that never binds: the table grows past it. It is
            shown beside the rows, and passing it is logged once. To bound a table, use `Lru` or
            `Lfu`.
        always_default: ids without a row read as `default` also where every id is admitted, in
            evaluation and serving.

    Raises:
        ConfigError: a value is wrong.
        RowShapeError: an array has a wrong shape or dtype.
        TableFull: a batch needs more rows than `Lru` or `Lfu` keep in the whole table, or than
            `Ssd` has in memory.
        StorageError: the disk of `Ssd` is full, or fails.

    Example:
        >>> table = hb.Table("user", dim=4, rule=hb.Adagrad(lr=0.1), admit=hb.MinCount(2))
        >>> table.find_or_insert(np.array([7, 8, 7]))
        array([ 0, -1,  0])
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
        dtype: Dtype = "float32",
        capacity: int | None = None,
        always_default: bool = False,
    ) -> None:
        self.name = name
        self.dim = dim
        self.default = default
        self.always_default = always_default
        self.seed = seed
        self.dtype = dtype
        self.capacity = capacity
        self.rule: Rule = Adagrad() if rule is None else rule
        self.admit = admit
        self.evictions = evictions(evict)
        self.tier: Tier = Ram() if tier is None else tier
        self.init: Init = Uniform() if init is None else init
        self._check()
        self._clock = clock_of(f"table {name!r}", admit, self.evictions)
        self.timed: bool | None = None  # whether ids come with times; the two must not mix
        self.undated = False  # rows may have no time: they get that of the first batch
        # None: never set; then a checkpoint does not record it
        self._frozen: Frozen | None = None
        self._min_count: int | None = None  # None: as in `admit`
        self._rate: float | None = None  # of the last step, if a change of it matters
        self._over_capacity = False  # logged once
        self._estimates = False  # logged once
        self.num_taken = 0  # how often the record of changes began anew
        self.spread: Spread | None = None  # None: all rows are in this process
        self.edits = "none"  # calls that changed rows here but for steps: the last, digest of all
        self.native = native_table(self)

    def _check(self) -> None:
        where = f"table {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"table.name: must be a string, not empty, got {self.name!r}. "
                "Give the table a name."
            )
        checks.whole_number(f"{where}: dim", self.dim, 1, MAX_DIM)
        checks.finite_number(f"{where}: default", self.default)
        checks.one_of(f"{where}: always_default", self.always_default, (False, True))
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise ConfigError(
                f"{where}: seed must be a 64-bit integer, got {self.seed!r}. Correct it."
            )
        checks.one_of(f"{where}: dtype", self.dtype, DTYPES)
        if self.capacity is not None:
            checks.whole_number(f"{where}: capacity", self.capacity, 1)
        expected: tuple[tuple[str, object, type], ...] = (
            ("rule", self.rule, Rule),
            ("tier", self.tier, Tier),
            ("init", self.init, Init),
            ("admit", MinCount(None) if self.admit is None else self.admit, Admission),
        )
        for keyword, value, kind in expected:
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{where}: {keyword} takes a value of {kind.__name__}, got {value!r}. "
                    f"See hotbed's {kind.__name__} values."
                )

    @property
    def config(self) -> dict[str, Any]:
        """Return the constructor's keywords, from which an equal empty table can be made.

        `capacity` and `always_default` are part of them only if they were given.
        """
        evict: Eviction | list[Eviction] | None = list(self.evictions) or None
        if len(self.evictions) == 1:
            evict = self.evictions[0]
        config = {
            "name": self.name,
            "dim": self.dim,
            "rule": self.rule,
            "admit": self.admit,
            "evict": evict,
            "tier": self.tier,
            "init": self.init,
            "default": self.default,
            "seed": self.seed,
            "dtype": self.dtype,
        }
        if self.capacity is not None:
            config["capacity"] = self.capacity
        if self.always_default:
            config["always_default"] = True
        return config

    def like(self, name: str, dim: int) -> Table:
        """Return an empty table with the same rule and policies, another name and dim."""
        return Table(**{**self.config, "name": name, "dim": dim})

    def __repr__(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        frozen = f", frozen={self.frozen!r}" if self.frozen else ""
        return (
            f"Table({self.name!r}, dim={self.dim}, rows={len(self)}{capacity}, "
            f"rule={self.rule}{frozen})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        """Return a copy with the same rows, optimizer and policy state.

        The copy does not inherit the record of changed rows. On several ranks each copies the rows
        that it has.
        """
        copied = Table(**self.config)
        memo[id(self)] = copied
        copied.spread = self.spread
        copied.undated = self.undated
        copied.load(self.export())
        copied.load_candidates(self.candidates())
        copied.load_sketch(self.sketch())
        copied.load_scalars(self.scalars())
        return copied

    def __getstate__(self) -> None:
        raise unpicklable(self.name)

    def __len__(self) -> int:
        return int(self.native.size())

    @property
    def frozen(self) -> Frozen:
        """False if the table learns; "rows" or "all" if values and optimizer state keep their bits.

        A frozen table inserts nothing: an unknown id reads as in evaluation. With "rows", times and
        counts are still recorded and rows still evicted; with "all", nothing changes. Updates skip
        the table: its step does not rise, so that decay and catch-up stop too.
        """
        return self._frozen or False

    @frozen.setter
    def frozen(self, frozen: Frozen) -> None:
        if frozen not in FROZEN:
            raise ConfigError(
                f"table {self.name!r}: frozen takes False, 'rows' or 'all', got {frozen!r}. Use "
                "False, 'rows' or 'all'."
            )
        self._frozen = frozen
        self.native.freeze(frozen or "nothing")

    def requires_grad_(self, requires_grad: bool = True) -> Table:
        """Freeze the table (False) or let it learn again (True), and return it.

        Example: `table.requires_grad_(False)`; with `table.frozen = "all"` nothing changes at all.
        """
        if requires_grad:
            self.frozen = False
        elif not self.frozen:
            self.frozen = "rows"
        return self

    def set_default(self, default: float, *, always: bool = False) -> None:
        """Set `default`, the value of each lane of an id without a row, as in the constructor.

        `always`: its `always_default`.
        """
        checks.finite_number(f"table {self.name!r}: default", default)
        self.default = default
        self.always_default = always
        self.native.set_default(default, always)

    @property
    def min_count(self) -> int | None:
        """Return the least count of an id that gets a row; None if every id gets one."""
        if not isinstance(self.admit, MinCount) or not self.native_admits:
            return None
        return self._min_count or self.admit.count

    def set_min_count(self, count: int) -> None:
        """Change the least count of an id that gets a row, for ids that are mapped from now on.

        Counts stay as they are, and a row that an id has stays. The change is saved with the
        table's state; `admit` is what the constructor got.

        Raises:
            ConfigError: the table was not made with `MinCount` of at least 1, or `count` is below
                1.
        """
        where = f"table {self.name!r}: min_count"
        checks.whole_number(where, count, 1)
        if self.min_count is None:
            raise ConfigError(
                f"{where}: the table keeps no counts of ids without a row, got "
                f"admit={self.admit!r}. Make it with admit=hb.MinCount(1) or more."
            )
        self._min_count = count
        self.native.set_min_count(count)

    @property
    def step(self) -> int:
        """Return the number of updates so far: the step of bias correction."""
        return int(self.native.step)

    @property
    def state_width(self) -> int:
        """Return the floats of optimizer state a row."""
        return int(self.native.state_width)

    @property
    def stats(self) -> dict[str, int]:
        """Return counters of the table; cheap, also when `len` must look at every row.

        `rows`: rows in memory, with expired ones until they are swept. `admitted`, `refused` (an id
        counts once a batch) and `evicted`: ids ever. `evicted_expired` (`Ttl`), `evicted_over_cap`
        (`Lru`, `Lfu`), `evicted_removed` (by a call), `evicted_restarted` (expired, and seen again
        before they were swept): evicted ids by reason; `evicted_unknown`: those of older states,
        which counted no reasons. Bytes of index, rows and candidates. `sketched_partitions`:
        partitions of 256 whose counts of waiting ids are estimates. `capacity`, if the table has
        one.
        """
        return self.completed(self.native.stats())

    @property
    def tier_stats(self) -> dict[str, Any]:
        """Return counters of the disk below the table; empty for `Ram`.

        For this table: `hits` and `misses`, rows of batches that were in memory, and that were not;
        `fetched`, misses that were read before their batch; `waited_seconds`, how long batches
        waited for the disk; `resident` rows of `ram_rows`; `row_bytes` of values and state;
        `memory_bytes` of the bookkeeping. For all tables of the folder together: `num_reads` of the
        disk, `put_bytes` of rows that left memory, `written_bytes` with those of compaction,
        `file_bytes` on the disk, `live_bytes` of rows there, `waiting_extents` of 256 KiB to be
        written, and the `engine`.
        """
        return self.native.tier_stats()

    def completed(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the native counters of a moment as `stats` returns them."""
        self.watch_admission()
        unknown = stats["evicted"] - sum(stats[f"evicted_{reason}"] for reason in REASONS)
        if unknown:
            stats["evicted_unknown"] = unknown
        if self.capacity is not None:
            stats["capacity"] = self.capacity
            self.watch_capacity(stats["rows"])
        return stats

    def watch_admission(self) -> None:
        """Log once that ids which wait for admission have filled their memory."""
        if self._estimates or not self.native.num_sketched:
            return
        self._estimates = True
        log.warning(
            "table %r: the ids that wait for admission fill admission_bytes=%s; from now on a "
            "sketch estimates their counts, never too low: ids may get a row early, none gets it "
            "late. Raise admission_bytes to count more ids exactly",
            self.name,
            f"{getattr(self.admit, 'admission_bytes', 0):,}",
        )

    def watch_capacity(self, num_rows: int) -> None:
        """Log once that the table has more rows, here and on other ranks, than were expected."""
        if self.capacity is None or num_rows <= self.capacity or self._over_capacity:
            return
        self._over_capacity = True
        log.warning(
            "table %r: %s rows, more than its capacity of %s; it grows on, and takes %.0f MiB now. "
            "Raise capacity, or bound the table by evict=hb.Lru(max_rows)",
            self.name,
            f"{num_rows:,}",
            f"{self.capacity:,}",
            self.native.row_bytes * num_rows / 2**20,
        )

    # ----------------------------------------------------------------------------------------------
    # ids and rows

    def find_or_insert(self, ids: Any, time: Any = None) -> NDArray[np.int64]:
        """Return the slots of ids, int64 [n] -> int64 [n]; insert the new ids that are admitted.

        An id that is not admitted has the slot -1. Slots are valid until the next find_or_insert or
        evict.

        Args:
            ids: int64 [n].
            time: int64 microseconds, one for all or one an id; Ttl in time needs it, and a table
                that counts steps does not use it.
        """
        ids = self._own(ids)
        times = checked_times(self, time, len(ids))
        step = self._map(ids, times, training=True)
        take_times(self, times)
        self.watch_admission()
        slots = np.empty(len(ids), np.int64)
        step.position_slots(0, _address(slots))
        return slots

    def find(self, ids: Any) -> NDArray[np.int64]:
        """Return the slots of ids, int64 [n] -> int64 [n]; -1 = no row. Change nothing."""
        ids = as_ids(ids)
        step = self._map(ids, None, training=False)
        slots = np.empty(len(ids), np.int64)
        step.position_slots(0, _address(slots))
        return slots

    def lookup(self, ids: Any) -> NDArray[np.float32]:
        """Return the rows of ids, int64 [n] -> float32 [n, dim]. Change nothing.

        Evaluation and serving read rows in the same way.
        """
        ids = self._own(ids)
        rows = np.empty((len(ids), self.dim), np.float32)
        self._step().lookup(
            [_one_each(ids)], 0, [(_address(rows), self.dim)], training=False, keeps=False
        )
        return rows

    def _own(self, ids: Any) -> NDArray[np.int64]:
        """Return ids as int64 [n]; raise TableError if another rank has the rows of one of them."""
        checked: NDArray[np.int64] = as_ids(ids)
        if self.owned is not None:
            others = checked[~self.owned[hashing.partition(checked)]]
            if len(others):
                raise TableError(
                    f"table {self.name!r}: several ranks hold its rows, got the id {others[0]}, "
                    "whose row belongs to another rank. Look it up through the network, on every "
                    "rank, or ask find() which ids are here."
                )
        return checked

    def _step(self) -> _core.Step:
        """Return a native step of this table alone, whose one feature is not pooled."""
        return _core.Step([self.native], [(0, "none")])

    def _map(
        self, ids: NDArray[np.int64], times: NDArray[np.int64] | None, *, training: bool
    ) -> _core.Step:
        step = self._step()
        step.map([_one_each(ids)], 0 if times is None else _address(times), training=training)
        return step

    @property
    def clock(self) -> Clock | None:
        """Return the clock by which the policies measure ages; None = they measure none.

        "time" is microseconds of data time; "steps" is `step`, which each update moves by one.
        """
        return self._clock

    @property
    def needs_times(self) -> bool:
        """Return True if find_or_insert needs times."""
        aging = [policy for policy in self.evictions if isinstance(policy, (Ttl, Lfu))]
        return any(policy.is_on and policy.clock == "time" for policy in aging)

    @property
    def keeps_times(self) -> bool:
        """Return True if rows or candidates record when they were last seen, in data time."""
        if self.clock == "steps":
            return False
        columns = kept_columns(self.admit, self.evictions)
        return "last_seen" in columns or "expire_after" in admission_fields(self.admit)

    def gather(self, slots: Any) -> NDArray[np.float32]:
        """Return the rows of slots, int64 [n] -> float32 [n, dim]; -1 reads as `default`."""
        slots = self._check_slots(slots)
        rows = np.empty((len(slots), self.dim), np.float32)
        self.native.catch_up()
        self.native.gather(slots, _address(rows))
        return rows

    def update(self, slots: Any, grads: Any, lr: float | None = None) -> None:
        """Sum the gradients of each slot in order, then apply one step of the rule once a row.

        Args:
            slots: int64 [n]; -1 is skipped.
            grads: float32 [n, dim].
            lr: the learning rate of this step (default: the rule's).

        Raises:
            NonFiniteGradient: a sum is not finite; nothing has changed.
            TableError: the table is frozen.
        """
        if self.frozen:
            raise TableError(
                f"table {self.name!r}: a frozen table takes no update. "
                "Call requires_grad_(True) first."
            )
        slots = self._check_slots(slots)
        grads = np.asarray(grads)
        rate = self.rule.lr if lr is None else lr
        checks.finite_number(f"table {self.name!r}: lr", rate, least=0)
        self.watch_rate(rate)
        if grads.dtype != np.float32 or grads.shape != (len(slots), self.dim):
            raise RowShapeError(
                f"table {self.name!r}: gradients must be float32 [{len(slots)}, {self.dim}], "
                f"got {grads.dtype} {list(grads.shape)}. Convert them."
            )
        grads = np.ascontiguousarray(grads)
        step = _core.Step.of_slots(self.native, slots)
        sums = np.empty((step.num_uniques()[0], self.dim), np.float32)
        if not step.sum_gradients([(_address(grads), self.dim)], [_address(sums)]):
            slot = step.find_nonfinite(0, _address(sums))
            raise NonFiniteGradient(
                f"table {self.name!r}: the gradient of slot {slot} is not finite; nothing was "
                "updated. Look at the loss.",
                self.name,
            )
        self._note_edit("update")
        step.apply([_address(sums)], [float(rate)])

    def watch_rate(self, rate: float) -> None:
        """Log once if the rate of an Ftrl table changes, which rescales its rows."""
        if not isinstance(self.rule, Ftrl) or not rate or self._rate == rate:
            return
        if self._rate is None:
            self._rate = rate
        elif self._rate:
            log.warning(
                "table %r: Ftrl, rate %g after %g; keep its rate constant: a change rescales every "
                "row at its next step",
                self.name,
                rate,
                self._rate,
            )
            self._rate = 0.0  # logged

    def _note_edit(self, call: str) -> None:
        """Note a call that changes rows in this process, which all ranks must make; see `edits`."""
        if self.spread is not None:
            self.edits = f"{call}, digest {zlib.crc32(f'{self.edits} {call}'.encode()):08x}"

    def _check_slots(self, slots: Any) -> NDArray[np.int64]:
        checked = as_ids(slots, "slots")
        if len(checked) and (checked.min() < -1 or checked.max() >= self.native.num_slots):
            raise RowShapeError(
                f"table {self.name!r}: slots must lie in -1..{self.native.num_slots - 1}, got "
                f"{checked.min()}..{checked.max()}. Give slots that find_or_insert returned."
            )
        return checked

    def evict(self, now: int | None = None, partitions: range = range(PARTITIONS)) -> int:
        """Move the watermark to `now`, remove expired rows and return their number.

        Expiry is logical: an expired id is absent, swept or not. A table with frozen="all" does not
        change.

        Args:
            now: int64 microseconds; a time before the watermark leaves the watermark in place. A
                table that counts steps takes its own `step` instead, whatever `now` is.
            partitions: sweep only these, to bound the pause.
        """
        moment: Any = self.step if self.clock == "steps" else now
        where = f"table {self.name!r}: now (int64 microseconds)"
        checks.whole_number(where, moment, NEVER, 2**63 - 1)
        self._note_edit(f"evict({moment})")
        return self._sweep(int(moment), partitions)

    def sweep(self, partitions: range = range(PARTITIONS)) -> int:
        """Remove the rows that the last `evict` made absent from these partitions.

        Returns the number of rows removed. The watermark stays in place.
        """
        return self._sweep(NEVER, partitions)

    def _sweep(self, now: int, partitions: range) -> int:
        if self.frozen == "all":
            return 0
        return int(self.native.evict(now, partitions.start, partitions.stop))

    # ----------------------------------------------------------------------------------------------
    # persistence

    def export(self, partitions: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, a record batch for each partition that has any, by rising id.

        Columns: partition, id, value, and of state, last_seen, count, … those that the table keeps.
        Rows are caught up first (scope "catch_up"). An empty table yields one batch without rows;
        with `partitions`, empty partitions yield none.
        """
        empty = partitions is None
        numbers = range(PARTITIONS) if partitions is None else partitions
        for partition, rows in by_partition(self.native.export_rows, numbers, self.native):
            if len(rows["id"]):
                empty = False
                rows = with_dtype(rows, self.dtype)
                yield row_batch(
                    np.full(len(rows["id"]), partition, np.uint8), rows, self.state_width
                )
        if empty:
            columns = self.native.export_rows([0])
            yield empty_batch(self.dim, self.state_width, columns, self.dtype)

    def track(self, on: bool = True, *, saved: bool = False) -> None:
        """Record which rows change or are removed, for `snapshot(changes=True)`.

        The rows that are there count as changed; with `saved` they do not: a state has them, which
        was loaded just now. Raises ConfigError unless the rule's scope is "touched".
        """
        if on and self.rule.scope != "touched":
            raise ConfigError(
                f"table {self.name!r}: changes cannot be tracked where every step moves all rows, "
                f"got scope={self.rule.scope!r}. Save full checkpoints, or use scope='touched'."
            )
        self.native.track(on, saved=saved)
        self.num_taken += saved  # another reader of the changes does not know of these rows

    def snapshot(self, changes: bool = False, *, takes: bool = True) -> Snapshot:
        """Return the table as it is now, to be read while training continues.

        Args:
            changes: only the rows that changed since the last snapshot (see `track`).
            takes: changes are recorded anew from here on; False leaves the record as it is. It
                serves one reader: `num_taken` counts how often it began anew.

        Raises:
            PersistError: another snapshot is open.
        """
        if self.native.has_snapshot:
            raise PersistError(
                f"table {self.name!r}: one snapshot at a time, got a second. Close the first."
            )
        self.num_taken += takes
        return Snapshot(
            self.native,
            self.scalars,
            self.state_width,
            dtype=self.dtype,
            changes=changes,
            takes=takes,
        )

    def remove(self, ids: Any) -> int:
        """Remove the rows of ids, int64 [n], as an eviction does, and return their number.

        On several ranks all call it with the same ids; the number is that of all of them.
        """
        return self.discard(ids) if self.spread is None else self.spread.removed(ids, self.discard)

    def discard(self, ids: Any) -> int:
        """Remove the rows of ids that are in this process, and return their number.

        On several ranks all call it, each with ids of its own.
        """
        self._note_edit("discard")
        return int(self.native.remove(as_ids(ids)))

    @property
    def owned(self) -> Owned:
        """The partitions whose rows are in this process, [256]; None: all of them."""
        return None if self.spread is None else self.spread.owned

    @property
    def is_spread(self) -> bool:
        """Whether other processes have rows of this table."""
        return self.owned is not None and not self.owned.all()

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load rows from `export` of any table of this dim, without admission.

        Ids that have a row are overwritten, others are inserted. A column that is absent changes
        nothing. Under the scopes "all" and "catch_up" rows are up to date at the step that the
        table has, also after `load_scalars`. On several ranks all call it, and each takes the rows
        that it owns. Raises RowShapeError for columns that do not fit dim and rule, and for numbers
        that are not finite.
        """
        self._note_edit("load")
        self.load_rows(batches)

    def load_rows(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load rows as `load` does, in a step, which all ranks make in any case."""
        for batch in owned_rows(batches, self.owned):
            place = f"table {self.name!r}"
            rows = flat_rows(batch, self.dim, self.state_width, place, self.dtype)
            self.native.load_rows(rows)

    def scalars(self) -> dict[str, Any]:
        """Return the table's own state as JSON values: step, watermark, rates and counters.

        A table that counts steps has its watermark under `watermark_step`.
        """
        stats = self.stats
        scalars: dict[str, Any] = {
            "step": self.native.step,
            "calls": self.native.calls,
            "watermark": self.native.watermark,
            "timed": self.timed,
            "rates": [list(run) for run in self.native.rates()],
            **{name: stats[name] for name in ("admitted", "refused", "evicted")},
            "evicted_by": {reason: stats[f"evicted_{reason}"] for reason in REASONS},
        }
        if self.clock == "steps":
            scalars["watermark"] = NEVER
            scalars["watermark_step"] = self.native.watermark
        if self._frozen is not None:
            scalars["frozen"] = self._frozen
        if self._min_count is not None:
            scalars["min_count"] = self._min_count
        return scalars

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Load `scalars` into a table whose rows were just loaded.

        Rows are up to date at the new step: those that have missed steps catch up first.
        `frozen` stays as it is if they do not contain it. Raises PersistError if they count ages by
        another clock.
        """
        check_clock(self, scalars)
        self.edits = "none"  # how rows were loaded before depends on the rank
        self._note_edit(f"load_scalars(step={scalars['step']})")
        self.timed = scalars["timed"]
        rates = [(int(step), float(lr)) for step, lr in scalars["rates"]]
        watermark = scalars["watermark"]
        if self.clock == "steps":
            watermark = scalars.get("watermark_step", NEVER)
        self.native.load_scalars(scalars["step"], watermark, scalars["calls"], rates)
        reasons = scalars.get("evicted_by", {})
        self.native.load_counters(
            scalars["admitted"],
            scalars["refused"],
            scalars["evicted"],
            [reasons.get(reason, 0) for reason in REASONS],
        )
        if "min_count" in scalars:
            self.set_min_count(scalars["min_count"])
        if "frozen" not in scalars:
            return
        if self._frozen not in (None, scalars["frozen"]):
            log.warning(
                "table %r: frozen=%r here, now %r as saved",
                self.name,
                self._frozen,
                scalars["frozen"],
            )
        self.frozen = scalars["frozen"]

    def clear(self) -> None:
        """Remove all contents: rows, candidates, counters and watermark.

        On several ranks all call it.
        """
        self._note_edit("clear")
        self.timed = None
        self._estimates = False
        self.native = native_table(self)
        self.native.freeze(self.frozen or "nothing")
        if self._min_count is not None:
            self.native.set_min_count(self._min_count)
        self.num_taken += 1  # what was recorded of changes is gone

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """Yield the ids without a row that admission counts: partition, id, count, last_seen.

        A sketch by `sketch_bytes` is yielded in the same columns: `id` is the number of the
        counter.
        """
        if not self.native_admits:
            return iter(())
        return waiting.candidate_batches(self.native.candidates, self.native.plain_sketch)

    def load_candidates(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load batches from `candidates`."""
        self._note_edit("load_candidates")
        is_plain = bool(getattr(self.admit, "sketch_bytes", None))
        waiting.load_candidates(self.native, batches, is_plain=is_plain)

    def sketch(self) -> Iterator[pa.RecordBatch]:
        """Yield the sketches of partitions whose waiting ids have filled `admission_bytes`.

        A row is one generation: partition, generation (0 = the younger), bits, newest, cells.
        """
        return waiting.sketch_batches(self.native.sketch)

    def load_sketch(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Load batches from `sketch`, also of another size, number of bits or generations."""
        self._note_edit("load_sketch")
        waiting.load_sketch(self.native, batches)

    @property
    def native_admits(self) -> bool:
        """Return True if admission may refuse an id."""
        return bool(admission_fields(self.admit))


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _one_each(ids: NDArray[np.int64]) -> tuple[int, int, int, int, int]:
    """Return ids as the native core takes them: one a sample, without offsets and weights."""
    return _address(ids), len(ids), 0, 0, len(ids)
