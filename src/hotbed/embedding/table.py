# SPDX-License-Identifier: Apache-2.0
"""Table: id -> slot -> row, with the rule that updates rows and the policies that say who lives in
it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import _core
from hotbed._core import Step as Step
from hotbed.data.batch import as_ids
from hotbed.errors import ConfigError, NonFiniteGradient, PersistError, RowShapeError, TableError

from .init import Constant, Init, Normal, Uniform, Zeros, check_integer, check_number, name_hash
from .policy import (
    PARTITIONS,
    Admission,
    Eviction,
    Lfu,
    Lru,
    MinCount,
    Probability,
    Ttl,
    evictions,
    kept_columns,
)
from .rule import (
    SCOPES,
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    Nesterov,
    RmsProp,
    RowwiseAdagrad,
    Rule,
    Sgd,
)
from .snapshot import COLUMN_TYPES, Snapshot, candidate_batch, empty_batch, row_batch
from .tier import Ram, Tier

Dtype = Literal["float32", "bfloat16", "float16"]
Frozen = Literal[False, "rows", "all"]
FROZEN: tuple[Frozen, ...] = (False, "rows", "all")
DTYPES = ("float32", "bfloat16", "float16")
POOLINGS = ("sum", "mean", "max", "none")
_RULE_KINDS = (Sgd, Momentum, Nesterov, Adagrad, RowwiseAdagrad, RmsProp, Adam, Ftrl)
_INIT_KINDS = (Uniform, Normal, Constant)
log = logging.getLogger("hotbed")


def set_num_threads(num_threads: int) -> None:
    """Number of threads of the native core (default: all processors). Results never depend on it."""
    check_integer("num_threads", num_threads, 1)
    _core.set_num_threads(num_threads)


class Table:
    """An embedding table that grows with new ids and forgets stale ones.

    `name`: seeds the initial rows together with `seed` and the id. `dim`: lanes of a row. `rule`:
    how a step changes a row. `admit`: who gets a row (default: every id). `evict`: who goes, a
    policy or a list (default: nobody). `init`: the initial row. `default`: what an id without a row
    reads as where admission is on (without admission it reads as its initial row). `dtype`: storage
    of the values, float32, bfloat16 or float16 (state stays float32; rounding is stochastic).

    Ids are any int64 (a NumPy, Arrow or DLPack buffer of integers; uint64 is reinterpreted);
    results are NumPy arrays. Raises ConfigError for bad values, RowShapeError for bad arrays,
    TableFull where a batch needs more rows than `Lru` or `Lfu` keep in the whole table.

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
    ) -> None:
        self.name = name
        self.dim = dim
        self.default = default
        self.seed = seed
        self.dtype = dtype
        self.rule: Rule = Adagrad() if rule is None else rule
        self.admit = admit
        self.evictions = evictions(evict)
        self.tier: Tier = Ram() if tier is None else tier
        self.init: Init = Uniform() if init is None else init
        self._check()
        self._timed: bool | None = None  # whether ids come with times; the two must not mix
        # None: nobody has asked; then a checkpoint says nothing of it
        self._frozen: Frozen | None = None
        self._rate: float | None = None  # of the last step, where a change of it matters
        self.native = _core.Table(self._native_config())

    def _check(self) -> None:
        where = f"table {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"table.name: must be a text — received {self.name!r} — give the table a name"
            )
        check_integer(f"{where}: dim", self.dim, 1)
        check_number(f"{where}: default", self.default)
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise ConfigError(
                f"{where}: seed must be a 64-bit integer — received {self.seed!r} — correct it"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"{where}: unknown dtype — received {self.dtype!r} — use one of {', '.join(DTYPES)}"
            )
        expected: tuple[tuple[str, object, type], ...] = (
            ("rule", self.rule, Rule),
            ("tier", self.tier, Tier),
            ("init", self.init, Init),
            ("admit", MinCount(None) if self.admit is None else self.admit, Admission),
        )
        for keyword, value, kind in expected:
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{where}: {keyword} takes a {kind.__name__.lower()} — received {value!r} — "
                    f"see hotbed's {kind.__name__} values"
                )

    def _native_config(self) -> _core.TableConfig:
        config = _core.TableConfig()
        config.name, config.name_hash, config.seed = (
            self.name,
            name_hash(self.name),
            self.seed % 2**64,
        )
        config.dim, config.dtype, config.default_value = (
            self.dim,
            DTYPES.index(self.dtype),
            self.default,
        )
        init = Constant(0.0) if isinstance(self.init, Zeros) else self.init
        config.init_kind = _INIT_KINDS.index(type(init))
        config.init_scale = next(iter(dataclasses.asdict(init).values()))
        config.rule = _native_rule(self.rule)
        config.admission, config.eviction = self._native_admission(), self._native_eviction()
        columns = kept_columns(self.admit, self.evictions)
        config.keep_count = "count" in columns
        config.keep_seen = "last_seen" in columns
        return config

    def _native_admission(self) -> _core.Admission:
        native = _core.Admission()
        policy = self.admit
        if isinstance(policy, MinCount) and policy.is_on and policy.count:
            native.kind = 1
            native.min_count = policy.count
            native.coefficient = policy.coefficient
            native.expire_after = (
                -1 if policy.expire_microseconds is None else policy.expire_microseconds
            )
        elif isinstance(policy, Probability) and policy.is_on and policy.p is not None:
            native.kind = 2
            native.probability = policy.p
        else:
            return native
        native.sketch_bytes = policy.sketch_bytes or 0
        native.max_candidates = policy.max_candidates
        return native

    def _native_eviction(self) -> _core.Eviction:
        native = _core.Eviction()
        for policy in self.evictions:
            if isinstance(policy, Ttl) and policy.microseconds is not None:
                native.ttl = policy.microseconds
            elif isinstance(policy, (Lru, Lfu)) and policy.is_on:
                native.max_rows = policy.max_rows or 0
            if isinstance(policy, Lfu) and policy.is_on:
                native.by_count = True
                native.half_life = policy.half_life_microseconds or 0.0
        return native

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's keywords, from which an equal empty table can be made."""
        evict = self.evictions[0] if len(self.evictions) == 1 else list(self.evictions) or None
        return {
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

    def like(self, name: str, dim: int) -> Table:
        """A new, empty table with the same rule and policies, another name and dim."""
        return Table(**{**self.config, "name": name, "dim": dim})

    def __repr__(self) -> str:
        frozen = f", frozen={self.frozen!r}" if self.frozen else ""
        return f"Table({self.name!r}, dim={self.dim}, rows={len(self)}, rule={self.rule}{frozen})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        """A second table with the same rows, optimizer and policy state; tracking of changes starts
        anew.
        """
        copied = Table(**self.config)
        memo[id(self)] = copied
        copied.load(self.export())
        copied.load_candidates(self.candidates())
        copied.load_scalars(self.scalars())
        return copied

    def __len__(self) -> int:
        return int(self.native.size())

    @property
    def frozen(self) -> Frozen:
        """Whether the table learns: False = it does; "rows" or "all" = values and optimizer state
        keep
            their bits.

        A frozen table inserts nothing: an unknown id reads as in evaluation. With "rows", times,
        counts and eviction go on; with "all", nothing changes. Updates pass over it: its step does
        not rise, so that decay and catch-up stop too.
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
        self.native.freeze(FROZEN.index(frozen))

    def requires_grad_(self, requires_grad: bool = True) -> Table:
        """Freeze the table (False) or let it learn again (True), as torch does for parameters;
        returns the table.

        Example: `table.requires_grad_(False)`; with `table.frozen = "all"` nothing at all changes.
        """
        if requires_grad:
            self.frozen = False
        elif not self.frozen:
            self.frozen = "rows"
        return self

    @property
    def step(self) -> int:
        """Number of updates so far: the step that bias correction counts."""
        return int(self.native.step)

    @property
    def state_width(self) -> int:
        """Floats of optimizer state a row."""
        return int(self.native.state_width)

    @property
    def stats(self) -> dict[str, int]:
        """`rows` in memory (expired ones until they are swept); ids ever `admitted`, `refused` (a
        batch and id counts once), `evicted`; bytes of index, rows and candidates. Asking is cheap,
        also while `len` must look at every row.
        """
        return dict(self.native.stats())

    # ----------------------------------------------------------------------------------------------
    # ids and rows

    def find_or_insert(self, ids: Any, time: Any = None) -> NDArray[np.int64]:
        """Slots of ids, int64 [n] -> int64 [n]; unknown ids that admission lets in get a row,
        others are -1.

        `time`: int64 microseconds, one for all or one an id; needed by Ttl. Slots hold until the
        next find_or_insert or evict.
        """
        ids = as_ids(ids)
        step = self._lookup(ids, self.check_times(time, len(ids)), training=True)
        slots = np.empty(len(ids), np.int64)
        step.position_slots(0, _address(slots))
        return slots

    def find(self, ids: Any) -> NDArray[np.int64]:
        """Slots of ids, int64 [n] -> int64 [n]; -1 = no row. Changes nothing."""
        ids = as_ids(ids)
        slots = np.empty(len(ids), np.int64)
        self._lookup(ids, None, training=False).position_slots(0, _address(slots))
        return slots

    def lookup(self, ids: Any) -> NDArray[np.float32]:
        """Rows of ids, int64 [n] -> float32 [n, dim], as evaluation and serving read them. Changes
        nothing.
        """
        ids = as_ids(ids)
        rows = np.empty((len(ids), self.dim), np.float32)
        self._lookup(ids, None, training=False, out=rows)
        return rows

    def _lookup(
        self,
        ids: NDArray[np.int64],
        times: NDArray[np.int64] | None,
        *,
        training: bool,
        out: NDArray[np.float32] | None = None,
    ) -> _core.Step:
        step = _core.Step([self.native], [(0, POOLINGS.index("none"))])
        rows = (0, 0) if out is None else (_address(out), self.dim)
        step.lookup(
            [(_address(ids), len(ids), 0, 0, len(ids))],
            0 if times is None else _address(times),
            training,
            training,
            [rows],
        )
        return step

    @property
    def needs_times(self) -> bool:
        """Whether find_or_insert must be given times."""
        ttl = any(isinstance(policy, Ttl) and policy.is_on for policy in self.evictions)
        return ttl or any(
            isinstance(policy, Lfu) and policy.half_life_microseconds is not None
            for policy in self.evictions
        )

    @property
    def keeps_times(self) -> bool:
        """Whether rows or candidates remember when they were seen last."""
        native = self._native_config()
        return bool(native.keep_seen or native.admission.expire_after >= 0)

    def check_times(self, time: Any, num_samples: int) -> NDArray[np.int64] | None:
        """The times of a batch as int64 [num_samples], or None; ConfigError where the policies need
        times and get none.
        """
        if time is None and self.needs_times:
            raise ConfigError(
                f"table {self.name!r}: its eviction needs times — received none — give the schema "
                "a Time column, or `time`"
            )
        if self._timed not in (None, time is not None):
            raise ConfigError(
                f"table {self.name!r}: batches with and without times mix — received "
                f"time={time!r} — give times always or never"
            )
        self._timed = time is not None
        if time is None:
            return None
        times = np.asarray(time)
        if times.dtype != np.int64 or times.shape not in ((), (num_samples,)):
            raise RowShapeError(
                f"table {self.name!r}: times are int64 microseconds, one or [{num_samples}] — "
                f"received {times.dtype} {list(times.shape)}"
            )
        return np.ascontiguousarray(np.broadcast_to(times, (num_samples,)))

    def gather(self, slots: Any) -> NDArray[np.float32]:
        """Rows of slots, int64 [n] -> float32 [n, dim]; -1 reads as the table's default."""
        slots = self._check_slots(slots)
        rows = np.empty((len(slots), self.dim), np.float32)
        self.native.catch_up()
        self.native.gather(slots, _address(rows))
        return rows

    def update(self, slots: Any, grads: Any, lr: float | None = None) -> None:
        """One step of the rule: the gradients, float32 [n, dim], of each slot are summed in order,
            then it is applied once a row.

        Slot -1 takes none. `lr`: this step's rate (default: the rule's). Raises NonFiniteGradient
        before anything changes, TableError for a frozen table.
        """
        if self.frozen:
            raise TableError(
                f"table {self.name!r}: a frozen table takes no update. Call requires_grad_(True) "
                "first."
            )
        slots = self._check_slots(slots)
        grads = np.asarray(grads)
        rate = self.rule.lr if lr is None else lr
        check_number(f"table {self.name!r}: lr", rate, 0.0)
        self.watch_rate(rate)
        if grads.dtype != np.float32 or grads.shape != (len(slots), self.dim):
            raise RowShapeError(
                f"table {self.name!r}: gradients are float32 [{len(slots)}, {self.dim}] — "
                f"received {grads.dtype} {list(grads.shape)}"
            )
        grads = np.ascontiguousarray(grads)
        step = _core.Step([self.native], [(0, POOLINGS.index("none"))])
        step.adopt_slots(slots)
        sums = np.empty((step.num_uniques()[0], self.dim), np.float32)
        if not step.sum_gradients([(_address(grads), self.dim)], [_address(sums)]):
            slot = step.find_nonfinite(0, _address(sums))
            raise NonFiniteGradient(
                f"table {self.name!r}: the gradient of slot {slot} is not finite — nothing was "
                "updated — look at the loss",
                self.name,
            )
        step.apply([_address(sums)], [float(rate)])

    def watch_rate(self, rate: float) -> None:
        """Log once that Ftrl is stepped with another rate, which rescales what it has learned."""
        if not isinstance(self.rule, Ftrl) or not rate or self._rate == rate:
            return
        if self._rate is None:
            self._rate = rate
        elif self._rate:
            advice = "keep its rate constant: a change rescales every row at its next step"
            log.warning("table %r: Ftrl, rate %g after %g; %s", self.name, rate, self._rate, advice)
            self._rate = 0.0  # logged

    def _check_slots(self, slots: Any) -> NDArray[np.int64]:
        checked = as_ids(slots, "slots")
        if len(checked) and (checked.min() < -1 or checked.max() >= self.native.num_slots):
            raise RowShapeError(
                f"table {self.name!r}: slots lie in -1..{self.native.num_slots - 1} — received "
                f"{checked.min()}..{checked.max()}"
            )
        return checked

    def evict(self, now: int, partitions: range = range(PARTITIONS)) -> int:
        """Moves the watermark to `now` (int64 microseconds; it never goes back) and removes expired
        rows; returns how many.

        Expiry is logical: an expired id is absent, swept or not. `partitions`: sweep only these, to
        bound the pause. A table with frozen="all" stays as it is.
        """
        check_integer(f"table {self.name!r}: now (int64 microseconds)", now, -(2**63))
        if now >= 2**63:
            raise ConfigError(
                f"table {self.name!r}: now is int64 microseconds — received {now} — convert it"
            )
        if self.frozen == "all":
            return 0
        return int(self.native.evict(int(now), partitions.start, partitions.stop))

    # ----------------------------------------------------------------------------------------------
    # persistence

    def export(self, partitions: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, a record batch a partition that has any, by rising id: partition, id, value,
            state, last_seen, count, ….

        A column is there if the table keeps it. Rows are caught up first (scope "catch_up"). An
        empty table gives one batch without rows; with `partitions`, empty ones give none.
        """
        empty = partitions is None
        for partition in range(PARTITIONS) if partitions is None else partitions:
            rows = self.native.export_partition(partition)
            if len(rows["id"]):
                empty = False
                yield row_batch(
                    np.full(len(rows["id"]), partition, np.uint8), rows, self.state_width
                )
        if empty:
            yield empty_batch(self.dim, self.state_width, self.native.export_partition(0))

    def track(self, on: bool = True) -> None:
        """Remember which rows change or go, for `snapshot(changes=True)`. ConfigError where the
        rule moves idle rows.
        """
        if on and self.rule.scope != "touched":
            raise ConfigError(
                f"table {self.name!r}: every step moves all its rows — received "
                f"scope={self.rule.scope!r} — save fulls, or use touched"
            )
        self.native.track(on)

    def snapshot(self, changes: bool = False) -> Snapshot:
        """The table as it is now, to be read while it goes on; `changes`: only what changed since
        the last one (see `track`).
        """
        if self.native.has_snapshot:
            raise PersistError(
                f"table {self.name!r}: one snapshot at a time — received a second — close the first"
            )
        return Snapshot(self.native, self.scalars, self.state_width, changes=changes)

    def remove(self, ids: Any) -> int:
        """Drops the rows of ids, int64 [n], as an eviction does; returns how many there were."""
        return int(self.native.remove(as_ids(ids)))

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Rows from `export` (of any table of this dim): known ids are overwritten, new ones
        inserted, without admission.
        """
        for batch in batches:
            rows: dict[str, NDArray[Any]] = {"id": batch.column("id").to_numpy()}
            for name, width in (("value", self.dim), ("state", self.state_width)):
                if name not in batch.schema.names or not width:
                    continue
                kind = batch.schema.field(name).type
                if kind != pa.list_(pa.float32(), width):
                    raise RowShapeError(
                        f"table {self.name!r}: {name} holds float32 lists of {width} — received "
                        f"{kind} — dim and rule must match"
                    )
                rows[name] = batch.column(name).flatten().to_numpy()
            if "value" not in rows:
                raise RowShapeError(
                    f"table {self.name!r}: rows need a column 'value' — received "
                    f"{batch.schema.names} — load what export gave"
                )
            rows |= {
                name: batch.column(name).to_numpy()
                for name in COLUMN_TYPES
                if name in batch.schema.names
            }
            self.native.load_rows(rows)

    def scalars(self) -> dict[str, Any]:
        """What belongs to the table but to no row, as JSON values: step, watermark, learning rates,
        counters.
        """
        stats = self.stats
        return {
            "step": self.native.step,
            "calls": self.native.calls,
            "watermark": self.native.watermark,
            "timed": self._timed,
            "rates": [list(run) for run in self.native.rates()],
            **{name: stats[name] for name in ("admitted", "refused", "evicted")},
            **({} if self._frozen is None else {"frozen": self._frozen}),
        }

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """What `scalars` gave, into a table just loaded; of freezing only where they speak of it."""
        self._timed = scalars["timed"]
        rates = [(int(step), float(lr)) for step, lr in scalars["rates"]]
        self.native.load_scalars(scalars["step"], scalars["watermark"], scalars["calls"], rates)
        self.native.load_counters(scalars["admitted"], scalars["refused"], scalars["evicted"])
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
        """Forgets everything: rows, admission's memory, counters, watermark. What `load` then gives
        is all there is.
        """
        self._timed = None
        self.native = _core.Table(self._native_config())
        self.native.freeze(FROZEN.index(self.frozen))

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """Admission's memory of ids without a row: partition, id, count, last_seen; a sketch as
        partition, counter number, count.
        """
        for partition in range(PARTITIONS) if self.native_admits else ():
            yield from candidate_batch(
                partition, self.native.candidates(partition), self.native.sketch(partition)
            )

    def load_candidates(self, batches: Iterable[pa.RecordBatch]) -> None:
        """What `candidates` gave."""
        sketched = bool(getattr(self.admit, "sketch_bytes", None))
        for batch in batches:
            count = batch.column("count").to_numpy()
            if sketched:
                self.native.load_sketch(batch.column("partition")[0].as_py(), count)
            else:
                self.native.load_candidates(
                    batch.column("id").to_numpy(), count, batch.column("last_seen").to_numpy()
                )

    @property
    def native_admits(self) -> bool:
        """Whether admission refuses anybody."""
        return self._native_admission().kind != 0


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _native_rule(rule: Rule) -> _core.Rule:
    native = _core.Rule()
    native.kind = _RULE_KINDS.index(type(rule))
    native.scope = SCOPES.index(rule.scope)
    native.lr = rule.lr
    native.l1 = rule.l1
    native.l2 = rule.l2
    native.clip = rule.clip or 0.0
    for field in (
        "momentum",
        "alpha",
        "beta1",
        "beta2",
        "eps",
        "decay",
        "beta",
        "initial_accumulator",
    ):
        if hasattr(rule, field):
            setattr(
                native,
                {"momentum": "beta1", "alpha": "beta2"}.get(field, field),
                float(getattr(rule, field)),
            )
    return native
