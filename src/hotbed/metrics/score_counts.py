# SPDX-License-Identifier: Apache-2.0
"""Weights of negatives and positives by score, in bins of equal mass where there are many scores.

Counts are float64 [3, n]: ascending scores, the weight of negatives and the weight of positives at
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotbed.metrics.metric import Array, Samples, starts


def count_scores(samples: Samples, bins: int | None = None) -> Array:
    """Return the counts of `samples`; those without weight are left out."""
    positive = samples.label > 0.5
    negatives = np.where(positive, 0.0, samples.weight)
    positives = np.where(positive, samples.weight, 0.0)
    counts = np.stack([samples.prediction, negatives, positives])
    return join_counts([counts[:, samples.weight > 0]], bins)


def join_counts(parts: Sequence[Array], bins: int | None = None) -> Array:
    """Return the counts of several parts together.

    Args:
        parts: counts in any order; their order is that of the additions, so the same parts give the
            same bits.
        bins: neighbouring scores are joined where there are more than so many. A bin takes the
            score in its middle. Its mass, its share of the negatives plus its share of the
            positives, is less than 4 / bins, unless it is one score.
    """
    counts = np.concatenate(parts, axis=1)
    counts = counts[:, np.argsort(counts[0], kind="stable")]
    counts = _summed(counts, np.flatnonzero(starts(counts[0])))
    if bins is None or counts.shape[1] <= bins:
        return counts
    totals = counts[1:].sum(axis=1, keepdims=True)
    mass = (counts[1:] / np.where(totals > 0, totals, 1.0)).sum(axis=0)
    cell = mass.sum() / bins
    middle = np.cumsum(mass) - 0.5 * mass
    first = starts(np.floor(middle / cell))
    heavy = mass >= cell
    first |= heavy
    first[1:] |= heavy[:-1]
    return _summed(counts, np.flatnonzero(first))


def area_under(counts: Array) -> float:
    """Return the weight of (negative, positive) pairs in order plus half of the ties."""
    _, negatives, positives = counts
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + 0.5 * negatives)))


def _summed(counts: Array, first: Array) -> Array:
    """Join the columns from each of `first` up to the next; the score is the one in the middle."""
    if not len(first):
        return counts
    last = np.append(first[1:], counts.shape[1]) - 1
    weights = np.add.reduceat(counts[1:], first, axis=1)
    return np.concatenate([counts[:1, (first + last) // 2], weights])
