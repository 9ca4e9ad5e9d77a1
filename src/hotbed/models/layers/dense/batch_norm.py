# SPDX-License-Identifier: Apache-2.0
"""Batch normalization."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` that also takes batches of fewer than two samples.

    It normalizes those by the running statistics. The last batch of a stream may have one sample,
    which has no variance; torch's layer raises an error there.

    In training, other batches are normalized by their own mean and variance, and the running ones
    move: running = (1 - momentum) * running + momentum * batch, with the variance over n - 1. So
    `momentum` is HugeCTR's and cuDNN's `factor`, whose default there is 1: the last batch alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[n, num_features] -> [n, num_features]."""
        if self.training and len(x) < 2:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(x)
