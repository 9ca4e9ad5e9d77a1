# SPDX-License-Identifier: Apache-2.0
"""SparseOptimizer: applies each table's rule to the rows that the last backward passes gave
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.embedding.init import check_number
from hotbed.embedding.module import TableModule, table_modules
from hotbed.embedding.parameter import StepsTables, TableRows
from hotbed.embedding.table import Step, Table
from hotbed.errors import ConfigError, NonFiniteGradient
from hotbed.optim.ranks import check_single_rank


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that a dense optimizer takes: all but the rows of its tables.

    Example: `torch.optim.Adam(hb.dense_parameters(model), lr=1e-3)`
    """
    return [parameter for parameter in model.parameters() if not isinstance(parameter, TableRows)]


class SparseOptimizer(torch.optim.Optimizer, StepsTables):
    """A torch optimizer over the tables of a model: schedulers, accumulation, clipping and
    GradScaler
        work as with any other.

    There is one parameter group for each set of tables that share dim and rule; its `lr` starts at
    the rule's, its `tables` names them. `step()` sums what all lookups since the last step left
    (once an id), and applies the rule once a row. A gradient that is not finite raises
    NonFiniteGradient, naming table and id, before any row changes. Frozen tables are passed over.
    Raises ConfigError for a model without tables, or with two tables of one name.

    Example:
        >>> dense, sparse = torch.optim.Adam(hb.dense_parameters(model)), hb.SparseOptimizer(model)
        >>> loss.backward(); dense.step(); sparse.step()
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = table_modules(model)
        if not self._modules:
            raise ConfigError(
                f"SparseOptimizer: the model holds no tables — received {type(model).__name__} — "
                "use a dense optimizer alone"
            )
        _check_names(self._modules)
        groups = [
            {
                "params": [rows],
                "lr": module.tables[group.tables[0]].rule.lr,
                "tables": [module.tables[t].name for t in group.tables],
            }
            for module in self._modules
            for group, rows in zip(module.groups, module.rows, strict=True)
        ]
        super().__init__(groups, {"lr": 0.0})
        owners: dict[int, int] = {}
        for module in self._modules:
            for table in module.tables:
                owners[id(table.native)] = owners.get(id(table.native), 0) + 1
        self._shared = any(count > 1 for count in owners.values())

    def __getstate__(self) -> dict[str, Any]:
        # modules first: a copy then finds the copies of their parameters
        return {"_modules": self._modules, "_shared": self._shared, **super().__getstate__()}

    def tables(self) -> list[Table]:
        """The tables, each once."""
        return list(
            {id(table): table for module in self._modules for table in module.tables}.values()
        )

    def check_finite(self) -> None:
        """Raises NonFiniteGradient, naming table and id, if a waiting gradient is not finite.
        Changes nothing.
        """
        for module, step, grads in self._waiting():
            if module.pending is None or module.pending.known_finite(grads):
                continue
            for number, (table, address) in enumerate(
                zip(module.tables, module.addresses(step, grads), strict=True)
            ):
                bad = step.find_nonfinite(number, address)
                if bad is not None:
                    raise NonFiniteGradient(
                        f"table {table.name!r}: the gradient of id {bad} is not finite — nothing "
                        "was updated — look at the loss",
                        table.name,
                        bad,
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every table that has a gradient waiting. Raises ConfigError where several
        ranks train.
        """
        check_single_rank("SparseOptimizer.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_finite()
        for own in self.param_groups:
            check_number(f"SparseOptimizer: lr of tables {own['tables']}", own["lr"], 0.0)
            for table in own["params"][0].tables:
                table.watch_rate(own["lr"])
        rates = {id(rows): float(own["lr"]) for own in self.param_groups for rows in own["params"]}
        waiting = list(self._waiting())
        steps = []
        sums = []
        lrs = []
        for module, step, grads in waiting:
            pending = module.pending
            lr = [0.0] * len(module.tables)
            held = pending is not None and pending.holds(grads)
            steps.append(step)
            sums.append(
                pending.addresses if pending is not None and held else module.addresses(step, grads)
            )
            for group, rows in zip(module.groups, module.rows, strict=True):
                for table in group.tables:
                    lr[table] = rates[id(rows)]
            lrs.append(lr)
            module.pending = None
        if self._shared and len(steps) > 1:  # a table in two modules still steps once
            lr_of = {
                id(t.native): one
                for (module, _, _), lr in zip(waiting, lrs, strict=True)
                for t, one in zip(module.tables, lr, strict=True)
            }
            merged, arrays = Step.merge(steps, sums)
            steps = [merged]
            sums = [[array.__array_interface__["data"][0] for array in arrays]]
            lrs = [[lr_of[id(native)] for native in merged.tables()]]
        for step, addresses, lr in zip(steps, sums, lrs, strict=True):
            step.apply(addresses, lr)
        return loss

    def _waiting(self) -> Iterator[tuple[TableModule, Step, list[Tensor]]]:
        for module in self._modules:
            grads = [rows.grad for rows in module.rows]
            if module.pending is None or any(grad is None for grad in grads):
                module.pending = None  # zero_grad() took the gradients: nothing waits
                continue
            yield (
                module,
                module.pending.step,
                [
                    grad if grad.is_contiguous() else grad.contiguous()
                    for grad in grads
                    if grad is not None
                ],
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what waits."""
        for module in self._modules:
            module.pending = None
            for rows in module.rows:
                rows.grad = None


def _check_names(modules: Sequence[TableModule]) -> None:
    tables: dict[str, Table] = {}
    for table in (table for module in modules for table in module.tables):
        if tables.setdefault(table.name, table) is not table:
            raise ConfigError(
                "SparseOptimizer: expected one table of each name, got two called "
                f"{table.name!r}. Rename one, or let "
                "the modules share one."
            )
