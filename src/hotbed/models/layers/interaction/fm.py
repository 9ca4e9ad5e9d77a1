# SPDX-License-Identifier: Apache-2.0
"""Factorization machines: products of all pairs of field vectors in linear time."""

from __future__ import annotations

from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class FMOrder2(nn.Module):
    """The sum of the element-wise products of all pairs of fields, ((sum e)^2 - sum e^2) / 2.

    The sums run over the fields; the output has one number for each element of an embedding.

    Args:
        dim: width of an embedding, needed for inputs [n, fields * dim] alone.

    Source: `FmOrder2` of HugeCTR; "bi-interaction pooling" of He and Chua, "Neural Factorization
    Machines for Sparse Predictive Analytics", SIGIR 2017.

    >>> import torch
    >>> FMOrder2(dim=2)(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[3., 8.]])
    """

    def __init__(self, *, dim: int | None = None) -> None:
        super().__init__()
        if dim is not None:
            checks.whole_number("FMOrder2.dim", dim, 1)
        self.dim = dim

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, dim] or [n, fields * dim] -> [n, dim]."""
        tensors.dimensions("FMOrder2", fields, 2, 3)
        if fields.dim() == 2:
            fields = self._as_fields(fields)
        elif self.dim is not None:
            tensors.size("FMOrder2", fields, 2, self.dim)
        return 0.5 * (fields.sum(1).square() - fields.square().sum(1))

    def _as_fields(self, flat: Tensor) -> Tensor:
        width = flat.shape[1]
        if self.dim is None or width % self.dim != 0:
            raise ConfigError(
                f"FMOrder2.dim: {width} columns are not fields of {self.dim} each, got shape "
                f"{list(flat.shape)}. Give the width of one embedding."
            )
        return flat.reshape(-1, width // self.dim, self.dim)

    def extra_repr(self) -> str:
        """Return the dim, for `repr`."""
        return f"dim={self.dim}"


class FMInteraction(nn.Module):
    """Sum of the inner products of all pairs of fields: `FMOrder2` summed over dim.

    Source: Rendle, "Factorization Machines", ICDM 2010.

    >>> import torch
    >>> FMInteraction()(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    tensor([11.])
    """

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, dim] -> [n]."""
        return 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(-1)
