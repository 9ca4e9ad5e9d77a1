# SPDX-License-Identifier: Apache-2.0
"""Load a model from a checkpoint: rebuild it from its description, then restore its state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotbed.config import build, did_you_mean
from hotbed.data.schema import Schema
from hotbed.embedding.modules.state import dense_state
from hotbed.embedding.table import Table
from hotbed.embedding.tier import Tier
from hotbed.errors import ConfigError, FormatError, HotbedError
from hotbed.parallel import Ranks, at, together
from hotbed.parallel.world import trains_together
from hotbed.persist.container.check.manifest import NOT_BUILT
from hotbed.persist.container.format import Reader, open_checkpoint, read_newest
from hotbed.persist.state.restoring import check_one_state
from hotbed.training.described import rebuilt_arguments
from hotbed.training.devices import find_device
from hotbed.training.model import RecModel

_SPARE_NUMBERS = 1 << 20


@at("load")
def load(
    path: str | Path | Reader,
    network: nn.Module | None = None,
    *,
    tier: Tier | Mapping[str, Tier] | None = None,
    allow: Sequence[str] = (),
    device: str | torch.device | None = None,
) -> RecModel:
    """Load a model from a checkpoint: rows, dense parameters and optimizer state as saved.

    A network of `hb.models` is rebuilt from the checkpoint, and so is one of a class that its
    module and name describe: the module is imported, if it is on `sys.path`. For another network,
    pass `network`, built as it was when it was saved. On several ranks, all call it, with one
    folder that they share.

    Args:
        path: of states or of one state, or a state as `hb.checkpoints.open_checkpoint` returns it.
        network: yours.
        tier: where the rows of all tables lie here, such as `hb.Ram()`, or those of some tables by
            name, such as `{"user": hb.Ram()}`; default: as saved.
        allow: as in `RecModel.restore`; `["classes.*"]` for a class whose source has changed.
        device: where the dense part computes here, as in `RecModel`. A state does not say where it
            was trained: None is the CPU, or where `network` is.

    Raises:
        ConfigError: there is no such device, or Hotbed cannot rebuild the network.
        FormatError: a file is missing, torn or changed; the message names it, and the rank where
            that is so on some of several alone.

    Example: `hb.load("model").predict(dataset)`.
    """
    if device is not None:
        device = find_device("load: device", device)

    def loaded(reader: Reader) -> RecModel:
        return _described_model(reader, network, tier, device).restore(reader, allow)

    if isinstance(path, Reader):
        return loaded(path)
    if not trains_together():
        return read_newest(path, loaded)
    with together():  # before ranks wait for each other in RecModel
        reader = open_checkpoint(path)
    return loaded(reader)


def _described_model(
    reader: Reader,
    network: nn.Module | None,
    tier: Tier | Mapping[str, Tier] | None,
    device: str | torch.device | None,
) -> RecModel:
    """Return the model that a state describes, before it has the values of the state."""
    if trains_together():
        check_one_state(reader, Ranks.of_job().gather_objects(reader.manifest.digest))
    manifest = reader.manifest
    described: dict[str, Any] = dict(manifest.model or {})
    tables = described.pop("given_tables", None)
    spec = described.pop("network", None)
    unknown = spec is None or manifest.schema is None or tables is None
    if network is None and unknown:
        raise ConfigError(
            f"load: {reader.folder} holds a network that Hotbed cannot rebuild, got no network. "
            "Pass network=, built as it was when it was saved."
        )
    with together():
        reader.verify()  # nothing is built from a description that is not whole
    is_given = network is not None
    if is_given and tier:
        raise ConfigError(
            f"load: tier is for a network that is rebuilt, got {tier!r} and a network. Build the "
            "tables of your network on that tier."
        )
    tiers = _tiers(tier, reader.table_names)
    try:
        schema = None if manifest.schema is None else Schema.from_json(manifest.schema)
        if network is None:
            built = {
                name: build({**table_spec, **tiers.get(name, {})}, Table, f"tables.{name}")
                for name, table_spec in tables.items()
            }
            parts = {"schema": schema, "tables": built}
            with torch.device("meta"):  # shapes alone: what is asked for may fit into no memory
                _check_size(reader, build(spec, nn.Module, "network", parts))
            network = build(spec, nn.Module, "network", parts)
        model = RecModel(network, **rebuilt_arguments(described), device=device)
    except NOT_BUILT as error:
        if is_given and isinstance(error, HotbedError):  # the network is the caller's
            raise
        raise FormatError(
            f"{reader.folder}/MANIFEST.json: its model cannot be built, got: {error} "
            "Pass network=, pass tier=hb.Ram() (a command: --set tables.tier=ram) where this "
            "machine lacks the disk of its tables, or restore the checkpoint from a copy."
        ) from error
    model.schema = schema or model.schema
    return model


def _tiers(
    tier: Tier | Mapping[str, Tier] | None, tables: Sequence[str]
) -> dict[str, dict[str, Tier]]:
    """Return the keyword `tier` of the tables that do not stay where they were, by name."""
    by_table = tier if isinstance(tier, Mapping) else dict.fromkeys(tables, tier)
    for name, of_table in by_table.items():
        if name not in tables:
            raise ConfigError(
                f"load: tier: there is no table {name!r}, got tiers of {list(by_table)}. "
                f"{did_you_mean(name, tables)}"
            )
        if of_table is not None and not isinstance(of_table, Tier):
            raise ConfigError(
                f"load: tier of table {name!r}: not a tier, got {of_table!r}. Give hb.Ram() or "
                "hb.Ssd(...)."
            )
    return {name: {"tier": tier} for name, tier in by_table.items() if tier is not None}


def _check_size(reader: Reader, network: nn.Module) -> None:
    """Raise ConfigError if a described network is far larger than its saved tensors."""
    wanted = sum(tensor.numel() for tensor in dense_state(network).values())
    saved = sum(math.prod(shape) for _, _, shape, _ in reader.tensors())
    if wanted > 2 * saved + _SPARE_NUMBERS:
        raise ConfigError(
            f"network: too large, got {wanted} numbers for {saved} saved. Correct its arguments."
        )
