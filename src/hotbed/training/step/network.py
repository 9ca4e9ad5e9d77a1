# SPDX-License-Identifier: Apache-2.0
"""What the loop asks of a network: which ids it looks up, and how it is called."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from hotbed.data.batch import Batch
from hotbed.data.schema import Schema
from hotbed.embedding.lookups import Plans
from hotbed.embedding.modules import EmbeddingCollection
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.persist.publish.plain import PlainModel

log = logging.getLogger("hotbed")

ADAPTER = "_hotbed_adapter"
"""The attribute of a network that holds its `NetworkAdapter`."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a network."""


class NetworkLookups(ABC):
    """The ids that a network looks up in its batches, for all who map or fetch them before it.

    Attributes:
        tables: in which it looks up.
        modules: that are asked for their ids together, each a `PlannedModule`; of some networks
            after the first `of`.
        rows_of: returns what the lookups of a forward pass take of its `Plans`, for a network that
            does not call `modules`; None = it calls them.
    """

    tables: Sequence[Table]
    modules: Sequence[Any]
    rows_of: Callable[[Plans], Any] | None = None

    @abstractmethod
    def of(self, example: Any) -> Batch | None:
        """Return the ids of all modules in a batch, with its grains and times.

        It is the batch itself where the network looks up its ids as they are; None where they are
        not known before the forward pass of this batch.

        Args:
            example: an `Example` of tensors, for a forward pass in the mode that the network has.

        Raises:
            HotbedError: the ids of no batch are known before.
        """

    def obstacle(self) -> str:
        """Return why no batch can be mapped before the one ahead of it is learned; "" if it can."""
        return obstacle_of(self.tables)

    def begin(self, *, ahead: bool) -> None:  # noqa: B027 - most look at no pass
        """Begin a pass over data; `ahead`: whether batches are to be mapped before their turn."""

    def followed(self, example: Any) -> Sequence[Any] | None:
        """Return the modules that can be asked for now, since the turn of an example has come.

        None: none of them, nor are their lookups watched. The step of the example before is over.

        Raises:
            ConfigError: that step has not looked up what was mapped for it.
        """
        return self.modules

    def expect(self, plans: Plans | None) -> None:  # noqa: B027 - by grains, batches carry them
        """Let the next forward pass in train mode take plans; None: it maps its ids itself."""

    def in_turn(self, grain: Any) -> AbstractContextManager[None]:
        """Return a block in which the network runs on a grain whose ids are mapped."""
        return nullcontext()

    def latest(self, example: Any) -> int | None:
        """Return the newest event time of an example in microseconds; None without times."""
        latest: int | None = example.latest
        return latest


class BatchLookups(NetworkLookups):
    """Collections that look up the ids of a `Batch` as they are.

    Args:
        collections: those of the network.
    """

    def __init__(self, collections: Iterable[EmbeddingCollection]) -> None:
        self.modules: list[EmbeddingCollection] = list(collections)
        self.tables = [table for collection in self.modules for table in collection.tables]
        self._last = Plans({})

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchLookups:
        """Return the lookups of a copied network, which has looked up nothing yet."""
        return BatchLookups(copy.deepcopy(self.modules, memo))

    def of(self, example: Any) -> Batch | None:
        if example.structure is not None and self.modules:
            raise ConfigError(
                "grains: hb.EmbeddingCollection looks up the columns of a batch, got a tuple. Give "
                "a hb.Dataset, look up by hb.Embedding, or leave grains out."
            )
        batch: Batch | None = example.batch
        return batch

    def obstacle(self) -> str:
        if not self.tables:
            return "no EmbeddingCollection with tables of its own"
        if any(module.histories is not None for module in self.modules):
            return "the histories of a batch depend on the batches before it"
        return super().obstacle()

    def followed(self, example: Any) -> list[EmbeddingCollection]:
        """Return the modules that looked up the ids of the batch before as they are, once."""
        for module in self._last.left():
            self.modules = [other for other in self.modules if other is not module]
            log.warning(
                "tables %s: the network did not look up the ids of a batch that were mapped for it,"
                " as it did before; from now on they are mapped when they are looked up",
                ", ".join(table.name for table in module.layout.tables),
            )
        return [m for m in self.modules if m.training and self._last.followed(m)]

    def expect(self, plans: Plans | None) -> None:
        self._last = Plans({}) if plans is None else plans


class NetworkAdapter(Protocol):
    """Calls a network by its own parameters; the network computes its ids from their values.

    `hb.auto` gives one to each model that it converts.
    """

    @property
    def was_called(self) -> bool:
        """Whether a batch has shown the arguments of the network, which a server needs."""

    def arguments_of(self, data: Any) -> Arguments:
        """Return how the loop calls the network with the data of a batch."""

    def times_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the times of the samples among the arguments; None if there are none."""

    def lookups(self, *, by_grains: bool) -> NetworkLookups:
        """Return the lookups of the network, in steps over grains or over whole batches.

        Raises:
            ConfigError: `by_grains`, and the network also looks up in other ways.
        """

    def plain_model(self, schema: Schema | None) -> PlainModel:
        """Return the network as the exporter takes it.

        `schema`: of the requests; None if the network did not learn from a Dataset.
        """


def adapter_of(network: nn.Module) -> NetworkAdapter | None:
    """Return the adapter of a network; None if it is called with a batch as it is."""
    adapter: NetworkAdapter | None = network.__dict__.get(ADAPTER)
    return adapter


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


def looks_up_once(network: nn.Module) -> bool:
    """Return whether a network says that it looks up the ids of each batch once, as they are.

    Its ids are then mapped before its forward pass. Another network may look up other ids at any
    step. Ids that were mapped for nothing would be inserted and counted, and a resumed run would
    not repeat that.
    """
    return _says(network, "looks_up_once")


def ignores_mode(network: nn.Module) -> bool:
    """Return whether a network says that its own code is the same in train and in eval mode.

    The layers in it may differ all the same.
    """
    return _says(network, "ignores_mode")


def _says(network: nn.Module, name: str) -> bool:
    """Return whether a network or its own class sets an attribute to True.

    What a base class says does not count, since a subclass may have another forward function.
    """
    attributes = {**vars(type(network)), **vars(network)}
    return attributes.get(name) is True
