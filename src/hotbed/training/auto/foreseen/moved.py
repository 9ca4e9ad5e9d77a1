# SPDX-License-Identifier: Apache-2.0
"""MovedLookups: the lookups of a converted model in a step by grains."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hotbed.data.batch import Batch, CountedTimes, Ids, times_of
from hotbed.embedding.modules import table_modules
from hotbed.errors import ConfigError
from hotbed.training.auto.network import Converted
from hotbed.training.step.example import Example
from hotbed.training.step.turns import LookupsInTurn, bags_of_samples


class MovedLookups(LookupsInTurn):
    """The lookups of a model that `hb.auto` converted: its id graph computes the ids.

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
        super().__init__(type(state.model).__name__, state.lookups)

    def of(self, example: Example) -> Batch:
        """Return the ids of each lookup, as the model computes them for each grain of a batch."""
        state = self._state
        batch = example.batch
        assert batch is not None, "the loop divides batches"
        if not state.lookups:
            return batch
        args, kwargs = state.bind(batch)
        state.learn_signature(args, kwargs)
        if not self._paths:
            self._take_paths(self._foreseen_paths())
        times = state.times_of(args, kwargs, times_of(batch))
        if isinstance(times, CountedTimes):
            times = times.time
        if times is not None:
            times = torch.as_tensor(times).detach().cpu().reshape(-1).expand(batch.num_samples)
        self._follow_mode()
        parts: dict[str, list[Ids]] = {name: [] for name in self._paths}
        ends = batch.grain_ends or (batch.num_samples,)
        for number, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            if first < last or not (batch.num_samples or number):
                of_grain = None if times is None else times[first:last]
                grain = batch[first:last].at(None, batch.encoder)
                for name, ids in self._ids_of(grain, of_grain).items():
                    parts[name].append(ids)
        return self._looked_up(parts, batch, times)

    def _foreseen_paths(self) -> list[str]:
        """Return the path of each lookup, in the order of the forward pass.

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
        return [call.path for call in graph.calls]

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
                ids[name] = bags_of_samples(bags, grain.num_samples, times)
        return ids
