# SPDX-License-Identifier: Apache-2.0
"""Attention of one query a sample over packed rows, as a torch operator of the native core.

torch has no operation that sums rows of a matrix by ranges and has a fast gradient on a CPU. The
compiler does not look into `hotbed::attend`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed import _core

ALL = 2**62
"""The `length` that reads all rows of a sample."""


@torch.library.custom_op("hotbed::attend", mutates_args=(), device_types="cpu")
def attend(queries: Tensor, rows: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the weighed mean of the rows of each sample, and the weights.

    Args:
        queries: float32 [n, dim].
        rows: float32 [m, dim]; sample i has the rows from offsets[i] to offsets[i + 1].
        offsets: int64 [n + 1].
        length: the last rows of a sample that are read.

    Returns:
        float32 [n, dim], zeros for a sample without rows; and float32 [m], the softmax of the inner
        products of query and rows within a sample, 0 for rows that are not read. The weights take
        no gradient.
    """
    pooled = torch.empty(queries.shape, dtype=torch.float32)
    weights = torch.empty(rows.shape[0], dtype=torch.float32)
    _core.attend(
        queries=_array(queries),
        rows=_array(rows),
        offsets=_array(offsets),
        length=length,
        weights=weights.numpy(),
        pooled=pooled.numpy(),
    )
    return pooled, weights


@attend.register_fake
def _(queries: Tensor, rows: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), rows.new_empty(rows.shape[0])


@torch.library.custom_op("hotbed::attend_backward", mutates_args=(), device_types="cpu")
def attend_backward(
    queries: Tensor,
    rows: Tensor,
    offsets: Tensor,
    length: int,
    weights: Tensor,
    pooled: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the queries and of the rows, from that of the means."""
    query_grads = torch.empty(queries.shape, dtype=torch.float32)
    row_grads = torch.empty(rows.shape, dtype=torch.float32)
    _core.attend_backward(
        queries=_array(queries),
        rows=_array(rows),
        offsets=_array(offsets),
        length=length,
        weights=weights.numpy(),
        pooled=pooled.numpy(),
        grad=_array(grad),
        query_grads=query_grads.numpy(),
        row_grads=row_grads.numpy(),
    )
    return query_grads, row_grads


@attend_backward.register_fake
def _(
    queries: Tensor,
    rows: Tensor,
    offsets: Tensor,
    length: int,
    weights: Tensor,
    pooled: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), rows.new_empty(rows.shape)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, rows, offsets, ctx.length = inputs
    pooled, weights = output
    ctx.mark_non_differentiable(weights)
    ctx.save_for_backward(queries, rows, offsets, weights, pooled)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    queries, rows, offsets, weights, pooled = ctx.saved_tensors
    grads = attend_backward(queries, rows, offsets, ctx.length, weights, pooled, grad)
    return *grads, None, None


attend.register_autograd(_backward, setup_context=_remember)
