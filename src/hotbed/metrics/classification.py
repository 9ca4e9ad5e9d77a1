# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted probabilities: AUC, log loss, normalized entropy, calibration, shares at a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hotbed import config
from hotbed.errors import ConfigError, DataError
from hotbed.metrics.metric import Array, Metric, Samples, SumsMetric, pair_areas


@config.described
class AUC(Metric):
    """Area under the ROC curve: the probability that a positive outranks a negative; ties count one half.

    Args:
        bins: None keeps all samples and is exact. A number keeps two counts a bin (equal widths in logit between -16
            and 16; predictions must be probabilities), so that memory does not grow: 65,536 bins err by less than 1e-4
            on smooth scores.
        exact: with bins, so many samples are kept as they are, and the AUC of up to so many is exact. Scores of a model
            that has learned little lie close together, in few bins.
    """

    def __init__(self, bins: int | None = None, exact: int = 0) -> None:
        if bins is not None and bins < 2:
            raise ConfigError(f"AUC.bins: too few — received {bins} — give None (exact) or a number such as 65536")
        if exact < 0:
            raise ConfigError(f"AUC.exact: a number of samples — received {exact} — give one from 0 on")
        self.bins, self.exact = bins, exact
        super().__init__()

    def clear(self) -> None:
        """Forget all samples."""
        self._parts: list[Samples] = []
        self._held = 0  # samples in parts
        self._counts = np.zeros((2, 0))

    def add(self, samples: Samples) -> None:
        """Take checked samples."""
        if self.bins is not None:
            _probabilities(self._name, samples.prediction)
            if self._counts.size or self._held + len(samples.label) > self.exact:
                kept, self._parts, self._held = [*self._parts, samples], [], 0
                for part in kept:
                    self._count(part, self.bins)
                return
        self._parts.append(replace(samples, group=None))
        self._held += len(samples.label)

    def state(self) -> dict[str, Any]:
        """The samples, or the counts of the bins that are not empty."""
        if not self._counts.size:
            self._parts = [Samples.concat(self._parts)]
            return self._parts[0].state()
        (places,) = np.nonzero(self._counts.any(0))
        return {"bins": self.bins, "place": places.astype(np.int64), "counts": self._counts[:, places]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; ConfigError where that AUC had another number of bins."""
        self.clear()
        if "place" not in state:
            self.add(Samples.from_state(state))
            return
        if state["bins"] != self.bins:
            raise ConfigError(f"AUC.bins: the state is of another kind — received bins={state['bins']} into "
                              f"bins={self.bins} — give the number that it was saved with")  # fmt: skip
        self._counts = np.zeros((2, self.bins or 0))
        self._counts[:, np.asarray(state["place"])] = state["counts"]

    def eval(self) -> float:
        """A number in [0, 1]; nan where one class is missing."""
        if self._counts.size:
            below = np.cumsum(self._counts[0]) - self._counts[0]
            area = np.array([np.sum(self._counts[1] * (below + 0.5 * self._counts[0]))])
            negatives, positives = self._counts.sum(1)[:, None]
        else:
            samples = Samples.concat(self._parts)
            self._parts = [samples]
            area, negatives, positives = pair_areas(samples, np.zeros(len(samples.label), np.int64), 1)
        if not (negatives[0] > 0 and positives[0] > 0):
            return self._undefined(
                f"it needs both classes, it saw {positives[0]:g} positive, {negatives[0]:g} negative"
            )
        return float(area[0] / (positives[0] * negatives[0]))

    def _count(self, samples: Samples, bins: int) -> None:
        if not self._counts.size:
            self._counts = np.zeros((2, bins))
        with np.errstate(divide="ignore"):
            logit = np.log(samples.prediction) - np.log1p(-samples.prediction)
        place = np.clip((logit + 16.0) * (bins / 32.0), 0, bins - 1).astype(np.int64)
        np.add.at(self._counts.reshape(-1), place + bins * (samples.label > 0.5), samples.weight)


@config.described
class LogLoss(SumsMetric):
    """Mean binary cross-entropy (natural log) of probabilities, clipped to [eps, 1 - eps]."""

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return _entropy_sums(self._name, samples, self.eps)

    def eval(self) -> float:
        """Nats a sample; nan without samples."""
        entropy, weight, _ = self._sums
        return float(entropy / weight) if weight > 0 else self._undefined("no samples")


@config.described
class NormalizedEntropy(SumsMetric):
    """Log loss divided by that of always predicting the mean label: below 1 is better than knowing only the mean.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014.
    """

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return _entropy_sums(self._name, samples, self.eps)

    def eval(self) -> float:
        """A number from 0 on; nan where one class is missing."""
        entropy, weight, positives = self._sums
        if not 0 < positives < weight:
            return self._undefined(f"it needs both classes, it saw {positives:g} positive of {weight:g}")
        rate = positives / weight
        return float(entropy / weight / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


@config.described
class Calibration(SumsMetric):
    """Mean prediction divided by mean label: 1 is calibrated, above 1 predicts too much."""

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return float(samples.prediction @ samples.weight), float(samples.label @ samples.weight), 0.0

    def eval(self) -> float:
        """A number from 0 on; nan without positive labels."""
        predicted, observed, _ = self._sums
        return float(predicted / observed) if observed > 0 else self._undefined("no positive labels")


class _Thresholded(SumsMetric):
    """A ratio of weights of samples chosen by prediction >= threshold and by label."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        chosen = samples.prediction >= self.threshold
        hit, of = self._ratio(chosen, samples.label > 0.5)
        return float(samples.weight[hit].sum()), float(samples.weight[of].sum()), 0.0

    def eval(self) -> float:
        """A number in [0, 1]; nan where nothing is there to divide by."""
        hit, of, _ = self._sums
        return float(hit / of) if of > 0 else self._undefined(f"no samples to divide by at threshold {self.threshold}")

    @abstractmethod
    def _ratio(self, chosen: Array, positive: Array) -> tuple[Array, Array]:
        """Which samples count above and below the line."""


@config.described
class Accuracy(_Thresholded):
    """Share of samples on the right side of `threshold` (prediction >= threshold reads as positive)."""

    def _ratio(self, chosen: Array, positive: Array) -> tuple[Array, Array]:
        return chosen == positive, np.ones_like(chosen)


@config.described
class Precision(_Thresholded):
    """Share of positives among the samples predicted positive (prediction >= threshold)."""

    def _ratio(self, chosen: Array, positive: Array) -> tuple[Array, Array]:
        return chosen & positive, chosen


@config.described
class Recall(_Thresholded):
    """Share of the positives that are predicted positive (prediction >= threshold)."""

    def _ratio(self, chosen: Array, positive: Array) -> tuple[Array, Array]:
        return chosen & positive, positive


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _entropy_sums(metric: str, samples: Samples, eps: float) -> tuple[float, float, float]:
    _probabilities(metric, samples.prediction)
    p = np.clip(samples.prediction, eps, 1.0 - eps)
    entropy = -(samples.label * np.log(p) + (1.0 - samples.label) * np.log1p(-p))
    return float(entropy @ samples.weight), float(samples.weight.sum()), float(samples.label @ samples.weight)


def _probabilities(metric: str, prediction: Array) -> None:
    if len(prediction) and not (prediction.min() >= 0.0 and prediction.max() <= 1.0):
        raise DataError(f"{metric}: predictions are no probabilities — received {prediction.min():g} to "
                        f"{prediction.max():g} — give sigmoid(logits)")  # fmt: skip
