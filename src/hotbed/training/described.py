# SPDX-License-Identifier: Apache-2.0
"""The words for a model: its description in a checkpoint, its summary and its `repr`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hotbed.config import build, describe
from hotbed.embedding.modules import table_modules
from hotbed.embedding.rule import Rule
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.metrics import Metric
from hotbed.models.losses import Loss, MultiTask
from hotbed.optim.dense import NAMES, TorchOptimizer
from hotbed.optim.precision import Boost
from hotbed.optim.sparse import dense_parameters


def described_argument(value: Any) -> Any:
    """Return an argument as plain values; None if only the user's own code can build it."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, torch.optim.Optimizer):
        if type(value) not in NAMES.values():
            return None
        plain = {
            key: item
            for key, item in value.defaults.items()
            if isinstance(item, (int, float, bool, tuple))
        }
        return {"torch": type(value).__name__, **plain}
    try:
        return describe(value)
    except ConfigError:
        return None


def given_tables(network: nn.Module) -> dict[str, Any] | None:
    """Return the descriptions of the tables that a model of `hb.models` was built from, by name."""
    tables = getattr(network, "_described", {}).get("tables")
    if tables is None:
        return None
    return {name: describe(table.config) for name, table in tables.items()}


def rebuilt_argument(name: str, value: Any) -> Any:
    """Build the argument `name` from its description: the inverse of `described_argument`."""
    if name == "metrics":
        return _rebuilt_metrics(value)
    if not isinstance(value, dict):
        return value
    if name == "optimizer":
        if "torch" not in value:
            return build(value, Rule, "optimizer")
        settings = {key: item for key, item in value.items() if key != "torch"}
        return TorchOptimizer(value["torch"], settings)
    if name == "loss_fn":
        if "kind" not in value:
            return {label: rebuilt_argument(name, loss) for label, loss in value.items()}
        return build(value, MultiTask if value["kind"] == "multi_task" else Loss, "loss_fn")
    if name == "boost_level":
        return build(value, Boost, "boost_level")
    return value


def _rebuilt_metrics(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_rebuilt_metrics(metric) for metric in value]
    if isinstance(value, dict) and "kind" not in value:
        return {name: _rebuilt_metrics(metric) for name, metric in value.items()}
    return build(value, Metric, "metrics")


def brief(value: Any) -> str:
    """Return a value as a call of its constructor, without arguments that have their default."""
    try:
        plain = describe(value)
    except ConfigError:
        plain = repr(value).replace("\n", " ")
    if isinstance(plain, dict) and "kind" in plain:
        keywords = ", ".join(f"{key}={item}" for key, item in plain.items() if key != "kind")
        return f"{plain['kind']}({keywords})" if keywords else str(plain["kind"])
    text = str(plain)
    return text if len(text) <= 100 else text[:97] + "..."


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
