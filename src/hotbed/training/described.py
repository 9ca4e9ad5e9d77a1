# SPDX-License-Identifier: Apache-2.0
"""The words for a model: its description in a checkpoint, its summary and its `repr`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hotbed.config import build, describe
from hotbed.embedding.footprint import measured
from hotbed.embedding.modules import table_modules
from hotbed.embedding.rule import Rule
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.metrics import Metric
from hotbed.models.graph.network import Graph
from hotbed.models.losses import Loss, MultiTask
from hotbed.optim.combined import Parts
from hotbed.optim.dense import NAMES, TorchOptimizer
from hotbed.optim.held import ROOT
from hotbed.optim.precision import Compile
from hotbed.optim.sparse import dense_parameters
from hotbed.plugins import digests

WITHIN = ("lookups", "optimizers", "classes")
"""Members of a model's description that are not arguments of RecModel: `described_within`."""
BEFORE = "boost_level"
"""The argument in whose place `compile` came; states of earlier builds have it."""


def described_argument(value: Any) -> Any:
    """Return an argument as plain values; None if only the user's own code can build it."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    parts = Parts.of(value)
    if parts is not None:
        value = parts.dense  # the descriptions of tables hold their rules
        if value is None or len(value.param_groups) > 1:
            return None
    if isinstance(value, torch.optim.Optimizer):
        if type(value) not in NAMES.values():
            return None
        plain: dict[str, Any] = {"torch": type(value).__name__}
        for key, setting in value.defaults.items():
            if isinstance(setting, (int, float, bool, tuple)):
                plain[key] = setting
        return plain
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


def described_within(
    network: nn.Module, optimizers: Mapping[str, Any], parts: Sequence[Any]
) -> dict[str, Any]:
    """Return the settings that no argument of RecModel gives, by the names of `WITHIN`.

    Args:
        network: its lookups have settings of their own.
        optimizers: those of a learner by name; those that the network holds have paths.
        parts: descriptions; the sources of classes of other packages that they name count.
    """
    lookups: dict[str, dict[str, list[Any]]] = {}
    for module in table_modules(network):
        for name, value in module.settings.items():
            values = lookups.setdefault(module.tables[0].name, {}).setdefault(name, [])
            if value not in values:
                values.append(value)
    described: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        plain = described_argument(optimizer) if name.startswith(ROOT) else None
        if plain is not None:
            described[name] = plain
    members = {"lookups": lookups, "optimizers": described, "classes": digests(parts)}
    return {name: member for name, member in members.items() if member}


def rebuilt_arguments(described: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of RecModel from the description of a model."""
    arguments: dict[str, Any] = {}
    for name, value in described.items():
        if name == BEFORE:
            arguments["compile"] = _compiled_before(value)
        elif value is not None and name not in WITHIN:
            arguments[name] = rebuilt_argument(name, value)
    return arguments


def rebuilt_argument(name: str, value: Any) -> Any:
    """Build the argument `name` from its description: the inverse of `described_argument`."""
    if name == "metrics":
        return _rebuilt_metrics(value)
    if not isinstance(value, dict):
        return value
    if name == "optimizer":
        return _rebuilt_optimizer(value)
    if name == "loss_fn":
        return _rebuilt_loss(value)
    if name == "compile":
        return build(value, Compile, "compile")
    return value


def _compiled_before(level: Any) -> Compile | None:
    """Return the value of `compile` that an argument of earlier builds stood for."""
    if isinstance(level, dict):
        settings: Compile = build({**level, "kind": "compile"}, Compile, BEFORE)
        return settings
    modes = {"O1": "default", "O2": "max-autotune-no-cudagraphs"}
    return Compile(modes[level]) if level in modes else None


def _rebuilt_optimizer(value: dict[str, Any]) -> Any:
    if "torch" not in value:
        return build(value, Rule, "optimizer")
    settings = dict(value)
    name = settings.pop("torch")
    return TorchOptimizer(name, settings)


def _rebuilt_loss(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "kind" not in value:
        return {label: _rebuilt_loss(loss) for label, loss in value.items()}
    if value["kind"] == "multi_task":
        return build(value, MultiTask, "loss_fn")
    return build(value, Loss, "loss_fn")


def _rebuilt_metrics(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_rebuilt_metrics(metric) for metric in value]
    if isinstance(value, dict) and "kind" not in value:
        metrics = {}
        for name, metric in value.items():
            metrics[name] = _rebuilt_metrics(metric)
        return metrics
    return build(value, Metric, "metrics")


def brief(value: Any) -> str:
    """Return a value as a call of its constructor, without arguments that have their default."""
    try:
        plain = describe(value)
    except ConfigError:
        plain = repr(value).replace("\n", " ")
    if isinstance(plain, dict) and "kind" in plain:
        arguments = dict(plain)
        kind = str(arguments.pop("kind"))
        if not arguments:
            return kind
        keywords = ", ".join(f"{key}={item}" for key, item in arguments.items())
        return f"{kind}({keywords})"
    text = str(plain)
    if len(text) > 100:
        text = text[:97] + "..."
    return text


class Summary(str):
    """The text of a summary, which a notebook does not show again after it was printed.

    `picture`: the layers as an SVG; empty for networks that are not from a description.
    """

    __slots__ = ("picture",)

    picture: str

    def _ipython_display_(self) -> None:
        """Show nothing when IPython displays the value of a cell."""


def summary_of(model: Any) -> Summary:
    """Describe dense parameters, tables with policies and sizes, and settings of a RecModel."""
    summary = Summary("\n".join(_lines(model)))
    summary.picture = ""
    if isinstance(model.network, Graph):
        summary.picture = model.network.picture()
    return summary


def headline_of(model: Any) -> str:
    """Describe a RecModel in one line."""
    num_rows = sum(len(table) for table in model.tables.values())
    steps = model.counters["steps"]
    epochs = model.counters["epochs"]
    parts = [
        type(model.network).__name__,
        f"{_num_dense(model):,} dense parameters",
        f"{len(model.tables)} tables with {num_rows:,} rows{_place(model)}",
        f"metrics {sorted(model.metrics)}",
        f"learned {steps:,} steps",
        f"{epochs} epochs",
    ]
    return f"RecModel({', '.join(parts)})"


def _lines(model: Any) -> Iterator[str]:
    network = type(model.network).__name__
    yield f"{network}: {_num_dense(model):,} dense parameters on {model.learner.device}"
    yield from _layers(model.network)
    if model.tables:
        yield f"{'table':18} {'dim':>4} {'rows':>10} {'MiB':>8}  rule, policies" + _place(model)
    for name, table in model.tables.items():
        yield _line_of(name, table)
        footprint = measured(table)
        if footprint is not None:
            yield f"  on {brief(table.tier)}: {footprint}"
    yield from _kept_columns(model)
    for name, value in model.arguments.items():
        if value is not None:
            yield f"{name}: {brief(value)}"


def _place(model: Any) -> str:
    """Return where the rows are that are counted, if there are several ranks; else "".

    The others are not asked: one rank alone may print.
    """
    learner = model.learner
    if learner.shard.size == 1:
        return ""
    return f" (on rank {learner.shard.rank} of {learner.shard.size})"


def _layers(network: nn.Module) -> Iterator[str]:
    """Yield a line for each layer; of a network from a description with the shapes of outputs."""
    if isinstance(network, Graph):
        for name, kind, shapes, size in network.rows():
            yield f"  {name:24} {kind:20} {size:>12,}  {shapes}"
        return
    for name, module in network.named_children():
        if not table_modules(module):
            kind = type(module).__name__
            size = _num_elements(module)
            yield f"  {name:24} {kind:20} {size:>12,}"


def _line_of(name: str, table: Table) -> str:
    policies = [table.rule, table.admit, *table.evictions]
    described = ", ".join(brief(policy) for policy in policies if policy)
    if table.capacity is not None:
        described += f", capacity {table.capacity:,}"
    mib = _num_bytes(table) / 2**20
    num_rows = len(table)
    return f"{name:18} {table.dim:>4} {num_rows:>10,} {mib:>8.1f}  {described}"


def _num_bytes(table: Table) -> int:
    return sum(value for key, value in table.stats.items() if "bytes" in key)


def _kept_columns(model: Any) -> Iterator[str]:
    """Yield a line for each history and count: its keys, and what they take in memory."""
    if model.histories is None:
        return
    for column in model.histories.columns:
        newest, older = (model.tables[name] for name in (column.newest_table, column.older_table))
        num_keys = len(newest)
        if num_keys:
            num_bytes = (_num_bytes(newest) + _num_bytes(older)) / num_keys
            yield f"{column.name}: {num_keys:,} keys by {column.by}, {num_bytes:,.0f} B each"


def _num_dense(model: Any) -> int:
    return sum(parameter.numel() for parameter in dense_parameters(model.network))


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
