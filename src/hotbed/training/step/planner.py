# SPDX-License-Identifier: Apache-2.0
"""Planner: maps the ids of a network's batches before its forward pass, now or ahead."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn

from hotbed.data.batch import Batch, times_of
from hotbed.embedding.device import counted_as_rows
from hotbed.embedding.lookups import Plans, WantedRows
from hotbed.embedding.modules import EmbeddingCollection, table_modules
from hotbed.embedding.table import MapQueue
from hotbed.errors import ConfigError
from hotbed.parallel import FAULT, edits_of, portable
from hotbed.training.step.example import Example
from hotbed.training.step.network import BatchLookups, NetworkLookups, adapter_of

Agreed = Callable[[Batch], Mapping[str, Any]]
"""Returns what all processes must have alike in the step of a batch."""


class Planner:
    """Maps the ids of batches to rows, in the order of the batches.

    `map` asks for the ids of a batch when its turn has come, `plan` for those of a batch that comes
    later. What they do not ask for is mapped in the forward pass. Results have the same bits either
    way. A step by grains asks for all ids itself, but for batches that are mapped ahead.

    Args:
        lookups: of the network; no other module looks up in their tables.
        agreed: of a step by grains; None = the batch is not divided.
    """

    def __init__(self, lookups: NetworkLookups, agreed: Agreed | None = None) -> None:
        self._lookups = lookups
        self._agreed = agreed
        self._foresees = False
        self._queue: MapQueue | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Planner:
        """Return the planner of a copied network, which has mapped nothing yet."""
        return Planner(*copy.deepcopy((self._lookups, self._agreed), memo))

    @staticmethod
    def of(network: nn.Module) -> Planner:
        """Return the planner of a network in steps over whole batches."""
        adapter = adapter_of(network)
        if adapter is not None:
            return Planner(adapter.lookups(by_grains=False))
        modules = table_modules(network)
        owners = Counter(id(table) for module in modules for table in module.tables)
        return Planner(
            BatchLookups(
                module
                for module in modules
                if isinstance(module, EmbeddingCollection)
                and all(owners[id(table)] == 1 for table in module.tables)
            )
        )

    @property
    def waits(self) -> bool:
        """Whether later examples are waited for: processes that share rows ask for the same."""
        return any(table.spread is not None for table in self._lookups.tables)

    @property
    def foresees(self) -> bool:
        """Whether later batches may be mapped now, after the `map` of the current one."""
        return self._foresees

    def begin(self, *, ahead: bool, queue: MapQueue | None = None) -> None:
        """Prepare a pass over data.

        Args:
            ahead: whether batches are to be mapped before their forward pass.
            queue: maps them, while earlier batches train; None = they are mapped at once.
        """
        self._foresees = False
        self._queue = queue
        self._lookups.begin(ahead=ahead)

    def obstacle(self) -> str:
        """Return why no batch can be mapped before the one ahead of it is learned; "" if it can."""
        return self._lookups.obstacle()

    def map(self, example: Example) -> Example:
        """Prepare the forward pass that follows; an example that `plan` mapped keeps its plans.

        Call it once an example, in order, after everything that must see the tables as they were.

        Raises:
            HotbedError: the ids of this example cannot be mapped, now or in `plan`.
        """
        if self._agreed is not None and self._queue is None:
            return example
        with counted_as_rows(example.device):
            return self._mapped(example, by_grains=self._agreed is not None)

    def _mapped(self, example: Example, *, by_grains: bool) -> Example:
        """Return an example whose ids are mapped, as far as they are known."""
        modules = self._lookups.modules if by_grains else self._lookups.followed(example)
        if example.plans is None and modules is not None:
            example = self._asked(example, modules)
        plans = example.plans
        num_asked = 0 if plans is None or modules is None else len(modules)
        self._foresees = 0 < num_asked == len(self._lookups.modules)
        if not by_grains:
            self._lookups.expect(plans)
        if plans is not None:
            plans.wait()
        return example

    def plan(self, example: Example) -> Example:
        """Map the ids of a later example, or let the queue map them.

        An error is kept, and raised by `map` when the turn of this example comes. An example that
        is returned as it is cannot be mapped before its forward pass.
        """
        try:
            return self._asked(example, self._lookups.modules)
        except Exception as error:
            return example.planned(Plans({}, error=error))

    def take_back(self, example: Example) -> None:
        """Make the tables what they were before the ids of an example were mapped ahead.

        Examples that were mapped later are taken back first. An example that was looked up stays.
        """
        if example.plans is not None:
            example.plans.take_back()

    def statistics(self, example: Example) -> dict[str, dict[str, int]]:
        """Return the statistics of the tables by name, as they are after the map of an example."""
        return {} if example.plans is None else example.plans.statistics()

    def latest(self, example: Example) -> int | None:
        """Return the newest event time of an example in microseconds; None without times."""
        return self._lookups.latest(example)

    def _asked(self, example: Example, modules: Sequence[Any]) -> Example:
        """Return an example whose ids were asked for; itself if they are not known before.

        `modules`: of the lookups; a step by grains asks for all.
        """
        foreseen = example.foreseen_by(self._lookups)
        if foreseen is None:
            return example
        if self._agreed is not None:
            plans = asked_by_grains(self._lookups, foreseen, self._agreed, self._queue)
        else:
            batch = foreseen.looked_up
            plans = Plans(batch.ids, self._lookups.rows_of)
            plans.ask(modules, WantedRows(times_of(batch), queue=self._queue))
        return foreseen.planned(plans)


def asked_by_grains(
    lookups: NetworkLookups, example: Example, agreed: Agreed, queue: MapQueue | None = None
) -> Plans:
    """Ask for the ids of a batch that is divided, for all modules in train mode.

    Args:
        lookups: of the network.
        example: of the batch, whose ids are computed.
        agreed: what all processes must have alike in its step.
        queue: see `WantedRows`.

    Raises:
        ConfigError: a module in eval mode has rows that several processes share.
        HotbedError: a process could not read its part of the batch.
    """
    batch = example.looked_up
    assert example.batch is not None, "the loop divides batches"
    for module in lookups.modules:
        if not module.training and module.lookup.spans_ranks:
            raise ConfigError(
                f"ranks: all ranks look up each step together, got tables "
                f"{[table.name for table in module.tables]} in eval mode. Set "
                'table.frozen = "all" instead.'
            )
    plans = Plans(batch.ids)
    values = partial(_agreed_in, example, agreed)
    modules = [module for module in lookups.modules if module.training]
    wanted = WantedRows(times_of(batch), True, queue, batch.grain_ends, values)
    with counted_as_rows(example.device) if queue is None else nullcontext():
        plans.ask(modules, wanted)
    return plans


def asked_together(network: Any, example: Example) -> list[Example]:
    """Return the grains of an example with plans for the collections of a network in eval mode.

    Their rows are asked for in one question. What else the network looks up, it asks for itself.

    Args:
        network: that scores them, or another callable.
        example: the samples that this process scores, of one batch or of several.

    Raises:
        HotbedError: a process could not read its samples.
    """
    batch = example.batch
    assert batch is not None, "the loop divides batches"
    grains = [grain for grain in example.grains if grain is not None]
    collections = asked_collections(network, batch.ids)
    tables = [table for collection in collections for table in collection.tables]
    shares = [Plans(grain.looked_up.ids, training=False) for grain in grains]
    plans = Plans(batch.ids, training=False)
    ends = list(accumulate(grain.num_samples for grain in grains))
    agreed = partial(_agreed_in, example, lambda batch: edits_of(tables))
    plans.ask(collections, WantedRows(training=False, grain_ends=ends, agreed=agreed))
    plans.divide(shares)
    return [grain.planned(share) for grain, share in zip(grains, shares, strict=True)]


def asked_collections(network: Any, columns: Container[str]) -> list[EmbeddingCollection]:
    """Return collections of a network over some Id columns; no two have the same table."""
    if not isinstance(network, nn.Module) or adapter_of(network) is not None:
        return []
    collections = []
    tables: set[str] = set()
    for module in table_modules(network):
        names = {table.name for table in module.tables}
        has_ids = all(feature.name in columns for feature in module.features)
        if isinstance(module, EmbeddingCollection) and has_ids and not names & tables:
            collections.append(module)
            tables |= names
    return collections


def _agreed_in(example: Example, agreed: Agreed) -> Mapping[str, Any]:
    """Return what all processes must have alike in a step, or why its batch could not be read."""
    assert example.batch is not None
    if example.error is not None:
        return {FAULT: portable(example.error)}
    return agreed(example.batch)
