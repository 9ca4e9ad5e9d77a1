# SPDX-License-Identifier: Apache-2.0
"""Planner: the map stage of a training loop."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from torch import nn

from hotbed.data.batch import Batch

from .base import table_modules
from .collection import EmbeddingCollection
from .plan import Plans

log = logging.getLogger("hotbed")


class Planner:
    """Maps the ids of a batch for the collections of a network, before its forward pass.

    A collection is mapped ahead if it is in train mode, shares no table with another module, and
    looked up the ids of the batch before as they are, exactly once. All others map in their forward
    pass. Results have the same bits either way.

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

    def map(self, batch: Batch) -> Batch:
        """Map the ids of `batch`, and return the batch with the plans that its lookups take.

        New ids are inserted, counted and timed now. Call it once a batch, after everything that
        must see the tables as they were, and run the forward pass of the same network next.
        """
        plans = Plans(batch.ids)
        self._forget_strays()
        for collection in self._collections:
            if collection.training and self._last.followed(collection):
                plans.add(collection, collection.map(collection.inputs_of(batch), batch.time))
        self._last = plans
        return replace(batch, plans=plans)

    def _forget_strays(self) -> None:
        for module in self._last.left():
            self._collections = [own for own in self._collections if own is not module]
            tables = ", ".join(table.name for table in module.tables)
            log.warning(
                "tables %s: the network did not look up the ids of a batch that were mapped for it,"
                " as it did before; from now on they are mapped when they are looked up",
                tables,
            )
