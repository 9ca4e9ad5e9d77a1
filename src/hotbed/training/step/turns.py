# SPDX-License-Identifier: Apache-2.0
"""Turns: what was mapped for the lookups of a forward pass, which take it in their order."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Batch, Ids, changed
from hotbed.embedding.lookups import Feature, Plans
from hotbed.embedding.modules import EmbeddingCollection, TableModule
from hotbed.errors import ConfigError

from .network import NetworkLookups

T = TypeVar("T")


def features_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the module path of each lookup by its feature, in the order of the forward pass.

    The second lookup of "user" in a forward pass is the feature "user/2".
    """
    lookups: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for path in paths:
        counts[path] += 1
        lookups[path if counts[path] == 1 else f"{path}/{counts[path]}"] = path
    return lookups


class LookupsInTurn(NetworkLookups, ABC):
    """Lookups of a network that computes its ids, in a step by grains: a feature for each.

    A collection for each table has one feature for each of its lookups in a forward pass, and
    shares the gradients of the modules that look up. The forward pass of a grain takes the rows in
    the order of its lookups, and pools them itself.

    Args:
        network: name of its class, for messages.
        modules: that look up in one table each, by their paths.
    """

    def __init__(self, network: str, modules: Mapping[str, TableModule]) -> None:
        self._network = network
        self._by_path = modules
        self.tables = list(dict.fromkeys(module.tables[0] for module in modules.values()))
        self.modules: list[EmbeddingCollection] = []
        self._paths: dict[str, str] = {}  # of the lookup of each feature

    def rows_of(self, plans: Plans) -> Turns[Tensor]:
        """Return the rows of a grain that was mapped, for the lookups of its forward pass.

        Raises:
            ConfigError: they were taken before.
        """
        rows: dict[str, Tensor] = {}
        for collection in self.modules:
            if not collection.training:
                continue
            inputs = collection.inputs_of(plans.ids)
            plan = plans.take(collection, inputs)
            if plan is None:
                raise ConfigError(
                    f"grains: {self._network} is called once with each part of a batch, got a "
                    "second call. Call it once."
                )
            _, sequences = collection.pool(inputs, None, plan)
            names = [feature.name for feature in collection.features]
            rows.update(zip(names, sequences, strict=True))
        ids = {name: Ids(torch.from_numpy(plans.ids[name].values)) for name in rows}
        return Turns(self._paths, ids, rows.__getitem__)

    def _take_paths(self, paths: Iterable[str]) -> None:
        """Make the collections of a network whose forward pass has these lookups, in order."""
        self._paths = features_of(paths)
        for table in self.tables:
            owner = next(m for m in self._by_path.values() if m.tables[0] is table)
            features = [
                Feature(name, table.name, "none")
                for name, path in self._paths.items()
                if self._by_path[path].tables[0] is table
            ]
            if features:
                collection = EmbeddingCollection(features, [table]).to(owner.device)
                collection.share_gradients(owner)
                collection.lookup = owner.lookup
                self.modules.append(collection)

    def _follow_mode(self) -> None:
        """Let each collection be in the mode of the modules whose rows it looks up."""
        for collection in self.modules:
            paths = [self._paths[feature.name] for feature in collection.features]
            modes = {self._by_path[path].training for path in paths}
            if len(modes) > 1:
                raise ConfigError(
                    f"grains: modules that share a table must be in one mode, got train and eval "
                    f"of {paths}. Set both alike."
                )
            collection.train(modes.pop())

    def _looked_up(
        self, parts: Mapping[str, Sequence[Ids]], batch: Batch, times: Tensor | None
    ) -> Batch:
        """Return the ids of all grains of a batch by feature; `parts`: those of each grain."""
        every = {name: Ids.concat(of_grains) for name, of_grains in parts.items()}
        looked_up = Batch(every, time=times, num_samples=batch.num_samples)
        return changed(looked_up, {"grain_ends": batch.grain_ends, "counted": batch.counted})


class Turns(Generic[T]):
    """What was mapped for the lookups of a forward pass, which take it in their order.

    Args:
        lookups: the lookup of each feature, in the order of the forward pass.
        ids: of each feature, of tensors.
        share: returns what the lookup of a feature takes, such as its rows.
        others: lookups for which nothing was mapped.
    """

    def __init__(
        self,
        lookups: Mapping[str, str],
        ids: Mapping[str, Ids],
        share: Callable[[str], T],
        others: Container[str] = (),
    ) -> None:
        self._waiting: dict[str, list[str]] = {}
        for name in ids:
            self._waiting.setdefault(lookups[name], []).append(name)
        self._ids = ids
        self._share = share
        self._others = others
        self._is_begun = False

    def serves(self, lookup: str) -> bool:
        """Return whether something was mapped for a lookup."""
        return lookup not in self._others

    def take(self, lookup: str, ids: Ids) -> T:
        """Return what the next lookup of this name takes.

        Raises:
            ConfigError: its ids are not those that were computed from the batch.
        """
        waiting = self._waiting.get(lookup)
        if not waiting:
            raise ConfigError(
                f"{lookup}: the forward pass looks up more than was computed from its batch, got "
                "one lookup too many. Call the model once a batch, with the batch that its loop "
                "iterates over."
            )
        name = waiting.pop(0)
        computed = self._ids[name]
        if not _agree(computed, ids):
            raise ConfigError(
                f"{lookup}: the forward pass looks up other ids than those that were computed from "
                f"its batch, got {_first(ids)} for {_first(computed)}. Call the model with the "
                "batch that its loop iterates over, and compute ids from the batch alone."
            )
        self._is_begun = True
        return self._share(name)

    def check_taken(self, *, may_skip: bool = True) -> None:
        """Raise ConfigError if a lookup did not take place.

        `may_skip`: whether a forward pass may look up nothing at all.
        """
        left = [lookup for lookup, names in self._waiting.items() if names]
        if left and (self._is_begun or not may_skip):
            raise ConfigError(
                f"{left[0]}: the forward pass looks up less than was computed from its batch, got "
                "a lookup that did not take place. Look up the same for every batch."
            )


def ids_of_samples(values: Tensor, num_samples: int, time: Tensor | None) -> Ids:
    """Return ids as those of samples; see `IdFeatures.compute`."""
    flat = values.reshape(-1)
    num_ids = len(flat)
    if num_ids == num_samples:
        return Ids(flat)
    if num_samples and num_ids % num_samples == 0:
        offsets = torch.arange(num_samples + 1) * (num_ids // num_samples)
        return Ids(flat, offsets)
    newest = num_samples - 1
    if time is not None and num_samples:
        newest = int(time.argmax())
    offsets = torch.full((num_samples + 1,), num_ids)
    offsets[: newest + 1] = 0
    return Ids(flat, offsets)


def bags_of_samples(bags: Ids, num_samples: int, times: Tensor | None) -> Ids:
    """Return ids or bags of a lookup as the ids of samples; see `IdFeatures.compute`.

    They are arrays, also where the network computed them on a device.
    """
    values = bags.values.reshape(-1).to("cpu", torch.int64)
    ids = None
    if bags.offsets is not None and num_samples:
        bags_each, rest = divmod(len(bags), num_samples)
        if bags_each and not rest:
            ids = Ids(values, bags.offsets[::bags_each].cpu())
    ids = ids or ids_of_samples(values, num_samples, times)
    return ids.map_arrays(lambda tensor: np.ascontiguousarray(tensor.numpy()))


def _agree(computed: Ids, ids: Ids) -> bool:
    """Return whether ids have the values, offsets and weights that were computed."""
    parts = (computed.values, computed.offsets, computed.weights)
    others = (ids.values, ids.offsets, ids.weights)
    return all(
        part is None or (other is not None and torch.equal(other.detach().reshape(-1).cpu(), part))
        for part, other in zip(parts, others, strict=True)
    )


def _first(ids: Ids) -> str:
    return f"{ids.values.reshape(-1)[:4].tolist()} …"
