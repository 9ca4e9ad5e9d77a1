# SPDX-License-Identifier: Apache-2.0
"""Multi-layer perceptrons."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers.activation.dice import Dice
from hotbed.models.layers.dense.batch_norm import BatchNorm
from hotbed.models.layers.dense.dropout import Dropout, ReLUDropout

Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "prelu", "dice"]

_PLAIN: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
}
_CHOICES = (*_PLAIN, "dice", None)


class MLP(nn.Sequential):
    """Hidden layers of Linear -> BatchNorm -> activation -> dropout, then a linear output.

    The order is that of FuxiCTR.

    Args:
        in_features: width of the input.
        hidden: widths of the hidden layers; may be empty.
        output_dim: width of a last linear layer without activation; None leaves it out.
        activation: of the hidden layers, one for all or a list with one for each: relu, gelu, silu,
            tanh, sigmoid, leaky_relu, prelu, dice; None is a linear layer.
        bias: whether the hidden layers add one, one for all or a list with one for each.
        dropout: rate in [0, 1).
        batch_norm: normalize before the activation.

    `MLP` of HugeCTR has its last activation on the output: `MLP(d, num_outputs)`.

    >>> import torch
    >>> MLP(4, [8, 8], output_dim=1, batch_norm=True)(torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    >>> MLP(4, [8, 1], activation=["relu", None], bias=[True, False])(torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        *,
        output_dim: int | None = None,
        activation: Activation | Sequence[Activation | None] | None = "relu",
        bias: bool | Sequence[bool] = True,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        widths = [in_features, *hidden]
        if any(width < 1 for width in (*widths, output_dim or 1)):
            raise ConfigError(
                f"MLP: a width is below 1, got {widths}, output {output_dim}. "
                "Give widths from 1 on."
            )
        if activation is None or isinstance(activation, str):
            checks.one_of("activation", activation, _CHOICES)
            activation = [activation] * len(hidden)
        if isinstance(bias, bool):
            bias = [bias] * len(hidden)
        for name in activation:
            checks.one_of("activation", name, _CHOICES)
        _one_for_each("activation", activation, hidden)
        _one_for_each("bias", bias, hidden)
        layers: list[nn.Module] = []
        pairs = itertools.pairwise(widths)
        for (width, next_width), name, has_bias in zip(pairs, activation, bias, strict=True):
            layers.append(nn.Linear(width, next_width, bias=has_bias))
            if batch_norm:
                layers.append(BatchNorm(next_width))
            layers += _activated(name, next_width, dropout)
        if output_dim is not None:
            layers.append(nn.Linear(widths[-1], output_dim))
        super().__init__(*layers)
        self.output_dim = output_dim or widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, output_dim]."""
        for layer in self:
            x = layer(x)
        return x


class GroupDense(nn.Module):
    """Linear layers with one activation in a row; every layer is an output.

    Args:
        in_features: width of the input.
        widths: width of each layer.
        activation: relu, gelu, silu, tanh, sigmoid, leaky_relu, prelu, dice; None leaves it out.
        last_activation: of the last layer.

    Source: `GroupDenseLayer` of HugeCTR, up to version 4: ReLU everywhere, the last layer has it or
    not.

    >>> import torch
    >>> [output.shape for output in GroupDense(4, [8, 2])(torch.zeros(3, 4))]
    [torch.Size([3, 8]), torch.Size([3, 2])]
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        *,
        activation: Activation | None = "relu",
        last_activation: Activation | None = "relu",
    ) -> None:
        super().__init__()
        checks.whole_number("GroupDense.in_features", in_features, 1)
        checks.one_of("GroupDense.activation", activation, _CHOICES)
        checks.one_of("GroupDense.last_activation", last_activation, _CHOICES)
        if not widths:
            raise ConfigError("GroupDense.widths: empty, got []. Give the width of each layer.")
        self.layers = nn.ModuleList()
        for place, (width, next_width) in enumerate(itertools.pairwise([in_features, *widths])):
            checks.whole_number("GroupDense.widths", next_width, 1)
            name = activation
            if place == len(widths) - 1:
                name = last_activation
            layer = nn.Linear(width, next_width)
            self.layers.append(nn.Sequential(layer, *_activated(name, next_width, 0.0)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[n, in_features] -> [n, width] for each layer."""
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return tuple(outputs)


def _activated(activation: Activation | None, width: int, dropout: float) -> list[nn.Module]:
    """Return the modules of an activation followed by dropout."""
    if activation == "relu":
        return [ReLUDropout(dropout)]
    if activation is None:
        return [Dropout(dropout)]
    if activation == "dice":
        return [Dice(width), Dropout(dropout)]
    return [_PLAIN[activation](), Dropout(dropout)]


def _one_for_each(name: str, values: Sequence[object], hidden: Sequence[int]) -> None:
    if len(values) != len(hidden):
        raise ConfigError(
            f"MLP.{name}: expected one for each of {len(hidden)} hidden layers, got "
            f"{list(values)}. Give as many, or one for all."
        )
