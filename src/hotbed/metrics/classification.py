# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted probabilities: AUC, entropies, calibration and shares at a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hotbed import checks, config
from hotbed.errors import ConfigError, DataError
from hotbed.metrics.metric import Array, Metric, Samples, SumsMetric
from hotbed.metrics.score_counts import area_under, count_scores, join_counts


@config.described
class AUC(Metric):
    """Area under the ROC curve: the probability that a positive outranks a negative.

    Ties count one half. Any score is allowed.

    Args:
        bins: None keeps all samples and is exact. With a number, memory grows only with the
            logarithm of the number of samples: blocks of `max(exact, bins)` samples are counted in
            at most `2 * bins` bins of equal mass, and equally many blocks are joined in pairs. Bins
            follow the scores, so it does not matter how close together they lie, or how they drift.
        exact: with bins, the AUC of up to `exact` samples is exact.

    With bins, the error is below `8 * doublings / bins` for any order of any scores; `doublings` is
    the binary logarithm of the number of blocks. It is 0 where there are at most `bins` different
    scores. Measured with 8,192 bins and 1,000,000 samples: below 1e-6 where the scores come from
    one distribution, about 1e-5 where they drift by thousands of their own width.
    """

    def __init__(self, bins: int | None = None, exact: int = 0) -> None:
        checks.at_least("AUC.bins", bins, 2, "Give None (exact) or a number such as 8192.")
        checks.at_least("AUC.exact", exact, 0)
        self.bins = bins
        self.exact = exact
        super().__init__()

    def clear(self) -> None:
        """Remove all samples."""
        self._parts: list[Samples] = []
        self._rows = 0  # samples in parts
        self._levels: list[Array | None] = []  # counts of 2^level blocks each

    def add(self, samples: Samples) -> None:
        """Add checked samples."""
        self._parts.append(Samples(samples.prediction, samples.label, samples.weight, None))
        self._rows += len(samples.label)
        if self.bins is None:
            return
        block = max(self.exact, self.bins)
        full = (self._rows - 1) // block
        if full <= 0:
            return
        rows = Samples.concat(self._parts)
        for number in range(full):
            part = rows[number * block : (number + 1) * block]
            self._count(count_scores(part, self.bins))
        self._parts = [rows[full * block :]]
        self._rows -= full * block

    def state(self) -> dict[str, Any]:
        """Return the samples; with bins, those not counted yet, and the counts by level."""
        samples = Samples.concat(self._parts)
        self._parts = [samples]
        if not self._levels:
            return samples.state()
        levels = [np.empty((3, 0)) if level is None else level for level in self._levels]
        return {
            **samples.state(),
            "bins": self.bins,
            "lengths": [level.shape[1] for level in levels],
            "counts": np.concatenate(levels, axis=1),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`.

        The state of an AUC with another number of bins is accepted and joined into the bins of this
        one, and so are the states of 0.1.0's first builds. Raises ConfigError for a state in bins
        if this AUC keeps all samples.
        """
        self.clear()
        if "bins" in state and self.bins is None:
            raise ConfigError(
                f"AUC.bins: the state is counted in bins, got bins={state['bins']} into bins=None. "
                "Give the number that it was saved with."
            )
        if "place" in state:
            self._count(_fixed_bins(state))
            return
        counts = np.asarray(state.get("counts", np.empty((3, 0))), np.float64)
        bounds = np.cumsum([0, *state.get("lengths", ())])
        for start, stop in pairwise(bounds.tolist()):
            level = counts[:, start:stop].copy()
            if state["bins"] != self.bins:
                level = join_counts([level], self.bins)
            self._levels.append(level if stop > start else None)
        self.add(Samples.from_state(state))

    def eval(self) -> float:
        """Return a number in [0, 1]; nan if one class is missing."""
        samples = Samples.concat(self._parts)
        self._parts = [samples]
        levels = [level for level in self._levels if level is not None]
        counts = join_counts([*levels, count_scores(samples)])
        negatives, positives = counts[1:].sum(axis=1).tolist()
        if not (negatives > 0 and positives > 0):
            return self._undefined(
                f"it needs both classes, got {positives:g} positive, {negatives:g} negative"
            )
        return float(area_under(counts) / (positives * negatives))

    def merge(self, later: Metric) -> None:
        """Add the samples of `later`; with bins, its blocks stay what they are.

        The bound of the error holds for the blocks of both.
        """
        self._check_like(later)
        assert isinstance(later, AUC)
        for number, level in enumerate(later._levels):
            if level is not None:
                self._count(level, number)
        self.add(Samples.concat(later._parts))

    def _count(self, counts: Array, number: int = 0) -> None:
        """Add the counts of 2^number blocks: two of a level become one of the next."""
        while number < len(self._levels):
            level = self._levels[number]
            if level is None:
                self._levels[number] = counts
                return
            counts = join_counts([level, counts], self.bins)
            self._levels[number] = None
            number += 1
        self._levels += [None] * (number - len(self._levels))
        self._levels.append(counts)


def _fixed_bins(state: Mapping[str, Any]) -> Array:
    """Return the counts of a state with bins of equal width in logit between -16 and 16."""
    places = np.asarray(state["place"], np.float64)
    logit = (places + 0.5) * (32.0 / state["bins"]) - 16.0
    return np.concatenate([1.0 / (1.0 + np.exp(-logit))[None], np.asarray(state["counts"])])


@config.described
class LogLoss(SumsMetric):
    """Mean binary cross-entropy (natural log) of probabilities, clipped to [eps, 1 - eps]."""

    smaller_is_better = True
    also_known_as = ("binarycrossentropy", "bce", "crossentropy", "nll")

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return _entropy_sums(self._name, samples, self.eps)

    def eval(self) -> float:
        """Return nats per sample; nan without samples."""
        entropy, weight, _ = self._sums
        if not weight > 0:
            return self._undefined("no samples")
        return float(entropy / weight)


@config.described
class NormalizedEntropy(SumsMetric):
    """Log loss divided by the log loss of always predicting the mean label.

    Below 1, the predictions are better than knowing only the mean.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014.
    """

    smaller_is_better = True

    def __init__(self, eps: float = 1e-7) -> None:
        self.eps = eps
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return _entropy_sums(self._name, samples, self.eps)

    def eval(self) -> float:
        """Return a number from 0 on; nan if one class is missing."""
        entropy, weight, positives = self._sums
        if not 0 < positives < weight:
            return self._undefined(
                f"it needs both classes, got {positives:g} positive of {weight:g}"
            )
        rate = positives / weight
        return float(entropy / weight / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


@config.described
class Calibration(SumsMetric):
    """Mean prediction divided by mean label: 1 is calibrated, above 1 predicts too much."""

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        return (
            float(samples.prediction @ samples.weight),
            float(samples.label @ samples.weight),
            0.0,
        )

    def eval(self) -> float:
        """Return a number from 0 on; nan without positive labels."""
        predicted, observed, _ = self._sums
        if not observed > 0:
            return self._undefined("no positive labels")
        return float(predicted / observed)


def _on_host(values: Any) -> Array:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


class _Thresholded(SumsMetric):
    """A ratio of weights of samples chosen by prediction >= threshold and by label."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        chosen = samples.prediction >= self.threshold
        hits, base = self._ratio(chosen, samples.label > 0.5)
        return float(samples.weight[hits].sum()), float(samples.weight[base].sum()), 0.0

    def eval(self) -> float:
        """Return a number in [0, 1]; nan without samples to divide by."""
        hits, base, _ = self._sums
        if not base > 0:
            return self._undefined(f"no samples to divide by at threshold {self.threshold}")
        return float(hits / base)

    @abstractmethod
    def _ratio(self, chosen: Array, positive: Array) -> tuple[Array, Array]:
        """Return which samples count in the numerator and in the denominator."""


@config.described
class Accuracy(_Thresholded):
    """Share of samples on the right side of `threshold` (positive: prediction >= threshold).

    For scores of classes, [n, classes], it is the share whose label, [n], is the number of the
    class with the highest score.

    Args:
        threshold: of the prediction.
        top: predictions are scores of classes, and a label counts as found among the `top` highest;
            of equal scores, the first counts as the higher one. Labels may be one-hot,
            [n, classes].
    """

    def __init__(self, threshold: float = 0.5, top: int | None = None) -> None:
        checks.at_least("Accuracy.top", top, 1, "Give a number of classes, or None.")
        self.top = top
        super().__init__(threshold)

    def update(self, *inputs: Any, weight: Any = None, group: Any = None) -> None:
        first, second = (self.indexes or [0, 1])[:2]
        if max(first, second) < len(inputs):
            scores, label = (_on_host(inputs[place]) for place in (first, second))
            if self.top is not None and scores.ndim == 2 and label.shape == scores.shape:
                label = label.argmax(1)
            if scores.ndim == 2 and scores.shape[1] > 1 and label.size == len(scores):
                highest = np.argsort(-scores, axis=1, kind="stable")[:, : self.top or 1]
                places = list(inputs)
                places[first] = (highest == label.reshape(-1, 1)).any(1).astype(np.float64)
                places[second] = np.ones(len(scores))
                inputs = tuple(places)
            elif self.top is not None:
                raise DataError(
                    f"Accuracy: top needs scores of classes, got scores {list(scores.shape)} and "
                    f"labels {list(label.shape)}. Give [n, classes] and [n]."
                )
        super().update(*inputs, weight=weight, group=group)

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


@config.described
class F1(SumsMetric):
    """Harmonic mean of precision and recall of the positives (prediction >= threshold).

    F1 is 2 h / (c + p), where h, c and p are the weights of the hits, of the samples predicted
    positive, and of the positives.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def _summands(self, samples: Samples) -> tuple[float, float, float]:
        chosen = samples.prediction >= self.threshold
        positive = samples.label > 0.5
        weight = samples.weight
        hits = float(weight[chosen & positive].sum())
        return hits, float(weight[chosen].sum()), float(weight[positive].sum())

    def eval(self) -> float:
        """Return a number in [0, 1]; nan without positives, predicted or real."""
        hits, chosen, positive = self._sums
        if not chosen + positive > 0:
            return self._undefined(f"no positives at threshold {self.threshold}")
        return float(2 * hits / (chosen + positive))


# --- arithmetic -----------------------------------------------------------------------------------


def _entropy_sums(metric: str, samples: Samples, eps: float) -> tuple[float, float, float]:
    _probabilities(metric, samples.prediction)
    labels = samples.label
    if len(labels) and not (labels.min() >= 0.0 and labels.max() <= 1.0):
        raise DataError(
            f"{metric}: labels lie outside 0 to 1, got {labels.min():g} to {labels.max():g}. Give "
            "0 and 1, or probabilities."
        )
    p = np.clip(samples.prediction, eps, 1.0 - eps)
    entropy = -(samples.label * np.log(p) + (1.0 - samples.label) * np.log1p(-p))
    return (
        float(entropy @ samples.weight),
        float(samples.weight.sum()),
        float(samples.label @ samples.weight),
    )


def _probabilities(metric: str, prediction: Array) -> None:
    if len(prediction) and not (prediction.min() >= 0.0 and prediction.max() <= 1.0):
        raise DataError(
            f"{metric}: predictions lie outside 0 to 1, got {prediction.min():g} to "
            f"{prediction.max():g}. Give sigmoid(logits)."
        )
