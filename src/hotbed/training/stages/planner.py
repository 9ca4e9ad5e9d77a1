# SPDX-License-Identifier: Apache-2.0
"""Planner: asks for the ids of batches, for the collections of a network."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from hotbed.data.batch import Batch, times_of
from hotbed.embedding.lookups import Plans, WantedRows
from hotbed.embedding.modules import EmbeddingCollection, table_modules
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import MapQueue, Table
from hotbed.errors import ConfigError
from hotbed.parallel import FAULT, portable
from hotbed.training.stages.example import Example
from hotbed.training.stages.network import BatchLookups, NetworkLookups

log = logging.getLogger("hotbed")

Agreed = Callable[[Batch], Mapping[str, Any]]
"""Returns what all processes must have alike in the step of a batch."""


class Planner:
    """A `Mapper` of a network that is called with a `Batch`: it asks for the ids of collections.

    `map` asks for those of a collection that is in train mode, and looked up the ids of the batch
    before as they are, exactly once. All others map in their forward pass. Results have the same
    bits either way. `plan` asks for batches that come later.

    A step by grains asks for all ids itself, and refuses a network that looks up others. There,
    batches are asked for here only if they are mapped ahead.

    Args:
        lookups: of the network; their collections share no table with another module.
        agreed: of a step by grains; None = the batch is not divided.
    """

    def __init__(self, lookups: NetworkLookups, agreed: Agreed | None = None) -> None:
        self._lookups = lookups
        self._agreed = agreed
        self._strayed: set[EmbeddingCollection] = set()
        self._last = Plans({})
        self._foresees = False
        self._queue: MapQueue | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Planner:
        """Return the planner of a copied network, which has mapped nothing yet."""
        return Planner(*copy.deepcopy((self._lookups, self._agreed), memo))

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
    def waits(self) -> bool:
        """Whether later examples are waited for: processes that share rows ask for the same."""
        return any(table.spread is not None for table in self._lookups.tables)

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
        if self._lookups.runs_network:
            return "the ids of its lookups are those of a forward pass"
        return obstacle_of(self._lookups.tables)

    def map(self, example: Example) -> Example:
        by_grains = self._agreed is not None
        if example.batch is None or (by_grains and self._queue is None):
            return example
        self._forget_strays()
        plans: Plans | None = example.batch.plans
        if plans is None:
            example = example.foreseen_by(self._lookups)
        followed = [module for module in self._collections if by_grains or self._followed(module)]
        self._foresees = bool(followed) and len(followed) == len(self._collections)
        if plans is None:
            plans = Plans(example.looked_up.ids)
            self._ask(plans, followed, example)
            example = example.planned(plans)
        if not by_grains:
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
            self._ask(plans, self._collections, example)
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

    def _ask(
        self, plans: Plans, collections: Sequence[EmbeddingCollection], example: Example
    ) -> None:
        if self._agreed is not None:
            ask_for_grains(plans, self._lookups, example, self._agreed, self._queue)
        else:
            plans.ask(collections, WantedRows(times_of(example.looked_up), queue=self._queue))

    def _followed(self, collection: EmbeddingCollection) -> bool:
        return collection.training and self._last.followed(collection)

    def _forget_strays(self) -> None:
        for module in self._last.left():
            self._strayed.update(c for c in self._collections if c is module)
            tables = ", ".join(table.name for table in module.layout.tables)
            log.warning(
                "tables %s: the network did not look up the ids of a batch that were mapped for it,"
                " as it did before; from now on they are mapped when they are looked up",
                tables,
            )


def ask_for_grains(
    plans: Plans,
    lookups: NetworkLookups,
    example: Example,
    agreed: Agreed,
    queue: MapQueue | None = None,
) -> None:
    """Ask for the ids of a batch that is divided, for all collections in train mode.

    Args:
        plans: of the batch.
        lookups: of the network.
        example: of the batch, whose ids are computed.
        agreed: what all processes must have alike in its step.
        queue: see `WantedRows`.

    Raises:
        ConfigError: a collection in eval mode has rows that several processes share.
        HotbedError: a process could not read its part of the batch.
    """
    batch = example.looked_up
    assert example.batch is not None, "the loop divides batches"
    for module in lookups.collections:
        if not module.training and module.lookup.spans_ranks:
            raise ConfigError(
                f"ranks: all ranks look up each step together, got tables "
                f"{[table.name for table in module.tables]} in eval mode. Set "
                'table.frozen = "all" instead.'
            )
    modules = [module for module in lookups.collections if module.training]
    values = partial(_agreed_in, example, agreed)
    plans.ask(modules, WantedRows(times_of(batch), True, queue, batch.grain_ends, values))


def _agreed_in(example: Example, agreed: Agreed) -> Mapping[str, Any]:
    """Return what all processes must have alike in a step, or why its batch could not be read."""
    assert example.batch is not None
    if example.error is not None:
        return {FAULT: portable(example.error)}
    return agreed(example.batch)


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
