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
    if not samples.weight.all():
        samples = samples[samples.weight > 0]
    positives = np.where(samples.label > 0.5, samples.weight, 0.0)
    negatives = samples.weight - positives
    return join_counts([np.stack([samples.prediction, negatives, positives])], bins)


def join_counts(parts: Sequence[Array], bins: int | None = None) -> Array:
    """Return the counts of several parts together.

    Args:
        parts: counts in any order; their order is that of the additions, so the same parts give the
            same bits.
        bins: neighbouring scores are joined if there are more scores than this. A bin takes the
            score in its middle. Its mass, its share of the negatives plus its share of the
            positives, is less than 4 / bins, unless it is one score.
    """
    counts = np.concatenate(parts, axis=1)
    counts = counts.take(_ascending(counts), axis=1)
    counts = _summed(counts, starts(counts[0]))
    if bins is None or counts.shape[1] <= bins:
        return counts
    negatives, positives = counts[1:]
    mass = _shares(negatives) + _shares(positives)
    cell = mass.sum() / bins
    middle = np.cumsum(mass) - 0.5 * mass
    first = starts(np.floor(middle / cell))
    heavy = mass >= cell
    first |= heavy
    first[1:] |= heavy[:-1]
    return _summed(counts, first)


def area_under(counts: Array) -> float:
    """Return the weight of (negative, positive) pairs in order plus half of the ties."""
    _, negatives, positives = counts
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + 0.5 * negatives)))


def _ascending(counts: Array) -> Array:
    """Return the order of ascending scores.

    Equal scores stay in order where that shows in the bits of their sum: whole numbers add up to
    the same bits in any order.
    """
    weights = counts[1:]
    are_whole = bool((weights == np.rint(weights)).all())
    return np.argsort(counts[0], kind=None if are_whole else "stable")


def _shares(weights: Array) -> Array:
    total = weights.sum()
    return weights / total if total > 0 else weights


def _summed(counts: Array, is_first: Array) -> Array:
    """Join the columns from each first one up to the next; the score is the one in the middle."""
    first = np.flatnonzero(is_first)
    num_columns = counts.shape[1]
    if len(first) == num_columns:
        return counts
    last = np.append(first[1:], num_columns) - 1
    summed = np.empty((3, len(first)))
    summed[0] = counts[0, (first + last) // 2]
    for row in (1, 2):
        np.add.reduceat(counts[row], first, out=summed[row])
    return summed
