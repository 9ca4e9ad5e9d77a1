# SPDX-License-Identifier: Apache-2.0
"""Metrics within groups (users, sessions): AUC, hit rate, NDCG. They keep all samples."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hotbed import config
from hotbed.errors import ConfigError, DataError
from hotbed.metrics.metric import Array, Samples, StoredMetric, at_least_one, pair_areas, starts


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
        area, negatives, positives = pair_areas(samples, codes, num_groups)
        mixed = (negatives > 0) & (positives > 0)
        if not mixed.any():
            return self._undefined(f"none of {num_groups} groups has both classes")
        weight = (negatives + positives)[mixed]
        return float(np.sum(weight * area[mixed] / (negatives * positives)[mixed]) / weight.sum())


@config.described
class HitRate(StoredMetric):
    """Share of groups with a positive label among their k highest predictions, of the groups that have a positive.

    Among equal predictions negatives come first, so that a constant prediction earns nothing by luck.
    """

    def __init__(self, k: int = 10, group: str | None = None) -> None:
        self.k, self.group = at_least_one("HitRate.k", k), group
        super().__init__()

    def eval(self) -> float:
        """A number in [0, 1]; nan where no group has a positive label."""
        samples = self._all()
        codes, num_groups = _groups(self._name, samples)
        positive = samples.label > 0.5
        order = np.lexsort((positive, -samples.prediction, codes))
        hits = order[positive[order] & (ranks(codes[order]) < self.k)]
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
        self.k = None if k is None else at_least_one("NDCG.k", k)
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
        rank = ranks(codes)
        discount = np.where(rank < (self.k or len(rank) + 1), 1.0 / np.log2(rank + 2.0), 0.0)
        tie = np.cumsum(starts(codes) | starts(score)) - 1
        shared = np.bincount(tie, discount) / np.bincount(tie) if len(tie) else np.empty(0)
        return np.bincount(codes, gains * shared[tie], num_groups)


def _groups(metric: str, samples: Samples) -> tuple[Array, int]:
    if samples.group is None:
        if len(samples.label):
            raise DataError(f"{metric}: it ranks within groups — received no group — pass group=, for example user ids")
        return np.empty(0, np.int64), 0
    names, codes = np.unique(samples.group, return_inverse=True)
    return codes.reshape(-1), len(names)


def ranks(codes: Array) -> Array:
    """Number of earlier elements of the same group, for sorted codes."""
    first = np.flatnonzero(starts(codes))
    return np.arange(len(codes)) - np.repeat(first, np.diff(first, append=len(codes)))
