# SPDX-License-Identifier: Apache-2.0
"""How much a distribution has moved: the population stability index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotbed.metrics.metric import Array


def stability(counts: Array | Sequence[int], before: Array | Sequence[int]) -> float:
    """Return the population stability index of two histograms, less what chance alone adds.

    The index is the sum of (share - share before) ln(share / share before) over the bins: Siddiqi,
    "Credit Risk Scorecards", 2006, who calls values below 0.1 stable and those above 0.25 a shift.
    Each bin counts half an event more, so that an empty one is defined. Of two samples of n and m
    events of one distribution over k bins, chance adds (k - 1) (1 / n + 1 / m): Yurdakul and
    Naranjo, "Statistical properties of the population stability index", 2020.

    Args:
        counts: events of each bin [k].
        before: events of the same bins [k], of those that they are compared with.

    Returns:
        0 or more; 0 where one of them has no events, or all are in one bin.
    """
    now = _floats(counts)
    then = _floats(before)
    bins = (now > 0) | (then > 0)
    num_bins = int(np.count_nonzero(bins))
    total = now.sum()
    total_before = then.sum()
    if num_bins < 2 or not total or not total_before:
        return 0.0
    shares = (now[bins] + 0.5) / (total + 0.5 * num_bins)
    shares_before = (then[bins] + 0.5) / (total_before + 0.5 * num_bins)
    index = float(((shares - shares_before) * np.log(shares / shares_before)).sum())
    chance = (num_bins - 1) * (1 / total + 1 / total_before)
    return max(0.0, index - float(chance))


def _floats(counts: Array | Sequence[int]) -> NDArray[np.float64]:
    return np.asarray(counts, np.float64)
