# SPDX-License-Identifier: Apache-2.0
"""Masks of padded sequences from their lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed import checks


class SequenceMask(nn.Module):
    """Lengths of padded sequences -> which pairs of entries an attention may join.

    mask[i, 0, a, b] is 1 if a < lengths_from[i] and b < lengths_to[i], else 0. The second axis
    stands for the heads of `MultiHeadAttention`.

    Source: HugeCTR's layer of the same name.

    Args:
        length_from: entries of each padded sequence of queries.
        length_to: entries of each padded sequence of keys.

    >>> SequenceMask(2, 3)(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([[[[1., 1., 0.],
              [0., 0., 0.]]]])
    """

    steps_from: Tensor
    steps_to: Tensor

    def __init__(self, length_from: int = 1, length_to: int = 1) -> None:
        super().__init__()
        checks.at_least("SequenceMask.length_from", length_from, 1)
        checks.at_least("SequenceMask.length_to", length_to, 1)
        self.register_buffer("steps_from", torch.arange(length_from), persistent=False)
        self.register_buffer("steps_to", torch.arange(length_to), persistent=False)

    def forward(self, lengths_from: Tensor, lengths_to: Tensor) -> Tensor:
        """Lengths [n] or [n, 1], twice -> float32 [n, 1, length_from, length_to]."""
        queries = self.steps_from < lengths_from.reshape(-1, 1)
        keys = self.steps_to < lengths_to.reshape(-1, 1)
        pairs = queries.unsqueeze(2) & keys.unsqueeze(1)
        return pairs.unsqueeze(1).float()
