# SPDX-License-Identifier: Apache-2.0
"""Metrics of samples that come in clusters, such as those of a user, with intervals.

Samples of a user resemble each other, so that intervals for independent samples are too narrow.
Here each metric has an influence of every sample: how far the sample moves it. The influences are
added by cluster, and the sum of their squares is the variance of the metric.

For shares and ratios this is the delta method: Deng, Knoblich and Lu, "Applying the Delta Method in
Metric Analytics", KDD 2018. For the AUC it is the estimate of Obuchowski, "Nonparametric Analysis
of Clustered ROC Curve Data", Biometrics 53, 1997, whose influences are the placement values of
DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988. Few or large clusters make such variances
too small; each sum is divided by the root of the share of the other clusters, after Bell and
McCaffrey, "Bias Reduction in Standard Errors for Linear Regression with Multi-Stage Samples", 2002.
In the difference of two metrics, the influences of clusters that both have are subtracted, so that
it does not matter whether the two share users.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from hotbed.metrics.classification import AUC, Calibration, LogLoss, NormalizedEntropy
from hotbed.metrics.metric import Array, Metric, Samples
from hotbed.metrics.ranking import NDCG, GroupMean, HitRate

LEAST_CLUSTERS = 20
"""Fewer clusters have no interval: their sums are not normal, and it would be too narrow."""

LEAST_REST = 1e-9
"""Least share of the other clusters, so that a single cluster does not divide by zero."""


@dataclass(frozen=True)
class Clustered:
    """Metrics by name, and how far each cluster moves them.

    Attributes:
        values: of the metrics; nan where one is undefined.
        clusters: numbers of clusters, rising, [c].
        influences: of each metric, [c].
        num_clusters: how many there are; of a difference, the smaller number of both.
    """

    values: Mapping[str, float]
    clusters: Array
    influences: Mapping[str, Array]
    num_clusters: int

    def error(self, name: str) -> float:
        """Return the standard error of a metric; nan for fewer than 20 clusters."""
        if self.num_clusters < LEAST_CLUSTERS:
            return math.nan
        return float(np.sqrt(np.sum(self.influences[name] ** 2)))

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of an interval that covers the true value with probability `level`."""
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.error(name)
        return self.values[name] - reach, self.values[name] + reach

    def minus(self, other: Clustered) -> Clustered:
        """Return the differences of the metrics to those of `other`, clusters matched by number."""
        clusters = np.union1d(self.clusters, other.clusters)
        own_places = np.searchsorted(clusters, self.clusters)
        other_places = np.searchsorted(clusters, other.clusters)
        values = {}
        influences = {}
        for name, value in self.values.items():
            values[name] = value - other.values[name]
            influence = np.zeros(len(clusters))
            influence[own_places] = self.influences[name]
            influence[other_places] -= other.influences[name]
            influences[name] = influence
        fewer = min(self.num_clusters, other.num_clusters)
        return Clustered(values, clusters, influences, fewer)


def clustered(samples: Samples, clusters: Array, lists: Array, k: int = 1) -> Clustered:
    """Return the metrics of samples that come in clusters.

    They are `auc`, `log_loss`, `normalized_entropy`, `calibration`, `rate` (the share of
    positives), and of the lists that were shown `hit_rate` and `ndcg`. Scores outside 0 to 1 are
    not probabilities: log loss, normalized entropy and calibration are nan.

    Args:
        samples: n samples of weight 1, with labels of 0 and 1.
        clusters: the number of each sample's cluster, int64 [n].
        lists: the number of each sample's list, int64 [n]; a list belongs to one cluster.
        k: of the hit rate; NDCG takes whole lists.
    """
    _, first, list_codes = np.unique(lists, return_index=True, return_inverse=True)
    pieces = {
        "auc": _auc(samples),
        **_probabilities(samples),
        "rate": _rate(samples),
        "hit_rate": _of_lists(HitRate(k), samples, list_codes, first),
        "ndcg": _of_lists(NDCG(None), samples, list_codes, first),
    }
    return by_cluster(pieces, clusters)


def by_cluster(pieces: Mapping[str, tuple[float, Array]], clusters: Array) -> Clustered:
    """Return metrics of samples that come in clusters.

    Args:
        pieces: the value of each metric, and the influence of each sample on it, [n].
        clusters: the number of each sample's cluster, int64 [n].
    """
    numbers, codes = np.unique(clusters, return_inverse=True)
    values: dict[str, float] = {}
    influences: dict[str, Array] = {}
    # a cluster pulls the metric towards itself, the more the larger its share is
    shares = np.bincount(codes, minlength=len(numbers)) / max(len(codes), 1)
    scales = 1.0 / np.sqrt(np.maximum(1.0 - shares, LEAST_REST))
    for name, (value, influence) in pieces.items():
        values[name] = value
        influences[name] = scales * np.bincount(codes, influence, len(numbers))
    return Clustered(values, numbers, influences, len(numbers))


def _value(metric: Metric, samples: Samples) -> float:
    """Return a metric of samples; nan without a warning if it is undefined."""
    metric.add(samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return metric.eval()


def _auc(samples: Samples) -> tuple[float, Array]:
    """Return the AUC and the influence of each sample.

    The placement value of a positive is the share of negatives below it, that of a negative the
    share of positives above it; ties count one half.
    """
    value = _value(AUC(), samples)
    influence = np.full(len(samples.label), np.nan)
    if math.isnan(value):
        return value, influence
    positive = samples.label > 0.5
    scores, codes = np.unique(samples.prediction, return_inverse=True)
    positives = np.bincount(codes[positive], minlength=len(scores))
    negatives = np.bincount(codes[~positive], minlength=len(scores))
    num_positives = positives.sum()
    num_negatives = negatives.sum()
    below = (np.cumsum(negatives) - 0.5 * negatives) / num_negatives
    above = 1.0 - (np.cumsum(positives) - 0.5 * positives) / num_positives
    influence[positive] = (below[codes[positive]] - value) / num_positives
    influence[~positive] = (above[codes[~positive]] - value) / num_negatives
    return value, influence


def _rate(samples: Samples) -> tuple[float, Array]:
    count = len(samples.label)
    if not count:
        return math.nan, np.empty(0)
    rate = float(samples.label.mean())
    return rate, (samples.label - rate) / count


def _probabilities(samples: Samples) -> dict[str, tuple[float, Array]]:
    """Return the metrics of probabilities, with the influence of each sample."""
    score = samples.prediction
    label = samples.label
    undefined = np.full(len(label), np.nan)
    if len(score) and not (score.min() >= 0.0 and score.max() <= 1.0):
        names = ("log_loss", "normalized_entropy", "calibration")
        return dict.fromkeys(names, (math.nan, undefined))
    metric = LogLoss()
    log_loss = _value(metric, samples)
    clipped = np.clip(score, metric.eps, 1.0 - metric.eps)
    entropies = -(label * np.log(clipped) + (1.0 - label) * np.log1p(-clipped))
    of_log_loss = (entropies - log_loss) / max(len(label), 1)
    entropy = _value(NormalizedEntropy(), samples)
    of_entropy = undefined
    rate, of_rate = _rate(samples)
    if not math.isnan(entropy):
        best = log_loss / entropy  # of always predicting the rate
        slope = math.log((1.0 - rate) / rate)
        of_entropy = of_log_loss / best - entropy / best * slope * of_rate
    calibration = _value(Calibration(), samples)
    of_calibration = undefined
    if not math.isnan(calibration):
        of_calibration = (score - calibration * label) / label.sum()
    return {
        "log_loss": (log_loss, of_log_loss),
        "normalized_entropy": (entropy, of_entropy),
        "calibration": (calibration, of_calibration),
    }


def _of_lists(
    metric: GroupMean, samples: Samples, codes: Array, first: Array
) -> tuple[float, Array]:
    """Return a metric within lists, with the influence of each list on the first of its samples."""
    values = metric.of_groups(samples, codes, len(first))
    counts = ~np.isnan(values)
    influence = np.zeros(len(samples.label))
    if not counts.any():
        return math.nan, np.full(len(samples.label), np.nan)
    value = float(values[counts].mean())
    influence[first[counts]] = (values[counts] - value) / counts.sum()
    return value, influence
