# SPDX-License-Identifier: Apache-2.0
"""Check the tensors that enter a lookup, move them to the host, and keep the gradients it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Ids, as_ids
from hotbed.errors import RowShapeError

from .table import Step, Table

_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


@dataclass
class Pending:
    """Gradients that wait for the optimizer: the distinct ids (`step`), a tensor of sums a group.

    `addresses`: the address of each table's first sum. `finite`: whether the sums were finite, at
    these `versions` of the tensors.
    """

    step: Step
    grads: list[Tensor]
    addresses: list[int]
    versions: list[int]
    finite: bool

    def known_finite(self, grads: Sequence[Tensor]) -> bool:
        """Return True when the sums were finite and nothing has changed them since."""
        versions = [grad._version for grad in grads]
        return self.finite and self.holds(grads) and self.versions == versions

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """Return True when these are the tensors that backward left, whatever their values are."""
        return all(grad is own for grad, own in zip(grads, self.grads, strict=True))


@dataclass(frozen=True)
class Weighted:
    """The values that the gradient of weights needs.

    `rows`: the row of each id [m, dim]; `results`: the number of the result to which it was added
    [m]; `shares`: its share of that result [m].
    """

    rows: Tensor
    results: Tensor
    shares: Tensor
    device: torch.device

    @staticmethod
    def of(table: Table, feature: str, pooling: str, ids: Ids) -> Weighted:
        rows = torch.from_numpy(table.lookup(int64(ids.values, feature).numpy()))
        results = torch.arange(len(rows))
        shares = torch.ones(len(rows))
        if pooling != "none" and ids.offsets is not None:
            lengths = int64(ids.offsets, feature).diff()
            results = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            if pooling == "mean":
                shares = 1.0 / lengths[results].float()
        return Weighted(rows, results, shares, ids.weights.device)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the weights [m] from `grad`, that of the results [n, dim]."""
        each = (self.rows * grad.detach().to("cpu", torch.float32)[self.results]).sum(1)
        return (each * self.shares).to(self.device)


def takes_gradient(weights: Any) -> bool:
    return isinstance(weights, Tensor) and weights.requires_grad and torch.is_grad_enabled()


def int64(array: Any, feature: str) -> Tensor:
    """Return ids or offsets as int64 [n] on the host."""
    if isinstance(array, Tensor):
        tensor = array
    else:
        tensor = torch.from_numpy(as_ids(array, f"feature {feature!r}: ids and offsets"))
    if tensor.dtype == torch.uint64:
        tensor = tensor.view(torch.int64)
    elif tensor.dtype in _INTEGERS:
        tensor = tensor.to(torch.int64)
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: expected ids and offsets as integers of shape [n], "
            f"got {tensor.dtype} {list(tensor.shape)}. Convert or flatten them."
        )
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.cpu().contiguous()


def float32(array: Any, feature: str) -> Tensor:
    """Return weights as float32 [m] on the host."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype != torch.float32 or tensor.dim() != 1:
        raise RowShapeError(
            f"feature {feature!r}: expected weights as float32 of shape [m], "
            f"got {tensor.dtype} {list(tensor.shape)}. Convert them."
        )
    return tensor.detach().cpu().contiguous()


def dense_rows(grad: Tensor) -> Tensor:
    """Return a gradient as float32 rows on the host; rows may lie apart, lanes may not."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.requires_grad:
        grad = grad.detach().to("cpu", torch.float32)
    if grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1]:
        return grad
    return grad.contiguous()
