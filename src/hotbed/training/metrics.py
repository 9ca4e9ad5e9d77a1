# SPDX-License-Identifier: Apache-2.0
"""Metrics of ranking models: clear, update batch by batch, eval.

    metric = AUC()
    metric.update(prediction, label)     # NumPy arrays or tensors [n]; weight= and group= where they apply
    metric.eval()                        # a float

Predictions are probabilities; AUC, GAUC, HitRate and NDCG take any score. Labels above 0.5 are positive. A metric that
is undefined for what it saw (one class only, no samples, no group) is nan and warns, saying why.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from typing import Literal

import numpy as np

from hotbed import config
from hotbed.errors import ConfigError, DataError
from hotbed.training.metric import Array, Samples, StoredMetric, SumsMetric
from hotbed.training.metric import Metric as Metric

# --- classification -------------------------------------------------------------------------------------------------


@config.described
class AUC(Metric):
    """Area under the ROC curve: the probability that a positive outranks a negative; ties count one half.

    Args:
        bins: None keeps all samples and is exact. A number keeps two counts a bin (equal widths in logit between -16
            and 16; predictions must be probabilities), so that memory does not grow: 65,536 bins err by less than 1e-4
            on smooth scores.
    """

    def __init__(self, bins: int | None = None) -> None:
        if bins is not None and bins < 2:
            raise ConfigError(f"AUC.bins: too few — received {bins} — give None (exact) or a number such as 65536")
        self.bins = bins
        super().__init__()

    def clear(self) -> None:
        """Forget all samples."""
        self._parts: list[Samples] = []
        self._counts = np.zeros((2, self.bins or 0))

    def add(self, samples: Samples) -> None:
        """Take checked samples."""
        if self.bins is None:
            self._parts.append(samples)
            return
        _probabilities(self._name, samples.prediction)
        with np.errstate(divide="ignore"):
            logit = np.log(samples.prediction) - np.log1p(-samples.prediction)
        place = np.clip((logit + 16.0) * (self.bins / 32.0), 0, self.bins - 1).astype(np.int64)
        for side, chosen in enumerate((samples.label <= 0.5, samples.label > 0.5)):
            self._counts[side] += np.bincount(place[chosen], samples.weight[chosen], self.bins)

    def eval(self) -> float:
        """A number in [0, 1]; nan where one class is missing."""
        if self.bins is None:
            samples = Samples.concat(self._parts)
            self._parts = [samples]
            area, negatives, positives = _areas(samples, np.zeros(len(samples.label), np.int64), 1)
        else:
            below = np.cumsum(self._counts[0]) - self._counts[0]
            area = np.array([np.sum(self._counts[1] * (below + 0.5 * self._counts[0]))])
            negatives, positives = self._counts.sum(1)[:, None]
        if not (negatives[0] > 0 and positives[0] > 0):
            return self._undefined(
                f"it needs both classes, it saw {positives[0]:g} positive, {negatives[0]:g} negative"
            )
        return float(area[0] / (positives[0] * negatives[0]))


@config.described
class GAUC(StoredMetric):
    """AUC within each group (for example a user), averaged with the groups' weights; one-class groups are left out.

    `group`: the Id column (one id a sample) that RecModel groups by; "gauc@user" as a name says the same.

    Source: Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", KDD 2017.
    """

    def __init__(self, group: str | None = None) -> None:
        self.group = group
        super().__init__()

    def eval(self) -> float:
        """A number in [0, 1]; nan where no group has both classes."""
        samples = self._all()
        codes, num_groups = _groups(self._name, samples)
        area, negatives, positives = _areas(samples, codes, num_groups)
        mixed = (negatives > 0) & (positives > 0)
        if not mixed.any():
            return self._undefined(f"none of {num_groups} groups has both classes")
        weight = (negatives + positives)[mixed]
        return float(np.sum(weight * area[mixed] / (negatives * positives)[mixed]) / weight.sum())


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


# --- ranking --------------------------------------------------------------------------------------------------------


@config.described
class HitRate(StoredMetric):
    """Share of groups with a positive label among their k highest predictions, of the groups that have a positive.

    Among equal predictions negatives come first, so that a constant prediction earns nothing by luck.
    """

    def __init__(self, k: int = 10, group: str | None = None) -> None:
        self.k, self.group = _positive("HitRate.k", k), group
        super().__init__()

    def eval(self) -> float:
        """A number in [0, 1]; nan where no group has a positive label."""
        samples = self._all()
        codes, num_groups = _groups(self._name, samples)
        positive = samples.label > 0.5
        order = np.lexsort((positive, -samples.prediction, codes))
        hits = order[positive[order] & (_ranks(codes[order]) < self.k)]
        eligible = np.unique(codes[positive])
        if not len(eligible):
            return self._undefined(f"none of {num_groups} groups has a positive label")
        return len(np.unique(codes[hits])) / len(eligible)


@config.described
class NDCG(StoredMetric):
    """Normalized discounted cumulative gain at k, mean over the groups that have a positive gain.

    Args:
        k: only the k highest predictions of a group count; None = all.
        gain: "linear" (the label) or "exponential" (2^label - 1).

    Equal predictions share the mean of their discounts. Source: Järvelin and Kekäläinen, "Cumulated Gain-Based
    Evaluation of IR Techniques", TOIS 2002.
    """

    def __init__(
        self, k: int | None = 10, gain: Literal["linear", "exponential"] = "linear", group: str | None = None
    ) -> None:
        self.group = group
        self.k = None if k is None else _positive("NDCG.k", k)
        if gain not in ("linear", "exponential"):
            raise ConfigError(f"NDCG.gain: unknown — received {gain!r} — give 'linear' or 'exponential'")
        self.gain = gain
        super().__init__()

    def eval(self) -> float:
        """A number in [0, 1]; nan where no group has a positive gain."""
        samples = self._all()
        codes, num_groups = _groups(self._name, samples)
        gains = samples.label if self.gain == "linear" else np.exp2(samples.label) - 1.0
        reached, best = (self._dcg(codes, score, gains, num_groups) for score in (samples.prediction, gains))
        if not (best > 0).any():
            return self._undefined(f"none of {num_groups} groups has a positive gain")
        return float(np.mean(reached[best > 0] / best[best > 0]))

    def _dcg(self, codes: Array, score: Array, gains: Array, num_groups: int) -> Array:
        order = np.lexsort((-score, codes))
        codes, score, gains = codes[order], score[order], gains[order]
        rank = _ranks(codes)
        discount = np.where(rank < (self.k or len(rank) + 1), 1.0 / np.log2(rank + 2.0), 0.0)
        tie = np.cumsum(_starts(codes) | _starts(score)) - 1
        shared = np.bincount(tie, discount) / np.bincount(tie) if len(tie) else np.empty(0)
        return np.bincount(codes, gains * shared[tie], num_groups)


# --- composition ----------------------------------------------------------------------------------------------------


@config.described
class Windowed(Metric):
    """A metric of the last `samples` samples only, such as progressive AUC over event time.

    Example: `Windowed(AUC(), samples=100_000)`.
    """

    def __init__(self, metric: Metric, samples: int) -> None:
        self.metric, self.samples = metric, _positive("Windowed.samples", samples)
        super().__init__()

    def clear(self) -> None:
        """Forget all samples."""
        self._parts: deque[Samples] = deque()
        self._held = 0

    def add(self, samples: Samples) -> None:
        """Take checked samples and drop the oldest beyond the window."""
        self._parts.append(samples)
        self._held += len(samples.label)
        while self._held > self.samples:
            oldest = self._parts.popleft()
            spare = self._held - self.samples
            if len(oldest.label) > spare:
                self._parts.appendleft(oldest[spare:])
            self._held -= min(spare, len(oldest.label))

    def eval(self) -> float:
        """The inner metric of the samples in the window."""
        self.metric.clear()
        for part in self._parts:
            self.metric.add(part)
        return self.metric.eval()


def get_metric(name: str) -> Metric:
    """A metric by its name, with default settings: auc, gauc, log_loss, normalized_entropy, calibration, accuracy,
    precision, recall, hit_rate, ndcg."""
    metric: Metric = config.build(name, Metric, "metric")
    return metric


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _areas(samples: Samples, codes: Array, num_groups: int) -> tuple[Array, Array, Array]:
    """By group: weight of (negative, positive) pairs in order plus half of the ties, of negatives, of positives."""
    order = np.lexsort((samples.prediction, codes))
    codes, score = codes[order], samples.prediction[order]
    positive = samples.label[order] > 0.5
    weight = samples.weight[order]
    tie = np.cumsum(_starts(codes) | _starts(score)) - 1
    num_ties = int(tie[-1]) + 1 if len(tie) else 0
    positives = np.bincount(tie[positive], weight[positive], num_ties)
    negatives = np.bincount(tie[~positive], weight[~positive], num_ties)
    owner = codes[np.flatnonzero(np.diff(tie, prepend=-1))]
    by_group = np.bincount(owner, negatives, num_groups)
    before = np.cumsum(negatives) - negatives - (np.cumsum(by_group) - by_group)[owner]
    area = np.bincount(owner, positives * (before + 0.5 * negatives), num_groups)
    return area, by_group, np.bincount(owner, positives, num_groups)


def _entropy_sums(metric: str, samples: Samples, eps: float) -> tuple[float, float, float]:
    _probabilities(metric, samples.prediction)
    p = np.clip(samples.prediction, eps, 1.0 - eps)
    entropy = -(samples.label * np.log(p) + (1.0 - samples.label) * np.log1p(-p))
    return float(entropy @ samples.weight), float(samples.weight.sum()), float(samples.label @ samples.weight)


def _probabilities(metric: str, prediction: Array) -> None:
    if len(prediction) and not (prediction.min() >= 0.0 and prediction.max() <= 1.0):
        raise DataError(f"{metric}: predictions are no probabilities — received {prediction.min():g} to "
                        f"{prediction.max():g} — give sigmoid(logits)")  # fmt: skip


def _groups(metric: str, samples: Samples) -> tuple[Array, int]:
    if samples.group is None:
        if len(samples.label):
            raise DataError(f"{metric}: it ranks within groups — received no group — pass group=, for example user ids")
        return np.empty(0, np.int64), 0
    names, codes = np.unique(samples.group, return_inverse=True)
    return codes.reshape(-1), len(names)


def _starts(values: Array) -> Array:
    """True where a value differs from the one before it; true at the first."""
    changed = np.ones(len(values), dtype=bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _ranks(codes: Array) -> Array:
    """Number of earlier elements of the same group, for sorted codes."""
    first = np.flatnonzero(_starts(codes))
    return np.arange(len(codes)) - np.repeat(first, np.diff(first, append=len(codes)))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name}: too small — received {value} — give a number from 1 on")
    return value
