# SPDX-License-Identifier: Apache-2.0
"""RowTargets: lookups whose gradients flow to tensors, for loops that update rows themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import (
    Buckets,
    Group,
    Lookup,
    MappedIds,
    Plan,
    Pooled,
    Sums,
    update_parts,
)
from hotbed.embedding.lookups.host_ids import dense_rows
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, RowShapeError

from .autograd import graph_weights
from .flow import Flow, FlowModule, look_up

log = logging.getLogger("hotbed")
MANY_PASSES = 256
"""Forward passes without an update after which a loop has probably forgotten it."""


@dataclass(frozen=True, eq=False)
class Target:
    """The distinct rows that one lookup read from a table: a leaf that takes their gradient.

    Attributes:
        rows: float32 [u, dim], requires a gradient. `torch.autograd.grad(loss, [target.rows])`
            returns the sums of the batch by row.
        slots: int64 [u], where the rows lie; -1 = no row: a refused id, or a filler.
        lookup: performed the lookup.
        mapped: its ids, which keep the slots valid.
        number: of the table among theirs.
    """

    rows: Tensor
    slots: Tensor
    lookup: Lookup
    mapped: MappedIds
    number: int

    @property
    def table(self) -> Table:
        return self.mapped.tables[self.number]


class RowTargets(Flow):
    """Lets the gradients of rows flow to a `Target` a table.

    A lookup in train mode with gradients enabled adds its targets to `waiting`, in the order of the
    tables. Give them to `update_targets` with their gradients, or drop them: until then their rows
    keep their slots. In eval mode, and without gradients, no target is added.

    Args:
        sizes: the number of rows that each target of a table has, by name of the table; rows of
            zeros with slot -1 fill it up. Tables without one have as many rows as distinct ids.

    Attributes:
        fixed: ids by name of the table whose rows take no update: their slot is -1.
        waiting: the targets of the lookups since the last update.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self.fixed: dict[str, Sequence[int]] = {}
        self.waiting: list[Target] = []
        self._warned = False

    def pool(
        self, module: FlowModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        """Return the results of `module`, and keep a target for each of its tables.

        Raises:
            RowShapeError: a table has more distinct ids than its size in `sizes`.
        """
        if any(graph_weights(ids.weights) is not None for ids in inputs):
            raise ConfigError(
                "RowTargets: weights of ids take no gradient here, got weights that require one. "
                "Detach them, or use TableFlow."
            )
        learns = module.training and module.learns and torch.is_grad_enabled()
        results, mapped = look_up(
            module, inputs, time, plan, training=module.training, keeps=learns
        )
        if not learns:
            return results
        targets = self._targets(module, mapped)
        self.waiting.extend(targets)
        self._watch(len(targets))
        leaves = [target.rows for target in targets]
        flat, *sequences = _Read.apply(  # type: ignore[no-untyped-call]  # torch has no types
            module, mapped, results, *leaves
        )
        return flat, sequences

    def _watch(self, num_tables: int) -> None:
        """Log once that many passes wait: memory grows, and their rows do not learn."""
        if self._warned or len(self.waiting) <= MANY_PASSES * num_tables:
            return
        self._warned = True
        log.warning(
            "the gradients of rows of more than %d forward passes wait for an update, and memory "
            "grows. Update the rows in each step of the loop, or drop their gradients",
            MANY_PASSES,
        )

    def _targets(self, module: FlowModule, mapped: MappedIds) -> list[Target]:
        uniques = mapped.num_uniques()
        sizes = [
            self._size(table, n) for table, n in zip(module.layout.tables, uniques, strict=True)
        ]
        targets = []
        for number, (table, size) in enumerate(zip(module.layout.tables, sizes, strict=True)):
            rows = torch.empty(size, table.dim, dtype=torch.float32, device="cpu")
            slots = torch.empty(size, dtype=torch.int64, device="cpu")
            mapped.read(number, rows, slots)
            rows[uniques[number] :] = 0.0
            slots[uniques[number] :] = -1
            if table.name in self.fixed:
                is_fixed = np.isin(mapped.unique_ids(number), self.fixed[table.name])
                places = np.flatnonzero(is_fixed)
                mapped.leave_out(number, places)
                slots[torch.from_numpy(places)] = -1
            targets.append(Target(rows.requires_grad_(), slots, module.lookup, mapped, number))
        return targets

    def _size(self, table: Table, num_uniques: int) -> int:
        size = self.sizes.get(table.name, num_uniques)
        if num_uniques > size:
            raise RowShapeError(
                f"table {table.name!r}: a batch has more distinct ids than its static size of "
                f"{size}, got {num_uniques}. Give at least {num_uniques}, or smaller batches."
            )
        return size


class _Read(torch.autograd.Function):
    """Results of a lookup as a function of the distinct rows of its tables."""

    @staticmethod
    def forward(
        ctx: Any, module: FlowModule, mapped: MappedIds, results: Pooled, *leaves: Tensor
    ) -> Any:
        ctx.module = module
        ctx.mapped = mapped
        ctx.sizes = [len(leaf) for leaf in leaves]
        ctx.set_materialize_grads(False)
        flat, sequences = results
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sums: list[Tensor | None] = [None] * len(ctx.sizes)
        if any(grad is not None for grad in grads):
            module: FlowModule = ctx.module
            groups = [
                _alone(table, number, Buckets((size,)))
                for number, (table, size) in enumerate(
                    zip(module.layout.tables, ctx.sizes, strict=True)
                )
            ]
            sums[:] = module.lookup.sum_gradients(
                module.layout, ctx.mapped, grads[0], grads[1:], groups
            ).grads
        return None, None, None, *sums


def _alone(table: Table, number: int, buckets: Buckets) -> Group:
    """Return the group of a table alone."""
    return Group(table.dim, (number,), repr(table.name), buckets)


def update_targets(
    gradients: Sequence[tuple[Target, Tensor | None]], rates: Mapping[str, float]
) -> None:
    """Apply the rule of each table to the rows of targets, once a row.

    Gradients of one row in several targets are summed. All are checked before any row changes. A
    table without a gradient among them is left alone: its step does not rise.

    Args:
        gradients: each target once, with its gradient, float32 [u, dim]; None = it has none.
        rates: the learning rate of each table, by name.

    Raises:
        NonFiniteGradient: a gradient is not finite; nothing was updated.
        RowShapeError: a gradient has not the shape of its target's rows.
        ConfigError: a target is given twice.
    """
    parts: dict[int, Sums] = {}
    for target, grad in gradients:
        part = parts.setdefault(id(target.mapped), Sums(target.mapped, [], []))
        if grad is None:
            continue
        group = _alone(target.table, target.number, Buckets(()))
        if group in part.groups:
            raise ConfigError(
                f"table {target.table.name!r}: a target takes one gradient, got it twice. Sum them."
            )
        parts[id(target.mapped)] = Sums(
            target.mapped, [*part.groups, group], [*part.grads, _checked(target, grad)]
        )
    for part in parts.values():
        part.check_finite()
    for target, grad in gradients:
        if grad is not None:
            target.table.watch_rate(rates.get(target.table.name, 0.0))
    sums = list(parts.values())
    tables = [[part.mapped.tables[group.tables[0]] for group in part.groups] for part in sums]
    part_rates = [[rates.get(table.name, 0.0) for table in part] for part in tables]
    lookups = {id(target.mapped): target.lookup for target, _ in gradients}
    update_parts(zip(lookups.values(), sums, part_rates, strict=True))
    for part in parts.values():
        part.mapped.let_go()


def _checked(target: Target, grad: Tensor) -> Tensor:
    """Return a gradient as an update takes it."""
    if grad.shape != target.rows.shape:
        raise RowShapeError(
            f"table {target.table.name!r}: a gradient must have the shape of its rows, "
            f"{list(target.rows.shape)}, got {list(grad.shape)}. Give the gradient of the rows."
        )
    return dense_rows(grad).contiguous()
