# SPDX-License-Identifier: Apache-2.0
"""Rows and sums of labels over the time of events."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SECOND = 1_000_000
# Each width is a multiple of the one before, so that narrow bins fit into wide ones.
_WIDTHS = {
    "second": _SECOND,
    "10 seconds": 10 * _SECOND,
    "minute": 60 * _SECOND,
    "10 minutes": 600 * _SECOND,
    "hour": 3600 * _SECOND,
    "6 hours": 6 * 3600 * _SECOND,
    "day": 86_400 * _SECOND,
    "week": 7 * 86_400 * _SECOND,
    "4 weeks": 28 * 86_400 * _SECOND,
    "52 weeks": 13 * 28 * 86_400 * _SECOND,
    "5,200 weeks": 1300 * 28 * 86_400 * _SECOND,
}
_UNITS = list(_WIDTHS)


class Timeline:
    """Sums of numbers in bins of time, at most `most_bins` of them.

    The width of the bins is the smallest of a second, a minute, an hour, a day and widths between
    and beyond them with which the bins suffice: it depends on the times only.
    """

    def __init__(self, width: int, most_bins: int = 300) -> None:
        self._most_bins = most_bins
        self._level = 0
        self._bins = np.zeros(0, np.int64)
        self._sums = np.zeros((0, width))

    @property
    def unit(self) -> str:
        """The width of a bin in words, such as "day"."""
        return _UNITS[self._level]

    def add(self, times: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
        """Add numbers [n, width] at times [n] in microseconds UTC."""
        bins = times // _WIDTHS[self.unit]
        self._gather(bins, numbers)

    def merge(self, later: Timeline) -> None:
        """Add what `later` holds."""
        self._widen(later._level)
        bins = later._bins // (_WIDTHS[self.unit] // _WIDTHS[later.unit])
        self._gather(bins, later._sums)

    def as_wide_as(self, other: Timeline) -> Timeline:
        """Return the same sums in bins that are at least as wide as those of `other`."""
        wide = Timeline(self._sums.shape[1], self._most_bins)
        wide._widen(other._level)
        wide.merge(self)
        return wide

    def sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the middle of each bin in microseconds UTC, ascending, and its sums [n, width]."""
        middles = self._bins.astype(np.float64) + 0.5
        return middles * float(_WIDTHS[self.unit]), self._sums

    def _gather(self, bins: NDArray[np.int64], numbers: NDArray[np.float64]) -> None:
        bins = np.concatenate([self._bins, bins])
        numbers = np.concatenate([self._sums, numbers])
        distinct, places = np.unique(bins, return_inverse=True)
        columns = [
            np.bincount(places, weights=column, minlength=len(distinct)) for column in numbers.T
        ]
        self._bins = distinct
        self._sums = np.stack(columns, axis=1)
        if len(distinct) > self._most_bins and self._level + 1 < len(_UNITS):
            self._widen(self._level + 1)

    def _widen(self, level: int) -> None:
        if level <= self._level:
            return
        factor = _WIDTHS[_UNITS[level]] // _WIDTHS[self.unit]
        bins = self._bins // factor
        sums = self._sums
        self._level = level
        self._bins = np.zeros(0, np.int64)
        self._sums = np.zeros((0, sums.shape[1]))
        self._gather(bins, sums)
