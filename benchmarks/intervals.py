# SPDX-License-Identifier: Apache-2.0
"""Intervals of means of few values, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""97.5 % quantiles for means of 2, 3, … 20 values; more values have a little less than 20."""


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of two values or more."""
    quantile = T_QUANTILES[min(len(values), len(T_QUANTILES) + 1) - 2]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
