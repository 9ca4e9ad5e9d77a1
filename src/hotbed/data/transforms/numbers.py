# SPDX-License-Identifier: Apache-2.0
"""Transforms of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.types import is_text
from hotbed.data.arrays import integers_of, numbers_of
from hotbed.data.arrow_types import is_whole
from hotbed.data.context import Context
from hotbed.data.learners import Learner, Moments, Quantiles
from hotbed.data.transforms.base import Transform, not_fitted
from hotbed.errors import ConfigError, SchemaError

_EXACT = 1 << 53  # float64 holds the integers up to it


@dataclass(frozen=True)
class Bucketize(Transform):
    """Replace a number by the number of boundaries that are <= it: 0 .. len(boundaries).

    Integers are compared as such, all 64 bits of them; other numbers as float64.
    With `bins` instead of boundaries, `Schema.fit` learns quantiles as boundaries.
    """

    boundaries: Sequence[float | int] | None = None
    bins: int | None = None

    def __post_init__(self) -> None:
        if self.boundaries is None and self.bins is None:
            raise ConfigError(
                "bucketize: expected boundaries or bins, got neither. Give one of them."
            )
        if self.boundaries is not None:
            boundaries = tuple(_number(edge) for edge in self.boundaries)
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
        if is_whole(values.type):
            numbers, null = integers_of(values)
            edges = _whole_edges(self.boundaries, numbers.dtype)
        else:
            numbers, null = numbers_of(values)
            edges = np.array(self.boundaries, np.float64)
        buckets = np.searchsorted(edges, numbers, side="right")
        return pa.array(buckets.astype(np.int64), mask=null)

    @property
    def reads_floats(self) -> bool:
        return all(abs(edge) < _EXACT for edge in self.boundaries or ())

    def learner(self) -> Learner | None:
        if self.boundaries is not None or self.bins is None:
            return None
        return Quantiles([number / self.bins for number in range(1, self.bins)])

    def learned(self, value: list[float]) -> Bucketize:
        return replace(self, boundaries=sorted(set(value)))


@dataclass(frozen=True)
class Clip(Transform):
    """Replace numbers below `low` by `low` and numbers above `high` by `high`.

    Integers stay integers, unless a bound is a fraction.
    """

    low: float | int | None = None
    high: float | int | None = None

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if is_whole(values.type):
            numbers, null = integers_of(values)
            bounds = _whole_bounds(self.low, self.high, numbers.dtype)
            if bounds is not None:
                clipped = np.clip(numbers, *bounds)
                return pa.array(clipped, mask=null)
        numbers, null = numbers_of(values)
        clipped = np.clip(numbers, self.low, self.high)
        return pa.array(clipped, mask=null)

    def keeps_rounding(self, kind: type[np.floating[Any]]) -> bool:
        return all(bound is None or kind(bound) == bound for bound in (self.low, self.high))


@dataclass(frozen=True)
class Log(Transform):
    """ln(offset + x). Values <= -offset are bad rows, since they have no logarithm: clip them."""

    offset: float = 1.0

    @property
    def reads_floats(self) -> bool:
        return True

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        numbers, null = numbers_of(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            shifted = np.maximum(self.offset + numbers, 0.0)
            logarithms = np.log(shifted)
            return pa.array(logarithms, mask=null, from_pandas=False)


@dataclass(frozen=True)
class Normalize(Transform):
    """(x - mean) / std. If all values that it learned from are equal, every value becomes 0.

    `Schema.fit` learns mean and std unless both are set.
    """

    mean: float | None = None
    std: float | None = None

    @property
    def reads_floats(self) -> bool:
        return True

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.mean is None or self.std is None:
            raise not_fitted("normalize")
        numbers, null = numbers_of(values)
        if self.std == 0 and context.rules > 1:
            return pa.array(np.zeros(len(numbers)), mask=null)
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
    """Replace what is missing by `value`, or by a `statistic` of the column.

    Integers stay integers, unless the value is a fraction.
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
        value = _plain(self.value)
        if pa.types.is_null(values.type):
            values = values.cast(pa.scalar(value).type)
        if isinstance(self.value, str) != is_text(values.type):
            raise SchemaError(
                f"fill_missing: the value does not fit a column of {values.type}, got "
                f"{self.value!r}. Give a value of that type."
            )
        if isinstance(value, str):
            if not values.null_count:
                return values
            return values.fill_null(pa.scalar(value).cast(values.type))
        if isinstance(value, int) and is_whole(values.type):
            integers, null = integers_of(values)
            if null.any():
                integers = _filled(integers, null, value)
            return pa.array(integers)
        numbers, null = numbers_of(values)
        return pa.array(np.where(null, value, numbers))

    def keeps_rounding(self, kind: type[np.floating[Any]]) -> bool:
        return not isinstance(self.value, str)

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


def _number(edge: float) -> float:
    """Return a boundary as a float, or as the integer that no float is."""
    number = float(edge)
    if number == edge:
        return number
    return int(edge)


def _plain(value: float | str) -> float | str:
    """Return a value to fill in, whole numbers as integers."""
    if isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def _whole_edges(boundaries: Sequence[float], kind: np.dtype[Any]) -> np.ndarray:
    """Return the least integers that reach each boundary, without those that are beyond `kind`."""
    limits = np.iinfo(kind)
    edges: list[int] = []
    for boundary in boundaries:
        if boundary <= limits.max:
            edges.append(math.ceil(max(boundary, limits.min)))
    return np.array(edges, kind)


def _whole_bounds(
    low: float | None, high: float | None, kind: np.dtype[Any]
) -> tuple[np.generic, np.generic] | None:
    """Return bounds of integers of a type; None where a bound is not an integer of it."""
    limits = np.iinfo(kind)
    least: float = limits.min
    most: float = limits.max
    if low is not None:
        least = max(least, low)
    if high is not None:
        most = min(most, high)
    for bound in (least, most):
        if not limits.min <= bound <= limits.max or bound != int(bound):
            return None
    return kind.type(int(least)), kind.type(int(most))


def _filled(integers: np.ndarray, null: np.ndarray, value: int) -> np.ndarray:
    """Return integers of 64 bits with `value` where they are null."""
    limits = np.iinfo(integers.dtype)
    if not limits.min <= value <= limits.max:
        raise SchemaError(
            f"fill_missing: the value does not fit a column of {integers.dtype}, got {value}. Give "
            f"a value from {limits.min} to {limits.max}."
        )
    return np.where(null, integers.dtype.type(value), integers)
