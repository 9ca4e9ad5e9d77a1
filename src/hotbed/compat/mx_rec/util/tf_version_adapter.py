# SPDX-License-Identifier: Apache-2.0
"""hccl_ops: what programs do with the gradients of several ranks."""

from __future__ import annotations

from torch import Tensor

from hotbed import checks

__all__ = ["hccl_ops"]

REDUCTIONS = ("sum", "max", "min", "prod")


class HcclOps:
    """Collective operations over one rank."""

    def allreduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the tensor: the reduction over one rank.

        Raises:
            ConfigError: the reduction is not "sum", "max", "min" or "prod".
        """
        checks.one_of("hccl_ops.allreduce: reduction", reduction, REDUCTIONS)
        return tensor


hccl_ops = HcclOps()
"""The collective operations of this process."""
