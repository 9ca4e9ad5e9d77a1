# SPDX-License-Identifier: Apache-2.0
"""Dice: PReLU whose bend follows the data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed import checks

_MOMENTUM = 0.1  # weight of a batch in the running statistics, as in nn.BatchNorm1d


class Dice(nn.Module):
    """Data adaptive PReLU: y = p x + (1 - p) alpha x, p = sigmoid((x - mean) / sqrt(var + eps)).

    Mean and (biased) variance are those of the batch in training, and running ones in eval mode,
    and for batches of fewer than two samples, as in batch normalization. Every leading axis counts
    as samples, so that padding counts too.

    HugeCTR's `PReLU_Dice` is this with `learned=False`, alpha 0.2 and, in eval mode too, the
    statistics of the batch.

    Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018,
        section 5.3.

    Args:
        width: size of the last axis; each of its units has an alpha and statistics of its own.
        alpha: slope where p is 0, at the start.
        learned: whether alpha is a parameter.
        epsilon: eps above.

    >>> Dice(1, alpha=0.0).eval()(torch.tensor([[0.0], [1.0]]))
    tensor([[0.0000],
            [0.7311]], grad_fn=<AddBackward0>)
    """

    alpha: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, width: int, *, alpha: float = 0.2, learned: bool = True, epsilon: float = 1e-8
    ) -> None:
        super().__init__()
        checks.at_least("Dice.width", width, 1)
        checks.finite_number("Dice.alpha", alpha)
        checks.finite_number("Dice.epsilon", epsilon, above=0)
        slopes = torch.full((width,), float(alpha))
        if learned:
            self.alpha = nn.Parameter(slopes)
        else:
            self.register_buffer("alpha", slopes)
        self.epsilon = epsilon
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        samples = x.flatten(0, -2)
        normed = F.batch_norm(
            samples,
            self.running_mean,
            self.running_var,
            training=self.training and len(samples) > 1,
            momentum=_MOMENTUM,
            eps=self.epsilon,
        )
        share = torch.sigmoid(normed.view_as(x))
        return share * x + (1 - share) * self.alpha * x
