# SPDX-License-Identifier: Apache-2.0
"""Planner: the map stage of a training loop."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from torch import nn

from hotbed.data.batch import Batch, changed
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import MapQueue, Table

from .base import table_modules
from .collection import EmbeddingCollection
from .plan import Plan, Plans

log = logging.getLogger("hotbed")


class Planner:
    """Maps the ids of a batch for the collections of a network, before its forward pass.

    A collection is mapped here if it is in train mode, shares no table with another module, and
    looked up the ids of the batch before as they are, exactly once. All others map in their forward
    pass. Results have the same bits either way. `plan` maps batches that come later.

    Example:
        >>> planner = Planner(network)
        >>> for batch in batches:
        ...     batch = planner.map(batch)
        ...     loss_of(network(batch), batch).backward()
    """

    def __init__(self, network: nn.Module) -> None:
        modules = table_modules(network)
        owners = Counter(id(table) for module in modules for table in module.tables)
        self._collections = [
            module
            for module in modules
            if isinstance(module, EmbeddingCollection)
            and all(owners[id(table)] == 1 for table in module.tables)
        ]
        self._last = Plans({})
        self._foresees = False
        self._queue: MapQueue | None = None

    def begin(self, queue: MapQueue | None) -> None:
        """Map ids by `queue` from now on; None = at once."""
        self._queue = queue

    def map(self, batch: Batch) -> Batch:
        """Map the ids of `batch`, and return the batch with the plans that its lookups take.

        New ids are inserted, counted and timed now. Call it once a batch, in order, after
        everything that must see the tables as they were, and run the forward pass of the same
        network next. A batch that `plan` mapped keeps its plans.

        Raises:
            HotbedError: the ids of this batch cannot be mapped, now or in `plan`.
        """
        self._forget_strays()
        followed = [module for module in self._collections if self._followed(module)]
        self._foresees = bool(followed) and len(followed) == len(self._collections)
        if batch.plans is None:
            plans = Plans(batch.ids)
            for collection in followed:
                plans.add(collection, self._plan_of(collection, batch))
            batch = changed(batch, {"plans": plans})
        self._last = batch.plans
        self._last.wait()
        return batch

    def obstacle(self) -> str:
        """Return why no batch can be mapped before the one ahead of it is learned; "" if it can."""
        if not self._collections:
            return "no EmbeddingCollection with tables of its own"
        reasons = (obstacle_of(collection.tables) for collection in self._collections)
        return next(filter(None, reasons), "")

    @property
    def foresees(self) -> bool:
        """Whether later batches may be mapped now.

        The network looked up the ids of the batch before the last one as they were, exactly once.
        """
        return self._foresees

    def plan(self, batch: Batch) -> Batch:
        """Map the ids of a later batch, in the order of the batches.

        An error is raised by `map` when the turn of this batch comes.
        """
        plans = Plans(batch.ids)
        try:
            for collection in self._collections:
                plans.add(collection, self._plan_of(collection, batch))
        except Exception as error:
            plans.error = error
        return changed(batch, {"plans": plans})

    def _plan_of(self, collection: EmbeddingCollection, batch: Batch) -> Plan:
        return collection.map(
            collection.inputs_of(batch), batch.time, training=True, queue=self._queue
        )

    def _followed(self, collection: EmbeddingCollection) -> bool:
        return collection.training and self._last.followed(collection)

    def _forget_strays(self) -> None:
        for module in self._last.left():
            self._collections = [own for own in self._collections if own is not module]
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
