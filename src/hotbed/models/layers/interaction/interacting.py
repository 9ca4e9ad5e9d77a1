# SPDX-License-Identifier: Apache-2.0
"""Self-attention over the fields of a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class InteractingLayer(nn.Module):
    """Self-attention over fields: y_i = relu(sum_j softmax_j(q_i . k_j) v_j + R x_i), by heads.

    q = Q x, k = K x and v = V x for each head; the results of the heads stand side by side. Where
    the output is as wide as the input, R is the identity. As in the paper, scores are not divided
    by the square root of their width.

    Args:
        in_features: width of a field.
        width: width of a field in the output, over all heads.
        num_heads: heads; they divide the width.

    Source: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
    Networks", CIKM 2019.

    >>> InteractingLayer(4, 8, num_heads=2)(torch.zeros(3, 5, 4)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, in_features: int, width: int, *, num_heads: int = 1) -> None:
        super().__init__()
        checks.whole_number("InteractingLayer.in_features", in_features, 1)
        checks.whole_number("InteractingLayer.width", width, 1)
        checks.at_least("InteractingLayer.num_heads", num_heads, 1)
        if width % num_heads:
            raise ConfigError(
                f"InteractingLayer.num_heads: must divide the width, got {num_heads} heads and "
                f"width {width}. Give a divisor of {width}."
            )
        self.num_heads = num_heads
        self.projections = nn.ModuleList(
            nn.Linear(in_features, width, bias=False) for _ in range(3)
        )
        self.residual: nn.Module = nn.Identity()
        if in_features != width:
            self.residual = nn.Linear(in_features, width, bias=False)

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, in_features] -> [n, fields, width]."""
        tensors.dimensions("InteractingLayer", fields, 3)
        query, key, value = (
            projection(fields).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in self.projections
        )
        attended = torch.softmax(query @ key.transpose(2, 3), dim=-1) @ value
        return torch.relu(attended.transpose(1, 2).flatten(2) + self.residual(fields))
