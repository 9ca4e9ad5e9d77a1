# SPDX-License-Identifier: Apache-2.0
"""The text of `RecModel.summary` and of the model's `repr`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hotbed.embedding.module import table_modules
from hotbed.embedding.table import Table
from hotbed.optim.sparse import dense_parameters
from hotbed.training.durable import brief


class Summary(str):
    """The text of a summary, which a notebook does not show again after it was printed."""

    __slots__ = ()

    def _ipython_display_(self) -> None:
        """Show nothing when IPython displays the value of a cell."""


def summary_of(model: Any) -> Summary:
    """Describe dense parameters, tables with policies and sizes, and settings of a RecModel."""
    return Summary("\n".join(_lines(model)))


def headline_of(model: Any) -> str:
    """Describe a RecModel in one line."""
    network = type(model.network).__name__
    rows = sum(len(table) for table in model.tables.values())
    counters = model.counters
    return (
        f"RecModel({network}, {_num_dense(model):,} dense parameters, "
        f"{len(model.tables)} tables with {rows:,} rows, metrics {sorted(model.metrics)}, "
        f"learned {counters['steps']:,} steps, {counters['epochs']} epochs)"
    )


def _lines(model: Any) -> Iterator[str]:
    network = type(model.network).__name__
    yield f"{network}: {_num_dense(model):,} dense parameters on {model.learner.device}"
    for name, module in model.network.named_children():
        if not table_modules(module):
            size = _num_elements(module)
            yield f"  {name:24} {type(module).__name__:20} {size:>12,}"
    if model.tables:
        yield f"{'table':18} {'dim':>4} {'rows':>10} {'MiB':>8}  rule, policies"
    for name, table in model.tables.items():
        yield _line_of(name, table)
    for name, value in model.arguments.items():
        if value is not None:
            yield f"{name}: {brief(value)}"


def _line_of(name: str, table: Table) -> str:
    policies = [table.rule, table.admit, *table.evictions]
    described = ", ".join(brief(policy) for policy in policies if policy)
    mib = sum(value for key, value in table.stats.items() if "bytes" in key) / 2**20
    return f"{name:18} {table.dim:>4} {len(table):>10,} {mib:>8.1f}  {described}"


def _num_dense(model: Any) -> int:
    return sum(parameter.numel() for parameter in dense_parameters(model.network))


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
