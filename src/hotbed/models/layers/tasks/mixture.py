# SPDX-License-Identifier: Apache-2.0
"""Experts, mixed by a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.models.layers import tensors


class ExpertMixture(nn.Module):
    """The sum of experts, weighed by the softmax of a gate: y = sum_e softmax(g)_e x_e.

    Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
        Mixture-of-Experts", KDD 2018.

    >>> ExpertMixture()(torch.zeros(2, 3), torch.ones(2, 3, 4)).shape
    torch.Size([2, 4])
    """

    def forward(self, gate: Tensor, experts: Tensor) -> Tensor:
        """Gate [n, e] and outputs of experts [n, e, d] -> [n, d]."""
        tensors.dimensions("ExpertMixture", gate, 2)
        tensors.dimensions("ExpertMixture", experts, 3)
        tensors.size("ExpertMixture", experts, 1, gate.shape[1])
        shares = torch.softmax(gate, dim=-1).to(experts.dtype)
        return torch.bmm(shares.unsqueeze(1), experts).squeeze(1)
