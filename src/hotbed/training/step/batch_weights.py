# SPDX-License-Identifier: Apache-2.0
"""BatchWeights: weights of ids that a batch brings along, and that learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hotbed.data.batch import Batch, changed
from hotbed.embedding.modules.autograd import graph_weights
from hotbed.training.step.example import Example


@dataclass(frozen=True)
class BatchWeights:
    """The weights of the ids of a batch that torch computed before its step, and whose graph waits.

    Each grain gets leaves in their place. Their gradients, side by side, are that of the weights.

    Attributes:
        weights: by name of the feature, float32 [m].
        ends: by name of the feature, the ids before which the grains end.
    """

    weights: Mapping[str, Tensor]
    ends: Mapping[str, Sequence[int]]

    @staticmethod
    def of(batch: Batch) -> BatchWeights:
        weights: dict[str, Tensor] = {}
        ends: dict[str, Sequence[int]] = {}
        for name, ids in batch.ids.items():
            learned = graph_weights(ids.weights)
            if learned is None:
                continue
            weights[name] = learned
            ends[name] = batch.grain_ends
            if ids.offsets is not None:
                ends[name] = [int(ids.offsets[end]) for end in batch.grain_ends]
        return BatchWeights(weights, ends)

    def with_leaves(self, grain: Example) -> Example:
        """Return a grain whose weights are leaves, which take the gradients."""
        assert grain.batch is not None, "the loop divides batches"
        ids = dict(grain.batch.ids)
        for name in self.weights:
            leaf = ids[name].weights.detach().requires_grad_()
            ids[name] = changed(ids[name], {"weights": leaf})
        return grain.of(changed(grain.batch, {"ids": ids}))

    def gradients_of(self, grain: Example) -> dict[str, Tensor | None]:
        """Return the gradients of the leaves of a grain."""
        assert grain.batch is not None, "the loop divides batches"
        ids = grain.batch.ids
        return {name: ids[name].weights.grad for name in self.weights}

    def joined(self, grains: Sequence[Mapping[str, Tensor | None] | None]) -> dict[str, Tensor]:
        """Return the gradients of the weights: those of the grains side by side.

        `grains`: what `gradients_of` returned; None = a grain that did not run. It has zeros.
        """
        gradients = {}
        for name, weights in self.weights.items():
            gradients[name] = torch.zeros_like(weights)
            runs = pairwise([0, *self.ends[name]])
            for of_grain, (first, last) in zip(grains, runs, strict=True):
                part = None if of_grain is None else of_grain[name]
                if part is not None:
                    gradients[name][first:last] = part
        return gradients

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the gradients of the weights flow on to what they were computed from."""
        if self.weights:
            torch.autograd.backward(
                list(self.weights.values()), [gradients[name] for name in self.weights]
            )
