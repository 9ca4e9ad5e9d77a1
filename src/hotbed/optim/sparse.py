# SPDX-License-Identifier: Apache-2.0
"""SparseOptimizer: applies the rule of each table to its rows that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hotbed import checks
from hotbed.config import did_you_mean
from hotbed.embedding.modules import TableModule, table_modules, update_tables
from hotbed.embedding.modules.parameter import StepsTables, TableRows
from hotbed.embedding.rule import Ftrl
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.optim.closure import loss_of
from hotbed.parallel.world import check_not_wrapped, check_single_rank


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `model` for a dense optimizer: all but the rows of its tables.

    Example: `torch.optim.Adam(hb.dense_parameters(model), lr=1e-3)`
    """
    return [parameter for parameter in model.parameters() if not isinstance(parameter, TableRows)]


class SparseOptimizer(torch.optim.Optimizer, StepsTables):
    """A torch optimizer over the tables of a model.

    Schedulers, accumulation, clipping and GradScaler work as with any other. There is one parameter
    group for each set of tables that share dim and rule; its `lr` starts at the rule's, its
    `tables` names them. `step()` sums the gradients of all lookups since the last step by id, and
    applies the rule once a row. Frozen tables are skipped.

    Attributes:
        keeps_gradients: whether gradients wait on after a step, until `zero_grad()`, as those of
            other torch optimizers do.

    Raises:
        ConfigError: the model has no tables, or two tables of one name, or torch shares out its
            dense part over ranks.
        NonFiniteGradient: in `step()`, a gradient is not finite. It names table and id, and no row
            has changed.

    Example:
        >>> dense, sparse = torch.optim.Adam(hb.dense_parameters(model)), hb.SparseOptimizer(model)
        >>> loss.backward(); dense.step(); sparse.step()
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = table_modules(model)
        if not self._modules:
            raise ConfigError(
                f"SparseOptimizer: the model has no tables, got {type(model).__name__}. "
                "Use a dense optimizer alone."
            )
        check_not_wrapped(model)
        _check_names(self._modules)
        # modules that share their gradients are one here
        self._modules = list({id(module.gradients): module for module in self._modules}.values())
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
        self.keeps_gradients = False

    def __getstate__(self) -> dict[str, Any]:
        # modules first: a copy then finds the copies of their parameters
        return {
            "_modules": self._modules,
            "keeps_gradients": self.keeps_gradients,
            **super().__getstate__(),
        }

    @staticmethod
    def join(parts: Sequence[SparseOptimizer]) -> SparseOptimizer:
        """Return an optimizer of the tables of several, which shares their parameter groups.

        A learning rate that is set in one is set in the other.
        """
        if len(parts) == 1:
            return parts[0]
        joined = SparseOptimizer(nn.ModuleList([m for part in parts for m in part._modules]))
        joined.param_groups = [group for part in parts for group in part.param_groups]
        return joined

    def tables(self) -> list[Table]:
        """Return the tables, each once."""
        return list(
            {id(table): table for module in self._modules for table in module.tables}.values()
        )

    def set_learning_rates(self, rates: float | Mapping[str, float]) -> None:
        """Set the learning rates of the next steps: one for all tables, or by table name.

        Raises:
            ConfigError: a rate is not a number >= 0, a table is unknown, or tables that share a
                parameter group (one dim and rule) get two rates.
        """
        names = [table.name for table in self.tables()]
        if not isinstance(rates, Mapping):
            rates = dict.fromkeys(names, rates)
        for name, value in rates.items():
            if name not in names:
                advice = did_you_mean(name, names)
                raise ConfigError(f"learning rate: no table has this name, got {name!r}. {advice}")
            checks.finite_number(f"learning rate of table {name!r}", value, least=0)
        for group in self.param_groups:
            chosen = {rates.get(name) for name in group["tables"]}
            if len(chosen) > 1:
                raise ConfigError(
                    f"learning rate: tables {group['tables']} have one dim and rule, and share a "
                    f"rate, got {dict(rates)}. Give each of them the same rate."
                )
        for group in self.param_groups:
            name = group["tables"][0]
            if name in rates:
                group["lr"] = rates[name]
                if "initial_lr" in group:  # a schedule that is attached later starts from it
                    group["initial_lr"] = rates[name]

    def check_finite(self) -> None:
        """Raise NonFiniteGradient, naming table and id, if a waiting gradient is not finite.

        Nothing is changed.
        """
        for module in self._modules:
            module.gradients.check_finite()

    def check(self) -> None:
        """Raise the error that `step()` would raise. Nothing is changed."""
        if not all(module.lookup.spans_ranks for module in self._modules):
            check_single_rank("SparseOptimizer.step")
        self.check_finite()
        for group in self.param_groups:
            where = f"SparseOptimizer: lr of tables {group['tables']}"
            checks.finite_number(where, group["lr"], least=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every table whose gradients wait.

        Raises:
            ConfigError: several ranks train, or a learning rate is not a number >= 0.
            NonFiniteGradient: a gradient is not finite; no row has changed.
        """
        loss = loss_of(closure)
        self.check()
        for group in self.param_groups:
            tables = group["params"][0].tables
            if isinstance(tables[0].rule, Ftrl):  # all of a group have one rule
                for table in tables:
                    table.watch_rate(group["lr"])
        rate_of = {id(group["params"][0]): float(group["lr"]) for group in self.param_groups}
        rates = [[rate_of[id(rows)] for rows in module.rows] for module in self._modules]
        update_tables(self._modules, rates, keeps=self.keeps_gradients)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait, or set them to zero.

        A step with gradients of zero moves rows that have momentum or decay, as in torch: all of
        them under the scopes `all` and `catch_up`, none under `touched`.
        """
        for module in self._modules:
            if set_to_none:
                module.gradients.drop()
            else:
                module.gradients.clear()


def _check_names(modules: Sequence[TableModule]) -> None:
    tables: dict[str, Table] = {}
    for table in (table for module in modules for table in module.tables):
        if tables.setdefault(table.name, table) is not table:
            raise ConfigError(
                "SparseOptimizer: expected one table of each name, got two called "
                f"{table.name!r}. Rename one, or let the modules share one."
            )
