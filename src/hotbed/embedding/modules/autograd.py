# SPDX-License-Identifier: Apache-2.0
"""TableFlow: lookups as functions of autograd, whose gradients wait for an update of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import MappedIds, Plan, Pooled
from hotbed.embedding.lookups.host_ids import int64

from .compiled import pool_compiled
from .flow import Flow, FlowModule, look_up
from .transforms import check_transforms


class TableFlow(Flow):
    """Lets gradients through to the rows of the tables, and to weights that require one."""

    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        check_transforms(module.layout.tables, inputs[0].values)
        weighted = {
            number: ids.weights
            for number, ids in enumerate(inputs)
            if ids.weights is not None and graph_weights(ids.weights) is not None
        }
        if torch.compiler.is_compiling():
            if weighted or module.layout.buckets.sizes:
                pooled: Pooled = _pool_eagerly(module, inputs, time)
                return pooled
            return pool_compiled(module, inputs, time)
        if torch.is_grad_enabled() and (weighted or module.learns):
            anchor = module.anchor if module.learns else module.anchor.detach()
            flat, *sequences = _Pool.apply(  # type: ignore[no-untyped-call]  # torch has no types
                anchor, module, inputs, time, plan, tuple(weighted), *weighted.values()
            )
            return flat, sequences
        results, _ = look_up(module, inputs, time, plan, training=module.training, keeps=False)
        return results


class _Pool(torch.autograd.Function):
    """The lookup as an autograd function.

    `weighted`: the numbers of the features whose weights require a gradient; `weights`: theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: FlowModule,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        weighted: Sequence[int],
        *weights: Tensor,
    ) -> Any:
        results, mapped = look_up(module, inputs, time, plan, training=module.training, keeps=True)
        ctx.mapped = mapped
        ctx.module = module
        ctx.weighted = {
            number: Weighted.of(module, mapped, number, inputs[number]) for number in weighted
        }
        ctx.set_materialize_grads(False)
        flat, sequences = results
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        module: FlowModule = ctx.module
        if module.learns and any(grad is not None for grad in grads):
            flat, *sequences = grads
            module.gradients.add(
                module.lookup, module.layout, ctx.mapped, flat, sequences, module.device
            )
        of_weights: list[Tensor | None] = []
        if ctx.weighted:
            parts = list(module.layout.split(grads[0], grads[1:]))
            for number, weighted in ctx.weighted.items():
                grad = parts[number]
                of_weights.append(None if grad is None else weighted.gradient(grad))
        return None, None, None, None, None, None, *of_weights


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
def _pool_eagerly(module: FlowModule, inputs: Sequence[Ids], time: Any) -> Pooled:
    return module.flow.pool(module, inputs, time, None)


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
    def of(module: FlowModule, mapped: MappedIds, number: int, ids: Ids) -> Weighted:
        """Return these values for the ids of a feature of `module`, which are mapped."""
        feature = module.layout.features[number]
        size = (len(ids.values), module.layout.dims[number])
        rows = torch.empty(size, dtype=torch.float32, device="cpu")
        mapped.read_positions(number, rows)
        results = torch.arange(len(rows), device="cpu")
        shares = torch.ones(len(rows), dtype=torch.float32, device="cpu")
        if feature.pooling != "none" and ids.offsets is not None:
            lengths = int64(ids.offsets, feature.name).diff()
            results = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
            if feature.pooling == "mean":
                shares = 1.0 / lengths[results].float()
        return Weighted(rows, results, shares, ids.weights.device)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the weights [m] from `grad`, that of the results [n, dim]."""
        each = (self.rows * grad.detach().to("cpu", torch.float32)[self.results]).sum(1)
        return (each * self.shares).to(self.device)


def graph_weights(weights: Any) -> Tensor | None:
    """Return the weights of ids if they are part of the graph of autograd, else None."""
    if isinstance(weights, Tensor) and weights.requires_grad and torch.is_grad_enabled():
        return weights
    return None
