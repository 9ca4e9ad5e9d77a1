# SPDX-License-Identifier: Apache-2.0
"""Inner products of field vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """The inner product of every pair of fields, in the order (1, 0), (2, 0), (2, 1), (3, 0), …

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
        Recommendation Systems", 2019.

    >>> DotInteraction(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[11.]])
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_fields, num_fields, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.output_dim = num_fields * (num_fields - 1) // 2

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, dim] -> [n, fields * (fields - 1) / 2]."""
        products = torch.bmm(fields, fields.transpose(1, 2))
        return products[:, self.rows, self.columns]
