# SPDX-License-Identifier: Apache-2.0
"""Which items a row may have as negatives, by what its user has seen until then.

A history holds items of the user's strictly earlier rows. If negatives were never among them, "the
item is in the history" would be the label. See docs/prepare_rows.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotbed.prepare.sampling.draw import Drawable, Int64Array, KnownItems, Weights, running_sum

BoolArray = NDArray[np.bool_]
Seen = Literal["matched", "any", "never"]


@dataclass(frozen=True)
class Visits:
    """The rows of some users, each with an item and a time.

    `users`: from 0 on, [n]. `moments`: from 0 on, one for each user and time, in the order of
    (user, time), [n]. `items`: places in the catalogue, [n].
    """

    users: Int64Array
    moments: Int64Array
    items: Int64Array

    @staticmethod
    def of(keys: Int64Array, times: Int64Array, items: Int64Array) -> Visits:
        """Return the rows of users with these keys."""
        _, users = np.unique(keys, return_inverse=True)
        order = np.lexsort((times, users))
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.diff(users[order]) != 0
        is_new[1:] |= np.diff(times[order]) != 0
        moments = np.empty(len(order), np.int64)
        moments[order] = np.cumsum(is_new) - 1
        return Visits(users, moments, items)

    def candidates(self, seen: Seen, weights: Weights) -> Sequence[Drawable]:
        """Return for each row the items that may be drawn for it.

        Args:
            seen: which of the items that the user has seen are among them.
            weights: of all items.
        """
        everywhere = np.ones(len(self.users), bool)
        if seen == "never":
            return [self._all_but(self.users, weights, everywhere)]
        if seen == "any":
            return [self._all_but(self.moments, weights, everywhere)]
        return self._matched(weights)

    def _all_but(self, groups: Int64Array, weights: Weights, is_open: BoolArray) -> Drawable:
        """Return all items but those of the rows of the same group."""
        known_items = KnownItems.of(groups, self.items, num_groups(groups))
        first = np.zeros(len(groups), np.int64)
        last = np.full(len(groups), len(weights.ends) - 1)
        return Drawable(weights, known_items, groups, first, last, is_open)

    def _matched(self, weights: Weights) -> Sequence[Drawable]:
        """Return items that are as new to the user as the item of the row.

        The items of a user stand on a line in the order in which they were first seen: those of
        strictly earlier rows are a stretch at its begin, those that come later one at its end.
        """
        first_seen, visit_places = _first_seen(self)
        line = Weights(running_sum(weights[first_seen.items]))
        begin = np.searchsorted(first_seen.users, self.users, side="left")
        end = np.searchsorted(first_seen.users, self.users, side="right")
        earlier_end = np.searchsorted(first_seen.moments, self.moments, side="left")
        later_begin = np.searchsorted(first_seen.moments, self.moments, side="right")
        is_repeated = visit_places < earlier_end

        again = np.flatnonzero(is_repeated)
        num_moments = num_groups(self.moments)
        at_that_time = KnownItems.of(self.moments[again], visit_places[again], num_moments)
        nothing = KnownItems.of(self.moments[:0], visit_places[:0], num_moments)
        items = first_seen.items
        return [
            Drawable(line, at_that_time, self.moments, begin, earlier_end, is_repeated, items),
            Drawable(line, nothing, self.moments, later_begin, end, ~is_repeated, items),
            self._all_but(self.users, weights, ~is_repeated),
        ]


def _first_seen(visits: Visits) -> tuple[Visits, Int64Array]:
    """Return the first visit of each user to each item, in the order of (moment, item).

    And for each visit, the place of the first one there, [n].
    """
    order = np.lexsort((visits.moments, visits.items, visits.users))
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.diff(visits.users[order]) != 0
    is_first[1:] |= np.diff(visits.items[order]) != 0
    rows = order[is_first]
    in_time = np.lexsort((visits.items[rows], visits.moments[rows]))
    places = np.empty(len(rows), np.int64)
    places[in_time] = np.arange(len(rows))
    visit_places = np.empty(len(order), np.int64)
    visit_places[order] = places[np.cumsum(is_first) - 1]
    rows = rows[in_time]
    return Visits(visits.users[rows], visits.moments[rows], visits.items[rows]), visit_places


def num_groups(groups: Int64Array) -> int:
    """Return the number of groups that are numbered from 0 on."""
    return int(groups.max(initial=-1)) + 1
