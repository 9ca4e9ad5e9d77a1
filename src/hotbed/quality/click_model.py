# SPDX-License-Identifier: Apache-2.0
"""What other orders of the shown lists would have earned: a click model of places and candidates.

A click needs a candidate that attracts and a place that is examined: its probability is the product
of both. This is the position-based model of Craswell, Zoeter, Taylor and Ramsey, "An Experimental
Comparison of Click Position-Bias Models", WSDM 2008. A click at a place counts for another place in
proportion to their examination: the estimate of Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay
and Wen, "Offline Evaluation of Ranking Policies with Click Models", KDD 2018.

The examination of places follows from candidates that scored alike and stood at different places,
because the others of their lists scored higher or lower. It is the maximum of a Poisson likelihood
with an attraction for each narrow range of scores. Such a likelihood has no bias from its many
ranges: Hausman, Hall and Griliches, "Econometric Models for Count Data with an Application to the
Patents-R&D Relationship", Econometrica 52, 1984.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotbed.metrics.clustered import Clustered, by_cluster

RATE = "rate"
_CLICKS_OF_RANGE = 10
_MOST_RANGES = 200  # of the scores of a route
_MOST_ROUNDS = 5000
_ENOUGH = 1e-10  # change of an examination, relative

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class ShownLists:
    """Candidates of shown lists, and what was clicked; in the order of their requests.

    Attributes:
        label: 1 for a click, [n].
        score: that the list was ordered by, [n].
        route: the number of the reason why a version scored: scores of one route are alike, [n].
        place: where the candidate stood, from 0 on, [n].
        of_list: the number of its list, [n].
        user: the number of its user, [n].
    """

    label: Floats
    score: Floats
    route: Codes
    place: Codes
    of_list: Codes
    user: Codes

    def ordered_by(self, score: Floats) -> Codes:
        """Return the places of candidates if other scores order them: those of their lists.

        Of equal scores the first in the request comes first.
        """
        by_place = np.lexsort((self.place, self.of_list))
        by_score = np.lexsort((-score, self.of_list))
        places = np.empty_like(self.place)
        places[by_score] = self.place[by_place]
        return places

    def same_first(self, one: Codes, other: Codes) -> float:
        """Return the share of lists of which two orders have the same candidate first."""
        first = {}
        for name, places in (("one", one), ("other", other)):
            order = np.lexsort((places, self.of_list))
            is_first = np.diff(self.of_list[order], prepend=-1) != 0
            first[name] = order[is_first]
        return float(np.mean(first["one"] == first["other"]))


def places_by(score: Floats, of_list: Codes) -> Codes:
    """Return the place of each candidate in its list, from 0 on, by falling score."""
    order = np.lexsort((-score, of_list))
    is_first = np.diff(of_list[order], prepend=-1) != 0
    starts = np.flatnonzero(is_first)
    within = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    places = np.empty(len(order), np.int64)
    places[order] = within
    return places


class ClickModel:
    """A click model of shown lists.

    Attributes:
        examination: of each place, as a multiple of that of the place with most clicks; 0 for a
            place without a click.
        shown: how many candidates stood at each place.
        clicks: how many of them were clicked.
        is_determined: whether scores at several places tell places and candidates apart.
    """

    def __init__(self, lists: ShownLists) -> None:
        self._lists = lists
        self._range = _ranges(lists)
        num_places = int(lists.place.max()) + 1
        shape = (num_places, int(self._range.max()) + 1)
        cell = lists.place * shape[1] + self._range
        num_cells = shape[0] * shape[1]
        shown = np.bincount(cell, minlength=num_cells).reshape(shape).astype(np.float64)
        clicks = np.bincount(cell, lists.label, num_cells).reshape(shape).astype(np.float64)
        self.shown = shown.sum(axis=1)
        self.clicks = clicks.sum(axis=1)
        self._reference = int(np.argmax(self.clicks))
        self.examination, self._attraction = self._fitted(shown, clicks)
        self._expected = self.examination[lists.place] * self._attraction[self._range]
        self._free = np.flatnonzero(self.clicks > 0)
        self._free = self._free[self._free != self._reference]
        self._covariance, self.is_determined = _inverse(self._information(shown))

    def rate(self, places: Codes) -> Clustered:
        """Return the click rate if the candidates stood at other places, with its influences.

        Those of the examinations count, too, because they are estimates.
        """
        lists = self._lists
        count = len(lists.label)
        old = self.examination[lists.place]
        ratio = np.divide(self.examination[places], old, out=np.zeros(count), where=old > 0)
        earned = lists.label * ratio
        value = float(earned.mean())
        slopes = np.bincount(places, earned, len(self.examination))
        slopes -= np.bincount(lists.place, earned, len(self.examination))
        gradient = np.zeros(len(self._covariance))
        gradient[: len(self._free)] = slopes[self._free] / count
        steps = self._covariance @ gradient
        of_place = np.zeros(len(self.examination))
        of_place[self._free] = steps[: len(self._free)]
        of_range = np.zeros(len(self._attraction))
        of_range[self._attraction > 0] = steps[len(self._free) :]
        surprise = lists.label - self._expected
        influence = (earned - value) / count
        influence += surprise * (of_place[lists.place] + of_range[self._range])
        return by_cluster({RATE: (value, influence)}, lists.user)

    def _fitted(self, shown: Floats, clicks: Floats) -> tuple[Floats, Floats]:
        """Return the examination of each place, and the attraction of each range of scores."""
        examination = np.where(self.clicks > 0, 1.0, 0.0)
        of_range = clicks.sum(axis=0)
        for _ in range(_MOST_ROUNDS):
            seen = examination @ shown
            attraction = np.divide(of_range, seen, out=np.zeros_like(seen), where=seen > 0)
            wanted = shown @ attraction
            next_one = np.divide(self.clicks, wanted, out=np.zeros_like(wanted), where=wanted > 0)
            next_one /= next_one[self._reference]
            change = np.abs(next_one - examination).max()
            examination = next_one
            if change < _ENOUGH:
                break
        seen = examination @ shown
        attraction = np.divide(of_range, seen, out=np.zeros_like(seen), where=seen > 0)
        return examination, attraction

    def _information(self, shown: Floats) -> Floats:
        """Return the information on the logarithms of examinations, then of attractions."""
        expected = self.examination[:, None] * shown * self._attraction
        ranges = self._attraction > 0
        across = expected[np.ix_(self._free, np.flatnonzero(ranges))]
        of_places = np.diag(expected.sum(axis=1)[self._free])
        of_ranges = np.diag(expected.sum(axis=0)[ranges])
        return np.block([[of_places, across], [across.T, of_ranges]])


def _inverse(information: Floats) -> tuple[Floats, bool]:
    """Return the pseudo-inverse of a symmetric matrix, and whether it is the inverse."""
    values, vectors = np.linalg.eigh(information)
    is_known = values > values[-1] * len(values) * np.finfo(np.float64).eps
    inverse = (vectors[:, is_known] / values[is_known]) @ vectors[:, is_known].T
    return inverse, bool(is_known.all())


def _ranges(lists: ShownLists) -> Codes:
    """Return the number of the range of scores of each candidate; routes have their own."""
    ranges = np.zeros(len(lists.score), np.int64)
    begin = 0
    for route in np.unique(lists.route):
        rows = np.flatnonzero(lists.route == route)
        num_ranges = int(lists.label[rows].sum()) // _CLICKS_OF_RANGE
        num_ranges = min(max(num_ranges, 1), _MOST_RANGES)
        shares = np.arange(1, num_ranges) / num_ranges
        bounds = np.unique(np.quantile(lists.score[rows], shares))
        ranges[rows] = begin + np.searchsorted(bounds, lists.score[rows], side="right")
        begin += len(bounds) + 1
    _, ranges = np.unique(ranges, return_inverse=True)
    return ranges.astype(np.int64)
