# SPDX-License-Identifier: Apache-2.0
"""Quadratic neural networks: each layer multiplies its input by a map of itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.models.layers.dense import BatchNorm, Dropout, ReLUDropout


class QuadraticNet(nn.Module):
    """Quadratic layers: x_{l+1} = x_l * sum_r relu(W_{l,r} x_l + b_{l,r}) + x_l.

    It is the alpha form of the paper: the Khatri-Rao product of x_l and `num_rows` maps of it,
    summed over the maps. Heads, which the paper has as well, only permute the elements of this
    product.

    Args:
        in_features: width of the input and the output.
        num_layers: quadratic layers; the degree doubles with each of them.
        num_rows: maps of one layer.
        dropout: rate after the activation of the maps and after each layer, in [0, 1).
        batch_norm: normalize the maps before their activation.

    Source: Li et al., "Revisiting Feature Interactions from the Perspective of Quadratic Neural
    Networks for Click-through Rate Prediction", KDD 2025.

    >>> QuadraticNet(6, num_layers=2)(torch.zeros(3, 6)).shape
    torch.Size([3, 6])
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        num_rows: int = 2,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        checks.whole_number("QuadraticNet.in_features", in_features, 1)
        checks.at_least("num_layers", num_layers, 1)
        checks.at_least("num_rows", num_rows, 1)
        self.num_rows = num_rows
        self.maps = nn.ModuleList()
        width = in_features * num_rows
        for _ in range(num_layers):
            layers: list[nn.Module] = [nn.Linear(in_features, width)]
            if batch_norm:
                layers.append(BatchNorm(width))
            layers.append(ReLUDropout(dropout))
            self.maps.append(nn.Sequential(*layers))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, in_features]."""
        for layer in self.maps:
            factors = layer(x).unflatten(1, (self.num_rows, -1)).sum(1)
            x = self.dropout(torch.addcmul(x, x, factors.to(x.dtype)))
        return x
