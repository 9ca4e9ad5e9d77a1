# SPDX-License-Identifier: Apache-2.0
"""hccl_ops: what programs do with the gradients of several ranks."""

from __future__ import annotations

from torch import Tensor

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.parallel import at

__all__ = ["hccl_ops"]

REDUCTIONS = ("sum", "max", "min", "prod")


class HcclOps:
    """Collective operations over the ranks of a program."""

    @at("allreduce")
    def allreduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the tensors of all ranks, reduced lane by lane; of one rank, the tensor itself.

        A sum is added by halves, so that its bits do not depend on who is slow. It has no gradient.

        Args:
            tensor: of one shape and dtype on all ranks.
            reduction: "sum", "max", "min" or "prod".

        Raises:
            ConfigError: the reduction is not "sum", "max", "min" or "prod".
        """
        checks.one_of("hccl_ops.allreduce: reduction", reduction, REDUCTIONS)
        ranks = framework.ranks_of_program()
        return tensor if ranks is None else ranks.reduced(tensor, reduction)


hccl_ops = HcclOps()
"""The collective operations of this process."""
