# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors that layers are called with.

`where` is the layer, as users know it: `Slice`. All raise ConfigError with the shapes that came.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotbed.errors import ConfigError


def dimensions(where: str, tensor: Tensor, *expected: int) -> None:
    """Raise ConfigError unless `tensor` has one of the `expected` numbers of dimensions."""
    if tensor.dim() not in expected:
        numbers = " or ".join(str(number) for number in expected)
        raise ConfigError(
            f"{where}: expected a tensor of {numbers} dimensions, got shape {list(tensor.shape)}. "
            "Reshape it, or connect another one."
        )


def size(where: str, tensor: Tensor, axis: int, expected: int) -> None:
    """Raise ConfigError unless dimension `axis` has the `expected` size."""
    if not -tensor.dim() <= axis < tensor.dim() or tensor.shape[axis] != expected:
        raise ConfigError(
            f"{where}: expected size {expected} in dimension {axis}, got shape "
            f"{list(tensor.shape)}. Build the layer for that size, or connect another tensor."
        )


def same_shape(where: str, tensors: Sequence[Tensor], but: int | None = None) -> None:
    """Raise ConfigError unless there are tensors, all of one shape; dimension `but` may differ."""
    shapes = [list(tensor.shape) for tensor in tensors]
    compared = [shape[:but] + shape[but + 1 :] if but is not None else shape for shape in shapes]
    ranks = {len(shape) for shape in shapes}
    if not shapes or len(ranks) > 1 or any(shape != compared[0] for shape in compared[1:]):
        exception = ""
        if but is not None:
            exception = f", dimension {but} excepted"
        raise ConfigError(
            f"{where}: expected tensors of one shape{exception}, got {shapes}. "
            "Reshape them, or connect others."
        )
