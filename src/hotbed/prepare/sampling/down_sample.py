# SPDX-License-Identifier: Apache-2.0
"""Down-sampling: fewer negatives among the training rows, with a weight that corrects it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotbed import checks
from hotbed.embedding.hashing import Uint64Array
from hotbed.prepare.places import shares_of


@dataclass(frozen=True)
class DownSample:
    """Keep a share `keep` of the training rows whose label is 0.

    A model that learns from the kept rows with their weights predicts the probabilities of all
    rows. Without weights it predicts too large a probability q; the right one is
    q / (q + (1 - q) / keep).

    Args:
        label: the label's name in the schema.
        keep: share of negatives that are kept, above 0 and at most 1.
        weight: the weight column to write: 1 / `keep` for kept negatives, else 1; None = none. If
            the schema has a weight, this is its name, and both are multiplied.
    """

    label: str
    keep: float
    weight: str | None = None

    def __post_init__(self) -> None:
        checks.finite_number(
            "down_sample.keep",
            self.keep,
            above=0,
            most=1,
            advice="Give the share of negatives that are kept.",
        )

    @property
    def weight_column(self) -> str:
        """The column of weights among the raw columns, of a name that raw columns do not have."""
        return f"{self.weight} after down-sampling"

    def kept_rows(self, labels: NDArray[np.float32], hashes: Uint64Array) -> NDArray[np.bool_]:
        """Return which training rows are kept, bool [n], by their labels and random hashes."""
        is_kept: NDArray[np.bool_] = (labels != 0) | (shares_of(hashes) < self.keep)
        return is_kept

    def weights(self, labels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the weights of kept training rows, float32 [n]."""
        return np.where(labels != 0, 1.0, 1.0 / self.keep).astype(np.float32)
