# SPDX-License-Identifier: Apache-2.0
"""What a model has to beat: a constant, the rate of each item, a linear model; learned in one pass.

Each learns batch by batch in memory that does not grow. Ids are hashed into `PLACES` places.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.plugins import snake_case

Floats = NDArray[np.float64]

PLACES = 2**20
PRIOR_ROWS = 10.0
"""Rows with the mean label that each item has before its first one."""

RATE = 0.1
FIRST_SQUARES = 0.1
"""Of Adagrad; the pair is near the best for logs of 10,000 to 400,000 rows (docs/accuracy.md)."""

MOST_DEVIATIONS = 5.0
_ITEMS = re.compile(
    r"(item|iid|product|movie|film|article|news|song|track|video|book|game|ad|ad_?group|listing|"
    r"offer|post|recipe|sku|asin|goods|artist|app)"
    r"(_?(id|idx|key|hash))?"
)


def names_an_item(name: str) -> bool:
    """Return whether the name of a column says that it holds what was chosen."""
    return bool(_ITEMS.fullmatch(snake_case(name)))


def places_of(features: Sequence[str], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a place for each id, a hash of it and of its feature; `ids`: [features, m]."""
    salts = [zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 % 2**64 for name in features]
    mixed = ids.view(np.uint64) ^ np.array(salts, np.uint64)[:, None]
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return (mixed >> np.uint64(44)).view(np.int64)


@dataclass(frozen=True)
class SampleFeatures:
    """The features of n samples.

    Attributes:
        num_samples: n.
        rows: sample of each id, int64 [m].
        places: place of each id, int64 [m].
        shares: what each id counts: one by the number of ids that its feature has in the sample.
        dense: numbers, [n, d].
        items: place of the item of each sample, int64 [n]; None: there is no item.
    """

    num_samples: int
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    shares: Floats
    dense: Floats
    items: NDArray[np.int64] | None

    def of(self, samples: NDArray[np.bool_]) -> SampleFeatures:
        """Return those of some samples."""
        numbers = np.cumsum(samples) - 1
        ids = samples[self.rows]
        rows = numbers[self.rows[ids]]
        items = None if self.items is None else self.items[samples]
        count = int(samples.sum())
        return SampleFeatures(
            count, rows, self.places[ids], self.shares[ids], self.dense[samples], items
        )


class SimpleModels:
    """The three for one label. `is_amount`: the label is any number, not a probability."""

    def __init__(self, *, is_amount: bool) -> None:
        self._is_amount = is_amount
        self._sums = np.zeros(3)  # of weights, labels, squares of labels
        self._item_weights = np.zeros(PLACES, np.float32)
        self._item_labels = np.zeros(PLACES, np.float32)
        self._weights = np.zeros(PLACES, np.float32)
        self._squares = np.zeros(PLACES, np.float32)
        self._steps = np.zeros(PLACES, np.float32)
        self._moments = np.zeros((3, 0))  # of dense columns: counts, sums, squares
        self._dense = np.zeros((2, 0))  # weights and squares

    def predictions(self, inputs: SampleFeatures) -> list[Floats]:
        """Return those of the constant, of the linear model and, if there is an item, of items."""
        mean = self._mean
        constant = np.full(inputs.num_samples, mean)
        margins = self._margins(inputs)
        if self._is_amount:
            predictions = [constant, mean + self._deviation * margins]
        else:
            predictions = [constant, _sigmoid(margins + np.log(mean / (1 - mean)))]
        if inputs.items is not None:
            weights = self._item_weights[inputs.items].astype(np.float64)
            labels = self._item_labels[inputs.items].astype(np.float64)
            predictions.append((labels + PRIOR_ROWS * mean) / (weights + PRIOR_ROWS))
        return predictions

    def has_seen(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which places had an id of a sample that was learned."""
        return self._squares[places] > 0

    def learn(self, inputs: SampleFeatures, labels: Floats, weights: Floats) -> None:
        """Learn n samples, labels [n] and weights [n]."""
        self._sums += [weights.sum(), (weights * labels).sum(), (weights * labels**2).sum()]
        self._learn_moments(inputs.dense)
        if inputs.items is not None:
            np.add.at(self._item_weights, inputs.items, weights.astype(np.float32))
            np.add.at(self._item_labels, inputs.items, (weights * labels).astype(np.float32))
        if self._is_amount:
            errors = self._margins(inputs) - (labels - self._mean) / self._deviation
        else:
            errors = self.predictions(inputs)[1] - labels
        errors *= weights
        places = inputs.places
        np.add.at(self._steps, places, (errors[inputs.rows] * inputs.shares).astype(np.float32))
        gradients = self._steps[places]  # a place that repeats is written again with equal values
        squares = self._squares[places] + gradients**2
        self._squares[places] = squares
        self._weights[places] -= RATE * gradients / np.sqrt(squares + FIRST_SQUARES)
        self._steps[places] = 0
        gradient = self._scaled(inputs.dense).T @ errors
        self._dense[1] += gradient**2
        self._dense[0] -= RATE * gradient / np.sqrt(self._dense[1] + FIRST_SQUARES)

    @property
    def _mean(self) -> float:
        weight, total, _ = self._sums
        if self._is_amount:
            return float(total / max(weight, 1.0))
        return float((total + 0.5) / (weight + 1.0))

    @property
    def _deviation(self) -> float:
        weight, total, squares = self._sums
        mean = total / max(weight, 1.0)
        return float(np.sqrt(max(squares / max(weight, 1.0) - mean**2, 0.0))) or 1.0

    def _margins(self, inputs: SampleFeatures) -> Floats:
        """Return what the linear model adds to the mean, before the sigmoid."""
        terms = self._weights[inputs.places] * inputs.shares
        sums = np.asarray(np.bincount(inputs.rows, terms, inputs.num_samples), np.float64)
        if self._dense.shape[1]:
            sums += self._scaled(inputs.dense) @ self._dense[0]
        return sums

    def _learn_moments(self, dense: Floats) -> None:
        if not self._moments.shape[1]:
            self._moments = np.zeros((3, dense.shape[1]))
            self._dense = np.zeros((2, dense.shape[1]))
        self._moments += [np.full(dense.shape[1], len(dense)), dense.sum(0), (dense**2).sum(0)]

    def _scaled(self, dense: Floats) -> Floats:
        """Return numbers in standard deviations from their mean so far."""
        counts, sums, squares = self._moments
        means = sums / counts
        deviations = np.sqrt(np.maximum(squares / counts - means**2, 1e-12))
        return np.clip((dense - means) / deviations, -MOST_DEVIATIONS, MOST_DEVIATIONS)

    def state(self) -> dict[str, Any]:
        """Return what was learned, of the places that have any."""
        items = np.flatnonzero(self._item_weights)
        places = np.flatnonzero(self._squares)
        return {
            "sums": self._sums.copy(),
            "items": items,
            "item_weights": self._item_weights[items],
            "item_labels": self._item_labels[items],
            "places": places,
            "weights": self._weights[places],
            "squares": self._squares[places],
            "moments": self._moments.copy(),
            "dense": self._dense.copy(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._sums = np.array(state["sums"])
        items = np.asarray(state["items"])
        self._item_weights[:] = 0
        self._item_labels[:] = 0
        self._item_weights[items] = state["item_weights"]
        self._item_labels[items] = state["item_labels"]
        places = np.asarray(state["places"])
        self._weights[:] = 0
        self._squares[:] = 0
        self._weights[places] = state["weights"]
        self._squares[places] = state["squares"]
        self._moments = np.array(state["moments"])
        self._dense = np.array(state["dense"])


def _sigmoid(margins: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(margins, -30, 30)))
