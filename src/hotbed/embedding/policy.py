# SPDX-License-Identifier: Apache-2.0
"""Policies: which ids get a row (admission) and which rows are removed (eviction).

Thresholds: `None` and -1 mean off; each policy states the meaning of 0; anything below -1 raises a
`ConfigError` that names the parameter.

The policies of a table measure ages by one clock. It counts microseconds of data time, or the steps
of the table: each update is a step, and an id that is looked up is seen in the step that the next
update ends. A table whose policies measure no ages orders its rows by data time; without times, by
its `find_or_insert` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hotbed import checks
from hotbed.errors import ConfigError

Clock = Literal["time", "steps"]
PARTITIONS = 256
MIN_MAX_ROWS = 4 * PARTITIONS
"""Least `max_rows` of Lru and Lfu: 4 rows in each of 256 partitions; fewer would thrash."""
MIN_SKETCH_BYTES = PARTITIONS * 4 * 4 * 16
"""Least `sketch_bytes`: 256 partitions, 4 rows of 16 counters of 4 bytes."""
ADMISSION_BYTES = 1 << 26
"""Default `admission_bytes`: 64 MiB, which count about 2.3 million waiting ids exactly."""
MIN_ADMISSION_BYTES = PARTITIONS * 256
MAX_ADMISSION_BYTES = 1 << 38
SKETCH_ROWS = 4
"""Cells that count an id in a sketch, the least of which is its count."""


def is_off(threshold: float | None) -> bool:
    """Return True when a threshold switches its policy off: `None` or -1."""
    return threshold is None or threshold == -1


def _check_memory(policy: MinCount | Probability) -> None:
    where = type(policy).__name__
    checks.whole_number(
        f"{where}.admission_bytes", policy.admission_bytes, MIN_ADMISSION_BYTES, MAX_ADMISSION_BYTES
    )
    others = {"sketch_bytes": MIN_SKETCH_BYTES, "max_candidates": PARTITIONS}
    for name, least in others.items():
        value = getattr(policy, name)
        if value is None:
            continue
        checks.whole_number(f"{where}.{name}", value, least)
        if policy.admission_bytes != ADMISSION_BYTES:
            raise ConfigError(
                f"{where}.admission_bytes: one bound is enough, got {policy.admission_bytes!r} "
                f"with {name}={value!r}. Give admission_bytes alone."
            )


def _sketch_width(sketch_bytes: int | None) -> int:
    """Return the counters in a row of one partition's sketch: a power of two, at least 16.

    Returns 0 without a sketch.
    """
    if sketch_bytes is None:
        return 0
    return max(16, 1 << ((sketch_bytes // PARTITIONS // 16).bit_length() - 1))


@dataclass(frozen=True)
class Admission:
    """Base of the admission policies; use `MinCount` or `Probability`."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Give an id a row once its count reaches `count`.

    Each occurrence of an id, also in the current batch, adds `coefficient` to its count; with
    `once_a_batch`, each batch does. Bad values raise `ConfigError` naming the parameter.

    Args:
        count: the least count that gets a row; None or -1 = off, 0 = admit all, but keep counts and
            times.
        coefficient: added to the count for each occurrence.
        sketch_bytes: count in a count-min sketch of plain 32-bit counters from the first id on, as
            earlier versions did (Cormode and Muthukrishnan 2005).
        max_candidates: count this number of ids exactly, as earlier versions did: when the map is
            full, counts are halved and zeros dropped, so that ids may be admitted late or never.
        expire_seconds: `evict` forgets waiting ids that were not seen for this time, in data time.
        expire_steps: the same in steps of the table; give one of the two.
        once_a_batch: an id counts once in each batch (each lookup), however often it occurs there.
        admission_bytes: the memory for ids that wait. They are counted exactly until it is full, in
            29 to 43 bytes each. Then a sketch in the same memory counts: ids may be admitted early,
            never late. See "Memory for ids that wait" in docs/embedding.md.

    Example: `hb.Table("user", dim=16, admit=hb.MinCount(3))`
    """

    count: int | None
    coefficient: int = 1
    sketch_bytes: int | None = None
    max_candidates: int | None = None
    expire_seconds: float | None = None
    expire_steps: int | None = None
    once_a_batch: bool = False
    admission_bytes: int = ADMISSION_BYTES

    def __post_init__(self) -> None:
        if self.count is not None:
            checks.whole_number("MinCount.count", self.count, -1)
        checks.whole_number("MinCount.coefficient", self.coefficient, 1)
        checks.one_of("MinCount.once_a_batch", self.once_a_batch, (True, False))
        _check_memory(self)
        _check_duration("MinCount.expire_seconds", self.expire_seconds)
        _check_steps("MinCount.expire_steps", self.expire_steps)
        ages = [
            name for name in ("expire_seconds", "expire_steps") if not is_off(getattr(self, name))
        ]
        if len(ages) > 1:
            raise ConfigError(
                f"MinCount.expire_steps: one clock is enough, got {self.expire_steps!r} with "
                f"expire_seconds={self.expire_seconds!r}. Give one of them."
            )
        if self.sketch_bytes is not None and ages:
            raise ConfigError(
                f"MinCount.{ages[0]}: a sketch keeps no times, got "
                f"{ages[0]}={getattr(self, ages[0])!r} "
                f"with sketch_bytes={self.sketch_bytes!r}. Drop one of the two."
            )

    @property
    def is_on(self) -> bool:
        return not is_off(self.count)

    @property
    def sketch_width(self) -> int:
        """Counters in each of the 4 rows of a sketch by `sketch_bytes`; 0 = none."""
        return _sketch_width(self.sketch_bytes)

    @property
    def clock(self) -> Clock | None:
        """Return the clock of the candidates' ages; None = they do not expire."""
        if not is_off(self.expire_steps):
            return "steps"
        return None if is_off(self.expire_seconds) else "time"

    @property
    def expire_after(self) -> int | None:
        """Return the age at which candidates expire, in microseconds or steps; None = off."""
        if not is_off(self.expire_steps):
            return self.expire_steps
        if self.expire_seconds is None or is_off(self.expire_seconds):
            return None
        return round(float(self.expire_seconds) * 1_000_000)


@dataclass(frozen=True)
class Probability(Admission):
    """Give an id a row with probability `p` at each of its occurrences.

    The draw is a pure function of (seed, table, id, its count). `p` lies in [0, 1]; None or -1 =
    off. `sketch_bytes`, `max_candidates` and `admission_bytes` are those of `MinCount`. A sketch
    leaves the probability as it is: the count of an id rises at each occurrence. Bad values raise
    `ConfigError` naming the parameter.
    """

    p: float | None
    sketch_bytes: int | None = None
    max_candidates: int | None = None
    admission_bytes: int = ADMISSION_BYTES

    def __post_init__(self) -> None:
        if not is_off(self.p):
            checks.finite_number("Probability.p", self.p, least=0, most=1)
        _check_memory(self)

    @property
    def is_on(self) -> bool:
        return not is_off(self.p)

    @property
    def sketch_width(self) -> int:
        """Counters in each of the 4 rows of a sketch by `sketch_bytes`; 0 = none."""
        return _sketch_width(self.sketch_bytes)


def _check_duration(where: str, value: float | None, unit_seconds: int = 1) -> None:
    if not is_off(value):
        checks.finite_number(where, value, least=0, most=checks.MOST_SECONDS / unit_seconds)


def _check_steps(where: str, value: int | None) -> None:
    if value is not None:
        checks.whole_number(where, value, -1, 2**63 - 1)


@dataclass(frozen=True)
class Eviction:
    """Base of the eviction policies; use `Ttl`, `Lru` or `Lfu`, or a list of Ttl and another."""


@dataclass(frozen=True)
class Ttl(Eviction):
    """Remove rows that were not seen for the given time, or for the given number of steps.

    From the next `evict` on, a row is absent if watermark - last seen >= ttl. In data time, the
    watermark is the largest time that `evict` was called with. In steps, it is the table's step at
    the last `evict`: one `SparseOptimizer.step` is one step, however many batches it accumulates.
    A row seen in step 7 with `steps=3` is absent from an `evict` after step 10 on.

    Give one of `seconds`, `days`, `hours`, `steps`; None or -1 = off; 0 = everything not newer than
    the watermark. Bad values raise `ConfigError` naming the parameter.
    """

    seconds: float | None = None
    days: float | None = None
    hours: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        names = ("seconds", "days", "hours", "steps")
        units = [name for name in names if getattr(self, name) is not None]
        _check_duration("Ttl.seconds", self.seconds)
        _check_duration("Ttl.days", self.days, 86_400)
        _check_duration("Ttl.hours", self.hours, 3_600)
        _check_steps("Ttl.steps", self.steps)
        if len(units) > 1:
            raise ConfigError(
                f"Ttl.{units[1]}: one unit is enough, got {' and '.join(units)}. Give one of them."
            )

    @property
    def microseconds(self) -> int | None:
        """Return the time to live in microseconds; None = off, or in steps."""
        for value, unit in ((self.seconds, 1), (self.days, 86_400), (self.hours, 3_600)):
            if value is not None and value != -1:
                return round(value * unit * 1_000_000)
        return None

    @property
    def duration(self) -> int | None:
        """Return the time to live by the policy's clock, microseconds or steps; None = off."""
        return self.microseconds if is_off(self.steps) else self.steps

    @property
    def clock(self) -> Clock | None:
        """Return the clock of the rows' ages; None = off."""
        if not is_off(self.steps):
            return "steps"
        return None if self.microseconds is None else "time"

    @property
    def is_on(self) -> bool:
        return self.duration is not None


def _check_max_rows(where: str, max_rows: int | None) -> None:
    if is_off(max_rows):
        return
    checks.whole_number(where, max_rows, MIN_MAX_ROWS, 2**63 - 1)


def _rows_a_partition(max_rows: int | None) -> int | None:
    if max_rows is None or max_rows == -1:
        return None
    return -(-max_rows // PARTITIONS)


@dataclass(frozen=True)
class Lru(Eviction):
    """Keep at most ceil(max_rows / 256) rows a partition; remove the rows seen longest ago.

    Among rows seen at the same time, the smallest id is removed first.

    `max_rows`: None or -1 = off, else at least 1,024; it is rounded up to a multiple of 256 (1,025
    keeps 1,280). A partition whose rows are all used by one batch exceeds its quota by that batch,
    and shrinks at the next. A batch that uses more rows than the whole table may keep raises
    `TableFull`.
    """

    max_rows: int | None

    def __post_init__(self) -> None:
        _check_max_rows("Lru.max_rows", self.max_rows)

    @property
    def rows_a_partition(self) -> int | None:
        return _rows_a_partition(self.max_rows)

    @property
    def is_on(self) -> bool:
        return self.rows_a_partition is not None


@dataclass(frozen=True)
class Lfu(Eviction):
    """Keep at most ceil(max_rows / 256) rows a partition; remove the rows with the least count.

    Among rows of the same count, the smallest id is removed first. `max_rows` as for `Lru`.
    `half_life_seconds`: after this time an occurrence counts half; None or -1 = counts do not age.
    """

    max_rows: int | None
    half_life_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_max_rows("Lfu.max_rows", self.max_rows)
        if not is_off(self.half_life_seconds):
            checks.finite_number("Lfu.half_life_seconds", self.half_life_seconds, above=0)

    @property
    def rows_a_partition(self) -> int | None:
        return _rows_a_partition(self.max_rows)

    @property
    def clock(self) -> Clock | None:
        """Return the clock by which counts age; None = they do not age."""
        return None if is_off(self.half_life_seconds) else "time"

    @property
    def half_life_microseconds(self) -> float | None:
        if self.half_life_seconds is None or is_off(self.half_life_seconds):
            return None
        return float(self.half_life_seconds) * 1_000_000

    @property
    def is_on(self) -> bool:
        return self.rows_a_partition is not None


def evictions(evict: Eviction | Sequence[Eviction] | None) -> tuple[Eviction, ...]:
    """Return the policies of a table's `evict` keyword as a tuple.

    Raises ConfigError unless there are at most one Ttl, and at most one of Lru and Lfu.
    """
    choices: Sequence[object] = ()
    if isinstance(evict, (list, tuple)):
        choices = evict
    elif evict is not None:
        choices = (evict,)
    policies: list[Eviction] = []
    for policy in choices:
        if not isinstance(policy, (Ttl, Lru, Lfu)):
            raise ConfigError(
                f"evict: must be Ttl, Lru, Lfu or a list of them, got {policy!r}. Give a policy."
            )
        policies.append(policy)
    num_ages = sum(isinstance(policy, Ttl) for policy in policies)
    num_bounds = sum(isinstance(policy, (Lru, Lfu)) for policy in policies)
    if num_ages > 1 or num_bounds > 1:
        raise ConfigError(
            f"evict: policies contend, got {policies!r}. Give one Ttl and one of Lru and Lfu."
        )
    return tuple(policies)


def clock_of(where: str, admit: Admission | None, policies: Sequence[Eviction]) -> Clock | None:
    """Return the clock by which the policies of a table measure ages; None = they measure none.

    Args:
        where: the table, for messages.
        admit: the admission of the table.
        policies: its evictions.

    Raises:
        ConfigError: one policy counts steps and another one data time.
    """
    aging: dict[Clock, Admission | Eviction] = {}
    for policy in (admit, *policies):
        if isinstance(policy, (MinCount, Ttl, Lfu)) and policy.is_on and policy.clock is not None:
            aging.setdefault(policy.clock, policy)
    if len(aging) > 1:
        raise ConfigError(
            f"{where}: the policies of a table measure ages by one clock, got {aging['steps']!r} "
            f"in steps and {aging['time']!r} in seconds. Give both in steps, or both in seconds."
        )
    return next(iter(aging), None)


def kept_columns(admit: Admission | None, policies: Sequence[Eviction]) -> list[str]:
    """Return the columns, of last_seen, count and score, that rows have for these policies."""
    counts_all = isinstance(admit, MinCount) and admit.count == 0
    lfu = [policy for policy in policies if isinstance(policy, Lfu) and policy.is_on]
    columns = []
    if counts_all or any(isinstance(policy, (Ttl, Lru)) and policy.is_on for policy in policies):
        columns.append("last_seen")
    if counts_all or lfu:
        columns.append("count")
    if any(policy.half_life_microseconds for policy in lfu):
        columns.append("score")
    return columns


def counts_once(policy: Admission | None) -> bool:
    """Return True if an id counts once in each batch, also in the counts of rows."""
    return isinstance(policy, MinCount) and policy.is_on and policy.once_a_batch


@dataclass(frozen=True)
class SketchLayout:
    """How one partition counts waiting ids in its share of `admission_bytes`.

    Attributes:
        exact_ids: ids that it counts exactly, before its sketch begins.
        num_generations: generations of the sketch: 2 if ids expire, else 1.
        part_bytes: memory of one generation.
        bits: of a cell; a count of 2**bits - 1 stands for all above it, too.
    """

    exact_ids: int
    num_generations: int
    part_bytes: int
    bits: int

    @property
    def width(self) -> int:
        """Cells in each row of a generation."""
        return self.part_bytes * 8 // self.bits // SKETCH_ROWS


def sketch_layout(policy: Admission | None) -> SketchLayout | None:
    """Return the layout of a policy's sketches; None if it never begins one."""
    if not isinstance(policy, (MinCount, Probability)) or not admission_fields(policy):
        return None
    if policy.sketch_bytes is not None:
        return None
    share = policy.admission_bytes // PARTITIONS // 64 * 64
    share = max(MIN_ADMISSION_BYTES // PARTITIONS, share - 64)
    bits = 32
    num_generations = 1
    if isinstance(policy, MinCount):
        width = min(policy.count or 1, 2**32 - 1).bit_length()
        bits = 1 << (width - 1).bit_length()
        num_generations = 1 if policy.expire_after is None else 2
    exact_ids = policy.max_candidates
    if exact_ids is None:
        exact_ids = int(share // 64 * 3 * 0.74)
    return SketchLayout(exact_ids, num_generations, share // num_generations, bits)


def admission_fields(policy: Admission | None) -> dict[str, Any]:
    """Return an admission as fields of the native core's; empty if it admits every id."""
    fields: dict[str, Any]
    if isinstance(policy, MinCount) and policy.is_on and policy.count:
        fields = {"kind": "min_count", "min_count": policy.count, "coefficient": policy.coefficient}
        if policy.expire_after is not None:
            fields["expire_after"] = policy.expire_after
    elif isinstance(policy, Probability) and policy.is_on and policy.p is not None:
        fields = {"kind": "probability", "probability": policy.p}
    else:
        return {}
    fields["admission_bytes"] = policy.admission_bytes
    fields["sketch_bytes"] = policy.sketch_bytes or 0
    fields["max_candidates"] = policy.max_candidates or 0
    return fields


def eviction_fields(policies: Sequence[Eviction]) -> dict[str, Any]:
    """Return the evictions of a table as fields of the native core's."""
    fields: dict[str, Any] = {}
    for policy in policies:
        if isinstance(policy, Ttl) and policy.duration is not None:
            fields["ttl"] = policy.duration
        elif isinstance(policy, (Lru, Lfu)) and policy.is_on:
            fields["max_rows"] = policy.max_rows or 0
        if isinstance(policy, Lfu) and policy.is_on:
            fields["by_count"] = True
            fields["half_life"] = policy.half_life_microseconds or 0.0
    return fields
