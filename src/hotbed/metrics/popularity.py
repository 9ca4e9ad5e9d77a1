# SPDX-License-Identifier: Apache-2.0
"""The baseline that every model has to beat: rank by how many positives an id has had so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotbed.metrics.metric import Array


class Popularity:
    """Counts the positives of each id, of at most `max_ids` ids; later ids count as never liked."""

    def __init__(self, max_ids: int = 1_000_000) -> None:
        self._max_ids = max_ids
        self._positives: dict[int, float] = {}

    def scores(self, ids: Array) -> Array:
        """The positives of each id so far, float64 [n]; `ids`: int64 [n]."""
        positives = [self._positives.get(number, 0.0) for number in ids.tolist()]
        return np.array(positives, np.float64)

    def learn(self, ids: Array, label: Array) -> None:
        """Add labels, [n], to the counts of their ids."""
        positives = self._positives
        for number, value in zip(ids.tolist(), label.tolist(), strict=True):
            if value and (number in positives or len(positives) < self._max_ids):
                positives[number] = positives.get(number, 0.0) + value

    def state(self) -> dict[str, Any]:
        """Ids and counts, in the order in which the ids came."""
        return {
            "ids": np.array(list(self._positives), np.int64),
            "positives": np.array(list(self._positives.values()), np.float64),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        ids = np.asarray(state["ids"]).tolist()
        self._positives = dict(zip(ids, np.asarray(state["positives"]).tolist(), strict=True))
