# SPDX-License-Identifier: Apache-2.0
"""Batch normalization."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` that also takes batches of fewer than two samples.

    It normalizes those by the running statistics. The last batch of a stream may have one sample,
    which has no variance; torch's layer raises an error there.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] -> [n, width]."""
        if self.training and len(x) < 2:
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        return super().forward(x)
