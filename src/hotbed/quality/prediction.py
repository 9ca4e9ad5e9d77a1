# SPDX-License-Identifier: Apache-2.0
"""The difference that a test of two jobs on users would have shown, predicted from a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import DataError
from hotbed.metrics.clustered import Clustered
from hotbed.quality.cells import BASE, REPLAY
from hotbed.quality.click_model import RATE, ClickModel, ShownLists, places_by
from hotbed.quality.samples import PLACE, ROUTE, codes, joined, list_numbers, user_numbers

LOGGED = "logged"
"""The side of a prediction whose orders were shown."""


@dataclass(frozen=True)
class Figure:
    """A predicted figure with the ends of its interval, which are nan for fewer than 20 users."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What a test on users would have shown, had it shown the same candidates in other orders.

    Attributes:
        rates: the click rate of each side: `logged`, `replay`, and `base` if there is one.
        difference: the rate of `replay` minus that of `against`.
        against: `base`, or `logged`.
        lists: how many requests count.
        samples: their candidates.
        users: their users.
        clicks: how many candidates were clicked.
        same_first: the share of lists of which both sides have the same candidate first.
        examination: how often each place is examined, as a multiple of the one with most clicks.
        is_determined: whether the log tells apart what places and what candidates do.
    """

    rates: Mapping[str, Figure]
    difference: Figure
    against: str
    lists: int
    samples: int
    users: int
    clicks: int
    same_first: float
    examination: NDArray[np.float64]
    is_determined: bool

    def table(self) -> pa.Table:
        """Return a row for each side, then one for the difference."""
        rows: list[dict[str, Any]] = []
        for name, figure in self.rates.items():
            rows.append({"side": name, "against": None, **vars(figure)})
        rows.append({"side": REPLAY, "against": self.against, **vars(self.difference)})
        names = ("lists", "samples", "users", "clicks", "same_first", "is_determined")
        numbers = {name: getattr(self, name) for name in names}
        return pa.Table.from_pylist([{**row, **numbers} for row in rows])

    @property
    def limits(self) -> list[str]:
        """Sentences on what the prediction cannot know."""
        sentences = [
            "Other candidates would have been shown: the prediction orders those that are in the "
            "log, and knows nothing about others.",
            "A click is taken to depend on its candidate and on its place, each by a factor of its "
            "own. Where users stop after a click, the difference is too large.",
            "Users would have come back more or less often, and both jobs would have learned from "
            "other clicks.",
        ]
        if self.against == LOGGED:
            sentences.append(
                "The versions in the log may have learned longer than the replayed job. To compare "
                "equals, replay both jobs (--base), or begin with a state (--start)."
            )
            sentences.append(
                "AUC, hit rate and NDCG prefer the logged scores, which decided what was seen. The "
                "predicted click rate does not."
            )
        if self.samples == self.lists:
            sentences.append("Each list has one candidate, so that no order changes anything.")
        if not self.is_determined:
            sentences.append(
                "The log cannot tell what places and what candidates do: scores that are alike "
                "stood at one place only. Do not rely on the difference."
            )
        return sentences


def predict(
    answered: pa.Table, scores: Mapping[str, NDArray[np.float32]], level: float
) -> Prediction:
    """Return the prediction for answered rows.

    Those without a logged score or without a place are left out: they were not shown.

    Args:
        answered: as `MeasuredColumns.samples` returns them, perhaps with `place`.
        scores: of the sides that were replayed, [n] each.
        level: of the intervals.

    Raises:
        DataError: none of them was clicked.
    """
    table = answered
    for side, values in scores.items():
        table = table.append_column(side, pa.array(values, pa.float64()))
    is_shown = pa.compute.is_finite(table["score"])
    if PLACE in table.column_names:
        is_shown = pa.compute.and_(is_shown, table[PLACE].is_valid())
    table = joined([table.filter(is_shown)])
    lists = _lists(table)
    if not lists.label.any():
        raise DataError(
            f"replay: the prediction needs clicks, got none of {table.num_rows} shown candidates "
            "after the warm-up. Give a longer log, or a smaller warm-up."
        )
    model = ClickModel(lists)
    places = {LOGGED: lists.place}
    for side in scores:
        score = np.nan_to_num(table[side].to_numpy(), nan=-np.inf)
        places[side] = lists.ordered_by(score)
    against = BASE if BASE in scores else LOGGED
    rates = {side: model.rate(of_side) for side, of_side in places.items()}
    return Prediction(
        {side: _figure(rate, level) for side, rate in rates.items()},
        _figure(rates[REPLAY].minus(rates[against]), level),
        against,
        len(np.unique(lists.of_list)),
        len(lists.label),
        len(np.unique(lists.user)),
        int(lists.label.sum()),
        lists.same_first(places[REPLAY], places[against]),
        model.examination,
        model.is_determined,
    )


def _figure(rate: Clustered, level: float) -> Figure:
    return Figure(rate.values[RATE], *rate.interval(RATE, level))


def _lists(table: pa.Table) -> ShownLists:
    """Return sorted samples as lists."""
    score = table["score"].to_numpy()
    _, of_list = np.unique(list_numbers(table), return_inverse=True)
    of_list = of_list.astype(np.int64)
    place = places_by(score, of_list)
    if PLACE in table.column_names:
        _, place = np.unique(table[PLACE].to_numpy(), return_inverse=True)
        place = place.astype(np.int64)
    label = table["label"].to_numpy()
    return ShownLists(label, score, codes(table[ROUTE]), place, of_list, user_numbers(table))
