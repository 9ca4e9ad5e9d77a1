# SPDX-License-Identifier: Apache-2.0
"""The probability that two events both happen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.models.layers import tensors


class JointLogit(nn.Module):
    """The logit of p(a) p(b) from the logits of p(a) and p(b).

    With p = 1 / (1 + e^-x), the logit of the product is -log(e^-x + e^-y + e^(-x-y)). Computed in
    this form it neither overflows nor loses digits, however small or near to 1 the product is.

    Source: p(click) p(conversion | click) of Ma et al., "Entire Space Multi-Task Model", SIGIR
        2018, written in logits.

    >>> torch.sigmoid(JointLogit()(torch.zeros(1), torch.zeros(1)))
    tensor([0.2500])
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits of one shape, twice -> logits of that shape."""
        tensors.same_shape("JointLogit", [x, y])
        return -torch.logsumexp(torch.stack([-x, -y, -x - y]), dim=0)
