# SPDX-License-Identifier: Apache-2.0
"""Updates: the lookups that wait for an update, and how their optimizers update them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from hotbed.embedding.modules import RowTargets, Target, update_targets
from hotbed.embedding.rule import Rule
from hotbed.errors import ConfigError


class RowOptimizer(Protocol):
    """A sparse optimizer, as tables and their updates see it.

    Attributes:
        name: for messages.
        rule: how a step changes a row.
        learning_rate: of the next updates.
    """

    name: str
    rule: Rule
    learning_rate: float


class Updates:
    """The updates of the rows that were looked up.

    Args:
        targets: collects the lookups that wait for an update.
        optimizers: that of each table, by its name.
    """

    def __init__(self, targets: RowTargets, optimizers: Mapping[str, RowOptimizer]) -> None:
        self._targets = targets
        self._optimizers = dict(optimizers)
        self._looked_up: list[str] = []  # tables in the order of their first lookup

    def note_lookup(self, table: str) -> None:
        """Note that a table is looked up, for the order of `waiting`."""
        if table not in self._looked_up:
            self._looked_up.append(table)

    @property
    def waiting(self) -> list[Target]:
        """The lookups that wait for an update, by forward pass.

        Within one, they are in the order in which the tables were first looked up.
        """
        waiting = self._targets.waiting
        passes = list(dict.fromkeys(id(target.mapped) for target in waiting))
        places = {name: number for number, name in enumerate(self._looked_up)}

        def place(target: Target) -> tuple[int, int]:
            return passes.index(id(target.mapped)), places.get(target.table.name, len(places))

        return sorted(waiting, key=place)

    def waiting_for(self, optimizer: RowOptimizer) -> list[Target]:
        """Return the lookups in the tables of an optimizer."""
        return [
            target
            for target in self._targets.waiting
            if self._optimizers[target.table.name] is optimizer
        ]

    def target_at(self, optimizer: RowOptimizer, address: Tensor) -> Target:
        """Return the lookup with these addresses.

        Raises:
            ConfigError: no lookup has them, or another optimizer updates its table.
        """
        for target in self._targets.waiting:
            if target.slots is address:
                self._check_optimizer(optimizer, target.table.name)
                return target
        raise ConfigError(
            f"{optimizer.name}.apply_gradients: addresses of no lookup that waits, got a tensor of "
            f"shape {list(address.shape)}. Give the tensors of get_collection"
            '("ASCEND_SPARSE_LOOKUP_ID_OFFSET") as they are, once.'
        )

    def _check_optimizer(self, optimizer: RowOptimizer, table: str) -> None:
        expected = self._optimizers[table]
        if expected is not optimizer:
            raise ConfigError(
                f"{optimizer.name}.apply_gradients: another optimizer updates the table {table!r}, "
                f"got addresses of it. Give them to {expected.name}, or the table another one in "
                "optimizer_list."
            )

    def apply(
        self, optimizer: RowOptimizer, gradients: Sequence[tuple[Target, Tensor | None]]
    ) -> None:
        """Update rows with their gradients, and forget these lookups; None updates nothing."""
        rates = dict.fromkeys(self._optimizers, optimizer.learning_rate)
        update_targets(gradients, rates)
        self.forget([target for target, _ in gradients])

    def forget(self, targets: Sequence[Target]) -> None:
        """Let these lookups wait no longer."""
        done = {id(target) for target in targets}
        self._targets.waiting = [
            target for target in self._targets.waiting if id(target) not in done
        ]
