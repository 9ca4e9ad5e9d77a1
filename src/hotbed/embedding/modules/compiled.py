# SPDX-License-Identifier: Apache-2.0
"""The lookup as torch operators, so that torch.compile takes a model with tables as one graph.

`hotbed::pool` looks up the ids of a module, `hotbed::receive` returns the gradients to it. The
compiler does not look into them: a number stands for a module, an empty tensor for an absent one,
and a ticket for the mapped ids between forward and backward.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import MappedIds
from hotbed.errors import ConfigError

from .flow import FlowModule, look_up
from .transforms import check_export

MAX_WAITING = 256
"""Forward passes of a module whose backward may still come.

A pass without backward (a metric, an exception) is dropped when this many newer ones wait.
"""


class Tickets:
    """The mapped ids of a module's compiled forward passes, until a backward takes them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, MappedIds] = OrderedDict()
        self._next = 0
        self._lost = -1  # the newest ticket that was dropped

    def put(self, mapped: MappedIds) -> int:
        ticket = self._next
        self._next += 1
        self._waiting[ticket] = mapped
        if len(self._waiting) > MAX_WAITING:
            self._lost, _ = self._waiting.popitem(last=False)
        return ticket

    def take(self, ticket: int) -> MappedIds | None:
        """Return the mapped ids of a ticket, or None; a ticket is taken once."""
        return self._waiting.pop(ticket, None)

    def missing(self, ticket: int) -> ConfigError:
        """Return the error of a ticket without mapped ids."""
        if ticket < 0:
            return ConfigError(
                "embedding: a compiled lookup in eval mode takes no gradient. Call model.train(), "
                "freeze the tables with requires_grad_(False), or do not compile the lookup."
            )
        if ticket <= self._lost:
            return ConfigError(
                f"embedding: backward must come before {MAX_WAITING} more forward passes, got an "
                "old graph. Call backward before that."
            )
        return ConfigError(
            "embedding: a compiled lookup takes one backward, got a second one (retain_graph=True)."
            " Add the losses before one backward, or do not compile the lookup."
        )


class CompiledModule(FlowModule, Protocol):
    """What the operators know of a table module."""

    tickets: Tickets


alive: weakref.WeakValueDictionary[int, CompiledModule] = weakref.WeakValueDictionary()
"""Modules by number: an operator takes tensors and plain values only."""


def pool_compiled(
    module: FlowModule, inputs: Sequence[Ids], time: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the results of a module by operators."""
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
    """Return the pooled features, the rows of each sequence feature, and the ticket."""
    module = alive[number]
    inputs = [
        Ids(v, o if len(o) else None, w if len(w) else None)
        for v, o, w in zip(values, offsets, weights, strict=True)
    ]
    (flat, sequences), mapped = look_up(
        module, inputs, time if len(time) else None, training=training, keeps=learns
    )
    ticket = -1
    if learns:
        ticket = module.tickets.put(mapped)
    return [flat, *sequences, torch.tensor([ticket], device="cpu")]


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
    check_export(module.layout.tables)
    num_samples = values[0].shape[0]
    if offsets[0].shape[0]:
        num_samples = offsets[0].shape[0] - 1
    layout = module.layout
    device = module.device
    sequences = [
        anchor.new_empty(v.shape[0], dim, device=device)
        for v, dim in zip(values, layout.dims, strict=True)
    ]
    unpooled = [rows for rows, pooled in zip(sequences, layout.pooled, strict=True) if not pooled]
    return [
        anchor.new_empty(num_samples, layout.output_dim, device=device),
        *unpooled,
        anchor.new_empty(1, dtype=torch.int64, device="cpu"),
    ]


@torch.library.custom_op("hotbed::receive", mutates_args=())
def receive(ticket: Tensor, grads: Sequence[Tensor], number: int) -> Tensor:
    """Give the gradients of a pool's results to its module; return the anchor's gradient, zero."""
    module = alive[number]
    mapped = module.tickets.take(int(ticket))
    if not module.learns:
        return torch.zeros((), device="cpu")
    if mapped is None:
        raise module.tickets.missing(int(ticket))
    present = [grad if grad.dim() == 2 else None for grad in grads]
    if module.device.type != "cpu":
        # they travel after this call, when compiled code may have given their memory to others
        present = [None if grad is None else grad.clone() for grad in present]
    flat, *sequences = present
    module.gradients.add(module.lookup, module.layout, mapped, flat, sequences, module.device)
    return torch.zeros((), device="cpu")


@receive.register_fake
def _(ticket: Tensor, grads: Sequence[Tensor], number: int) -> Tensor:
    return torch.empty((), device="cpu")  # the anchor stays on the host


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
