# SPDX-License-Identifier: Apache-2.0
"""The lookup as torch operators, so that torch.compile takes a model with tables as one graph.

`hotbed::pool` runs TableModule.map_and_pool, `hotbed::receive` returns the gradients to the module.
The compiler does not look into them: a number stands for a module, an empty tensor for an absent
one, and a ticket for the plan between forward and backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import Step

from .plan import Plan, PlannedModule, Pooled, Tickets
from .transforms import check_export


class CompiledModule(PlannedModule, Protocol):
    """What the operators know of a table module."""

    training: bool
    anchor: Tensor
    number: int
    tickets: Tickets
    dims: list[int]
    pooled: list[bool]
    output_dim: int

    @property
    def learns(self) -> bool: ...
    def map_and_pool(
        self,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None = None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, Step]: ...
    def receive(
        self, step: Step, flat: Tensor | None, sequences: Sequence[Tensor | None]
    ) -> None: ...


alive: weakref.WeakValueDictionary[int, CompiledModule] = weakref.WeakValueDictionary()
"""Modules by number: an operator takes tensors and plain values only."""


def pool_compiled(
    module: CompiledModule, inputs: Sequence[Ids], time: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Run TableModule.pool as operators."""
    nothing = torch.empty(0, dtype=torch.int64)
    values = [ids.values for ids in inputs]
    offsets = [nothing if ids.offsets is None else ids.offsets for ids in inputs]
    weights = [torch.empty(0) if ids.weights is None else ids.weights for ids in inputs]
    moment = nothing if time is None else time
    learns = torch.is_grad_enabled() and module.training
    results = pool(
        module.anchor, values, offsets, weights, moment, module.number, module.training, learns
    )
    return results[0], list(results[1:-1])


_POOL = (  # spelled out: torch 2.6 cannot read the schema from `-> list[Tensor]`
    "(Tensor anchor, Tensor[] values, Tensor[] offsets, Tensor[] weights, Tensor time, SymInt "
    "number, bool training, bool learns)"
    " -> Tensor[]"
)


@torch.library.custom_op("hotbed::pool", mutates_args=(), schema=_POOL)
def pool(
    anchor: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    time: Tensor,
    number: int,
    training: bool,
    learns: bool,
) -> list[Tensor]:
    """Return the pooled features, the rows of each sequence feature, and the plan's ticket."""
    module = alive[number]
    inputs = [
        Ids(v, o if len(o) else None, w if len(w) else None)
        for v, o, w in zip(values, offsets, weights, strict=True)
    ]
    (flat, sequences), step = module.map_and_pool(
        inputs, time if len(time) else None, training=training, keeps=learns
    )
    ticket = -1
    if learns:
        ticket = module.tickets.put(step)
    return [flat, *sequences, torch.tensor([ticket])]


@pool.register_fake
def _(
    anchor: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor],
    time: Tensor,
    number: int,
    training: bool,
    learns: bool,
) -> list[Tensor]:
    module = alive[int(number)]  # torch 2.6 may give a symbol, which int() pins to its value
    check_export([table.name for table in module.tables])
    num_samples = values[0].shape[0]
    if offsets[0].shape[0]:
        num_samples = offsets[0].shape[0] - 1
    sequences = [
        anchor.new_empty(v.shape[0], dim) for v, dim in zip(values, module.dims, strict=True)
    ]
    unpooled = [rows for rows, pooled in zip(sequences, module.pooled, strict=True) if not pooled]
    return [
        anchor.new_empty(num_samples, module.output_dim),
        *unpooled,
        anchor.new_empty(1, dtype=torch.int64),
    ]


@torch.library.custom_op("hotbed::receive", mutates_args=())
def receive(ticket: Tensor, grads: Sequence[Tensor], number: int) -> Tensor:
    """Give the gradients of a pool's results to its module; return the anchor's gradient, zero."""
    module = alive[number]
    step = module.tickets.take(int(ticket))
    if not module.learns:
        return torch.zeros(())
    if step is None:
        raise module.tickets.missing(int(ticket))
    flat, *sequences = [grad if grad.dim() == 2 else None for grad in grads]
    module.receive(step, flat, sequences)
    return torch.zeros(())


@receive.register_fake
def _(ticket: Tensor, grads: Sequence[Tensor], number: int) -> Tensor:
    return torch.empty(())


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.number = inputs[5]
    ctx.num_features = len(inputs[1])
    ctx.save_for_backward(output[-1])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    of_results = [torch.empty(0) if grad is None else grad for grad in grads[:-1]]
    # ids and offsets take no gradient; weights that do are not compiled
    none: list[None] = [None] * ctx.num_features
    return receive(ticket, of_results, ctx.number), none, none, none, None, None, None, None


pool.register_autograd(_backward, setup_context=_remember)
