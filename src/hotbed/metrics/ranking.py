# SPDX-License-Identifier: Apache-2.0
"""Metrics within groups (users, sessions): AUC, hit rate, NDCG. They keep all samples.

Samples of weight 0 are left out. In `HitRate` and `NDCG` a group counts with the mean weight of its
samples, in `GAUC` with their sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np

from hotbed import checks, config
from hotbed.errors import ConfigError
from hotbed.metrics.metric import Array, Samples, StoredMetric, starts


class GroupMetric(StoredMetric, ABC):
    """A metric within groups: every update needs them."""

    needs_group = True
    group: str | None


class GroupMean(GroupMetric, ABC):
    """The mean over groups of what each of them has alone."""

    counting: ClassVar[str]
    """What a group must have to count, for messages."""

    def eval(self) -> float:
        """Return a number in [0, 1]; nan if no group counts."""
        samples = _weighted(self._all())
        codes, num_groups = _groups(samples)
        values = self.of_groups(samples, codes, num_groups)
        if np.isnan(values).all():
            return self._undefined(f"none of {num_groups} groups has {self.counting}")
        return _mean_of_groups(samples, codes, values)

    @abstractmethod
    def of_groups(self, samples: Samples, codes: Array, num_groups: int) -> Array:
        """Return the value of each group, [num_groups]; nan for a group that does not count.

        `codes`: the number of each sample's group.
        """


@config.described
class GAUC(GroupMetric):
    """AUC within each group (for example a user), averaged with the groups' weights.

    Groups of one class are left out. The weight of a group is the sum of its samples' weights.

    `group`: the Id column (one id per sample) that RecModel groups by; the name "gauc@user" sets it
    to "user".

    Source: Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", KDD 2017.
    """

    def __init__(self, group: str | None = None) -> None:
        self.group = group
        super().__init__()

    def eval(self) -> float:
        """Return a number in [0, 1]; nan if no group has both classes."""
        samples = self._all()
        codes, num_groups = _groups(samples)
        area, negatives, positives = _pair_areas(samples, codes, num_groups)
        mixed = (negatives > 0) & (positives > 0)
        if not mixed.any():
            return self._undefined(f"none of {num_groups} groups has both classes")
        weight = (negatives + positives)[mixed]
        return float(np.sum(weight * area[mixed] / (negatives * positives)[mixed]) / weight.sum())


@config.described
class HitRate(GroupMean):
    """Share of groups with a positive label among their k highest predictions.

    Only groups that have a positive label count.
    A group counts with the mean weight of its samples; samples of weight 0 are left out. Among
    equal predictions, negatives come first, so that a constant prediction does not hit by chance.
    """

    counting = "a positive label"

    def __init__(self, k: int = 10, group: str | None = None) -> None:
        checks.at_least("HitRate.k", k, 1)
        self.k = k
        self.group = group
        super().__init__()

    def of_groups(self, samples: Samples, codes: Array, num_groups: int) -> Array:
        """Return 1 or 0 for each group, [num_groups]; nan without a positive label.

        `codes`: the number of each sample's group.
        """
        positive = samples.label > 0.5
        order = np.lexsort((positive, -samples.prediction, codes))
        hits = order[positive[order] & (ranks(codes[order]) < self.k)]
        values = np.full(num_groups, np.nan)
        values[codes[positive]] = 0.0
        values[codes[hits]] = 1.0
        return values


@config.described
class NDCG(GroupMean):
    """Normalized discounted cumulative gain at k, mean over the groups that have a positive gain.

    A group counts with the mean weight of its samples; samples of weight 0 are left out.

    Args:
        k: only the k highest predictions of a group count; None = all.
        gain: "linear" (the label) or "exponential" (2^label - 1).
        whole: rank all samples as one list, without groups, as HugeCTR does.

    Equal predictions share the mean of their discounts. Source: Järvelin and Kekäläinen, "Cumulated
    Gain-Based Evaluation of IR Techniques", TOIS 2002.
    """

    counting = "a positive gain"

    def __init__(
        self,
        k: int | None = 10,
        gain: Literal["linear", "exponential"] = "linear",
        group: str | None = None,
        whole: bool = False,
    ) -> None:
        if whole and group is not None:
            raise ConfigError(
                f"NDCG.whole: one ranking of all samples has no groups, got group={group!r}. "
                "Leave one of them out."
            )
        self.group = group
        self.whole = whole
        self.needs_group = not whole
        checks.at_least("NDCG.k", k, 1)
        checks.one_of("NDCG.gain", gain, ("linear", "exponential"))
        self.k = k
        self.gain = gain
        super().__init__()

    def of_groups(self, samples: Samples, codes: Array, num_groups: int) -> Array:
        """Return the gain of each group as a share of the best, nan without one, [num_groups].

        `codes`: the number of each sample's group.
        """
        gains = samples.label if self.gain == "linear" else np.exp2(samples.label) - 1.0
        reached, best = (
            self._dcg(codes, score, gains, num_groups) for score in (samples.prediction, gains)
        )
        shares = np.full(num_groups, np.nan)
        np.divide(reached, best, out=shares, where=best > 0)
        return shares

    def _dcg(self, codes: Array, score: Array, gains: Array, num_groups: int) -> Array:
        order = np.lexsort((-score, codes))
        codes = codes[order]
        score = score[order]
        gains = gains[order]
        rank = ranks(codes)
        discount = np.where(rank < (self.k or len(rank) + 1), 1.0 / np.log2(rank + 2.0), 0.0)
        tie = np.cumsum(starts(codes) | starts(score)) - 1
        shared = np.bincount(tie, discount) / np.bincount(tie) if len(tie) else np.empty(0)
        return np.bincount(codes, gains * shared[tie], num_groups)


def _groups(samples: Samples) -> tuple[Array, int]:
    """Return the number of each sample's group, and the number of groups; one without groups."""
    if samples.group is None:
        return np.zeros(len(samples.label), np.int64), min(len(samples.label), 1)
    names, codes = np.unique(samples.group, return_inverse=True)
    return codes.reshape(-1), len(names)


def _weighted(samples: Samples) -> Samples:
    """Return the samples of weight above 0."""
    positive = samples.weight > 0
    if positive.all():
        return samples
    return samples[positive]


def _mean_of_groups(samples: Samples, codes: Array, values: Array) -> float:
    """Return the mean of the values of groups that have one, by the mean weight of their samples.

    `codes`: the number of each sample's group; each group has a sample.
    """
    total = np.bincount(codes, samples.weight, len(values))
    weights = total / np.bincount(codes, minlength=len(values))
    counts = ~np.isnan(values)
    return float(np.average(values[counts], weights=weights[counts]))


def ranks(codes: Array) -> Array:
    """Return the number of earlier elements of the same group, for sorted codes."""
    first = np.flatnonzero(starts(codes))
    return np.arange(len(codes)) - np.repeat(first, np.diff(first, append=len(codes)))


def _pair_areas(samples: Samples, codes: Array, num_groups: int) -> tuple[Array, Array, Array]:
    """Return three weights by group, each [num_groups].

    They are the weight of the (negative, positive) pairs in order plus half of the ties, the weight
    of the negatives, and the weight of the positives.
    """
    order = np.lexsort((samples.prediction, codes))
    codes = codes[order]
    score = samples.prediction[order]
    positive = samples.label[order] > 0.5
    weight = samples.weight[order]
    tie = np.cumsum(starts(codes) | starts(score)) - 1
    num_ties = int(tie[-1]) + 1 if len(tie) else 0
    positives = np.bincount(tie[positive], weight[positive], num_ties)
    negatives = np.bincount(tie[~positive], weight[~positive], num_ties)
    owner = codes[np.flatnonzero(np.diff(tie, prepend=-1))]
    by_group = np.bincount(owner, negatives, num_groups)
    before = np.cumsum(negatives) - negatives - (np.cumsum(by_group) - by_group)[owner]
    area = np.bincount(owner, positives * (before + 0.5 * negatives), num_groups)
    return area, by_group, np.bincount(owner, positives, num_groups)
