# SPDX-License-Identifier: Apache-2.0
"""Masks that depend on the sample: what MaskNet multiplies features with."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks
from hotbed.models.layers import tensors
from hotbed.models.layers.dense import ReLUDropout


class FieldNorm(nn.LayerNorm):
    """Each field normalized by itself: (v_i - mean) / sqrt(variance + eps) * gamma_i + beta_i.

    gamma and beta are of each field.

    Args:
        num_fields: number of fields.
        dim: width of a field.
        eps: added to the variance.

    Source: Wang et al., "MaskNet", DLP-KDD 2021, where it normalizes the embeddings.

    >>> import torch
    >>> FieldNorm(2, 3)(torch.zeros(4, 2, 3)).shape
    torch.Size([4, 2, 3])
    """

    def __init__(self, num_fields: int, dim: int, *, eps: float = 1e-5) -> None:
        checks.whole_number("FieldNorm.num_fields", num_fields, 1)
        checks.whole_number("FieldNorm.dim", dim, 1)
        super().__init__((num_fields, dim), eps=eps)

    def forward(self, fields: Tensor) -> Tensor:
        """[n, fields, dim] -> [n, fields, dim]."""
        tensors.dimensions("FieldNorm", fields, 3)
        normalized = F.layer_norm(fields, self.normalized_shape[1:], eps=self.eps)
        return normalized * self.weight + self.bias


class MaskBlock(nn.Module):
    """MaskNet's block: relu(LayerNorm(W (x * mask(v)))), mask(v) = A_2 relu(A_1 v + a_1) + a_2.

    Args:
        in_features: width of x, and of its mask.
        mask_features: width of v, the embeddings that the mask depends on.
        out_features: width of the output.
        reduction_ratio: width of the mask's hidden layer, divided by that of v.
        dropout: rate after the activation, in [0, 1).

    Source: Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
    Instance-Guided Mask", DLP-KDD 2021.

    >>> import torch
    >>> MaskBlock(6, 4, 2)(torch.zeros(3, 6), torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        mask_features: int,
        out_features: int,
        *,
        reduction_ratio: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.whole_number("MaskBlock.in_features", in_features, 1)
        checks.whole_number("MaskBlock.mask_features", mask_features, 1)
        checks.whole_number("MaskBlock.out_features", out_features, 1)
        checks.above("reduction_ratio", reduction_ratio, 0.0)
        hidden = max(int(mask_features * reduction_ratio), 1)
        self.mask = nn.Sequential(
            nn.Linear(mask_features, hidden), nn.ReLU(), nn.Linear(hidden, in_features)
        )
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.norm = nn.LayerNorm(out_features)
        self.activation = ReLUDropout(dropout)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        """[n, in_features] and [n, mask_features] -> [n, out_features]."""
        output: Tensor = self.activation(self.norm(self.linear(x * self.mask(v))))
        return output
