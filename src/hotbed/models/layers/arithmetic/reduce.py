# SPDX-License-Identifier: Apache-2.0
"""Sums and means over one dimension."""

from __future__ import annotations

import abc

from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError

_SAMPLES = (
    "Give a dimension from 1 on: dimension 0 is the samples, and the score of a sample must not "
    "depend on the others."
)


class _Reduction(nn.Module, abc.ABC):
    """Makes one number of all along one dimension."""

    def __init__(self, *, axis: int = 1, keepdim: bool = False) -> None:
        super().__init__()
        self._name = type(self).__name__
        checks.whole_number(f"{self._name}.axis", axis, 1, advice=_SAMPLES)
        self.axis = axis
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        """[n, …] -> the same shape without dimension `axis`, or with size 1 there."""
        if x.dim() <= self.axis:
            raise ConfigError(
                f"{self._name}: dimension {self.axis} does not exist, got shape {list(x.shape)}. "
                "Give another axis, or connect another tensor."
            )
        return self._reduced(x)

    @abc.abstractmethod
    def _reduced(self, x: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"axis={self.axis}, keepdim={self.keepdim}"


class ReduceSum(_Reduction):
    """The sum over one dimension.

    Args:
        axis: the dimension, from 1 on.
        keepdim: keep it with size 1.

    Source: `ReduceSum` of HugeCTR, which always keeps the dimension; of ONNX.

    >>> import torch
    >>> ReduceSum()(torch.ones(2, 3, 4)).shape, ReduceSum(keepdim=True)(torch.ones(2, 3)).shape
    (torch.Size([2, 4]), torch.Size([2, 1]))
    """

    def _reduced(self, x: Tensor) -> Tensor:
        return x.sum(self.axis, keepdim=self.keepdim)


class ReduceMean(_Reduction):
    """The mean over one dimension.

    Args:
        axis: the dimension, from 1 on.
        keepdim: keep it with size 1.

    Source: `ReduceMean` of HugeCTR, which always keeps the dimension; of ONNX.

    >>> import torch
    >>> ReduceMean()(torch.tensor([[1.0, 3.0]]))
    tensor([2.])
    """

    def _reduced(self, x: Tensor) -> Tensor:
        return x.mean(self.axis, keepdim=self.keepdim)
