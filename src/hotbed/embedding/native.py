# SPDX-License-Identifier: Apache-2.0
"""The configuration of a table as the native core takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hotbed import _core

from .hashing import name_hash
from .init import Constant, Init, Zeros
from .policy import (
    Admission,
    Eviction,
    admission_fields,
    counts_once,
    eviction_fields,
    kept_columns,
)
from .rule import Rule
from .tier import Tier

T = TypeVar("T")


class TableSettings(Protocol):
    """The settings of a table that the native core needs."""

    name: str
    seed: int
    dim: int
    dtype: Any
    default: float
    init: Init
    rule: Rule
    tier: Tier
    admit: Admission | None
    evictions: tuple[Eviction, ...]

    @property
    def clock(self) -> str | None: ...


def native_config(table: TableSettings) -> _core.TableConfig:
    """Return the keywords of a table for the native core."""
    config = _core.TableConfig()
    config.name = table.name
    config.name_hash = name_hash(table.name)
    config.seed = table.seed % 2**64
    config.dim = table.dim
    config.dtype = table.dtype
    config.tier = type(table.tier).__name__
    config.default_value = table.default
    init = table.init
    if isinstance(init, Zeros):
        init = Constant(0.0)
    config.init_kind = type(init).__name__
    config.init_scale = next(iter(dataclasses.asdict(init).values()))
    config.rule = _rule(table.rule)
    config.admission = _with_fields(_core.Admission(), admission_fields(table.admit))
    config.admission.once_a_batch = counts_once(table.admit)
    config.eviction = _with_fields(_core.Eviction(), eviction_fields(table.evictions))
    columns = kept_columns(table.admit, table.evictions)
    config.keep_count = "count" in columns
    config.keep_seen = "last_seen" in columns
    config.counts_steps = table.clock == "steps"
    return config


def _rule(rule: Rule) -> _core.Rule:
    """Return a rule as the native core takes it: by the names of its class and fields."""
    fields = dataclasses.asdict(rule)
    scope = fields.pop("scope")
    fields["clip"] = rule.clip or 0.0  # 0 = off
    return _core.Rule(type(rule).__name__, scope=scope, fields=fields)


def _with_fields(native: T, fields: Mapping[str, Any]) -> T:
    for name, value in fields.items():
        setattr(native, name, value)
    return native
