# SPDX-License-Identifier: Apache-2.0
"""Draw items that a row may have as negatives, each as likely as its weight, without rejections.

Weights are integers, so that sums of them are exact and the draw is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.hashing import Uint64Array

Int64Array = NDArray[np.int64]
TOTAL = 1 << 40
"""The sum of the weights of popularity. A draw modulo it from 64 bits is even to 1 in 2^24."""


@dataclass(frozen=True)
class Weights:
    """Integer weights of items as their running sum: item i has `ends[i + 1] - ends[i]`."""

    ends: Int64Array

    @staticmethod
    def of(counts: Int64Array, power: float) -> Weights:
        """Return weights that are proportional to `counts ** power`.

        Args:
            counts: the number of rows of each item, int64 [n]; an item with 0 is never drawn.
            power: 0 for equal weights, which are exact.
        """
        is_present = counts > 0
        weights = is_present.astype(np.int64)
        if power != 0:
            powers = np.where(is_present, counts, 0).astype(np.float64) ** power
            shares = powers / max(powers.sum(), 1.0) * TOTAL
            weights = np.where(is_present, np.maximum(shares.astype(np.int64), 1), 0)
        return Weights(running_sum(weights))

    def __getitem__(self, items: Int64Array) -> Int64Array:
        """Return the weights of `items`."""
        return np.asarray(self.ends[items + 1] - self.ends[items])


@dataclass(frozen=True)
class KnownItems:
    """The items of each of some groups: ascending, one group after the other.

    `starts`: the place in `items` where each group's items begin, int64 [groups + 1].
    """

    items: Int64Array
    starts: Int64Array

    @staticmethod
    def of(groups: Int64Array, items: Int64Array, num_groups: int) -> KnownItems:
        """Return the items of groups 0 .. n - 1 from pairs of both; repeated pairs count once."""
        order = np.lexsort((items, groups))
        groups = groups[order]
        items = items[order]
        is_first = np.ones(len(groups), bool)
        is_first[1:] = (groups[1:] != groups[:-1]) | (items[1:] != items[:-1])
        starts = np.searchsorted(groups[is_first], np.arange(num_groups + 1))
        return KnownItems(items[is_first], starts)


@dataclass(frozen=True)
class Drawable:
    """For each of n rows, the items that may be drawn: a stretch of a line without known items.

    The weights of the items lie one after the other on the line. The weights of the known items
    before a place of the unknown ones lead to its item.

    `line`: the weights. `known`: by group, items of the line that are not drawn; they lie in the
    stretch of their rows. `groups`: the group of each row, [n]. `first`, `last`: the stretch of
    each row, [n]. `is_open`: rows that may draw here, [n]. `items`: what stands on the line; None:
    the items are the places.
    """

    line: Weights
    known: KnownItems
    groups: Int64Array
    first: Int64Array
    last: Int64Array
    is_open: NDArray[np.bool_]
    items: Int64Array | None = None

    @cached_property
    def sizes(self) -> Int64Array:
        """The weight of all items that may be drawn, [n]."""
        whole = self.line.ends[self.last] - self.line.ends[self.first]
        starts = self.known.starts[self.groups]
        stops = self.known.starts[self.groups + 1]
        return np.where(self.is_open, whole - (self._sums[stops] - self._sums[starts]), 0)

    def at(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the items of `rows` at places of their weight, 0 .. size - 1."""
        groups = self.groups[rows]
        start = self.known.starts[groups]
        places = self.line.ends[self.first[rows]] + offsets
        stop = count_up_to(self._before, start, self.known.starts[groups + 1], places)
        places = places + self._sums[stop] - self._sums[start]
        drawn = np.searchsorted(self.line.ends, places, side="right") - 1
        if self.items is None:
            return drawn
        return self.items[drawn]

    @cached_property
    def _sums(self) -> Int64Array:
        """The running sum of the weights of the known items."""
        return running_sum(self.line[self.known.items])

    @cached_property
    def _before(self) -> Int64Array:
        """For each known item, where it stands on the line without the known items before it."""
        owners = np.repeat(self.known.starts[:-1], np.diff(self.known.starts))
        before: Int64Array = self.line.ends[self.known.items]
        return before - (self._sums[:-1] - self._sums[owners])


def draw(choices: Sequence[Drawable], rows: Int64Array, random: Uint64Array) -> Int64Array:
    """Return items of the candidates of m `rows`, int64 [m, k]; -1 for rows without candidates.

    The items of one row are independent of each other: they may repeat.

    Args:
        choices: of the same n rows; a row may have candidates in several.
        rows: the rows that get items, [m].
        random: 64 random bits for each item of each of the n rows, [n, k].
    """
    width = random.shape[1]
    drawn = np.full((len(rows), width), -1, np.int64)
    sizes = np.sum([choice.sizes[rows] for choice in choices], axis=0)
    places = np.flatnonzero(sizes > 0)
    rows = rows[places]
    sizes = sizes[places].astype(np.uint64)
    for number in range(width):
        offsets = (random[rows, number] % sizes).astype(np.int64)
        for choice in choices:
            is_here = (offsets >= 0) & (offsets < choice.sizes[rows])
            drawn[places[is_here], number] = choice.at(rows[is_here], offsets[is_here])
            offsets = offsets - choice.sizes[rows]  # below 0 once the item is drawn
    return drawn


def running_sum(values: Int64Array) -> Int64Array:
    """Return 0 and the sums of the first 1, 2, ... values, int64 [n + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def count_up_to(
    values: Int64Array, first: Int64Array, last: Int64Array, limits: Int64Array
) -> Int64Array:
    """Return the end of the values up to `limits` in each ascending range `first` to `last`."""
    low = first.copy()
    high = last.copy()
    open_ranges = np.flatnonzero(low < high)
    while len(open_ranges):
        middle = (low[open_ranges] + high[open_ranges]) // 2
        is_below = values[middle] <= limits[open_ranges]
        low[open_ranges] = np.where(is_below, middle + 1, low[open_ranges])
        high[open_ranges] = np.where(is_below, high[open_ranges], middle)
        open_ranges = open_ranges[low[open_ranges] < high[open_ranges]]
    return low
