# SPDX-License-Identifier: Apache-2.0
"""Tables: the keys under `tables` of a job."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hotbed import config
from hotbed.data.schema import Schema
from hotbed.embedding.init import Init, Uniform
from hotbed.embedding.policy import Admission, Eviction
from hotbed.embedding.rule import Adagrad, Rule
from hotbed.embedding.tier import Ram, Tier
from hotbed.errors import ConfigError
from hotbed.job.file import override

if TYPE_CHECKING:
    from hotbed.embedding.table import Table


@dataclass(frozen=True)
class Tables:
    """Keywords of the embedding tables, as in `hb.make_tables`.

    Args:
        overrides: keywords of single tables by name, such as `{"user": {"dim": 8}}`.
    """

    dim: int = 16
    rule: Rule = field(default_factory=lambda: Adagrad(lr=0.05))
    admit: Admission | None = None
    evict: Eviction | list[Eviction] | None = None
    tier: Tier = field(default_factory=Ram)
    init: Init = field(default_factory=lambda: Uniform(0.05))
    default: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    capacity: int | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keywords = dict(config.parameters(Tables))
        del keywords["overrides"]
        tables: dict[str, dict[str, Any]] = {}
        for table, keys in self.overrides.items():
            tables[table] = {}
            for key, value in keys.items():
                path = f"overrides.{table}.{key}"
                if key not in keywords:
                    advice = config.did_you_mean(key, keywords)
                    raise ConfigError(
                        f"{path}: unknown key, got {key!r} with the value {value!r}. {advice}"
                    )
                tables[table][key] = config.build(value, keywords[key].annotation, path)
        object.__setattr__(self, "overrides", tables)

    def tier_of(self, table: str) -> Tier:
        """Return where the rows of a table lie."""
        tier: Tier = self.overrides.get(table, {}).get("tier", self.tier)
        return tier

    def tiers(self) -> list[Tier]:
        """Return where rows of tables may lie."""
        return [self.tier, *map(self.tier_of, self.overrides)]

    def in_memory(self) -> Tables:
        """Return the same with the rows of all tables in memory."""
        overrides = {name: {**keys, "tier": Ram()} for name, keys in self.overrides.items()}
        return replace(self, tier=Ram(), overrides=overrides)

    def make(self, schema: Schema, seed: int) -> dict[str, Table]:
        """Return a table for each table name of the schema."""
        from hotbed.embedding.tables import make_tables

        return make_tables(
            schema,
            self.dim,
            rule=self.rule,
            admit=self.admit,
            evict=self.evict,
            tier=self.tier,
            init=self.init,
            default=self.default,
            seed=seed,
            dtype=self.dtype,
            capacity=self.capacity,
            overrides=self.overrides,
        )


@dataclass(frozen=True)
class TableOfState:
    """What `--set` says of one table of a state."""

    tier: Tier


@dataclass(frozen=True)
class TablesOfState:
    """What `--set` says of the tables of a state; a state says all else itself.

    Args:
        tier: where the rows of all tables lie here; None = as saved.
        overrides: by table.
    """

    tier: Tier | None = None
    overrides: Mapping[str, TableOfState] = field(default_factory=dict)


@dataclass(frozen=True)
class StateSettings:
    """What `--set` says of a state that is given without its job."""

    tables: TablesOfState = field(default_factory=TablesOfState)

    @staticmethod
    def of(assignments: Mapping[str, object]) -> StateSettings:
        """Return the settings of values by dotted path.

        Raises:
            ConfigError: a key is none of these.
        """
        spec = override({}, assignments)
        return typing.cast(StateSettings, config.build(spec, StateSettings, "--set"))

    def tiers(self, tables: Sequence[str]) -> dict[str, Tier]:
        """Return the tiers of those of a state's tables that do not stay where they were."""
        tiers = {} if self.tables.tier is None else dict.fromkeys(tables, self.tables.tier)
        return tiers | {name: table.tier for name, table in self.tables.overrides.items()}


AS_SAVED = StateSettings()
