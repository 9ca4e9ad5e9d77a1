# SPDX-License-Identifier: Apache-2.0
"""What the loop asks of a network that it does not call with a batch as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from hotbed.data.batch import Batch, Ids
from hotbed.data.schema import Schema
from hotbed.embedding.lookups import Plans
from hotbed.embedding.modules import EmbeddingCollection, TableModule
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.persist.publish.plain import PlainModel

ADAPTER = "_hotbed_adapter"
"""The attribute of a network that holds its `NetworkAdapter`."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a network."""


class NetworkLookups(Protocol):
    """The lookups of a network whose ids are mapped before its forward pass."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables in which they look up."""

    @property
    def collections(self) -> Sequence[EmbeddingCollection]:
        """The collections that map and pool their ids; of some networks after the first `of`."""

    @property
    def rows_of(self) -> Callable[[Plans], Any] | None:
        """What `Plans` of a forward pass take."""

    @property
    def runs_network(self) -> bool:
        """Whether `of` runs the network, so that it cannot do so beside a step."""

    def of(self, example: Any) -> Batch:
        """Return the ids of the features of all collections, with the grains and times of a batch.

        It is the batch itself where the network looks up its ids as they are.

        Args:
            example: an `Example` of tensors, for a forward pass in the mode that the network has.

        Raises:
            HotbedError: the ids are not known before the forward pass.
        """

    def in_turn(self, grain: Any) -> AbstractContextManager[None]:
        """Return a block in which the network runs on a grain whose ids are mapped."""


class BatchLookups:
    """A `NetworkLookups` of collections that look up the ids of a `Batch` as they are."""

    rows_of = None
    runs_network = False

    def __init__(self, collections: Sequence[EmbeddingCollection]) -> None:
        self.collections = collections
        self.tables = [table for collection in collections for table in collection.tables]

    def of(self, example: Any) -> Batch:
        if example.structure is not None and self.collections:
            raise ConfigError(
                "grains: hb.EmbeddingCollection looks up the columns of a batch, got a tuple. Give "
                "a hb.Dataset, look up by hb.Embedding, or leave grains out."
            )
        batch: Batch = example.batch
        return batch

    def in_turn(self, grain: Any) -> AbstractContextManager[None]:
        return nullcontext()


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

    def ids_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[tuple[TableModule, Ids]]:
        """Return the ids of coming lookups, as far as they can be computed now.

        Args:
            args: positional arguments of the network.
            kwargs: its keyword arguments.

        Raises:
            HotbedError: they cannot be computed before the forward pass.
        """

    def lookups(self) -> NetworkLookups:
        """Return the lookups of the network, for a step that maps their ids before.

        Raises:
            ConfigError: the network also looks up in other ways.
        """

    def plain_model(self, schema: Schema | None) -> PlainModel:
        """Return the network as the exporter takes it.

        `schema`: of the requests; None if the network did not learn from a Dataset.
        """


def adapter_of(network: nn.Module) -> NetworkAdapter | None:
    """Return the adapter of a network; None if it is called with a batch as it is."""
    adapter: NetworkAdapter | None = network.__dict__.get(ADAPTER)
    return adapter


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
