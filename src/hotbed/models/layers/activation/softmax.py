# SPDX-License-Identifier: Apache-2.0
"""Softmax over the entries that a mask keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed import checks


def masked_softmax(scores: Tensor, mask: Tensor | None, axis: int = -1) -> Tensor:
    """Return the softmax of `scores` over the entries of `axis` where `mask` is not 0.

    Other entries get 0, also where the mask keeps none. The mask broadcasts to the scores; None
    keeps all.
    """
    if mask is None:
        return torch.softmax(scores, axis)
    keep = mask.bool()
    lowest = torch.finfo(scores.dtype).min
    weights = torch.softmax(scores.masked_fill(~keep, lowest), axis)
    return weights.masked_fill(~keep, 0.0)


class Softmax(nn.Module):
    """Softmax of scaled scores: y_i = m_i exp(factor x_i) / sum_j m_j exp(factor x_j).

    Without a mask, and with factor 1, it is `nn.Softmax`. A row without any kept entry is all
    zeros.

    HugeCTR's layer adds -10000 to masked scores and 1e-6 to the sum. The results differ by at most
    1e-6, except for rows without a kept entry, where HugeCTR's layer weighs the padding.

    Args:
        factor: of the scores, for example 1 / sqrt(dim).
        axis: over which the results sum to 1.

    >>> Softmax()(torch.zeros(2, 2), torch.tensor([[1, 0], [1, 1]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """

    def __init__(self, factor: float = 1.0, axis: int = -1) -> None:
        super().__init__()
        checks.finite_number("Softmax.factor", factor)
        self.factor = factor
        self.axis = axis

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores of any shape, and a mask that broadcasts to it -> the same shape."""
        return masked_softmax(x * self.factor, mask, self.axis)

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"factor={self.factor}, axis={self.axis}"
