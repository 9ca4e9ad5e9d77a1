# SPDX-License-Identifier: Apache-2.0
"""Transforms of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.data.arrays import is_text, numbers_of
from hotbed.data.learners import Learner, Moments, Quantiles
from hotbed.data.transforms.base import Context, Transform, not_fitted
from hotbed.errors import ConfigError, SchemaError


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
        checks.at_least("bucketize.bins", self.bins, 2, "Give the number of buckets.")

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
        if isinstance(self.value, str) != is_text(values.type):
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
