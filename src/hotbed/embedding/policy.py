# SPDX-License-Identifier: Apache-2.0
"""Policies: which ids get a row (admission) and which rows go (eviction).

Thresholds: `None` and -1 mean off; 0 is stated at each; anything below -1 is a `ConfigError` that
names the parameter. Times are data times in microseconds; a table that is given no times counts its
`find_or_insert` calls instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotbed.errors import ConfigError

from .init import check_integer, check_number

PARTITIONS = 256
MIN_MAX_ROWS = 4 * PARTITIONS
"""Least `max_rows` of Lru and Lfu: they keep max_rows / 256 rows a partition, and fewer than 4
would thrash.
"""
MIN_SKETCH_BYTES = PARTITIONS * 4 * 4 * 16
"""Least `sketch_bytes`: 256 partitions, 4 rows of 16 counters of 4 bytes."""


def is_off(threshold: float | None) -> bool:
    """True when a threshold switches its policy off: `None` or -1."""
    return threshold is None or threshold == -1


def _check_candidates(where: str, sketch_bytes: int | None, max_candidates: int) -> None:
    if sketch_bytes is not None:
        check_integer(f"{where}.sketch_bytes", sketch_bytes, MIN_SKETCH_BYTES)
    check_integer(f"{where}.max_candidates", max_candidates, PARTITIONS)


def _sketch_width(sketch_bytes: int | None) -> int:
    """Counters in a row of one partition's sketch: a power of two, at least 16; 0 without a sketch."""
    return (
        0
        if sketch_bytes is None
        else max(16, 1 << ((sketch_bytes // PARTITIONS // 16).bit_length() - 1))
    )


@dataclass(frozen=True)
class Admission:
    """Base of the admission policies; use `MinCount` or `Probability`."""


@dataclass(frozen=True)
class MinCount(Admission):
    """An id gets a row once it was seen `count` times; an occurrence, also in the current batch,
    counts `coefficient`.

    `count`: None or -1 = off, 0 = admit all but keep counts and times. Memory: an exact map of at
    most `max_candidates` refused ids (when full, counts are halved and zeros dropped), or one
    count-min sketch a partition of together `sketch_bytes` (Cormode and Muthukrishnan 2005; may
    admit early, never late, and an evicted id keeps its count). `expire_seconds`: a candidate not
    seen for so long is forgotten at `evict` (exact map only). Raises `ConfigError` naming the
    parameter.

    Example: `hb.Table("user", dim=16, admit=hb.MinCount(3))`
    """

    count: int | None
    coefficient: int = 1
    sketch_bytes: int | None = None
    max_candidates: int = 1 << 20
    expire_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_integer("MinCount.count", self.count, -1)
        check_integer("MinCount.coefficient", self.coefficient, 1)
        _check_candidates("MinCount", self.sketch_bytes, self.max_candidates)
        _check_duration("MinCount.expire_seconds", self.expire_seconds)
        if self.sketch_bytes is not None and not is_off(self.expire_seconds):
            raise ConfigError(
                "MinCount.expire_seconds: a sketch keeps no times — received "
                f"expire_seconds={self.expire_seconds!r} "
                f"with sketch_bytes={self.sketch_bytes!r} — drop one of the two"
            )

    @property
    def is_on(self) -> bool:
        return not is_off(self.count)

    @property
    def sketch_width(self) -> int:
        """Counters in each of the 4 rows of a partition's sketch; 0 = exact map."""
        return _sketch_width(self.sketch_bytes)

    @property
    def expire_microseconds(self) -> int | None:
        return (
            None
            if is_off(self.expire_seconds)
            else round(float(self.expire_seconds or 0) * 1_000_000)
        )


@dataclass(frozen=True)
class Probability(Admission):
    """Each occurrence of an id gets it a row with probability `p`, a pure function of (seed, table,
    id, its count).

    `p` in [0, 1]; None or -1 = off. Memory as for `MinCount`. Raises `ConfigError` naming the
    parameter.
    """

    p: float | None
    sketch_bytes: int | None = None
    max_candidates: int = 1 << 20

    def __post_init__(self) -> None:
        if not is_off(self.p):
            check_number("Probability.p", self.p, 0.0, maximum=1.0)
        _check_candidates("Probability", self.sketch_bytes, self.max_candidates)

    @property
    def is_on(self) -> bool:
        return not is_off(self.p)

    @property
    def sketch_width(self) -> int:
        """Counters in each of the 4 rows of a partition's sketch; 0 = exact map."""
        return _sketch_width(self.sketch_bytes)


def _check_duration(where: str, value: float | None) -> None:
    if not is_off(value):
        check_number(where, value, 0.0)


@dataclass(frozen=True)
class Eviction:
    """Base of the eviction policies; use `Ttl`, `Lru` or `Lfu`, or a list of Ttl and one of the
    others.
    """


@dataclass(frozen=True)
class Ttl(Eviction):
    """A row not seen for the given time is gone from the next `evict` on: watermark - last seen >=
        ttl, in data time.

    Give one of `seconds`, `days`, `hours`; None or -1 = off; 0 = everything not newer than the
    watermark. The watermark is the largest time `evict` was called with. Raises `ConfigError`
    naming the parameter.
    """

    seconds: float | None = None
    days: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("seconds", "days", "hours") if getattr(self, name) is not None]
        for name in given:
            _check_duration(f"Ttl.{name}", getattr(self, name))
        if len(given) > 1:
            raise ConfigError(
                f"Ttl.{given[1]}: one unit is enough — received {' and '.join(given)} — give one "
                "of them"
            )

    @property
    def microseconds(self) -> int | None:
        """The time to live in microseconds; None = off."""
        for value, unit in ((self.seconds, 1), (self.days, 86_400), (self.hours, 3_600)):
            if value is not None and value != -1:
                return round(value * unit * 1_000_000)
        return None

    @property
    def is_on(self) -> bool:
        return self.microseconds is not None


def _check_max_rows(where: str, max_rows: int | None) -> None:
    if is_off(max_rows):
        return
    check_integer(where, max_rows, MIN_MAX_ROWS)


def _rows_a_partition(max_rows: int | None) -> int | None:
    return None if max_rows is None or max_rows == -1 else -(-max_rows // PARTITIONS)


@dataclass(frozen=True)
class Lru(Eviction):
    """Keeps at most ceil(max_rows / 256) rows a partition; the row seen longest ago goes, then the
    smallest id.

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
    """Keeps at most ceil(max_rows / 256) rows a partition; the row with the least count goes, then
    the smallest id.

    `max_rows` as for `Lru`. `half_life_seconds`: an occurrence counts half after so long; None or
    -1 = counts do not age.
    """

    max_rows: int | None
    half_life_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_max_rows("Lfu.max_rows", self.max_rows)
        if not is_off(self.half_life_seconds):
            check_number("Lfu.half_life_seconds", self.half_life_seconds, 0.0, above=True)

    @property
    def rows_a_partition(self) -> int | None:
        return _rows_a_partition(self.max_rows)

    @property
    def half_life_microseconds(self) -> float | None:
        return (
            None
            if is_off(self.half_life_seconds)
            else float(self.half_life_seconds or 0) * 1_000_000
        )

    @property
    def is_on(self) -> bool:
        return self.rows_a_partition is not None


def evictions(evict: Eviction | Sequence[Eviction] | None) -> tuple[Eviction, ...]:
    """The eviction policies of a table's `evict` keyword, checked: at most one Ttl, and one of Lru
    and Lfu.
    """
    given = () if evict is None else tuple(evict) if isinstance(evict, (list, tuple)) else (evict,)
    for policy in given:
        if not isinstance(policy, (Ttl, Lru, Lfu)):
            raise ConfigError(
                f"evict: must be Ttl, Lru, Lfu or a list of them — received {policy!r} — give a "
                "policy"
            )
    if (
        sum(isinstance(policy, Ttl) for policy in given) > 1
        or sum(isinstance(p, (Lru, Lfu)) for p in given) > 1
    ):
        raise ConfigError(
            f"evict: policies contend — received {list(given)!r} — give one Ttl and one of Lru "
            "and Lfu"
        )
    return given


def kept_columns(admit: Admission | None, policies: Sequence[Eviction]) -> list[str]:
    """Return the columns that rows have for the sake of these policies: of last_seen, count and
    score.
    """
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
