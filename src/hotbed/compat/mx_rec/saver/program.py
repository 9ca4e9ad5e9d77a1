# SPDX-License-Identifier: Apache-2.0
"""The state of a program: what a checkpoint holds of it, and how it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hotbed.compat.mx_rec.framework import Framework
from hotbed.compat.mx_rec.saver.settings import settings_of_data, settings_of_parts
from hotbed.connectors import Position
from hotbed.embedding.modules import table_modules
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, PersistError
from hotbed.parallel import Shard
from hotbed.persist.container.format import Reader
from hotbed.persist.state.checkpoint import State
from hotbed.persist.state.network import random_state, set_random_state
from hotbed.persist.state.restoring import restore
from hotbed.persist.state.resume import compare

log = logging.getLogger("hotbed.compat.mx_rec")

POSITION = "train"


class Program:
    """The parts of a program that a checkpoint holds.

    Args:
        owner: has the tables, the hooks and the position in the data.
        parts: one or several networks, dense optimizers, and other objects with `state_dict` and
            `load_state_dict`, such as schedulers. None = the models that
            `get_dense_and_sparse_variable` got.

    Raises:
        ConfigError: a part is something else.
    """

    def __init__(self, owner: Framework, parts: Any) -> None:
        self._owner = owner
        if parts is not None and not isinstance(parts, list | tuple):
            parts = [parts]
        self._parts: Sequence[Any] | None = parts
        for part in self._parts or []:
            _check_part(part)

    def state(self, version: int, parent: str | None, shard: Shard) -> State:
        """Return the state of this moment; each process of the program must ask.

        Args:
            version: its number.
            parent: the digest of the state that was restored.
            shard: writes the rows that this process owns.
        """
        training = self._owner.started("Saver").progress
        here = (training.position, random_state())
        positions = {}
        random = {}
        for rank, (position, states) in enumerate(self._owner.shard.gathered(here)):
            if position is not None:
                positions[_of_rank(POSITION, rank)] = position.to_json()
            random.update({_of_rank(name, rank): state for name, state in states.items()})
        progress = {
            "pipeline": {
                "step": training.step,
                "now": training.newest(),
                "ranks": self._owner.shard.size,
            },
            "hooks": [hook.state() for hook in self._owner.hooks],
            "rates": [(each.rule.lr, each.learning_rate) for each in self._owner.optimizers],
            "objects": [part.state_dict() for part in self._others()],
            "wall_caught": self._owner.clock(),
            "wall_parts": self._parts_setting(),
            "wall_data": settings_of_data(self._owner, training.dataset),
            "wall_defaults": {name: each.default for name, each in self._owner.tables.items()},
        }
        return State(
            self._network(),
            self.tables(),
            self._optimizers(),
            positions=positions,
            counters={"steps": training.step},
            progress=progress,
            random=random,
            version=version,
            parent=parent,
            shard=shard,
        )

    def load(self, reader: Reader, allow: Sequence[str]) -> None:
        """Load a checkpoint of the same program, before its first batch.

        The settings of the data are compared when they are read: a program may open them later.

        Args:
            reader: the checkpoint.
            allow: names of settings that may differ although the state means something else with
                them.

        Raises:
            PersistError: it is of another program; the message names what differs.
        """
        progress: Any = reader.progress
        others = self._others()
        if len(others) != len(progress["objects"]):
            raise PersistError(
                f"{reader.folder}: it holds {len(progress['objects'])} objects besides networks "
                f"and optimizers, got var_list with {len(others)}. Give those that were saved."
            )
        accepted = compare(
            reader.folder, progress.get("wall_parts", {}), self._parts_setting(), allow
        )
        tables = self.tables()
        self._restore_defaults(reader, tables)
        optimizers = self._optimizers()
        if not optimizers:
            log.info(
                "Saver: var_list has no dense optimizer; its state begins anew after a restoration"
            )
        shard = self._owner.shard
        restore(reader, State(self._network(), tables, optimizers, shard=shard), allow, accepted)
        for part, state in zip(others, progress["objects"], strict=True):
            part.load_state_dict(state)
        rates = progress["rates"]
        for optimizer, (rate, current) in zip(self._owner.optimizers, rates, strict=False):
            if optimizer.rule.lr == rate:  # else the program sets another one
                optimizer.learning_rate = current
        for hook, state in zip(self._owner.hooks, progress["hooks"], strict=False):
            hook.load_state(state)  # a hook that is new begins anew
        training = self._owner.started("Saver.restore").progress
        training.resume(
            progress["pipeline"]["step"],
            progress["pipeline"]["now"],
            self._position_in(reader, progress["pipeline"].get("ranks", 1)),
        )
        saved = progress.get("wall_data", {})
        training.check = lambda data: compare(
            reader.folder, saved, settings_of_data(self._owner, data), allow
        )
        names = {_of_rank(name, shard.rank): name for name in random_state()}
        states = {name: reader.random.get(here) for here, name in names.items()}
        set_random_state({name: state for name, state in states.items() if state is not None})

    def _position_in(self, reader: Reader, num_ranks: int) -> Position | None:
        """Return where the data of this process are; None: they begin anew.

        `num_ranks`: how many processes wrote the state. Another number reads other shares.
        """
        shard = self._owner.shard
        position = reader.manifest.positions.get(_of_rank(POSITION, shard.rank))
        if num_ranks != shard.size:
            log.warning(
                "%s: %d processes read the data, and %d do now: the data begin anew",
                reader.folder,
                num_ranks,
                shard.size,
            )
            position = None
        return None if position is None else Position.from_json(position)

    def _restore_defaults(self, reader: Reader, tables: Mapping[str, Table]) -> None:
        """Set the values of absent ids, which lookups only say after the first batch.

        Where a lookup of the saved program said it, later ones have to say the same.
        """
        progress: Any = reader.progress
        defaults = progress.get("wall_defaults", {})
        for entry in reader.manifest.tables:
            if entry.name not in tables or self._owner.tables[entry.name].default is not None:
                continue
            default = entry.config.get("default", 0.0)
            always = entry.config.get("always_default", False)
            tables[entry.name].set_default(default, always=always)
            self._owner.tables[entry.name].default = defaults.get(entry.name)

    def tables(self) -> dict[str, Table]:
        """Return the tables that are saved, by name."""
        pipeline = self._owner.started("Saver")
        described = self._owner.tables
        return {name: table for name, table in pipeline.tables.items() if described[name].is_save}

    def _network(self) -> nn.Module | None:
        parts = self._owner.models if self._parts is None else self._parts
        networks = [part for part in parts if isinstance(part, nn.Module)]
        if len(networks) > 1:
            return nn.ModuleList(networks)
        return next(iter(networks), None)

    def _parts_setting(self) -> dict[str, Any]:
        return settings_of_parts(self._optimizers(), self._others())

    def _optimizers(self) -> dict[str, torch.optim.Optimizer | None]:
        dense = [part for part in self._parts or [] if isinstance(part, torch.optim.Optimizer)]
        return {f"dense_{number}": optimizer for number, optimizer in enumerate(dense)}

    def _others(self) -> list[Any]:
        kinds = (nn.Module, torch.optim.Optimizer)
        return [part for part in self._parts or [] if not isinstance(part, kinds)]


def _of_rank(name: str, rank: int) -> str:
    """Return the name of what a process has of its own; the first one has the plain name."""
    return f"{name} of rank {rank}" if rank else name


def _check_part(part: Any) -> None:
    """Raise ConfigError unless a part can be saved."""
    if isinstance(part, nn.Module) and table_modules(part):
        raise ConfigError(
            f"Saver: var_list holds modules without tables of their own, got {type(part).__name__} "
            "with Hotbed's tables. Save it by hb.checkpoints, or use create_table."
        )
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise ConfigError(
            "Saver: var_list holds networks, dense optimizers and other objects with state_dict(), "
            f"got {type(part).__name__}. Give Saver([network, optimizer])."
        )
