# SPDX-License-Identifier: Apache-2.0
"""How predicted probabilities compare with what happened: the data of a reliability curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotbed.metrics.metric import Array

BINS = 1024
LOGIT_BOUND = 16.0


class Reliability:
    """Sums of predictions, labels and weights in 1,024 bins of equal width in logit.

    `curve` joins the bins into a few points of about equal weight, so that it says as much about an
    event of one in a thousand as about an even one.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, BINS))

    def update(self, prediction: Array, label: Array, weight: Array | None = None) -> None:
        """Take probabilities, labels and weights, each [n]; a missing weight counts as 1."""
        probability = np.asarray(prediction, np.float64).reshape(-1)
        positive = np.asarray(label, np.float64).reshape(-1)
        with np.errstate(divide="ignore"):
            logit = np.log(probability) - np.log1p(-probability)
        scaled = (logit + LOGIT_BOUND) * (BINS / (2 * LOGIT_BOUND))
        place = np.minimum(np.maximum(scaled, 0), BINS - 1).astype(np.int64)
        summands = (None, probability, positive)
        if weight is not None:
            weights = np.asarray(weight, np.float64).reshape(-1)
            summands = (weights, weights * probability, weights * positive)
        for row, values in zip(self._sums, summands, strict=True):
            row += np.bincount(place, values, BINS)

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return float(self._sums[0].sum())

    def curve(self, points: int = 12) -> list[tuple[float, float]]:
        """(mean prediction, share of positives) of at most `points` groups, ascending.

        The groups have about the same weight.
        """
        weights, predicted, positive = self._sums
        if not self.weight:
            return []
        middle = np.cumsum(weights) - weights / 2
        group = np.minimum((middle / self.weight * points).astype(np.int64), points - 1)
        group_weights = np.bincount(group, weights, points)
        filled = group_weights > 0
        x = np.bincount(group, predicted, points)[filled] / group_weights[filled]
        y = np.bincount(group, positive, points)[filled] / group_weights[filled]
        return list(zip(x.tolist(), y.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """The bins that are not empty."""
        (place,) = np.nonzero(self._sums[0])
        return {"place": place.astype(np.int64), "sums": self._sums[:, place]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self._sums = np.zeros((3, BINS))
        self._sums[:, np.asarray(state["place"])] = state["sums"]
