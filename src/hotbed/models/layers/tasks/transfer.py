# SPDX-License-Identifier: Apache-2.0
"""What an earlier event tells about a later one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hotbed.models.layers import tensors
from hotbed.models.layers.tasks.mixture import ExpertMixture


class InformationTransfer(nn.Module):
    """Attention over what an earlier task transfers, p, and what this task has itself, q.

    z = sum of w_u V u over u in (p, q), where w is the softmax of (Q u) . (K u) / sqrt(dim).

    Source: the AIT module of Xi et al., "Modeling the Sequential Dependence among Audience
        Multi-step Conversions with Multi-task Learning in Targeted Display Advertising", KDD 2021,
        equations 3 and 4.

    Args:
        dim: width of p, q and z.

    >>> InformationTransfer(4)(torch.ones(2, 4), torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.value = nn.Linear(dim, dim)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.mixture = ExpertMixture()

    def forward(self, transferred: Tensor, own: Tensor) -> Tensor:
        """p [n, dim] and q [n, dim] -> z [n, dim]."""
        tensors.same_shape("InformationTransfer", [transferred, own])
        tensors.size("InformationTransfer", own, 1, self.dim)
        both = torch.stack([transferred, own], dim=1)
        gate = (self.query(both) * self.key(both)).sum(2) / math.sqrt(self.dim)
        mixed: Tensor = self.mixture(gate, self.value(both))
        return mixed
