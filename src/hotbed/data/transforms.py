# SPDX-License-Identifier: Apache-2.0
"""Transforms of one column, the same code in training and in serving. All work on whole Arrow
arrays; nulls stay nulls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.times import to_microseconds
from hotbed.errors import ConfigError, SchemaError

__all__ = [
    "Bucketize",
    "Clip",
    "Context",
    "Cross",
    "Extract",
    "FillMissing",
    "Hash",
    "Log",
    "Map",
    "Normalize",
    "Split",
    "TimeOfDay",
    "Transform",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Context(Protocol):
    """What a transform may ask of the encoder."""

    def hash(self, values: pa.Array, seed: int) -> pa.Array:
        """XXH64 of strings' UTF-8 bytes or of integers' 8 little-endian bytes, as int64."""

    def column(self, name: str) -> pa.Array:
        """A raw column of the same rows."""


class Transform(ABC):
    """A column in, a column of the same length out."""

    @abstractmethod
    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        """The transformed values; `values` is flat (lists are transformed item by item)."""

    def inputs(self) -> Sequence[str]:
        """Other raw columns that it reads."""
        return ()

    def expression(self, x: pl.Expr) -> pl.Expr | None:
        """What to learn from its column `x` before use; None = nothing (left) to learn."""
        return None

    def learned(self, value: Any) -> Transform:
        """This transform with the value of its `expression` filled in."""
        return self


@dataclass(frozen=True)
class Hash(Transform):
    """XXH64 of strings or integers; with `bins` ids fall into 0 .. bins - 1 (collisions share a
    row), without they stay 64 bits.
    """

    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("hash.bins", self.bins)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        return _into_bins(context.hash(values, self.seed), self.bins)


@dataclass(frozen=True)
class Cross(Transform):
    """One id for the combination of this column and the raw columns `with_` (no lists); null if any
    part is null.

    Order of the parts matters. Example: `Id("user_hour", column="user",
    transforms=[Cross(["hour"])])`
    """

    with_: Sequence[str]
    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "with_", (self.with_,) if isinstance(self.with_, str) else tuple(self.with_)
        )
        _positive("cross.bins", self.bins)
        if not self.with_:
            raise ConfigError(
                "cross.with_: names no column — received [] — name the columns to combine with"
            )

    def inputs(self) -> Sequence[str]:
        return self.with_

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        parts = [context.hash(values, self.seed)]
        for name in self.with_:
            other = context.column(name)
            if pa.types.is_nested(other.type) or len(other) != len(values):
                raise SchemaError(
                    f"cross: column {name!r} is {other.type} — only columns of single values "
                    "combine — leave it out"
                )
            parts.append(context.hash(other, self.seed))
        mixed = np.zeros(len(values), np.uint64)
        null = np.zeros(len(values), bool)
        for part in parts:
            null |= part.is_null().to_numpy(zero_copy_only=False)
            mixed = (
                mixed ^ part.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
            ) * _GOLDEN
            mixed ^= mixed >> np.uint64(32)
        return _into_bins(pa.array(mixed.view(np.int64), mask=null), self.bins)


@dataclass(frozen=True)
class Bucketize(Transform):
    """Number -> how many boundaries are <= it: 0 .. len(boundaries). `bins` instead of boundaries:
    learn quantiles in `Schema.fit`.
    """

    boundaries: Sequence[float] | None = None
    bins: int | None = None

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.bins is None) and self.boundaries is None:
            raise ConfigError(
                "bucketize: neither boundaries nor bins — received None — give one of them"
            )
        if self.boundaries is not None:
            object.__setattr__(self, "boundaries", tuple(float(edge) for edge in self.boundaries))
            if list(self.boundaries) != sorted(set(self.boundaries)):
                raise ConfigError(
                    f"bucketize.boundaries: must rise — received {self.boundaries} — sort them "
                    "and drop repeats"
                )
        if self.bins is not None and self.bins < 2:
            raise ConfigError(
                f"bucketize.bins: at least 2 — received {self.bins} — give the number of buckets"
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.boundaries is None:
            raise _not_fitted("bucketize")
        numbers, null = _numbers(values)
        return pa.array(
            np.searchsorted(np.array(self.boundaries), numbers, side="right").astype(np.int64),
            mask=null,
        )

    def expression(self, x: pl.Expr) -> pl.Expr | None:
        if self.boundaries is not None or self.bins is None:
            return None
        return pl.concat_list([x.quantile(i / self.bins, "linear") for i in range(1, self.bins)])

    def learned(self, value: Any) -> Bucketize:
        return replace(self, boundaries=sorted({float(edge) for edge in value if edge is not None}))


@dataclass(frozen=True)
class Clip(Transform):
    """Numbers below `low` become `low`, above `high` become `high`."""

    low: float | None = None
    high: float | None = None

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        numbers, null = _numbers(values)
        return pa.array(np.clip(numbers, self.low, self.high), mask=null)


@dataclass(frozen=True)
class Log(Transform):
    """ln(offset + x). Values <= -offset have no logarithm and are bad input: clip them first."""

    offset: float = 1.0

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        numbers, null = _numbers(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            return pa.array(
                np.log(np.maximum(self.offset + numbers, 0.0)), mask=null, from_pandas=False
            )


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std; both are learned by `Schema.fit` unless given. A constant column becomes 0."""

    mean: float | None = None
    std: float | None = None

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.mean is None or self.std is None:
            raise _not_fitted("normalize")
        numbers, null = _numbers(values)
        return pa.array((numbers - self.mean) / (self.std or 1.0), mask=null)

    def expression(self, x: pl.Expr) -> pl.Expr | None:
        if self.mean is not None and self.std is not None:
            return None
        return pl.struct(mean=x.mean(), std=x.std(ddof=0))

    def learned(self, value: Any) -> Normalize:
        return replace(self, mean=float(value["mean"] or 0.0), std=float(value["std"] or 0.0))


@dataclass(frozen=True)
class FillMissing(Transform):
    """Nulls (and NaN) become `value`, or the "mean" or "median" of the column (`statistic`),
    learned by `Schema.fit`.
    """

    value: float | int | str | None = None
    statistic: str | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.statistic not in ("mean", "median"):
            raise ConfigError(
                f"fill_missing: no value and statistic {self.statistic!r} — give value=... or "
                "statistic='mean' or "
                "'median'"
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.value is None:
            raise _not_fitted("fill_missing")
        if pa.types.is_null(values.type):
            values = values.cast(pa.scalar(self.value).type)
        if isinstance(self.value, str) != _is_text(values.type):
            raise SchemaError(
                f"fill_missing: {self.value!r} does not fit a column of {values.type} — fill with "
                "a value of that type"
            )
        if isinstance(self.value, str) or (
            isinstance(self.value, int) and pa.types.is_integer(values.type)
        ):
            return (
                values.fill_null(pa.scalar(self.value).cast(values.type))
                if values.null_count
                else values
            )
        numbers, null = _numbers(values)
        return pa.array(np.where(null, self.value, numbers))

    def expression(self, x: pl.Expr) -> pl.Expr | None:
        if self.value is not None:
            return None
        return x.mean() if self.statistic == "mean" else x.median()

    def learned(self, value: Any) -> FillMissing:
        return replace(self, value=float(value or 0.0))


@dataclass(frozen=True)
class Split(Transform):
    """Text -> list of texts at `delimiter`; empty parts are left out. `"Comedy|Drama"` -> Comedy,
    Drama.
    """

    delimiter: str = "|"

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if not _is_text(values.type) and not pa.types.is_null(values.type):
            raise SchemaError(
                f"split: needs a column of text — received {values.type} — drop the transform or "
                "declare the column "
                "a string"
            )
        parts = pc.split_pattern(values.cast(pa.large_string()), self.delimiter)
        items = parts.flatten()
        lengths = pc.list_value_length(parts).fill_null(0).to_numpy(zero_copy_only=False)
        filled = pc.binary_length(items).to_numpy(zero_copy_only=False) > 0
        if not filled.all():
            owner = np.repeat(np.arange(len(values)), lengths)
            lengths = np.bincount(owner[filled], minlength=len(values))
            items = items.filter(pa.array(filled))
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        missing = values.is_null() if values.null_count else None
        return pa.LargeListArray.from_arrays(pa.array(offsets), items, mask=missing)


@dataclass(frozen=True)
class Map(Transform):
    """Value -> 1 + its place in `vocabulary`; unknown values -> 0. Without a vocabulary
    `Schema.fit` learns the values seen at least `min_count` times, most frequent first, at most
    `max_size`.
    """

    vocabulary: Sequence[str | int] | None = None
    min_count: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", tuple(self.vocabulary))

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.vocabulary is None:
            raise _not_fitted("map")
        if pa.types.is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        known = pa.array(self.vocabulary, type=values.type)
        found = pc.add(pc.index_in(values, value_set=known).cast(pa.int64()), 1).fill_null(0)
        return pc.if_else(values.is_null(), pa.scalar(None, pa.int64()), found)

    def expression(self, x: pl.Expr) -> pl.Expr | None:
        return None if self.vocabulary is not None else x.drop_nulls().value_counts().implode()

    def learned(self, value: Any) -> Map:
        counts = sorted(
            ((item["count"], item["x"]) for item in value if item["count"] >= self.min_count),
            key=lambda c: (-c[0], c[1]),
        )
        return replace(self, vocabulary=[word for _, word in counts[: self.max_size]])


@dataclass(frozen=True)
class Extract(Transform):
    r"""First group of the regular expression `pattern`; null where it does not match. `number`: the
    group is an integer.

    Example: `Id("year", column="title", transforms=[Extract(r"\((\d{4})\)\s*$", number=True)])`
    """

    pattern: str
    number: bool = False

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        text = pl.Series(values.cast(pa.string())).str.extract(self.pattern, 1)
        return (
            (text.cast(pl.Int64, strict=False) if self.number else text)
            .to_arrow()
            .cast(pa.int64() if self.number else pa.string())
        )


@dataclass(frozen=True)
class TimeOfDay(Transform):
    """Time -> an integer part of it, UTC: "hour" 0..23, "minute" of the day 0..1439, "weekday" 0
    (Monday)..6, "hour_of_week" 0..167.

    `unit` as in `Time`. Example: `Id("hour", column="timestamp", transforms=[TimeOfDay()])`
    """

    part: str = "hour"
    unit: str = "s"

    def __post_init__(self) -> None:
        if self.part not in ("hour", "minute", "weekday", "hour_of_week"):
            raise ConfigError(
                f"time_of_day.part: {self.part!r} — use 'hour', 'minute', 'weekday' or "
                "'hour_of_week'"
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        micros = to_microseconds(values, self.unit)
        hours = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), 3_600_000_000)
        minutes = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), 60_000_000)
        weekday = (hours // 24 + 3) % 7  # 1970-01-01 was a Thursday
        parts = {
            "hour": hours % 24,
            "minute": minutes % 1440,
            "weekday": weekday,
            "hour_of_week": weekday * 24 + hours % 24,
        }
        return pa.array(parts[self.part], mask=micros.is_null().to_numpy(zero_copy_only=False))


def _into_bins(hashed: pa.Array, bins: int | None) -> pa.Array:
    if bins is None:
        return hashed
    values = hashed.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64) % np.uint64(bins)
    return pa.array(values.astype(np.int64), mask=hashed.is_null().to_numpy(zero_copy_only=False))


def _numbers(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Float64 values and where they are null (NaN counts as null)."""
    if not (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_boolean(values.type)
        or pa.types.is_null(values.type)
    ):
        raise SchemaError(
            f"a transform of numbers meets a column of {values.type} — received text or lists — "
            "cast it or Extract "
            "the number"
        )
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers, np.isnan(numbers)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(
            f"{name}: at least 1 or None — received {value} — give the number of ids to fold into"
        )


def _not_fitted(kind: str) -> ConfigError:
    return ConfigError(
        f"{kind}: not fitted — received no learned values — call schema.fit(training_source) "
        "first and use what it "
        "returns"
    )
