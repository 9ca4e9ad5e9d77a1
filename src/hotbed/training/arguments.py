# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of RecModel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hotbed.config import did_you_mean
from hotbed.data.dataset import Dataset
from hotbed.embedding.histories import HistoryStore
from hotbed.embedding.modules import histories_of, table_modules
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.optim.precision import Compile
from hotbed.training.run import Goal

log = logging.getLogger("hotbed")


def check_network(network: Any) -> None:
    """Raise ConfigError unless this is a module."""
    if isinstance(network, type):
        name = network.__name__
        raise ConfigError(f"network: a class, got {name}. Pass an instance, {name}(…).")
    if not isinstance(network, nn.Module):
        kind = type(network).__name__
        raise ConfigError(f"network: not an nn.Module, got {kind}. Pass an instance of one.")


def check_evaluation(network: Any) -> None:
    """Raise ConfigError unless this can be eval_network, or is None."""
    if isinstance(network, type) or not (network is None or callable(network)):
        kind = f"the class {network.__name__}" if isinstance(network, type) else repr(network)
        raise ConfigError(
            f"eval_network: must be an nn.Module or a function of the items of a batch, got "
            f"{kind:.60}. Give such, or None."
        )


def check_compile(settings: Any) -> None:
    """Raise ConfigError unless this can be `compile`, or is None."""
    if settings is not None and not isinstance(settings, Compile):
        raise ConfigError(
            f"compile: must be a Compile, got {settings!r:.60}. Give such as hb.Compile(), or None."
        )


def tables_of(network: nn.Module) -> dict[str, Table]:
    """Return the tables of a network by name.

    Raises:
        ConfigError: two of them have the same name.
    """
    tables: dict[str, Table] = {}
    every = [table for module in table_modules(network) for table in module.tables]
    histories = histories_of(network)
    if histories is not None:
        every += histories.tables.values()
    for table in every:
        if tables.setdefault(table.name, table) is not table:
            raise ConfigError(
                f"network: two tables have the same name, got {table.name!r} twice. Rename one."
            )
    return tables


def check_keeps(histories: HistoryStore | None, schema: Any) -> None:
    """Raise ConfigError if a network cannot keep the histories and counts of its data."""
    names = [column.name for column in getattr(schema, "kept", ())]
    if names and histories is None:
        raise ConfigError(
            f"histories: no part of the network keeps what the schema declares, got {names}. Build "
            "the network around hb.EmbeddingCollection(schema, tables), or leave these columns out."
        )


def check_rows_in_order(histories: HistoryStore | None, goal: Goal) -> None:
    """Raise ConfigError if histories would be kept of rows that do not come once and in order."""
    if histories is None:
        return
    name = histories.columns[0].name
    problem = ""
    data = goal.dataset
    num_epochs = goal.end_epoch - goal.first_epoch
    if num_epochs > 1:
        problem = f"{num_epochs} epochs"
    elif isinstance(data, Dataset) and not data.endless and data.shuffle:
        problem = f"shuffle={data.shuffle}"
    if problem:
        raise ConfigError(
            f"histories: {name!r} is kept of rows that come once and in the order of their times, "
            f"got {problem}. Learn one pass in that order without shuffle, or give each row its "
            "list as a column of the data (docs/sequences.md)."
        )


def check_names(where: str, names: Sequence[str], tables: Mapping[str, Table]) -> None:
    """Raise ConfigError if a name is not that of a table."""
    for name in names:
        if name not in tables:
            raise ConfigError(
                f"{where}: the network has no such table, got {name!r}. "
                f"{did_you_mean(name, tables)}"
            )


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks as a list: of several, of one, or of None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def log_frozen_lookups(network: nn.Module) -> None:
    """Log the table modules that stay in eval mode while the network is trained."""
    lookups = {id(module) for module in table_modules(network) if not module.training}
    names = [name for name, module in network.named_modules() if id(module) in lookups]
    if names and any(module.training for module in network.modules()):
        log.warning(
            "network: modules %s are in eval mode, so their tables take no new ids and their rows "
            "stay; "
            "call network.train() before training unless that is meant",
            ", ".join(names),
        )
