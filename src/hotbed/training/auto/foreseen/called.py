# SPDX-License-Identifier: Apache-2.0
"""CalledLookups: the lookups of a converted model that is called with whole batches."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, CountedTimes, Ids, times_of
from hotbed.embedding.lookups import FeatureLayout, Lookup, Plan, Plans
from hotbed.embedding.modules import table_modules
from hotbed.errors import ConfigError, HotbedError
from hotbed.training.auto.leaf_names import tensors_of
from hotbed.training.auto.lookups import MovedLookup
from hotbed.training.auto.network import Converted, takes_batch
from hotbed.training.step.example import Example
from hotbed.training.step.network import NetworkLookups, obstacle_of
from hotbed.training.step.turns import Turns, features_of

log = logging.getLogger("hotbed")

Place = tuple[Any, ...]
"""The keys, fields and numbers that lead to a tensor in nested values."""


@dataclass(frozen=True, eq=False)
class CalledLookup:
    """A `PlannedModule`: one lookup of a forward pass, which has a plan of its own.

    Attributes:
        name: of its feature.
        module: that looks up.
    """

    name: str
    module: MovedLookup

    @property
    def lookup(self) -> Lookup:
        return self.module.lookup

    @property
    def layout(self) -> FeatureLayout:
        return self.module.layout

    def inputs_of(self, batch: Any) -> list[Ids]:
        return [batch.ids[self.name]]


class CalledLookups(NetworkLookups):
    """The lookups of a model that `hb.auto` converted, whose id graph computes their ids.

    They are mapped ahead alone. The first example is not mapped: its forward pass shows where the
    arguments of the model lie in it, and whether the model looks up what its id graph says. The ids
    of a table are known if those of all its lookups are.

    Args:
        state: of the converted model.
    """

    def __init__(self, state: Converted) -> None:
        self._state = state
        self.tables = [lookup.tables[0] for lookup in state.lookups.values()]
        self.modules: list[CalledLookup] = []
        self._calls: list[CalledLookup] = []  # all whose ids the id graph computes
        self._is_ahead = False
        self._first: _FirstCall | None = None
        self._ready = False
        self._problem = ""  # why nothing is mapped ahead
        self._places: list[Place | None] = []  # of the leaves in an example; None = not needed
        self._performed: Counter[str] | None = None  # lookups, with those of the example under way

    def __deepcopy__(self, memo: dict[int, Any]) -> CalledLookups:
        """Return the lookups of a copied model, which has mapped nothing yet."""
        return CalledLookups(copy.deepcopy(self._state, memo))

    def obstacle(self) -> str:
        if not self._state.lookups:
            return "hb.auto kept every embedding of the model"
        reasons = [self._reason_of_tables(path) for path in self._state.lookups]
        return reasons[0] if all(reasons) else self._problem

    def begin(self, *, ahead: bool) -> None:
        self._is_ahead = ahead
        self._performed = None
        if self._first is not None:
            self._first.close()
            self._first = None

    def followed(self, example: Example) -> list[CalledLookup] | None:
        self._check_performed()
        if self._is_ahead and not self._ready and not self._problem:
            self._watch(example)
        trains = self._state.model.training and all(call.module.training for call in self.modules)
        return self.modules if self._is_ahead and self._ready and trains else None

    def of(self, example: Example) -> Batch | None:
        """Return the ids of each lookup, as the model computes them; None before its first call."""
        state = self._state
        if state.signature is None:
            return None
        with torch.no_grad():
            leaves, times = self._leaves(example)
            graph = state.id_graph()
            if graph.misfit(leaves):
                return None
            ids = {
                call.name: call.module.as_ids(of.values, of.offsets, of.weights)
                for call, (_, of) in zip(self._all_calls(), graph(leaves), strict=True)
            }
        counted = None
        if isinstance(times, CountedTimes):
            counted = times.counted
            times = times.time
        return Batch(ids, time=times, counted=counted, num_samples=example.num_samples)

    def expect(self, plans: Plans | None) -> None:
        self._state.expected = plans
        if plans is not None:
            self._performed = self._num_performed()
            self._performed.update(call.module.path for call in self.modules)

    def rows_of(self, plans: Plans) -> Turns[Plan | None]:
        """Return the plans of a forward pass, one for each of its lookups."""
        calls = {call.name: call for call in self.modules}
        paths = {name: call.module.path for name, call in calls.items()}
        ids = {name: plans.ids[name] for name in calls}
        others = self._state.lookups.keys() - paths.values()

        def plan(name: str) -> Plan | None:
            return plans.take(calls[name], calls[name].inputs_of(plans))

        return Turns(paths, ids, plan, others)

    def latest(self, example: Example) -> int | None:
        if example.time is not None or self._state.times is None or not self._ready:
            return example.latest
        _, times = self._leaves(example)
        return None if times is None or not len(times) else int(times.max())

    # --- the first batch

    def _watch(self, example: Example) -> None:
        """Watch the step of the first batch, and learn from it when the next batch has come."""
        first = self._first
        self._first = None
        if first is not None:
            first.close()
        if first is None or not first.is_over:
            self._first = _FirstCall(self._state, example)
            return
        try:
            self._choose(first)
            self._locate(first)
            self._ready = True
        except HotbedError as error:
            self._problem = str(error)
            log.info("no batch is mapped ahead: %s", self._problem)

    def _all_calls(self) -> list[CalledLookup]:
        """Return the lookups of a forward pass whose ids the id graph computes."""
        if not self._calls:
            paths = features_of(call.path for call in self._state.id_graph().calls)
            lookups = self._state.lookups
            self._calls = [CalledLookup(name, lookups[path]) for name, path in paths.items()]
            self.modules = self._calls
        return self._calls

    def _choose(self, first: _FirstCall) -> None:
        """Choose the lookups that are mapped ahead: all of a table, or none.

        Raises:
            ConfigError: there are none.
        """
        graph = self._state.id_graph()
        seen = Counter(call.path for call in graph.calls)
        weighted = {call.path for call in graph.calls if call.weighted and call.weights is None}
        reasons: dict[str, str] = {}
        for path in self._state.lookups:
            reason = graph.obstacles.get(path, "") or self._reason_of_tables(path)
            if path in weighted:
                reason = reason or "its weights depend on more than the batch"
            if first.performed(path) != seen[path]:
                reason = reason or (
                    f"it was looked up {first.performed(path)} times in the step of the first "
                    f"batch, and {seen[path]} times in the code of one forward pass"
                )
            if reason:
                reasons[path] = reason
                log.info("the ids of %s are mapped in the forward pass: %s", path, reason)
        blocked = {self._state.lookups[path].tables[0] for path in reasons}
        calls = self._all_calls()
        self.modules = [call for call in calls if call.module.tables[0] not in blocked]
        if not self.modules:
            raise ConfigError(next(iter(reasons.values()), "the model looks up nothing"))

    def _locate(self, first: _FirstCall) -> None:
        """Find the leaves of the model's arguments among the tensors of the first example.

        Raises:
            ConfigError: a leaf that the id graph needs is not one of them.
        """
        signature = self._state.signature
        assert signature is not None
        args, kwargs = first.arguments
        if takes_batch(args, kwargs):
            return
        example = first.example
        tensors = list(tensors_of((example.arguments, example.keywords)))
        needed = self._state.needed()
        leaves = signature.leaves(args, kwargs, needed)
        places: list[Place | None] = []
        for name, leaf in zip(signature.names, leaves, strict=True):
            place = None
            if name in needed:
                place = next((path for path, tensor in tensors if _is_same(tensor, leaf)), None)
                if place is None:
                    raise ConfigError(
                        f"argument {name!r} of the model is not a tensor of the batch"
                    )
            places.append(place)
        self._places = places

    def _leaves(self, example: Example) -> tuple[list[Tensor], Any]:
        """Return the leaves of the arguments of an example, and the times of its samples."""
        state = self._state
        assert state.signature is not None
        arguments = (example.arguments, dict(example.keywords))
        times = None
        if self._places:
            leaves = self._placed(example)
        else:
            if takes_batch(*arguments):
                times = times_of(arguments[0][0])
                arguments = state.bind(arguments[0][0])
            leaves = state.signature.leaves(*arguments, state.needed())
        leaves = [leaf.cpu() for leaf in leaves]
        return leaves, state.times_in(leaves, times)

    def _placed(self, example: Example) -> list[Tensor]:
        """Return the leaves of an example that lie where those of the first one lay."""
        assert self._state.signature is not None
        tensors = dict(tensors_of((example.arguments, example.keywords)))
        leaves = []
        for leaf, place in zip(self._state.signature.tensors, self._places, strict=True):
            if place is None:
                leaves.append(torch.empty(0, *leaf.shape, dtype=getattr(torch, leaf.dtype)))
            elif place in tensors:
                leaves.append(tensors[place])
            else:
                raise ConfigError(
                    f"Ahead: argument {leaf.name!r} of the model must lie in the batch where it "
                    f"lay in the first one, at {_written(place)}, got none. Yield batches of one "
                    "structure."
                )
        return leaves

    # --- checks

    def _reason_of_tables(self, path: str) -> str:
        lookup = self._state.lookups[path]
        lookups = list(self._state.lookups.values())
        for module in table_modules(self._state.model):
            if module not in lookups and lookup.tables[0] in module.tables:
                return "another module looks up in its table"
        return obstacle_of(lookup.tables)

    def _num_performed(self) -> Counter[str]:
        return Counter({call.module.path: call.module.performed for call in self.modules})

    def _check_performed(self) -> None:
        """Raise ConfigError if a batch that was mapped ahead was looked up more than once."""
        expected = self._performed
        self._performed = None
        if expected is None:
            return
        calls = Counter(call.module.path for call in self.modules)
        for path, more in (self._num_performed() - expected).items():
            raise ConfigError(
                f"{path}: the ids of a batch that were mapped ahead are looked up once, got "
                f"{calls[path] + more} lookups in one step instead of {calls[path]}. "
                "Call the model once a batch, or train without hb.Ahead."
            )


class _FirstCall:
    """The first forward pass in train mode: its arguments, and how often each lookup took place.

    Attributes:
        example: the batch that it belongs to.
        arguments: positional and keyword arguments of the model.
        is_over: whether it has taken place.
    """

    def __init__(self, state: Converted, example: Example) -> None:
        self.example = example
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.is_over = False
        self._lookups = state.lookups
        self._before = {path: lookup.performed for path, lookup in state.lookups.items()}
        self._hook = state.model.register_forward_pre_hook(
            self._observe, prepend=True, with_kwargs=True
        )

    def performed(self, path: str) -> int:
        """Return how often a lookup took place in train mode since the example."""
        return self._lookups[path].performed - self._before[path]

    def close(self) -> None:
        """Watch the model no longer."""
        self._hook.remove()

    def _observe(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and not self.is_over:
            self.arguments = (args, kwargs)
            self.is_over = True


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same values in the same memory."""
    if tensor is other:
        return True
    if tensor.data_ptr() != other.data_ptr() or tensor.device != other.device:
        return False
    if tensor.shape != other.shape or tensor.stride() != other.stride():
        return False
    return tensor.dtype == other.dtype and tensor.numel() > 0


def _written(place: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in place[1:]) or "[0]"
