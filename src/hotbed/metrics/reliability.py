# SPDX-License-Identifier: Apache-2.0
"""How predicted probabilities compare with what happened: the data of a reliability curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotbed.metrics.metric import Array, Samples

BINS = 1024
LOGIT_BOUND = 16.0
BLOCK = 4096
"""Samples that are counted together: to count each small batch alone would take longer."""


class Reliability:
    """Sums of predictions, labels and weights in 1,024 bins of equal width in logit.

    `curve` joins the bins into a few points of about equal weight, so that it says as much about an
    event of one in a thousand as about an even one.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._counted = np.zeros((3, BINS))
        self._waiting: list[Samples] = []
        self._num_waiting = 0

    def update(self, prediction: Array, label: Array, weight: Array | None = None) -> None:
        """Take probabilities, labels and weights, each [n]; a missing weight counts as 1."""
        probability = np.array(prediction, np.float64).reshape(-1)
        positive = np.array(label, np.float64).reshape(-1)
        weights = np.ones(len(positive))
        if weight is not None:
            weights = np.array(weight, np.float64).reshape(-1)
        self._waiting.append(Samples(probability, positive, weights, None))
        self._num_waiting += len(positive)
        if self._num_waiting >= BLOCK:
            self._counted = self._sums()
            self._waiting = []
            self._num_waiting = 0

    def merge(self, later: Reliability) -> None:
        """Add the samples of `later`, which came after those of this curve, as `Metric.merge`."""
        self._counted = self._sums() + later._sums()
        self._waiting = []
        self._num_waiting = 0

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return float(self._sums()[0].sum())

    def curve(self, points: int = 12) -> list[tuple[float, float]]:
        """(mean prediction, share of positives) of at most `points` groups, ascending.

        The groups have about the same weight.
        """
        weights, predicted, positive = self._sums()
        total = weights.sum()
        if not total:
            return []
        middle = np.cumsum(weights) - weights / 2
        group = np.minimum((middle / total * points).astype(np.int64), points - 1)
        group_weights = np.bincount(group, weights, points)
        filled = group_weights > 0
        x = np.bincount(group, predicted, points)[filled] / group_weights[filled]
        y = np.bincount(group, positive, points)[filled] / group_weights[filled]
        return list(zip(x.tolist(), y.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """The bins that are not empty, and the samples that are not counted yet."""
        (place,) = np.nonzero(self._counted[0])
        return {
            **Samples.concat(self._waiting).state(),
            "place": place.astype(np.int64),
            "sums": self._counted[:, place],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.clear()
        self._counted[:, np.asarray(state["place"])] = state["sums"]
        if "prediction" in state:  # absent from states of earlier builds
            self._waiting = [Samples.from_state(state)]
            self._num_waiting = len(self._waiting[0].label)

    def _sums(self) -> Array:
        """Return the sums of all samples, those that wait included."""
        samples = Samples.concat(self._waiting)
        with np.errstate(divide="ignore"):
            logit = np.log(samples.prediction) - np.log1p(-samples.prediction)
        scaled = (logit + LOGIT_BOUND) * (BINS / (2 * LOGIT_BOUND))
        place = np.clip(scaled, 0, BINS - 1).astype(np.int64)
        weights = samples.weight
        summands = (weights, weights * samples.prediction, weights * samples.label)
        return self._counted + [np.bincount(place, values, BINS) for values in summands]
