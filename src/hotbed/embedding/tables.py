# SPDX-License-Identifier: Apache-2.0
"""make_tables: build the tables that a schema names; and the check of those that are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotbed.errors import ConfigError

from .histories import history_tables
from .init import Init
from .policy import Admission, Eviction
from .rule import Rule
from .table import Dtype, Table
from .tier import Tier

if TYPE_CHECKING:
    from hotbed.data.schema import Schema


def make_tables(
    schema: Schema,
    dim: int,
    *,
    rule: Rule | None = None,
    admit: Admission | None = None,
    evict: Eviction | Sequence[Eviction] | None = None,
    tier: Tier | None = None,
    init: Init | None = None,
    default: float = 0.0,
    seed: int = 0,
    dtype: Dtype = "float32",
    capacity: int | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Table]:
    """Build one Table for every table name in the schema.

    All tables get these keywords, see `hb.Table`; those of histories and counts get `tier` alone.
    Raises ConfigError for an override of a table or keyword that does not exist, and for an `evict`
    that needs times if the schema has no Time.

    Args:
        overrides: keywords of single tables by table name; they replace the others.

    Example: `hb.make_tables(schema, dim=16, overrides={"user": {"capacity": 5_000_000}})`
    """
    keywords = dict(
        dim=dim,
        rule=rule,
        admit=admit,
        evict=evict,
        tier=tier,
        init=init,
        default=default,
        seed=seed,
        dtype=dtype,
        capacity=capacity,
    )
    names = [str(name) for name in dict.fromkeys(column.table for column in schema.ids)]
    overrides = overrides or {}
    _check_overrides(overrides, names, keywords)
    tables = {name: Table(name, **{**keywords, **overrides.get(name, {})}) for name in names}
    for name, table in history_tables(schema, tier).items():
        if name in tables:
            raise ConfigError(
                f"tables.{name}: the histories of the schema lie in a table of this name, got an "
                "Id with it. Rename one of them."
            )
        tables[name] = table
    untimed = [name for name, table in tables.items() if table.needs_times]
    if untimed and schema.time is None:
        raise ConfigError(
            f"tables.{untimed[0]}.evict: it needs the time of each sample, got a schema without "
            "a Time column. Add hb.Time, or count steps: hb.Ttl(steps=…)."
        )
    return tables


def check_table(where: str, value: object) -> None:
    """Raise ConfigError unless this is a table."""
    if not isinstance(value, Table):
        raise ConfigError(
            f"{where}: expected a Table, got {value!r:.60}. Make it with hb.Table or "
            "hb.make_tables."
        )


def _check_overrides(
    overrides: Mapping[str, Mapping[str, Any]], names: Collection[str], keywords: Collection[str]
) -> None:
    for name, options_of_table in overrides.items():
        if name not in names:
            raise ConfigError(
                f"tables.overrides.{name}: the schema does not name this table, got {name!r}. "
                f"Use one of {', '.join(names)}."
            )
        for keyword in options_of_table:
            if keyword not in keywords:
                raise ConfigError(
                    f"tables.overrides.{name}.{keyword}: unknown keyword, got {keyword!r}. "
                    f"Use one of {', '.join(keywords)}."
                )
