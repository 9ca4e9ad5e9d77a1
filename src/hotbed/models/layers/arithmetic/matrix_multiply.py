# SPDX-License-Identifier: Apache-2.0
"""Products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError


class MatrixMultiply(nn.Module):
    """The matrix product of two tensors.

    * [m, k] times [k, j] is [m, j];
    * [n, m, k] times [n, k, j] is [n, m, j], sample by sample;
    * [n, h, m, k] times [n, h, k, j] is [n, h, m, j], head by head;
    * [m, k] times [k, g, j] is [m, g, j].

    Source: `MatrixMultiply` of HugeCTR.

    >>> MatrixMultiply()(torch.ones(5, 2, 3), torch.ones(5, 3, 4)).shape
    torch.Size([5, 2, 4])
    """

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Two tensors as above -> their product."""
        if left.dim() == 2 and right.dim() == 3 and left.shape[1] == right.shape[0]:
            product = left @ right.flatten(1)
            return product.reshape(-1, *right.shape[1:])
        matrices = left.dim() == right.dim() and left.dim() in (2, 3, 4)
        if not matrices or left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
            raise ConfigError(
                "MatrixMultiply: expected [..., m, k] and [..., k, j] with equal sizes before, or "
                f"[m, k] and [k, g, j], got shapes {list(left.shape)} and {list(right.shape)}. "
                "Reshape them, or connect others."
            )
        return torch.matmul(left, right)
