# SPDX-License-Identifier: Apache-2.0
"""The base of transforms, and those of values without a file beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.connectors.times import to_microseconds
from hotbed.data.arrays import as_numpy, list_array, nulls_of, numbers_of
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Learner, Moments, Quantiles, ValueCounts
from hotbed.errors import ConfigError, SchemaError

_BINS_ADVICE = "Give the number of ids to fold into, or None for no folding."
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Context(Protocol):
    """The part of the encoder that a transform may use."""

    def hash(self, values: pa.Array, seed: int) -> pa.Array:
        """Return XXH64 of strings' UTF-8 bytes or of integers' 8 little-endian bytes, int64."""

    def ids(self, values: pa.Array) -> np.ndarray:
        """Return int64 [n]: integers as they are, text as its XXH64; 0 for null."""

    def column(self, name: str) -> pa.Array:
        """Return a raw column of the same rows."""


class Transform(ABC):
    """Base of the transforms: a column in, a column of the same length out."""

    @abstractmethod
    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        """Return the transformed values; `values` is flat (lists are transformed item by item)."""

    reads_text: ClassVar[bool] = False
    """Whether the transform reads text; a column that begins with it is not parsed as numbers."""

    gives_ids: ClassVar[bool] = False
    """Whether text and integers become ids of their own, which do not clash in a table."""

    by_item: ClassVar[bool] = True
    """Whether a list is transformed item by item; else a column must hold single values."""

    fitted: FittedMap | None = None
    """What the transform learned, where that lies in a file."""

    @property
    def gives_nulls(self) -> bool:
        """Whether keys that training did not have become null, which a dense column must fill."""
        return False

    def inputs(self) -> Sequence[str]:
        """Return the names of other raw columns that the transform reads."""
        return ()

    def learns_from(self) -> Sequence[str]:
        """Return the names of other raw columns that only learning reads."""
        return ()

    joint: str | None = None
    """Transforms of one name learn together, from the values of all of their columns."""

    def learner(self) -> Learner | None:
        """Return what learns from the column; None if nothing is left to learn."""
        return None

    def learned(self, value: Any) -> Transform:
        """Return this transform with the value of `Learner.learned` filled in."""
        return self


@dataclass(frozen=True)
class Hash(Transform):
    """XXH64 of strings or integers.

    With `bins`, ids lie in 0 .. bins - 1, and collisions share a row. Without `bins`, ids keep all
    64 bits.
    """

    reads_text: ClassVar[bool] = True
    gives_ids: ClassVar[bool] = True

    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.at_least(
            "hash.bins",
            self.bins,
            1,
            _BINS_ADVICE,
        )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        return _into_bins(context.hash(values, self.seed), self.bins)


@dataclass(frozen=True)
class Cross(Transform):
    """One id for the combination of this column and the raw columns `with_` (not lists).

    The id is null if any part is null. The order of the parts matters.

    Example: `Id("user_hour", column="user", transforms=[Cross(["hour"])])`
    """

    gives_ids: ClassVar[bool] = True

    with_: Sequence[str]
    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.with_, str):
            object.__setattr__(self, "with_", (self.with_,))
        else:
            object.__setattr__(self, "with_", tuple(self.with_))
        checks.at_least(
            "cross.bins",
            self.bins,
            1,
            _BINS_ADVICE,
        )
        if not self.with_:
            raise ConfigError(
                "cross.with_: expected at least one column, got []. Name the columns to combine "
                "with."
            )

    def inputs(self) -> Sequence[str]:
        return self.with_

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        parts = [context.hash(values, self.seed)]
        for name in self.with_:
            other = context.column(name)
            if pa.types.is_nested(other.type) or len(other) != len(values):
                raise SchemaError(
                    f"cross: expected columns of single values, got {other.type} for column "
                    f"{name!r}. Leave it out."
                )
            parts.append(context.hash(other, self.seed))
        mixed = np.zeros(len(values), np.uint64)
        null = np.zeros(len(values), bool)
        for part in parts:
            null |= nulls_of(part)
            values_or_zero = part.fill_null(0)
            hashes = as_numpy(values_or_zero).view(np.uint64)
            mixed = (mixed ^ hashes) * _GOLDEN
            mixed ^= mixed >> np.uint64(32)
        ids = pa.array(mixed.view(np.int64), mask=null)
        return _into_bins(ids, self.bins)


@dataclass(frozen=True)
class Bucketize(Transform):
    """Replace a number by the number of boundaries that are <= it: 0 .. len(boundaries).

    With `bins` instead of boundaries, `Schema.fit` learns quantiles as boundaries.
    """

    boundaries: Sequence[float] | None = None
    bins: int | None = None

    def __post_init__(self) -> None:
        if self.boundaries is None and self.bins is None:
            raise ConfigError(
                "bucketize: expected boundaries or bins, got neither. Give one of them."
            )
        if self.boundaries is not None:
            boundaries = tuple(float(edge) for edge in self.boundaries)
            object.__setattr__(self, "boundaries", boundaries)
            if list(self.boundaries) != sorted(set(self.boundaries)):
                raise ConfigError(
                    f"bucketize.boundaries: boundaries must rise, got {self.boundaries}. Sort "
                    "them and drop repeats."
                )
        checks.at_least(
            "bucketize.bins",
            self.bins,
            2,
            "Give the number of buckets.",
        )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.boundaries is None:
            raise not_fitted("bucketize")
        numbers, null = numbers_of(values)
        buckets = np.searchsorted(np.array(self.boundaries), numbers, side="right")
        return pa.array(buckets.astype(np.int64), mask=null)

    def learner(self) -> Learner | None:
        if self.boundaries is not None or self.bins is None:
            return None
        return Quantiles([number / self.bins for number in range(1, self.bins)])

    def learned(self, value: list[float]) -> Bucketize:
        return replace(self, boundaries=sorted(set(value)))


@dataclass(frozen=True)
class Clip(Transform):
    """Replace numbers below `low` by `low` and numbers above `high` by `high`."""

    low: float | None = None
    high: float | None = None

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        numbers, null = numbers_of(values)
        clipped = np.clip(numbers, self.low, self.high)
        return pa.array(clipped, mask=null)


@dataclass(frozen=True)
class Log(Transform):
    """ln(offset + x). Values <= -offset are bad rows, since they have no logarithm: clip them."""

    offset: float = 1.0

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        numbers, null = numbers_of(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            shifted = np.maximum(self.offset + numbers, 0.0)
            logarithms = np.log(shifted)
            return pa.array(logarithms, mask=null, from_pandas=False)


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std. A constant column becomes 0.

    `Schema.fit` learns mean and std unless both are set.
    """

    mean: float | None = None
    std: float | None = None

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.mean is None or self.std is None:
            raise not_fitted("normalize")
        numbers, null = numbers_of(values)
        std = self.std or 1.0
        return pa.array((numbers - self.mean) / std, mask=null)

    def learner(self) -> Learner | None:
        if self.mean is not None and self.std is not None:
            return None
        return Moments()

    def learned(self, value: tuple[float, float]) -> Normalize:
        mean, std = value
        return replace(self, mean=mean, std=std)


@dataclass(frozen=True)
class FillMissing(Transform):
    """Replace nulls (and NaN) by `value`, or by a `statistic` of the column.

    `statistic`: "mean" or "median", learned by `Schema.fit`.
    """

    value: float | int | str | None = None
    statistic: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.statistic not in ("mean", "median"):
            raise ConfigError(
                f"fill_missing: expected a value or a statistic, got statistic={self.statistic!r}. "
                "Give value=..., statistic='mean' or statistic='median'."
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.value is None:
            raise not_fitted("fill_missing")
        if pa.types.is_null(values.type):
            values = values.cast(pa.scalar(self.value).type)
        if isinstance(self.value, str) != _is_text(values.type):
            raise SchemaError(
                f"fill_missing: the value does not fit a column of {values.type}, got "
                f"{self.value!r}. Give a value of that type."
            )
        if isinstance(self.value, str) or (
            isinstance(self.value, int) and pa.types.is_integer(values.type)
        ):
            if not values.null_count:
                return values
            return values.fill_null(pa.scalar(self.value).cast(values.type))
        numbers, null = numbers_of(values)
        return pa.array(np.where(null, self.value, numbers))

    def learner(self) -> Learner | None:
        if self.value is not None:
            return None
        if self.statistic == "mean":
            return Moments()
        return Quantiles([0.5])

    def learned(self, value: Sequence[float]) -> FillMissing:
        if not value:  # the median of nothing
            return replace(self, value=0.0)
        return replace(self, value=value[0])


@dataclass(frozen=True)
class Split(Transform):
    """Split text into a list of texts at `delimiter`; empty parts are left out.

    Example: `"Comedy|Drama"` becomes Comedy and Drama.
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False

    delimiter: str = "|"

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        is_missing = pa.types.is_null(values.type)
        if not is_missing and not _is_text(values.type):
            raise SchemaError(
                f"split: expected a column of text, got {values.type}. Drop the transform or "
                "declare the column a string."
            )
        parts = pc.split_pattern(values.cast(pa.large_string()), self.delimiter)
        items = parts.flatten()
        lengths = pc.list_value_length(parts).fill_null(0).to_numpy(zero_copy_only=False)
        filled = pc.binary_length(items).to_numpy(zero_copy_only=False) > 0
        if not filled.all():
            owner = np.repeat(np.arange(len(values)), lengths)
            lengths = np.bincount(owner[filled], minlength=len(values))
            items = items.filter(pa.array(filled))
        return list_array(items, lengths, values)


@dataclass(frozen=True)
class Map(Transform):
    """Replace a value by 1 + its place in a vocabulary, and an unknown value by 0.

    Without one, `Schema.fit` and `hotbed prepare` learn the values that occur at least `min_count`
    times, most frequent first, at most `max_size` of them.

    Args:
        vocabulary: The values, as a small vocabulary is kept.
        min_count: How often a value must occur.
        max_size: The most values that are kept.
        joint: Maps of the same name learn one vocabulary, from the values of all their columns.
        fitted: The values by their ids, as `hotbed prepare` keeps them.
    """

    reads_text: ClassVar[bool] = True

    vocabulary: Sequence[str | int] | None = None
    min_count: int = 1
    max_size: int | None = None
    joint: str | None = None
    fitted: FittedMap | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if self.vocabulary is not None and self.fitted is not None:
            raise ConfigError(
                f"map: vocabulary and fitted exclude each other, got a vocabulary and "
                f"{str(self.fitted.path)!r}. Give one of them."
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.fitted is not None:
            slots = self.fitted.slots(context.ids(values))
            return pa.array(slots + 1, mask=nulls_of(values))
        if self.vocabulary is None:
            raise not_fitted("map")
        if pa.types.is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        vocabulary = pa.array(self.vocabulary, type=values.type)
        places = pc.index_in(values, value_set=vocabulary).cast(pa.int64())
        ids = pc.add(places, 1).fill_null(0)
        missing = pa.scalar(None, pa.int64())
        return pc.if_else(values.is_null(), missing, ids)

    def learner(self) -> Learner | None:
        if self.vocabulary is not None or self.fitted is not None:
            return None
        return ValueCounts()

    def learned(self, value: pl.DataFrame | FittedMap) -> Map:
        if isinstance(value, FittedMap):
            return replace(self, fitted=value)
        is_frequent = pl.col("count") >= self.min_count
        words = value.filter(is_frequent).slice(0, self.max_size)
        return replace(self, vocabulary=words["value"].to_list())


@dataclass(frozen=True)
class Extract(Transform):
    r"""The first group of the regular expression `pattern`; null where it does not match.

    `number`: read the group as an integer.

    Example: `Id("year", column="title", transforms=[Extract(r"\((\d{4})\)\s*$", number=True)])`
    """

    reads_text: ClassVar[bool] = True

    pattern: str
    number: bool = False

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        text = pl.Series(values.cast(pa.string()))
        groups = text.str.extract(self.pattern, 1)
        if self.number:
            numbers = groups.cast(pl.Int64, strict=False)
            return numbers.to_arrow().cast(pa.int64())
        return groups.to_arrow().cast(pa.string())


@dataclass(frozen=True)
class TimeOfDay(Transform):
    """An integer part of a time, UTC.

    `part`: "hour" 0..23, "minute" of the day 0..1439, "weekday" 0 (Monday)..6, or "hour_of_week"
    0..167. `unit`: as in `Time`.

    Example: `Id("hour", column="timestamp", transforms=[TimeOfDay()])`
    """

    part: str = "hour"
    unit: str = "s"

    def __post_init__(self) -> None:
        parts = ("hour", "minute", "weekday", "hour_of_week")
        checks.one_of("time_of_day.part", self.part, parts)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        micros = to_microseconds(values, self.unit)
        times = as_numpy(micros.fill_null(0))
        hours = np.floor_divide(times, 3_600_000_000)
        minutes = np.floor_divide(times, 60_000_000)
        weekday = (hours // 24 + 3) % 7  # 1970-01-01 was a Thursday
        parts = {
            "hour": hours % 24,
            "minute": minutes % 1440,
            "weekday": weekday,
            "hour_of_week": weekday * 24 + hours % 24,
        }
        return pa.array(parts[self.part], mask=nulls_of(micros))


def _into_bins(hashed: pa.Array, bins: int | None) -> pa.Array:
    if bins is None:
        return hashed
    hashes = as_numpy(hashed.fill_null(0)).view(np.uint64)
    values = hashes % np.uint64(bins)
    return pa.array(values.astype(np.int64), mask=nulls_of(hashed))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return bool(pa.types.is_string_view(kind))


def not_fitted(kind: str, advice: str = "Call schema.fit(training_source)") -> ConfigError:
    """Return the error to raise where a transform has not learned yet."""
    return ConfigError(
        f"{kind}: the transform is not fitted, got no learned values. {advice} first and use the "
        "schema that it returns."
    )
