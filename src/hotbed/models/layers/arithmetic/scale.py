# SPDX-License-Identifier: Apache-2.0
"""Repeated elements and rows."""

from __future__ import annotations

from torch import Tensor, nn

from hotbed import checks
from hotbed.models.layers import tensors


class Scale(nn.Module):
    """Repeat each element, or each row, `factor` times; "scale" is the size, not the values.

    With axis 0 each element is repeated inside its row: [[a, b]] -> [[a, a, b, b]]. With axis 1
    each row is repeated: [[a, b]] -> [[a, b], [a, b]]. A graph uses it to put a target item beside
    every item of a history, or a weight of one item beside every element of its embedding.

    Args:
        axis: 0 repeats elements, 1 repeats rows.
        factor: how often.

    Source: `Scale` of HugeCTR. Its backward pass takes the gradient of the first copy; this one
    adds those of all copies, which is the true gradient.

    >>> import torch
    >>> Scale(axis=0, factor=2)(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 1., 2., 2.]])
    """

    def __init__(self, *, axis: int, factor: int) -> None:
        super().__init__()
        checks.one_of("Scale.axis", axis, (0, 1))
        checks.whole_number("Scale.factor", factor, 1)
        self.axis = axis
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] -> [n, d * factor] (axis 0) or [n * factor, d] (axis 1)."""
        tensors.dimensions("Scale", x, 2)
        if self.axis == 0:
            return x.unsqueeze(2).expand(-1, -1, self.factor).flatten(1)
        return x.unsqueeze(1).expand(-1, self.factor, -1).flatten(0, 1)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"axis={self.axis}, factor={self.factor}"
