# SPDX-License-Identifier: Apache-2.0
"""A history pooled by how much its entries matter for a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.errors import ConfigError
from hotbed.models.layers.activation.softmax import masked_softmax
from hotbed.models.layers.dense import MLP, Activation


class AttentionPooling(nn.Module):
    """Sum of a history, weighed for a target: y = sum_k a(t, h_k) h_k over the entries h_k.

    a(t, h) = MLP([t, h, t - h, t * h]), the local activation unit of DIN. Padding has weight 0. The
    weights do not sum to 1, so that y keeps how strong an interest is; `softmax` makes them.

    Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018,
        section 4.3; with t - h as in the authors' code.

    Args:
        dim: size of an entry, and of the target.
        hidden: widths of the hidden layers of a.
        activation: of the hidden layers; not "dice", whose statistics would count padding.
        softmax: whether the weights of a history sum to 1.

    >>> AttentionPooling(4)(torch.ones(2, 4), torch.ones(2, 3, 4), torch.zeros(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (80, 40),
        *,
        activation: Activation = "sigmoid",
        softmax: bool = False,
    ) -> None:
        super().__init__()
        if activation == "dice":
            raise ConfigError(
                "AttentionPooling.activation: 'dice' would count padding, got 'dice'. Use sigmoid "
                "or prelu."
            )
        self.softmax = softmax
        self.unit = MLP(4 * dim, hidden, output_dim=1, activation=activation)

    def forward(self, target: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """Target [n, dim], history [n, length, dim] and its mask [n, length] -> [n, dim]."""
        weights = self._weights(target, history)
        if self.softmax:
            weights = masked_softmax(weights, mask)
        else:
            weights = weights * mask
        return torch.bmm(weights.unsqueeze(1).to(history.dtype), history).squeeze(1)

    def _weights(self, target: Tensor, history: Tensor) -> Tensor:
        """Return what the unit says of each entry, [n, length].

        Its first layer is linear in an entry, with a matrix that depends on the target. So it takes
        a quarter of the products, and [t, h, t - h, t * h] is never made.
        """
        first, *others = self.unit
        assert isinstance(first, nn.Linear)
        of_target, of_entry, of_difference, of_product = first.weight.chunk(4, dim=1)
        matrices = (of_entry - of_difference) + of_product * target.unsqueeze(1)
        x = F.linear(target, of_target + of_difference, first.bias).unsqueeze(1)
        x = x + history @ matrices.transpose(1, 2)
        for layer in others:
            x = layer(x)
        return x.squeeze(2)
