# SPDX-License-Identifier: Apache-2.0
"""Down-sampling: fewer negatives among the training rows, with a weight that corrects it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DownSample:
    """Keep a share `keep` of the training rows whose label is 0.

    Args:
        label: the label's name in the schema.
        keep: share of negatives that are kept, above 0 and at most 1.
        weight: the weight column to write: 1 / `keep` for kept negatives, else 1; None = none.
    """

    label: str
    keep: float
    weight: str | None = None
