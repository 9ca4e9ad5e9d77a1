# SPDX-License-Identifier: Apache-2.0
"""Tables of the engine from the descriptions of a program: the core of step 8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hotbed.compat.mx_rec.description import TableDescription
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.feature_spec import Thresholds
from hotbed.compat.mx_rec.pipeline import Pipeline
from hotbed.compat.mx_rec.progress import Progress
from hotbed.compat.mx_rec.updates import RowOptimizer
from hotbed.embedding.policy import MinCount, Ttl
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.compat.mx_rec.framework import Framework


def owners_of(owner: Framework) -> dict[str, RowOptimizer]:
    """Return the optimizer of each table by its name.

    Raises:
        CallError: tables or optimizers are missing.
        ConfigError: there are several optimizers, and a table names none.
    """
    if not owner.tables:
        raise CallError("step 8: sparse tables are needed, got none. Call create_table first.")
    if not owner.optimizers:
        raise CallError(
            "step 8: a sparse optimizer is needed, got none. Create one of mx_rec.optimizers first."
        )
    owners = {}
    for table in owner.tables.values():
        if table.optimizer is None and len(owner.optimizers) > 1:
            names = " and ".join(repr(optimizer.name) for optimizer in owner.optimizers)
            raise ConfigError(
                f"table {table.name!r}: which optimizer updates it is open, got {names}. Give "
                "create_table(..., optimizer_list=[optimizer])."
            )
        owners[table.name] = table.optimizer or owner.optimizers[0]
    return owners


def agreed(thresholds: Iterable[tuple[str, str, Thresholds]]) -> dict[str, Thresholds]:
    """Return the thresholds of each table by its name.

    Args:
        thresholds: name of the table, what sets them, and the thresholds.

    Raises:
        ConfigError: two of one table differ.
    """
    first: dict[str, tuple[str, Thresholds]] = {}
    for table, who, values in thresholds:
        other, theirs = first.setdefault(table, (who, values))
        if theirs.values != values.values:
            raise ConfigError(
                f"table {table!r}: the access and evict threshold param must be same in one table "
                f"when multi lookup, got {theirs} of {other} and {values} of {who}. Give both the "
                "same."
            )
    return {table: values for table, (_, values) in first.items()}


def make_table(
    table: TableDescription, optimizer: RowOptimizer, thresholds: Thresholds, num_ranks: int
) -> Table:
    """Return the table of the engine that a description stands for."""
    admit = None
    evict = None
    if thresholds.admits:
        # an eviction also forgets ids that wait, as Rec SDK does
        admit = MinCount(
            thresholds.access_threshold,
            thresholds.faae_coefficient,
            expire_seconds=thresholds.eviction_threshold,
            admission_bytes=table.admission_bytes,
        )
    if thresholds.evicts:
        evict = Ttl(seconds=thresholds.eviction_threshold)
    return Table(
        table.name,
        table.dim,
        rule=optimizer.rule,
        admit=admit,
        evict=evict,
        tier=table.tier(num_ranks),
        init=table.initializer,
        default=table.default or 0.0,
        capacity=table.expected_rows,
    )


def make_tables(
    descriptions: Mapping[str, TableDescription],
    owners: Mapping[str, RowOptimizer],
    thresholds: Mapping[str, Thresholds],
    num_ranks: int,
) -> dict[str, Table]:
    """Return the tables of the engine by name."""
    tables = {}
    for name, table in descriptions.items():
        table.thresholds = thresholds.get(name, Thresholds())
        tables[name] = make_table(table, owners[name], table.thresholds, num_ranks)
    return tables


def make_pipeline(
    owner: Framework, owners: Mapping[str, RowOptimizer], tables: Mapping[str, Table]
) -> Pipeline:
    """Return the pipeline over these tables, and let the hooks that evict begin."""
    lookup = None
    if owner.ranks is not None:
        owner.ranks.check_equal(owner.options, owner.models, tables)
        lookup = owner.ranks.lookup(owner.tables, tables)
    hooks = (owner.hooks, owner.savers, owner.saver_hooks)
    pipeline = Pipeline(
        owner.tables,
        tables,
        owners,
        owner.inserts,
        Progress(owner.options, *hooks, owner.shard),
        is_dynamic=owner.options.use_dynamic,
        lookup=lookup,
    )
    for hook in owner.hooks:
        hook.begin(pipeline.tables)
    return pipeline
