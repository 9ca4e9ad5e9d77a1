# SPDX-License-Identifier: Apache-2.0
"""Factorization machines: products of field vectors in linear time."""

from __future__ import annotations

from torch import Tensor, nn


class FMInteraction(nn.Module):
    """Sum of the inner products of all pairs of fields, in linear time.

    It is ((sum v)^2 - sum v^2) / 2, summed over dim.

    Source: Rendle, "Factorization Machines", ICDM 2010.

    >>> FMInteraction()(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([11.])
    """

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, dim] -> [n]."""
        return 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(-1)
