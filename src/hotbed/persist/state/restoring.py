# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a network, tables and optimizers, all of it checked before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from hotbed.config import build, describe
from hotbed.embedding.dates import check_clock
from hotbed.embedding.table import Table
from hotbed.errors import PersistError
from hotbed.optim.held import ROOT
from hotbed.parallel import at
from hotbed.persist.container.format import Reader
from hotbed.persist.state.checkpoint import State, package_version
from hotbed.persist.state.network import load_network, load_optimizer, network_misfit, read_tensors
from hotbed.persist.state.resume import Meaning, compare, meaning
from hotbed.persist.state.tables import check_rows, load_table

log = logging.getLogger("hotbed.persist")


@at("restore")
def restore(
    reader: Reader, state: State, allow: Sequence[str] = (), accepted: Set[str] = frozenset()
) -> None:
    """Load a checkpoint into network, tables and optimizers, which were built alike.

    Every file is checked before anything changes. `reader.progress` and `reader.random` are for
    the caller.

    Args:
        reader: the checkpoint.
        state: the network, tables and optimizers to load.
        allow: names of fields that may differ although the state means something else with them;
            see docs/persist.md.
        accepted: names of changes that the caller has compared and accepted.

    Raises:
        FormatError: a file is bad; the message names it.
        PersistError: a field, parameter, table or optimizer does not fit; the message names it.
    """
    shard = state.shard
    check_one_state(reader, shard.gathered(reader.manifest.digest))
    with shard.together():
        tensors, changes = _checked(reader, state, allow)
    with shard.together():
        if state.network is not None:
            load_network(state.network, tensors)
        for name in reader.table_names:
            load_table(reader, name, state.tables[name], shard)
        _load_optimizers(reader, state, tensors, changes | accepted)
    every = shard.gathered([len(state.tables[name]) for name in reader.table_names])
    for name, counts in zip(reader.table_names, zip(*every, strict=True), strict=True):
        check_rows(reader.newest_link, name, sum(counts))


def continues(reader: Reader, tables: Mapping[str, Table]) -> bool:
    """Return whether the next save of tables that were restored from a state can be a delta on it.

    It is so if this build wrote the state, of tables that were described alike but for their tier:
    else the columns of rows may differ, or loading has changed rows.
    """

    def plain(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "tier"}

    return reader.manifest.package_version == package_version() and all(
        plain(entry.config) == plain(describe(tables[entry.name].config))
        for entry in reader.manifest.tables
    )


def check_one_state(reader: Reader, digests: Sequence[str]) -> None:
    """Raise PersistError if the digests of the states that several processes opened differ."""
    if any(digest != digests[0] for digest in digests):
        raise PersistError(
            f"{reader.folder}: all ranks must read one state, got digests "
            f"{[digest[:12] for digest in digests]}. Give each rank the same path, in a folder "
            "that they share."
        )


def _checked(
    reader: Reader, state: State, allow: Sequence[str]
) -> tuple[Mapping[str, Tensor], set[str]]:
    """Check all that will be loaded; return the tensors, and the names of accepted changes."""
    folder = reader.folder
    if reader.manifest.contents == "values":
        raise PersistError(
            f"{folder}: expected a state, got published values. Give the path that training saves "
            "to."
        )
    state.check_shard()
    reader.verify(state.shard.owned)
    if set(reader.table_names) != set(state.tables):
        raise PersistError(
            f"{folder}: it has tables {sorted(reader.table_names)}, got a network with "
            f"{sorted(state.tables)}. Build the network as it was when it was saved."
        )
    tensors = read_tensors(reader)

    def misfit() -> str:
        return _misfit(reader, state, tensors)

    accepted = compare(folder, *meanings(reader, state), allow, misfit)
    if reason := misfit():
        raise PersistError(
            f"{folder}: the model has other shapes, got this: {reason}. Build it as it was when it "
            "was saved."
        )
    for entry in reader.manifest.tables:
        check_clock(state.tables[entry.name], entry.scalars)
    return tensors, accepted


def _load_optimizers(
    reader: Reader, state: State, tensors: Mapping[str, Tensor], accepted: set[str]
) -> None:
    folder = reader.folder
    dense = reader.manifest.dense
    optimizers: Mapping[str, Any] = {} if dense is None else dense.optimizers
    for name, optimizer in state.optimizers.items():
        if name.startswith(ROOT) and name not in optimizers:
            log.warning("%s: it does not hold the optimizer %s, which begins anew", folder, name)
        elif optimizer is not None and name in optimizers:
            try:
                load_optimizer(optimizer, name, tensors, optimizers[name], accepted)
            except PersistError as error:
                raise PersistError(f"{folder}: {error}") from error


def _misfit(reader: Reader, state: State, tensors: Mapping[str, Tensor]) -> str:
    """Return which table or parameter has another shape than the checkpoint's; "" for none."""
    for entry in reader.manifest.tables:
        table = state.tables[entry.name]
        if table.dim != entry.config["dim"]:
            return f"table {entry.name!r} has dim {entry.config['dim']} there, and {table.dim} here"
        if describe(table.rule) == entry.config["rule"]:
            continue
        width = build(entry.config, Table, f"tables.{entry.name}").state_width
        if table.state_width != width:
            return (
                f"a row of table {entry.name!r} has {width} numbers of optimizer state there, and "
                f"{table.state_width} here"
            )
    if state.network is None:
        return ""
    return network_misfit(state.network, state.rows, tensors)


def meanings(reader: Reader, state: State) -> tuple[Meaning, Meaning]:
    """Return what the checkpoint means, and what `state` does.

    Parts that one of them does not describe are left out of both.
    """
    manifest = reader.manifest
    configs = {entry.name: entry.config for entry in manifest.tables}
    schema = None if state.schema is None else manifest.schema
    model = None if state.model is None else manifest.model
    own_configs = {name: describe(table.config) for name, table in state.tables.items()}
    own_schema = None if schema is None else state.schema
    own_model = None if model is None else state.model
    return meaning(configs, schema, model), meaning(own_configs, own_schema, own_model)
