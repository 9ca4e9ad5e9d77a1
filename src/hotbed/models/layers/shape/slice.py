# SPDX-License-Identifier: Apache-2.0
"""Parts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError


class Slice(nn.Module):
    """Ranges of the last dimension, one output for each; ranges may overlap.

    Args:
        ranges: pairs [first, end): `first` counts from 0, `end` is not in the range.

    Source: `Slice` of HugeCTR. There ranges must ascend; here they come in any order.

    >>> [part.tolist() for part in Slice([[0, 2], [1, 3]])(torch.tensor([[1, 2, 3]]))]
    [[[1, 2]], [[2, 3]]]
    """

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        super().__init__()
        if not ranges:
            raise ConfigError("Slice.ranges: empty, got []. Give a pair [first, end] an output.")
        for pair in ranges:
            if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
                raise ConfigError(
                    "Slice.ranges: expected [first, end] with 0 <= first < end, got "
                    f"{list(pair)}. Give such a pair."
                )
        self.ranges = [(first, end) for first, end in ranges]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[…, d] -> for each range a tensor […, end - first]."""
        for first, end in self.ranges:
            if end > x.shape[-1]:
                raise ConfigError(
                    f"Slice.ranges: [{first}, {end}] leaves the last dimension, got shape "
                    f"{list(x.shape)}. Give ranges up to {x.shape[-1]}."
                )
        return tuple(x[..., first:end] for first, end in self.ranges)

    def extra_repr(self) -> str:
        """Return the ranges, for `repr`."""
        return f"ranges={[list(pair) for pair in self.ranges]}"


class Gather(nn.Module):
    """The entries of one dimension at `indices`, in their order; an index may come twice.

    Args:
        indices: places from 0 on.
        axis: the dimension, from 1 on; dimension 0 is the samples.

    Source: `Gather` and `Select` of HugeCTR.

    >>> Gather([2, 0])(torch.tensor([[1, 2, 3]]))
    tensor([[3, 1]])
    """

    indices: Tensor

    def __init__(self, indices: Sequence[int], *, axis: int = 1) -> None:
        super().__init__()
        if not indices or min(indices) < 0:
            raise ConfigError(
                f"Gather.indices: expected places from 0 on, got {list(indices)}. Give such."
            )
        advice = "Give a dimension from 1 on; dimension 0 is the samples."
        checks.whole_number("Gather.axis", axis, 1, advice=advice)
        self.axis = axis
        self.last = max(indices)
        self.register_buffer("indices", torch.tensor(list(indices)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, …] -> the same shape, with len(indices) in dimension `axis`."""
        if x.dim() <= self.axis or x.shape[self.axis] <= self.last:
            raise ConfigError(
                f"Gather.indices: index {self.last} does not exist in dimension {self.axis}, got "
                f"shape {list(x.shape)}. Give indices and an axis within the shape."
            )
        return x.index_select(self.axis, self.indices)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"{self.indices.tolist()}, axis={self.axis}"
