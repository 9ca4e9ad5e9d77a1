# SPDX-License-Identifier: Apache-2.0
"""MovedLookups: the lookups of a converted model, for a step that maps their ids before."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import Batch, CountedTimes, Ids, changed, times_of
from hotbed.embedding.lookups import Feature, Plans
from hotbed.embedding.modules import EmbeddingCollection, table_modules
from hotbed.errors import ConfigError
from hotbed.training.auto.network import Converted

from .features import RowsInTurn, ids_of_samples, lookups_by_feature


class MovedLookups:
    """A `NetworkLookups` of a model that `hb.auto` converted: its id graph computes the ids.

    A collection for each table has one feature for each of its lookups in a forward pass, and
    shares the gradients of the modules that look up. The forward pass of a grain takes the rows in
    the order of its lookups, and pools them itself.

    Args:
        state: of the model.

    Raises:
        ConfigError: the model has tables that `hb.auto` did not make.
    """

    def __init__(self, state: Converted) -> None:
        self._state = state
        modules = list(state.lookups.values())
        others = [module for module in table_modules(state.model) if module not in modules]
        if others:
            raise ConfigError(
                "grains: a model of hb.auto has the tables that hb.auto made, got others: "
                f"{[table.name for table in others[0].tables]}. Leave grains out and start one "
                "process, or write the network with hb.EmbeddingCollection alone."
            )
        self.tables = list(dict.fromkeys(module.tables[0] for module in modules))
        self.collections: list[EmbeddingCollection] = []
        self._paths: dict[str, str] = {}  # of the lookup of each feature

    def of(self, batch: Batch) -> Batch:
        """Return the ids of each lookup, as the model computes them for each grain of a batch."""
        state = self._state
        if not state.lookups:
            return batch
        args, kwargs = state.bind(batch)
        state.learn_signature(args, kwargs)
        if not self._paths:
            self._paths = self._foreseen_paths()
            self.collections = self._make_collections()
        times = state.times_of(args, kwargs, times_of(batch))
        if isinstance(times, CountedTimes):
            times = times.time
        if times is not None:
            times = torch.as_tensor(times).detach().cpu().reshape(-1).expand(batch.num_samples)
            for module in state.lookups.values():
                module.layout.date(times.numpy())
        self._follow_mode()
        parts: dict[str, list[Ids]] = {name: [] for name in self._paths}
        ends = batch.grain_ends or (batch.num_samples,)
        for number, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            if first < last or not (batch.num_samples or number):
                of_grain = None if times is None else times[first:last]
                grain = batch[first:last].at(None, batch.encoder)
                for name, ids in self._ids_of(grain, of_grain).items():
                    parts[name].append(ids)
        every = {name: Ids.concat(of_grains) for name, of_grains in parts.items()}
        looked_up = Batch(every, time=times, num_samples=batch.num_samples)
        return changed(looked_up, {"grain_ends": batch.grain_ends, "counted": batch.counted})

    def rows_of(self, plans: Plans) -> RowsInTurn:
        """Return the rows of a grain that was mapped, for the lookups of its forward pass.

        Raises:
            ConfigError: they were taken before.
        """
        rows: dict[str, Tensor] = {}
        for collection in self.collections:
            if not collection.training:
                continue
            inputs = collection.inputs_of(plans.ids)
            plan = plans.take(collection, inputs)
            if plan is None:
                raise ConfigError(
                    f"grains: {type(self._state.model).__name__} is called once with each part of "
                    "a batch, got a second call. Call it once."
                )
            _, sequences = collection.pool(inputs, None, plan)
            names = [feature.name for feature in collection.features]
            rows.update(zip(names, sequences, strict=True))
        ids = {name: plans.ids[name].map_arrays(torch.from_numpy) for name in rows}
        return RowsInTurn(self._paths, ids, rows.__getitem__)

    def _foreseen_paths(self) -> dict[str, str]:
        """Return the lookup of each feature.

        Raises:
            ConfigError: the ids of a lookup are not known before the forward pass.
        """
        model = type(self._state.model).__name__
        graph = self._state.id_graph()
        for path, reason in graph.obstacles.items():
            raise ConfigError(
                f"grains: a step by grains computes the ids of {model} before its forward pass, "
                f"got a lookup {path!r} whose ids depend on more than the batch: {reason}. "
                f"Compute them from the batch alone, or keep the embedding with "
                f"tables={{{path!r}: None}}, or leave grains out and start one process."
            )
        return lookups_by_feature(graph)

    def _make_collections(self) -> list[EmbeddingCollection]:
        lookups = self._state.lookups
        collections = []
        for table in self.tables:
            owner = next(module for module in lookups.values() if module.tables[0] is table)
            features = [
                Feature(name, table.name, "none")
                for name, path in self._paths.items()
                if lookups[path].tables[0] is table
            ]
            if features:
                collection = EmbeddingCollection(features, [table])
                collection.share_gradients(owner)
                collection.lookup = owner.lookup
                collections.append(collection)
        return collections

    def _follow_mode(self) -> None:
        """Let each collection be in the mode of the modules whose rows it looks up."""
        for collection in self.collections:
            modules = [
                self._state.lookups[self._paths[feature.name]] for feature in collection.features
            ]
            modes = {module.training for module in modules}
            if len(modes) > 1:
                raise ConfigError(
                    f"grains: modules that share a table must be in one mode, got train and eval "
                    f"of {[module.path for module in modules]}. Set both alike."
                )
            collection.train(modes.pop())

    def _ids_of(self, grain: Batch, times: Tensor | None) -> dict[str, Ids]:
        """Return the ids of each feature for the samples of a grain, as arrays."""
        state = self._state
        assert state.signature is not None
        with torch.no_grad():
            graph = state.id_graph()
            leaves = state.signature.leaves(*state.bind(grain), state.needed())
            misfit = graph.misfit(leaves)
            if misfit:
                raise ConfigError(
                    f"grains: the ids of {type(state.model).__name__} cannot be computed for a "
                    f"grain of {grain.num_samples} samples, got: {misfit}. Bring batches of which "
                    "each grain has such sizes, or take fewer grains."
                )
            ids = {}
            for (name, path), (_, looked_up) in zip(
                self._paths.items(), graph(leaves), strict=True
            ):
                bags = state.lookups[path].as_ids(
                    looked_up.values, looked_up.offsets, looked_up.weights
                )
                ids[name] = _of_samples(bags, grain.num_samples, times)
        return ids


def _of_samples(bags: Ids, num_samples: int, times: Tensor | None) -> Ids:
    """Return ids or bags of a lookup as the ids of samples; see `IdFeatures.compute`."""
    values = bags.values.reshape(-1).to(torch.int64)
    ids = None
    if bags.offsets is not None and num_samples:
        bags_each, rest = divmod(len(bags), num_samples)
        if bags_each and not rest:
            ids = Ids(values, bags.offsets[::bags_each])
    ids = ids or ids_of_samples(values, num_samples, times)
    return ids.map_arrays(lambda tensor: np.ascontiguousarray(tensor.numpy()))
