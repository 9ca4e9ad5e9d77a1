# SPDX-License-Identifier: Apache-2.0
"""Fetcher: tables on a disk begin to read the rows of batches that come later."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import nn

from hotbed.data.batch import Batch, Ids
from hotbed.embedding.lookups import FeatureLayout
from hotbed.embedding.modules import EmbeddingCollection, TableModule, histories_of, table_modules
from hotbed.embedding.table import Table
from hotbed.embedding.tier import Ssd
from hotbed.errors import HotbedError
from hotbed.training.step.example import CPU, Example, prepare
from hotbed.training.step.network import BatchLookups, NetworkLookups, adapter_of

log = logging.getLogger("hotbed")

Coming = Batch | Example
"""A batch that was read and is not learned yet."""


class Fetcher:
    """Lets tables on a disk read the rows of coming batches, each batch once and in order.

    Several batches are given to the tables at once, half of those that are read ahead: a block of
    the disk that holds rows of some of them is then read once.

    It only looks at batches that were read already, so reading and learning are as without it. A
    thread of its own finds their ids in the tables, where nothing changes, and begins the reads. A
    batch that is learned before the thread has come to it is left out. An error of the thread is
    logged and has no other effect: the lookup of that batch reads the rows itself, and raises what
    is wrong.

    Args:
        network: that looks up the batches.
        modules: of the network, with tables that read ahead.

    Attributes:
        depth: how many batches ahead rows are read.
    """

    def __init__(self, network: nn.Module, modules: Iterable[TableModule]) -> None:
        adapter = adapter_of(network)
        self._features = {module.layout: _DiskFeatures(module) for module in modules}
        self._lookups: NetworkLookups = BatchLookups(
            module for module in modules if isinstance(module, EmbeddingCollection)
        )
        if adapter is not None:
            self._lookups = adapter.lookups(by_grains=False)
        self._histories = histories_of(network)
        self._thread = ThreadPoolExecutor(1, "hotbed-fetch")
        self._waiting: dict[int, tuple[Coming, Future[None]]] = {}  # by the identity of the batch
        self._problem = ""  # the first one, which is logged
        self._is_known = True  # whether ids are known before the forward pass
        self.depth = max(features.depth for features in self._features.values())

    @staticmethod
    def of(network: nn.Module) -> Fetcher | None:
        """Return a fetcher for the tables of a network; None if none of them reads ahead."""
        modules = [module for module in table_modules(network) if any(map(_depth, module.tables))]
        return Fetcher(network, modules) if modules else None

    def look(self, coming: Sequence[Coming]) -> None:
        """Let the thread fetch those of the coming batches that it was not given before.

        Args:
            coming: the next batches in order; they are compared by identity.
        """
        before = self._waiting
        self._waiting = {}
        new: list[Coming] = []
        for batch in coming:
            number = id(batch)
            if number in before:
                self._waiting[number] = before.pop(number)
            else:
                new.append(batch)
        for _, task in before.values():  # the turn of their last batch has come
            if all(task is not other for _, other in self._waiting.values()):
                task.cancel()
        enough = (self.depth + 1) // 2
        if new and (len(new) >= enough or len(self._waiting) < enough):
            task = self._thread.submit(self._fetch, list(map(self._ids_of, new)))
            self._waiting.update((id(batch), (batch, task)) for batch in new)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
        self._waiting = {}

    def _ids_of(self, coming: Coming) -> list[tuple[_DiskFeatures, Sequence[Ids]]]:
        """Return the ids of lookups in tables that read ahead, as far as they are known now."""
        ids = None
        if isinstance(coming, Batch):
            if self._histories is not None:  # as they are now; the rows in between leave few more
                coming = self._histories.foreseen(coming)
            coming = prepare(coming, CPU, labelled=False)
        try:
            if self._is_known:
                ids = self._lookups.of(coming)
        except HotbedError as error:
            self._is_known = False  # a model that cannot be traced is not traced again
            self._note(error)
        if ids is None:
            return []
        modules = [module for module in self._lookups.modules if module.layout in self._features]
        return [(self._features[module.layout], module.inputs_of(ids)) for module in modules]

    def _fetch(self, batches: Sequence[Sequence[tuple[_DiskFeatures, Sequence[Ids]]]]) -> None:
        inputs: dict[_DiskFeatures, list[Sequence[Ids]]] = {}
        for lookups in batches:
            for features, ids in lookups:
                inputs.setdefault(features, []).append(ids)
        try:
            for features, of_batches in inputs.items():
                features.fetch(of_batches)
        except Exception as error:  # the lookup raises it again
            self._note(error)

    def _note(self, error: Exception) -> None:
        if not self._problem:
            self._problem = str(error)
            log.warning("rows of a batch are read in its step, not ahead: %s", self._problem)


class _DiskFeatures:
    """The features of a module whose tables read ahead.

    Attributes:
        depth: how many batches ahead.
    """

    def __init__(self, module: TableModule) -> None:
        self._module = module
        layout = module.layout
        numbers = range(len(layout.features))
        self._numbers = [number for number in numbers if _depth(layout.table_of(number))]
        tables = dict.fromkeys(map(layout.table_of, self._numbers))
        features = [layout.features[number] for number in self._numbers]
        self._layout = FeatureLayout(list(tables), features)
        self.depth = max(map(_depth, tables), default=0)

    def fetch(self, batches: Sequence[Sequence[Ids]]) -> None:
        """Begin to read the rows of batches, of which each has the ids of all features."""
        ids = [Ids.concat([inputs[number] for inputs in batches]) for number in self._numbers]
        self._module.lookup.fetch(self._layout, ids)


def _depth(table: Table) -> int:
    """Return how many batches ahead a table reads rows; 0 = none, as a table in memory."""
    return table.tier.fetch if isinstance(table.tier, Ssd) else 0
