# SPDX-License-Identifier: Apache-2.0
"""Planner: maps the ids of batches for the collections of a network."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from hotbed.data.batch import Batch, times_of
from hotbed.embedding.lookups import Plan, Plans
from hotbed.embedding.modules import EmbeddingCollection, table_modules
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import MapQueue, Table
from hotbed.training.stages.example import Example
from hotbed.training.stages.network import BatchLookups, NetworkLookups

log = logging.getLogger("hotbed")


class Planner:
    """A `Mapper` of a network that is called with a `Batch`: it maps the ids for its collections.

    A collection is mapped here if it is in train mode, and looked up the ids of the batch before as
    they are, exactly once. All others map in their forward pass. Results have the same bits either
    way. `plan` maps batches that come later.

    Args:
        lookups: of the network; their collections share no table with another module.
    """

    waits = False

    def __init__(self, lookups: NetworkLookups) -> None:
        self._lookups = lookups
        self._strayed: set[EmbeddingCollection] = set()
        self._last = Plans({})
        self._foresees = False
        self._queue: MapQueue | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Planner:
        """Return the planner of a copied network, which has mapped nothing yet."""
        return Planner(copy.deepcopy(self._lookups, memo))

    @staticmethod
    def of(network: nn.Module) -> Planner:
        """Return a planner of the collections of a network that share no table."""
        modules = table_modules(network)
        owners = Counter(id(table) for module in modules for table in module.tables)
        return Planner(
            BatchLookups(
                [
                    module
                    for module in modules
                    if isinstance(module, EmbeddingCollection)
                    and all(owners[id(table)] == 1 for table in module.tables)
                ]
            )
        )

    def begin(self, *, ahead: bool, queue: MapQueue | None = None) -> None:
        self._queue = queue

    @property
    def foresees(self) -> bool:
        """Whether later batches may be mapped now.

        The network looked up the ids of the batch before the last one as they were, exactly once.
        """
        return self._foresees

    def obstacle(self) -> str:
        """Return why no batch can be mapped before the one ahead of it is learned; "" if it can."""
        if not self._lookups.tables:
            return "no EmbeddingCollection with tables of its own"
        return obstacle_of(self._lookups.tables)

    def map(self, example: Example) -> Example:
        if example.batch is None:
            return example
        self._forget_strays()
        example = example.foreseen_by(self._lookups)
        followed = [module for module in self._collections if self._followed(module)]
        self._foresees = bool(followed) and len(followed) == len(self._collections)
        plans: Plans | None = example.looked_up.plans
        if plans is None:
            plans = Plans(example.looked_up.ids)
            for collection in followed:
                plans.add(collection, self._plan_of(collection, example.looked_up))
            example = example.planned(plans)
        self._last = plans
        plans.wait()
        return example

    def plan(self, example: Example) -> Example:
        if example.batch is None:
            return example
        plans = Plans({})
        try:
            example = example.foreseen_by(self._lookups)
            plans.ids = example.looked_up.ids
            for collection in self._collections:
                plans.add(collection, self._plan_of(collection, example.looked_up))
        except Exception as error:
            plans.error = error
        return example.planned(plans, plans.error)

    def take_back(self, example: Example) -> None:
        if example.batch is not None and example.batch.plans is not None:
            example.batch.plans.take_back()

    def statistics(self, example: Example) -> dict[str, dict[str, int]]:
        if example.batch is None or example.batch.plans is None:
            return {}
        statistics: dict[str, dict[str, int]] = example.batch.plans.statistics()
        return statistics

    def latest(self, example: Example) -> int | None:
        return example.latest

    @property
    def _collections(self) -> list[EmbeddingCollection]:
        every = self._lookups.collections
        return [collection for collection in every if collection not in self._strayed]

    def _plan_of(self, collection: EmbeddingCollection, batch: Batch) -> Plan:
        return collection.map(
            collection.inputs_of(batch),
            times_of(batch),
            training=True,
            queue=self._queue,
            grain_ends=batch.grain_ends,
        )

    def _followed(self, collection: EmbeddingCollection) -> bool:
        return collection.training and self._last.followed(collection)

    def _forget_strays(self) -> None:
        for module in self._last.left():
            self._strayed.update(c for c in self._collections if c is module)
            tables = ", ".join(table.name for table in module.tables)
            log.warning(
                "tables %s: the network did not look up the ids of a batch that were mapped for it,"
                " as it did before; from now on they are mapped when they are looked up",
                tables,
            )


def obstacle_of(tables: Iterable[Table]) -> str:
    """Return why ids of these tables cannot be mapped before earlier updates; "" if they can."""
    for table in tables:
        if table.clock == "steps":
            return f"the policies of table {table.name!r} count its steps"
        if table.rule.moves_new_rows:
            return (
                f"the rule of table {table.name!r} decays rows without a gradient (scope "
                f"{table.rule.scope!r}), and a new row must not miss or repeat a step"
            )
        is_bounded = any(isinstance(policy, (Lfu, Lru)) for policy in table.evictions)
        if is_bounded and table.rule.scope != "touched":
            return (
                f"the rule of table {table.name!r} has the scope {table.rule.scope!r}, and a row "
                "that the full table removes must not miss a step"
            )
    return ""
