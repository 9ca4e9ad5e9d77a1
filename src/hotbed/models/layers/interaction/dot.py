# SPDX-License-Identifier: Apache-2.0
"""Inner products of field vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class DotInteraction(nn.Module):
    """The inner product of every pair of fields, in the order (1, 0), (2, 0), (2, 1), (3, 0), …

    Args:
        num_fields: number of fields of the last input.
        with_dense: take a dense vector [n, dim] before the fields. It is field 0 of the products,
            and stands before them in the output.
        padding: end with a column of zeros.

    Attributes:
        output_dim: columns of the output after the dense vector.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019. With both options it is `Interaction` of HugeCTR, whose output
    has dim + (f + 1)(f + 2) / 2 - (f + 1) + 1 columns for f fields.

    >>> DotInteraction(2)(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([[11.]])
    >>> layer = DotInteraction(1, with_dense=True, padding=True)
    >>> layer(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0]]]))
    tensor([[ 1.,  2., 11.,  0.]])
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, num_fields: int, *, with_dense: bool = False, padding: bool = False) -> None:
        super().__init__()
        checks.whole_number("DotInteraction.num_fields", num_fields, 1)
        self.num_fields = num_fields
        self.with_dense = with_dense
        self.padding = padding
        num_vectors = num_fields + with_dense
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.output_dim = len(rows) + padding

    def forward(self, *inputs: Tensor) -> Tensor:
        """[n, fields, dim], or [n, dim] and [n, fields, dim] -> [n, output_dim (+ dim)]."""
        if len(inputs) != 1 + self.with_dense:
            raise ConfigError(
                f"DotInteraction: expected {1 + self.with_dense} tensors, got {len(inputs)}. "
                "Give the fields; with with_dense=True a dense vector before them."
            )
        *dense, fields = inputs
        tensors.dimensions("DotInteraction", fields, 3)
        tensors.size("DotInteraction", fields, 1, self.num_fields)
        if self.with_dense:
            tensors.dimensions("DotInteraction", dense[0], 2)
            tensors.size("DotInteraction", dense[0], 1, fields.shape[2])
            fields = torch.cat([dense[0].unsqueeze(1), fields], dim=1)
        products = torch.bmm(fields, fields.transpose(1, 2))
        output = products[:, self.rows, self.columns]
        if self.padding:
            output = F.pad(output, (0, 1))
        if self.with_dense:
            output = torch.cat([dense[0], output], dim=1)
        return output

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"{self.num_fields}, with_dense={self.with_dense}, padding={self.padding}"
