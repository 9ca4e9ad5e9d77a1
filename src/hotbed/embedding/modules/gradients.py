# SPDX-License-Identifier: Apache-2.0
"""The gradients that a lookup gets back, until the optimizer applies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import Step, Table

from .inputs import int64


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


def dense_rows(grad: Tensor) -> Tensor:
    """Return a gradient as float32 rows on the host; rows may lie apart, lanes may not."""
    if grad.dtype != torch.float32 or not grad.is_cpu or grad.requires_grad:
        grad = grad.detach().to("cpu", torch.float32)
    if grad.dim() == 2 and grad.stride(1) == 1 and grad.stride(0) >= grad.shape[1]:
        return grad
    return grad.contiguous()
