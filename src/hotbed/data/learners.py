# SPDX-License-Identifier: Apache-2.0
"""Learners: what transforms learn from a column, part by part.

`Schema.fit` and `hotbed prepare` use the same learners. The parts of a column may lie on many
threads or machines; they are merged in the order of their rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from hotbed.data.arrays import nulls_of, numbers_of, series_of
from hotbed.data.arrow_types import is_whole
from hotbed.data.context import Context
from hotbed.errors import SchemaError

MOST_POINTS = 131_072
"""Points that a level of `Quantiles` holds: up to as many values, quantiles are exact."""

PENDING_VALUES = 1_000_000
"""Counted values that `ValueCounts` collects before it sums up equal ones."""

_Points: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Values, and the number of rows that each stands for."""


class Learner(ABC):
    """Base of the learners: what is known of a column's values after some of its rows.

    A learner of one's own is a plain object that `pickle` takes.
    """

    keyed: ClassVar[bool] = False
    """Whether what is learned grows with the number of different values.

    `hotbed prepare` gathers equal values in one place before such a learner sees them.
    """

    @abstractmethod
    def add(self, values: pa.Array, context: Context) -> None:
        """Learn from the next rows.

        Args:
            values: the column as it reaches the transform: flat (the items of lists), with nulls
                for missing values (never NaN).
            context: the raw columns of the same rows.
        """

    @abstractmethod
    def merge(self, later: Self) -> None:
        """Add what `later` learned from rows behind those of this learner."""

    @abstractmethod
    def learned(self) -> Any:
        """Return what `Transform.learned` takes."""


class Moments(Learner):
    """Mean and standard deviation of the values that are not missing.

    `learned` returns (mean, std); std divides by the number of values. Both are 0 without values.
    If all values are equal, the mean is exactly this value and std is 0.
    Parts are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        self._least = math.inf
        self._most = -math.inf

    def add(self, values: pa.Array, context: Context) -> None:
        numbers, null = numbers_of(values)
        present = numbers[~null]
        part = Moments()
        part.count = len(present)
        if part.count:
            part._least = float(present.min())
            part._most = float(present.max())
            with np.errstate(invalid="ignore", over="ignore"):
                part.mean = float(present.mean())
                part._squares = float(np.square(present - part.mean).sum())
        self.merge(part)

    def merge(self, later: Self | Moments) -> None:
        if not later.count:
            return
        self._least = min(self._least, later._least)
        self._most = max(self._most, later._most)
        if not self.count:
            self.count = later.count
            self.mean = later.mean
            self._squares = later._squares
            return
        count = self.count + later.count
        distance = later.mean - self.mean
        share = later.count / count
        self.mean += distance * share
        self._squares += later._squares + distance * distance * self.count * share
        self.count = count

    def learned(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 0.0
        if self._least == self._most:
            return self._least, 0.0
        return self.mean, float(np.sqrt(self._squares / self.count))


class Quantiles(Learner):
    """The values below which `shares` of the values lie, missing ones left out.

    `learned` returns one value for each share, interpolated linearly between two values; nothing
    without values. Up to `most_points` values it is exact. Beyond that, the rank of the value that
    is returned differs from the right one by at most 1/4096 of the values, up to 10^12 of them.

    Levels of points, as in Manku, Rajagopalan and Lindsay, "Approximate medians and other quantiles
    in one pass and with limited memory" (SIGMOD 1998): a level that is full is replaced by an
    eighth of its points, at equal ranks, on the next level. A level adds at most half the share of
    such a point to the error.
    """

    def __init__(self, shares: Sequence[float], most_points: int = MOST_POINTS) -> None:
        self.shares = tuple(shares)
        self._most_points = most_points
        self._levels: list[list[_Points]] = [[]]

    def add(self, values: pa.Array, context: Context) -> None:
        numbers, null = numbers_of(values)
        present = numbers[~null]
        self._levels[0].append((present, np.ones(len(present))))
        self._shrink()

    def merge(self, later: Self) -> None:
        for level, points in enumerate(later._levels):
            self._level(level).extend(points)
        self._shrink()

    def learned(self) -> list[float]:
        values, ends = _sorted([part for points in self._levels for part in points])
        if not len(values):
            return []
        quantiles: list[float] = []
        for share in self.shares:
            rank = share * (ends[-1] - 1)
            below = np.floor(rank)
            low = values[np.searchsorted(ends, below, side="right")]
            high = values[np.searchsorted(ends, np.ceil(rank), side="right")]
            value = low
            if high != low:
                value = (high - low) * (rank - below) + low
            quantiles.append(float(value))
        return quantiles

    def _level(self, level: int) -> list[_Points]:
        while level >= len(self._levels):
            self._levels.append([])
        return self._levels[level]

    def _shrink(self) -> None:
        level = 0
        while level < len(self._levels):
            points = self._levels[level]
            num_points = sum(len(values) for values, _ in points)
            if num_points > self._most_points:
                self._level(level + 1).append(_fewer(points, self._most_points // 8))
                points.clear()
            level += 1


def _sorted(points: Sequence[_Points]) -> _Points:
    """Return all values in order, and the number of rows up to and with each."""
    if not points:
        return np.zeros(0), np.zeros(0)
    values = np.concatenate([part for part, _ in points])
    rows = np.concatenate([part for _, part in points])
    order = np.argsort(values, kind="stable")
    return values[order], np.cumsum(rows[order])


def _fewer(points: Sequence[_Points], num_points: int) -> _Points:
    """Return the values in the middle of `num_points` equal shares of the rows."""
    values, ends = _sorted(points)
    rows = ends[-1] / num_points
    middles = (np.arange(num_points) + 0.5) * rows
    places = np.searchsorted(ends, middles)
    return values[places], np.full(num_points, rows)


class ValueCounts(Learner):
    """How many rows hold each value, missing values left out.

    `learned` returns a data frame of `value` and `count`, most frequent first; of equal counts, the
    smaller value comes first. Integers are counted as ids: unsigned ones are int64 of the same bits
    as soon as a signed column is among them.
    """

    keyed: ClassVar[bool] = True

    def __init__(self, pending_values: int = PENDING_VALUES) -> None:
        self._parts: list[pl.DataFrame] = []
        self._pending_values = pending_values
        self._is_unsigned = True

    def add(self, values: pa.Array, context: Context) -> None:
        is_unsigned = pa.types.is_uint64(values.type)
        if is_whole(values.type):
            values = pa.array(context.ids(values), mask=nulls_of(values))
        series = series_of("value", values).drop_nulls()
        if len(series):
            self._is_unsigned &= is_unsigned
            counts = series.value_counts(name="count")
            self._parts.append(counts.cast({"count": pl.Int64}))
            self._sum_up()

    def merge(self, later: Self) -> None:
        self._parts.extend(later._parts)
        self._is_unsigned &= later._is_unsigned
        self._sum_up()

    def learned(self) -> pl.DataFrame:
        if not self._parts:
            return pl.DataFrame(schema={"value": pl.Int64, "count": pl.Int64})
        counts = _summed(self._parts)
        if self._is_unsigned:
            counts = counts.with_columns(pl.col("value").reinterpret(signed=False))
        return counts.sort("count", "value", descending=[True, False])

    def _sum_up(self) -> None:
        """Sum up equal values when many have come since the last time."""
        first, *others = [len(part) for part in self._parts] or [0]
        if sum(others) > max(self._pending_values, first):
            self._parts = [_summed(self._parts)]


def _summed(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    kinds = {part["value"].dtype for part in parts}
    texts = {kind for kind in kinds if kind in (pl.String, pl.Binary)}
    if texts and kinds != texts:
        shown = ", ".join(sorted(str(kind) for kind in kinds))
        raise SchemaError(
            f"a vocabulary: expected values of one type, got {shown}. Declare one type for the "
            "columns in the source."
        )
    counts = pl.concat(parts, how="vertical_relaxed")
    return counts.group_by("value").agg(pl.col("count").sum())
