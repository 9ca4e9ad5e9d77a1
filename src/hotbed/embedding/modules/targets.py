# SPDX-License-Identifier: Apache-2.0
"""RowTargets: lookups whose gradients flow to tensors, for loops that update rows themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.table import Step, Table
from hotbed.errors import ConfigError, NonFiniteGradient, RowShapeError

from .gradients import Sums, dense_rows, takes_gradient
from .lookup import LookedUpModule, Lookup
from .plan import Pooled

if TYPE_CHECKING:
    from .base import TableModule
    from .plan import Plan

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
        step: the native plan of the lookup, which keeps the slots valid.
        tables: those of the step.
        number: of the table among them.
    """

    rows: Tensor
    slots: Tensor
    step: Step
    tables: Sequence[Table]
    number: int

    @property
    def table(self) -> Table:
        return self.tables[self.number]


class RowTargets(Lookup):
    """Looks up rows as `LocalLookup` does, but their gradients flow to a `Target` a table.

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
        self, module: LookedUpModule, inputs: Sequence[Ids], time: Any, plan: Plan | None
    ) -> Pooled:
        """Return the results of `module`, and keep a target for each of its tables.

        Raises:
            RowShapeError: a table has more distinct ids than its size in `sizes`.
        """
        if any(takes_gradient(ids.weights) for ids in inputs):
            raise ConfigError(
                "RowTargets: weights of ids take no gradient here, got weights that require one. "
                "Detach them, or look up with LocalLookup."
            )
        learns = module.training and module.learns and torch.is_grad_enabled()
        pooled, step = module.map_and_pool(
            inputs, time, plan, training=module.training, keeps=learns
        )
        if not learns:
            return pooled
        targets = self._targets(module, step)
        self.waiting.extend(targets)
        self._watch(len(targets))
        leaves = [target.rows for target in targets]
        flat, *sequences = _Read.apply(  # type: ignore[no-untyped-call]  # torch has no types
            module, step, pooled, *leaves
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

    def _targets(self, module: LookedUpModule, step: Step) -> list[Target]:
        uniques = step.num_uniques()
        sizes = [self._size(table, n) for table, n in zip(module.tables, uniques, strict=True)]
        targets = []
        for number, (table, size) in enumerate(zip(module.tables, sizes, strict=True)):
            rows = torch.empty(size, table.dim, dtype=torch.float32, device="cpu")
            slots = torch.empty(size, dtype=torch.int64, device="cpu")
            step.unique_rows(number, rows.data_ptr(), slots.data_ptr())
            rows[uniques[number] :] = 0.0
            slots[uniques[number] :] = -1
            if table.name in self.fixed:
                ids = step.unique_ids(number)
                left_out = np.flatnonzero(np.isin(ids, self.fixed[table.name]))
                step.leave_out(number, left_out)
                slots[torch.from_numpy(left_out)] = -1
            target = Target(rows.requires_grad_(), slots, step, module.tables, number)
            targets.append(target)
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
    def forward(ctx: Any, module: TableModule, step: Step, pooled: Pooled, *leaves: Tensor) -> Any:
        ctx.module = module
        ctx.step = step
        ctx.sizes = [len(leaf) for leaf in leaves]
        ctx.set_materialize_grads(False)
        flat, sequences = pooled
        return (flat, *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sums: list[Tensor | None] = [None] * len(ctx.sizes)
        if any(grad is not None for grad in grads):
            sums = ctx.module.sums(ctx.step, grads[0], grads[1:], ctx.sizes)
        return None, None, None, *sums


def update_targets(gradients: Sequence[tuple[Target, Tensor]], rates: Mapping[str, float]) -> None:
    """Apply the rule of each table to the rows of targets, once a row.

    Gradients of one row in several targets are summed. All are checked before any row changes. A
    table without a gradient among them is left alone: its step does not rise.

    Args:
        gradients: each target once, with its gradient, float32 [u, dim].
        rates: the learning rate of each table, by name.

    Raises:
        NonFiniteGradient: a gradient is not finite; nothing was updated.
        RowShapeError: a gradient has not the shape of its target's rows.
        ConfigError: a target is given twice.
    """
    parts: dict[int, Sums] = {}
    for target, grad in gradients:
        rows = _checked(target, grad)
        part = parts.get(id(target.step))
        if part is None:
            tables = target.tables
            part = Sums(
                tables,
                target.step,
                [],
                [None] * len(tables),
                [rates.get(table.name, 0.0) for table in tables],
            )
            parts[id(target.step)] = part
        if part.addresses[target.number] is not None:
            raise ConfigError(
                f"table {target.table.name!r}: a target takes one gradient, got it twice. Sum them."
            )
        part.arrays.append(rows)
        part.addresses[target.number] = rows.data_ptr()
    sums = list(parts.values())
    if len(sums) > 1:
        sums = [Sums.merge(sums)]
    for part in sums:
        for table, rate, address in zip(part.tables, part.rates, part.addresses, strict=True):
            if address is not None:
                table.watch_rate(rate)
        part.apply()


def _checked(target: Target, grad: Tensor) -> Tensor:
    """Return a gradient as the native update reads it."""
    name = target.table.name
    if grad.shape != target.rows.shape:
        raise RowShapeError(
            f"table {name!r}: a gradient must have the shape of its rows, "
            f"{list(target.rows.shape)}, got {list(grad.shape)}. Give the gradient of the rows."
        )
    rows = dense_rows(grad).contiguous()
    bad = target.step.find_nonfinite(target.number, rows.data_ptr())
    if bad is not None:
        raise NonFiniteGradient(
            f"table {name!r}: the gradient of id {bad} is not finite; nothing was updated. "
            "Look at the loss.",
            name,
            bad,
        )
    return rows
