# SPDX-License-Identifier: Apache-2.0
"""Multi-layer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers.dense.batch_norm import BatchNorm
from hotbed.models.layers.dense.dropout import Dropout, ReLUDropout

Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
}


class MLP(nn.Sequential):
    """Hidden layers of Linear -> BatchNorm -> activation -> dropout, then a linear output.

    The order is that of FuxiCTR.

    Args:
        in_features: width of the input.
        hidden: widths of the hidden layers; may be empty.
        output_dim: width of a last linear layer without activation; None leaves it out.
        activation: one of relu, gelu, silu, tanh, sigmoid, leaky_relu.
        dropout: rate in [0, 1).
        batch_norm: normalize before the activation.

    >>> import torch
    >>> MLP(4, [8, 8], output_dim=1, batch_norm=True)(torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        *,
        output_dim: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        checks.one_of("activation", activation, _ACTIVATIONS)
        widths = [in_features, *hidden]
        if any(width < 1 for width in (*widths, output_dim or 1)):
            raise ConfigError(
                f"MLP: a width is below 1, got {widths}, output {output_dim}. "
                "Give widths from 1 on."
            )
        layers: list[nn.Module] = []
        for width, next_width in itertools.pairwise(widths):
            layers.append(nn.Linear(width, next_width))
            if batch_norm:
                layers.append(BatchNorm(next_width))
            if activation == "relu":
                layers.append(ReLUDropout(dropout))
            else:
                layers += [_ACTIVATIONS[activation](), Dropout(dropout)]
        if output_dim is not None:
            layers.append(nn.Linear(widths[-1], output_dim))
        super().__init__(*layers)
        self.output_dim = output_dim or widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, output_dim]."""
        for layer in self:
            x = layer(x)
        return x
