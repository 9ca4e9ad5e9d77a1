# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class Concat(nn.Module):
    """Tensors one after another along one dimension; all other sizes are equal.

    Args:
        axis: the dimension, from 1 on. For [n, d] it is 1; for [n, f, d], 1 puts fields below
            each other, 2 puts embeddings side by side.

    Source: `Concat` of HugeCTR; ONNX.

    >>> Concat()(torch.ones(2, 3), torch.ones(2, 4)).shape
    torch.Size([2, 7])
    """

    def __init__(self, *, axis: int = 1) -> None:
        super().__init__()
        advice = "Give a dimension from 1 on; dimension 0 is the samples."
        checks.whole_number("Concat.axis", axis, 1, advice=advice)
        self.axis = axis

    def forward(self, *inputs: Tensor) -> Tensor:
        """Tensors [n, …] -> one tensor, whose size along `axis` is the sum of theirs."""
        tensors.same_shape("Concat", inputs, but=self.axis)
        if inputs[0].dim() <= self.axis:
            raise ConfigError(
                f"Concat: dimension {self.axis} does not exist, got shape "
                f"{list(inputs[0].shape)}. Give another axis, or connect other tensors."
            )
        return torch.cat(inputs, dim=self.axis)

    def extra_repr(self) -> str:
        """Return the dimension, for `repr`."""
        return f"axis={self.axis}"


class FusedReshapeConcat(nn.Module):
    """Embeddings side by side, with the last item of each sample apart from those before it.

    A sample has s items: its history, and in the last place the target. From
    x = [input_0, input_1, …] along the last dimension, the outputs are `history` [n * (s - 1), d]
    and `target` [n, d], where d is the sum of the widths. A history has one row for each item, in
    the order of samples.

    Source: `FusedReshapeConcat` of HugeCTR, used by its DIN sample.

    >>> goods, categories = torch.ones(2, 11, 4), torch.ones(2, 11, 3)
    >>> [output.shape for output in FusedReshapeConcat()(goods, categories)]
    [torch.Size([20, 7]), torch.Size([2, 7])]
    """

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors [n, s, d_i] -> [n * (s - 1), d], [n, d] with d = sum of d_i."""
        items = _side_by_side("FusedReshapeConcat", inputs)
        if items.shape[1] < 2:
            raise ConfigError(
                "FusedReshapeConcat: expected a history and a target, so two or more items, got "
                f"shape {list(items.shape)}. Give histories of one item or more."
            )
        return items[:, :-1].flatten(0, 1), items[:, -1]


class FusedReshapeConcatGeneral(nn.Module):
    """Embeddings side by side, with one row for each item of each sample.

    Source: `FusedReshapeConcatGeneral` of HugeCTR.

    >>> FusedReshapeConcatGeneral()(torch.ones(2, 5, 4), torch.ones(2, 5, 3)).shape
    torch.Size([10, 7])
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        """Tensors [n, s, d_i] -> [n * s, d] with d = sum of d_i."""
        return _side_by_side("FusedReshapeConcatGeneral", inputs).flatten(0, 1)


def _side_by_side(where: str, inputs: Sequence[Tensor]) -> Tensor:
    for tensor in inputs:
        tensors.dimensions(where, tensor, 3)
    tensors.same_shape(where, inputs, but=2)
    return torch.cat(list(inputs), dim=2)
