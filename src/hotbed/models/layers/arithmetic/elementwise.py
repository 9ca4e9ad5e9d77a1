# SPDX-License-Identifier: Apache-2.0
"""Sums, differences and products of tensors, element by element."""

from __future__ import annotations

from torch import Tensor, nn

from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class Add(nn.Module):
    """The sum of two or more tensors of one shape.

    Source: `Add` of HugeCTR; Keras.

    >>> import torch
    >>> Add()(torch.ones(2), torch.ones(2), torch.ones(2))
    tensor([3., 3.])
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        """Tensors of any one shape -> the same shape."""
        _at_least_two("Add", inputs)
        total = inputs[0]
        for tensor in inputs[1:]:
            total = total + tensor
        return total


class Sub(nn.Module):
    """The first tensor minus the second.

    Source: `Sub` of HugeCTR.

    >>> import torch
    >>> Sub()(torch.ones(2), torch.full((2,), 3.0))
    tensor([-2., -2.])
    """

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Two tensors of any one shape -> the same shape."""
        tensors.same_shape("Sub", [left, right])
        return left - right


class ElementwiseMultiply(nn.Module):
    """The product of two or more tensors of one shape, element by element (Hadamard product).

    Source: `ElementwiseMultiply` of HugeCTR. Its `DotProduct`, up to version 3.1, computes this
    too: it does not sum over the last dimension. HugeCTR's gradient is 0 for all inputs where the
    product is 0; this one is the true gradient.

    >>> import torch
    >>> ElementwiseMultiply()(torch.full((2,), 2.0), torch.full((2,), 3.0))
    tensor([6., 6.])
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        """Tensors of any one shape -> the same shape."""
        _at_least_two("ElementwiseMultiply", inputs)
        product = inputs[0]
        for tensor in inputs[1:]:
            product = product * tensor
        return product


def _at_least_two(where: str, inputs: tuple[Tensor, ...]) -> None:
    if len(inputs) < 2:
        raise ConfigError(
            f"{where}: expected two or more tensors, got {len(inputs)}. Connect another one."
        )
    tensors.same_shape(where, inputs)
