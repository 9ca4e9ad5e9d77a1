# SPDX-License-Identifier: Apache-2.0
"""Linear pieces: the last layer of every model, and the initial weights that all models share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogitHead(nn.Module):
    """The last linear layer: one logit from one or more inputs, float32 also under autocast.

    It equals `nn.Linear(sum(widths), 1)` of the concatenated inputs, but does not copy them. It
    runs outside autocast, because logits rounded to bfloat16 (8 bits) tie with each other, which
    costs AUC.

    Args:
        in_features: width of the input, or a list with the width of each input.

    >>> LogitHead([2, 3])(torch.ones(4, 2), torch.ones(4, 3)).shape
    torch.Size([4])
    """

    def __init__(self, in_features: int | Sequence[int]) -> None:
        super().__init__()
        if isinstance(in_features, int):
            in_features = [in_features]
        self.widths = list(in_features)
        self.linear = nn.Linear(sum(self.widths), 1)

    def forward(self, *parts: Tensor) -> Tensor:
        """Tensors [n, widths[i]] -> [n] float32."""
        with outside_autocast(parts[0].device.type):
            weights = self.linear.weight.float().split(self.widths, dim=1)
            bias = self.linear.bias.float()
            logit = F.linear(parts[0].float(), weights[0], bias)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                logit = logit + F.linear(part.float(), weight)
        return logit.squeeze(-1)


def outside_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, for what needs float32."""
    if device == "meta":  # of shapes alone, which autocast does not know
        device = "cpu"
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def xavier_(module: nn.Module) -> None:
    """Set Xavier-normal weights and zero biases for every `nn.Linear` inside `module`.

    FuxiCTR and BARS start from the same weights.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
        networks", 2010.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
