# SPDX-License-Identifier: Apache-2.0
"""Operators of FBGEMM, which models of TorchRec call, by the operators of torch.

FBGEMM is not imported here: a graph holds its operators only after the user's code has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what computes each operator of FBGEMM with those of torch; {} without FBGEMM."""
    if "fbgemm_gpu" not in sys.modules:
        return {}
    return {getattr(torch.ops.fbgemm, name).default: of for name, of in _OPERATORS.items()}


def _complete_cumsum(lengths: Tensor) -> Tensor:
    """Return offsets with all ends, [n + 1] or [k, n + 1], of lengths [n] or [k, n]."""
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=lengths.dtype), (1, 0))


def _padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[Any], padding_value: float = 0
) -> Any:
    """Return the rows of each bag side by side, [n, length, ...], with padding behind them."""
    if len(offsets) != 1:
        return NotImplemented
    (ends,) = offsets
    places = torch.arange(max_lengths[0], device=values.device)
    rows = ends[:-1, None] + places
    is_row = rows < ends[1:, None]
    padding = values.new_full((1, *values.shape[1:]), padding_value)
    rows = torch.where(is_row, rows, values.shape[0])
    return torch.cat([values, padding])[rows]


def _offsets_range(offsets: Tensor, range_size: Any) -> Tensor:
    """Return the place of each value in its bag, [range_size]; offsets have no end."""
    values = torch.arange(range_size, device=offsets.device, dtype=offsets.dtype)
    begun = torch.zeros(range_size + 1, device=offsets.device, dtype=offsets.dtype)
    begun = begun.scatter_add(0, offsets.to(torch.int64), torch.ones_like(offsets))
    bags = begun.narrow(0, 0, range_size).cumsum(0) - 1
    return values - offsets[bags]


def _permuted(
    pooled: Tensor, starts: Tensor, permute: Tensor, inv_starts: Tensor, inv_permute: Tensor
) -> Tensor:
    """Return the features of pooled rows [n, width] in another order; starts have all ends."""
    columns = torch.arange(pooled.shape[1], device=pooled.device)
    places = (columns[:, None] >= inv_starts[1:]).sum(1)
    return pooled[:, starts[permute[places]] + columns - inv_starts[places]]


def _permuted_groups(
    pooled: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[Any],
    reverse: bool = False,
) -> Any:
    """Return groups of features of several pooled rows.

    Each of `permutes` [k, 6] is: input, output, first column of the input, first column of the
    output, width, and a link for gradients.
    """
    if reverse:
        return NotImplemented
    source, target, first, start, width, _ = permutes.to(torch.int64).unbind(1)
    ends = in_shapes.to(torch.int64).cumsum(0)
    first = first + (ends - in_shapes)[source]
    every = torch.cat(list(pooled), 1)
    groups = []
    for number, length in enumerate(out_lengths):
        columns = torch.arange(length, device=every.device)[:, None]
        is_part = (target == number) & (start <= columns) & (columns < start + width)
        groups.append(every[:, (is_part * (first + columns - start)).sum(1)])
    return groups


_OPERATORS: dict[str, Callable[..., Any]] = {
    "asynchronous_complete_cumsum": _complete_cumsum,
    "jagged_to_padded_dense": _padded_dense,
    "jagged_to_padded_dense_forward": _padded_dense,
    "offsets_range": _offsets_range,
    "permute_multi_embedding": _permuted_groups,
    "permute_multi_embedding_function": _permuted_groups,
    "permute_pooled_embs": _permuted,
    "permute_pooled_embs_auto_grad": _permuted,
}
