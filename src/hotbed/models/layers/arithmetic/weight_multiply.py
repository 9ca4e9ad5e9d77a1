# SPDX-License-Identifier: Apache-2.0
"""One learned vector for each number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.models.layers import tensors


class WeightMultiply(nn.Module):
    """One vector for each number: out[n, i * dim + k] = x[n, i] * weight[i, k].

    It gives dense columns embeddings, as DeepFM and NFM do: a number scales the vector of its
    column.

    Args:
        in_features: number of columns of the input.
        dim: width of the vector of one column.

    Source: `WeightMultiply` of HugeCTR (`Multiply` up to version 2.3); the initial weights are
    Xavier-uniform for in_features inputs and in_features * dim outputs, as there.

    >>> WeightMultiply(3, dim=2)(torch.zeros(4, 3)).shape
    torch.Size([4, 6])
    """

    def __init__(self, in_features: int, *, dim: int) -> None:
        super().__init__()
        checks.whole_number("WeightMultiply.in_features", in_features, 1)
        checks.whole_number("WeightMultiply.dim", dim, 1)
        self.weight = nn.Parameter(torch.empty(in_features, dim))
        limit = (6.0 / (in_features + in_features * dim)) ** 0.5
        nn.init.uniform_(self.weight, -limit, limit)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, in_features * dim]."""
        tensors.dimensions("WeightMultiply", x, 2)
        tensors.size("WeightMultiply", x, 1, self.weight.shape[0])
        products = x.unsqueeze(2) * self.weight
        return products.flatten(1)

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        in_features, dim = self.weight.shape
        return f"{in_features}, dim={dim}"
