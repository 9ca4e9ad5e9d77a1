# SPDX-License-Identifier: Apache-2.0
"""Draw items that a user does not know, each as likely as its weight, without rejections.

Weights are integers, so that sums of them are exact and the draw is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        ends = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(weights, out=ends[1:])
        return Weights(ends)

    def __getitem__(self, items: Int64Array) -> Int64Array:
        """Return the weights of `items`."""
        return np.asarray(self.ends[items + 1] - self.ends[items])


@dataclass(frozen=True)
class Known:
    """The items that each of some users knows: ascending, one user after the other.

    `starts`: the place in `items` where each user's items begin, int64 [users + 1].
    """

    items: Int64Array
    starts: Int64Array

    @staticmethod
    def of(users: Int64Array, items: Int64Array) -> Known:
        """Return the items of users 0 .. n - 1 from pairs of both; repeated pairs count once."""
        order = np.lexsort((items, users))
        users = users[order]
        items = items[order]
        is_first = np.ones(len(users), bool)
        is_first[1:] = (users[1:] != users[:-1]) | (items[1:] != items[:-1])
        users = users[is_first]
        num_users = int(users[-1]) + 1 if len(users) else 0
        starts = np.searchsorted(users, np.arange(num_users + 1))
        return Known(items[is_first], starts)


def draw(weights: Weights, known: Known, users: Int64Array, random: Uint64Array) -> Int64Array:
    """Return items that the users do not know, int64 [n, k]; -1 for users who know all items.

    The items of one row are independent of each other: they may repeat.

    The weights of the unknown items lie one after the other on a line, and a random place on this
    line is chosen. The weights of the known items before it lead to the item.

    Args:
        weights: of all items.
        known: the known items of all users.
        users: the user of each row, int64 [n].
        random: 64 random bits for each item to draw, [n, k].
    """
    num_items = random.shape[1]
    sums = np.zeros(len(known.items) + 1, np.int64)
    np.cumsum(weights[known.items], out=sums[1:])
    owners = np.repeat(known.starts[:-1], np.diff(known.starts))
    before = weights.ends[known.items] - (sums[:-1] - sums[owners])
    first = known.starts[users]
    last = known.starts[users + 1]
    unknown = weights.ends[-1] - (sums[last] - sums[first])
    drawn = np.full((len(users), num_items), -1, np.int64)
    rows = np.flatnonzero(unknown > 0)
    for number in range(num_items):
        sizes = unknown[rows].astype(np.uint64)
        places = (random[rows, number] % sizes).astype(np.int64)
        stop = _count_up_to(before, first[rows], last[rows], places)
        places += sums[stop] - sums[first[rows]]
        drawn[rows, number] = np.searchsorted(weights.ends, places, side="right") - 1
    return drawn


def _count_up_to(
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
