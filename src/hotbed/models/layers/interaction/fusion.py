# SPDX-License-Identifier: Apache-2.0
"""Two streams of one sample: a gate that selects features for each, and products that join them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors
from hotbed.models.layers.dense import MLP, Activation
from hotbed.models.layers.dense.linear import outside_autocast


class FeatureGate(nn.Module):
    """Features times a gate between 0 and 2: x * 2 sigmoid(MLP(c)).

    Args:
        in_features: width of the features x.
        context_features: width of the context c that the gate depends on; 0 = c is a learned vector
            of 16 numbers, and the gate is the same for each sample.
        hidden: widths of the gate's hidden layers.
        activation: of these.

    Source: Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023.

    >>> FeatureGate(6, 2, [4])(torch.zeros(3, 6), torch.zeros(3, 2)).shape
    torch.Size([3, 6])
    """

    def __init__(
        self,
        in_features: int,
        context_features: int = 0,
        hidden: Sequence[int] = (64,),
        *,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        checks.whole_number("FeatureGate.in_features", in_features, 1)
        checks.whole_number("FeatureGate.context_features", context_features, 0)
        self.context: nn.Parameter | None = None
        if not context_features:
            context_features = 16
            self.context = nn.Parameter(torch.randn(1, context_features))
        self.gate = MLP(context_features, hidden, output_dim=in_features, activation=activation)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """[n, in_features] and [n, context_features] -> [n, in_features]."""
        if (context is None) == (self.context is None):
            raise ConfigError(
                f"FeatureGate: expected {1 + (self.context is None)} tensors, got "
                f"{1 + (context is not None)}. Give a context if context_features is not 0."
            )
        gate = self.gate(self.context if context is None else context)
        return x * (2 * torch.sigmoid(gate)).to(x.dtype)


class BilinearProduct(nn.Module):
    """The sum of x_h^T W_h y_h over heads h, in the precision of W also under autocast.

    x_h and y_h are the parts of x and y: as many equal parts as there are heads.

    Args:
        in_features: widths of x and of y.
        num_heads: number of parts; it divides both widths.

    Source: Mao et al., "FinalMLP", AAAI 2023.

    >>> BilinearProduct([4, 6], num_heads=2)(torch.ones(3, 4), torch.ones(3, 6)).shape
    torch.Size([3])
    """

    def __init__(self, in_features: Sequence[int], *, num_heads: int = 1) -> None:
        super().__init__()
        checks.at_least("num_heads", num_heads, 1)
        first, second = in_features
        if first % num_heads or second % num_heads:
            raise ConfigError(
                f"num_heads: must divide both widths, got {num_heads} heads and widths {first} and "
                f"{second}. Give a divisor of both."
            )
        self.num_heads = num_heads
        sizes = [width // num_heads for width in in_features]
        self.weight = nn.Parameter(torch.empty(num_heads, *sizes))
        with torch.no_grad():
            self.weight.normal_(std=math.sqrt(2 / (self.weight.numel() + 1)))  # as in FuxiCTR

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, in_features[0]] and [n, in_features[1]] -> [n]."""
        tensors.dimensions("BilinearProduct", x, 2)
        tensors.dimensions("BilinearProduct", y, 2)
        with outside_autocast(x.device.type):
            first = x.to(self.weight.dtype).unflatten(1, (self.num_heads, -1))
            second = y.to(self.weight.dtype).unflatten(1, (self.num_heads, -1))
            products = torch.einsum("nha,hab,nhb->n", first, self.weight, second)
        return products
