# SPDX-License-Identifier: Apache-2.0
"""Other shapes of the same elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotbed import checks
from hotbed.errors import ConfigError
from hotbed.models.layers import tensors


class Reshape(nn.Module):
    """The same elements in another shape, or those of selected fields.

    * `Reshape()`: [n, a, b, …] -> [n, a * b * …];
    * `Reshape(leading_dim=d)`: any shape -> [elements / d, d];
    * `Reshape(leading_dim=d, time_steps=t)`: any shape -> [elements / (t * d), t, d];
    * `Reshape(selected=[…])`: [n, f, d] -> [n, len(selected) * d], the chosen fields in that order;
    * `Reshape(shape=[-1, a, b])`: any shape -> [elements / (a * b), a, b].

    Args:
        leading_dim: size of the last dimension; HugeCTR's name for it.
        time_steps: size of the dimension before it.
        selected: places of fields, from 0 on.
        shape: all sizes of the result; one of them is -1, which is the size that is left.

    Source: `Reshape` of HugeCTR, where `time_steps` is `time_step`.

    >>> Reshape()(torch.ones(2, 3, 4)).shape, Reshape(leading_dim=6)(torch.ones(2, 3, 4)).shape
    (torch.Size([2, 12]), torch.Size([4, 6]))
    >>> Reshape(leading_dim=4, time_steps=3)(torch.ones(6, 4)).shape
    torch.Size([2, 3, 4])
    >>> Reshape(selected=[2, 0])(torch.ones(2, 3, 4)).shape
    torch.Size([2, 8])
    """

    indices: Tensor | None

    def __init__(
        self,
        *,
        leading_dim: int | None = None,
        time_steps: int | None = None,
        selected: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        sizes_given = leading_dim is not None or time_steps is not None
        if (selected is not None or shape is not None) and sizes_given:
            raise ConfigError(
                "Reshape: selected and shape come alone, got leading_dim or time_steps too. Use "
                "two layers."
            )
        if shape is not None:
            _check_shape(shape, selected)
        if time_steps is not None and leading_dim is None:
            raise ConfigError(
                f"Reshape.time_steps: needs leading_dim, got {time_steps} alone. Give both."
            )
        for name, size in (("leading_dim", leading_dim), ("time_steps", time_steps)):
            if size is not None:
                checks.whole_number(f"Reshape.{name}", size, 1)
        if selected is not None and (not selected or min(selected) < 0):
            raise ConfigError(
                f"Reshape.selected: expected places from 0 on, got {list(selected)}. Give such."
            )
        self.leading_dim = leading_dim
        self.time_steps = time_steps
        self.shape = None if shape is None else list(shape)
        indices = None
        if selected is not None:
            indices = torch.tensor(list(selected))
        self.register_buffer("indices", indices, persistent=False)
        self.last = max(selected or [0])

    def forward(self, x: Tensor) -> Tensor:
        """A tensor -> its elements in the shapes above."""
        if self.indices is not None:
            return self._selected(x, self.indices)
        if self.shape is not None:
            shape = self.shape
        elif self.leading_dim is None:
            return x.flatten(1)
        elif self.time_steps is None:
            shape = [-1, self.leading_dim]
        else:
            shape = [-1, self.time_steps, self.leading_dim]
        elements = abs(math.prod(shape))  # without the size that is left
        if x.numel() % elements != 0:
            rows = [size for size in shape if size > 0]
            raise ConfigError(
                f"Reshape: {x.numel()} elements do not fill rows of {rows}, got shape "
                f"{list(x.shape)}. Give sizes whose product divides the elements of a sample."
            )
        return x.reshape(shape)

    def _selected(self, x: Tensor, indices: Tensor) -> Tensor:
        tensors.dimensions("Reshape.selected", x, 3)
        if x.shape[1] <= self.last:
            raise ConfigError(
                f"Reshape.selected: field {self.last} does not exist, got shape {list(x.shape)}. "
                f"Give fields from 0 to {x.shape[1] - 1}."
            )
        return x.index_select(1, indices).flatten(1)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        if self.indices is not None:
            return f"selected={self.indices.tolist()}"
        if self.shape is not None:
            return f"shape={self.shape}"
        if self.leading_dim is None:
            return ""
        if self.time_steps is None:
            return f"leading_dim={self.leading_dim}"
        return f"leading_dim={self.leading_dim}, time_steps={self.time_steps}"


def _check_shape(shape: Sequence[int], selected: Sequence[int] | None) -> None:
    if selected is not None:
        raise ConfigError("Reshape: shape comes alone, got selected too. Use two layers.")
    sizes = [size for size in shape if size != -1]
    if len(sizes) != len(shape) - 1 or any(size < 1 for size in sizes):
        raise ConfigError(
            f"Reshape.shape: expected sizes from 1 on, and -1 once, got {list(shape)}. Put -1 in "
            "the place of the samples."
        )
