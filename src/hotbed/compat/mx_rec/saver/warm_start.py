# SPDX-License-Identifier: Apache-2.0
"""Warm start: rows and parameters of another program's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.saver.saver import opened
from hotbed.config import describe
from hotbed.data.schema import Id, Schema
from hotbed.errors import ConfigError
from hotbed.persist.container.format import Reader
from hotbed.persist.state import network
from hotbed.persist.upkeep import warm_starts

__all__ = ["WarmStartSettings", "warm_start"]


@dataclass(frozen=True)
class WarmStartSettings:
    """What to take from the checkpoints of other programs.

    Args:
        ckpt_to_initialize_from: a path that `Saver.restore` takes, or a list of paths. Later ones
            replace what earlier ones brought.
        vars_to_warm_start: a regular expression for the beginning of names of tables and of
            parameters, or a list of them; with a list of paths, one of these for each path.
        var_name_to_vocab_info: must be None: a table finds its rows by their ids.
        var_name_to_prev_var_name: names here to names there, of tables and of parameters; with a
            list of paths, one mapping for each path.

    Raises:
        ConfigError: the lists have different lengths.
    """

    ckpt_to_initialize_from: Any
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: Any = None
    var_name_to_prev_var_name: Any = None

    def __post_init__(self) -> None:
        if self.var_name_to_vocab_info:
            raise ConfigError(
                "WarmStartSettings: var_name_to_vocab_info is not needed, got "
                f"{type(self.var_name_to_vocab_info).__name__}. Leave it out: a table finds its "
                "rows by their ids."
            )
        if not isinstance(self.ckpt_to_initialize_from, list | tuple):
            _check_patterns(self.patterns)
            return
        names = self.var_name_to_prev_var_name
        parts = [self.vars_to_warm_start, *([] if names is None else [names])]
        num_paths = len(self.ckpt_to_initialize_from)
        if any(not isinstance(part, list | tuple) or len(part) != num_paths for part in parts):
            raise ConfigError(
                "WarmStartSettings: lists have one entry for each of the "
                f"{num_paths} paths, got vars_to_warm_start={self.vars_to_warm_start!r} and "
                f"var_name_to_prev_var_name={names!r}. Give lists of {num_paths}."
            )

    @property
    def parts(self) -> list[WarmStartSettings]:
        """The settings of each path."""
        paths = self.ckpt_to_initialize_from
        if not isinstance(paths, list | tuple):
            return [self]
        names = self.var_name_to_prev_var_name or [None for _ in paths]
        return [
            WarmStartSettings(path, variables, None, name)
            for path, variables, name in zip(paths, self.vars_to_warm_start, names, strict=True)
        ]

    def takes(self, name: str) -> bool:
        """Return whether a table or a parameter of this program is taken."""
        return any(re.match(pattern, name) for pattern in self.patterns)

    @property
    def patterns(self) -> Sequence[str]:
        """The regular expressions of one path."""
        several = self.vars_to_warm_start
        return several if isinstance(several, list | tuple) else [several]


def _check_patterns(patterns: Sequence[Any]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                "WarmStartSettings: vars_to_warm_start holds regular expressions, got "
                f"{pattern!r} ({error}). Correct it."
            ) from error


Settings = WarmStartSettings | str
"""Settings, or a path: all that it has."""


def warm_start(warm_start_from: Settings | Sequence[Settings], *models: nn.Module) -> list[str]:
    """Take rows and parameters from checkpoints of other programs, between step 8 and training.

    Rows bring their optimizer state if the optimizer is of the same kind. Tables and parameters
    without a counterpart there start as they do without it.

    Args:
        warm_start_from: settings, a path, or several of these; later ones replace what earlier ones
            brought.
        models: whose parameters are taken; without them, rows only.

    Returns:
        The names of what was taken, tables first.

    Raises:
        ConfigError: the checkpoint is missing, or has none of these names.
        PersistError: dims or shapes differ.
        CallError: step 8 has not run, or a batch was learned already.

    Example: `mx.warm_start(mx.WarmStartSettings("runs/old", ["user", "item"]))`
    """
    pipeline = framework.current().started("warm_start")
    if pipeline.progress.has_begun:
        raise CallError(
            "warm_start: rows are taken before the first batch, got step "
            f"{pipeline.progress.step}. Call it right after step 8."
        )
    several: Any = warm_start_from
    if not isinstance(several, list | tuple):
        several = [several]
    names: dict[str, None] = {}
    for each in several:
        settings = each if isinstance(each, WarmStartSettings) else WarmStartSettings(each)
        for part in settings.parts:
            names.update(dict.fromkeys(_take(part, pipeline.tables, models)))
    return list(names)


def _take(
    settings: WarmStartSettings, rows: Mapping[str, Any], models: Iterable[nn.Module]
) -> list[str]:
    """Take what the settings of one path name; return the names."""
    reader = opened(settings.ckpt_to_initialize_from)
    there = settings.var_name_to_prev_var_name or {}
    names = []
    for name, table in rows.items():
        source = there.get(name, name)
        if settings.takes(name) and source in reader.table_names:
            warm_starts.warm_start(
                {name: table},
                reader,
                {name: source, source: name},  # the table of this name there is not meant
                optimizer_state=_is_alike(table, reader, source),
                schema=Schema([Id(name)]),  # ids are plain integers here
            )
            names.append(name)
    parameters = {tensor.name.removeprefix("network/") for tensor in reader.tensors()}
    for model in models:
        sources = {name: there.get(name, name) for name in model.state_dict()}
        chosen = {
            name: source
            for name, source in sources.items()
            if settings.takes(name) and source in parameters
        }
        network.warm_start_network(model, reader, chosen)
        names += chosen
    if not names:
        raise ConfigError(
            f"warm_start: {reader.folder} has nothing of these names, got "
            f"{settings.vars_to_warm_start!r} and the tables {reader.table_names}. Correct "
            "vars_to_warm_start or var_name_to_prev_var_name."
        )
    return names


def _is_alike(table: Any, reader: Reader, source: str) -> bool:
    """Return whether a table there has a rule of the same kind."""
    rule = reader.entry(source).config["rule"]
    return bool(describe(table.rule)["kind"] == rule["kind"])
