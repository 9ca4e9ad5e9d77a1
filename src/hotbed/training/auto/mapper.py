# SPDX-License-Identifier: Apache-2.0
"""ModelMapper: maps the ids of a converted model before its forward pass, or ahead."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, times_of
from hotbed.embedding.lookups import Plan, Statistics
from hotbed.embedding.modules import table_modules
from hotbed.embedding.table import MapQueue
from hotbed.errors import ConfigError, HotbedError
from hotbed.training.stages.example import Example
from hotbed.training.stages.planner import obstacle_of

from .network import Converted

log = logging.getLogger("hotbed")

Place = tuple[Any, ...]
"""The keys, fields and numbers that lead to a tensor in nested values."""


class ModelMapper:
    """Maps the ids of a model that `hb.auto` converted, by its id graph.

    The first example is not mapped: its forward pass shows where the arguments of the model lie in
    it, and whether the model looks up what its id graph says. A table is mapped ahead if the ids of
    all its lookups are known before the forward pass.

    Args:
        state: of the converted model.
    """

    waits = False

    def __init__(self, state: Converted) -> None:
        self._state = state
        self._is_ahead = False
        self._queue: MapQueue | None = None
        self._foresees = False
        self._first: _FirstCall | None = None
        self._ready = False
        self._problem = ""  # why nothing is mapped ahead
        self._places: list[Place | None] = []  # of the leaves in an example; None = not needed
        self._binds = False  # the model takes a Batch, whose columns are bound to its arguments
        self._maps: tuple[str, ...] = ()  # paths of the lookups that are mapped
        self._calls: Counter[str] = Counter()  # of these, in one forward pass
        self._performed: dict[str, int] | None = None  # lookups before the example under way

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelMapper:
        """Return the mapper of a copied model, which has mapped nothing yet."""
        return ModelMapper(copy.deepcopy(self._state, memo))

    def begin(self, *, ahead: bool, queue: MapQueue | None = None) -> None:
        self._is_ahead = ahead
        self._queue = queue
        self._foresees = False
        self._performed = None
        if self._first is not None:
            self._first.close()
            self._first = None

    @property
    def foresees(self) -> bool:
        return self._foresees

    def obstacle(self) -> str:
        if not self._state.lookups:
            return "hb.auto kept every embedding of the model"
        reasons = [self._reason_of_tables(path) for path in self._state.lookups]
        if all(reasons):
            return reasons[0]
        return self._problem

    def map(self, example: Example) -> Example:
        self._check_performed()
        if self._is_ahead and not self._ready and not self._problem:
            self._watch(example)
        if self._is_ahead and example.foreseen is None and self._trains():
            example = self.plan(example)
        self._foresees = example.foreseen is not None
        self._state.expect(example.foreseen)
        if example.error is not None:
            raise example.error
        for plan in _plans(example):
            plan.wait()
        if example.foreseen is not None:
            self._performed = self._num_performed()
        return example

    def plan(self, example: Example) -> Example:
        try:
            with torch.no_grad():
                leaves = self._leaves(example)
                if self._state.id_graph().misfit(leaves):
                    return example
                batch = example.batch
                times = None if batch is None or not self._binds else times_of(batch)
                foreseen = self._state.foresee(leaves, self._maps, times, self._queue)
        except Exception as error:
            return replace(example, error=error)
        return replace(example, foreseen=foreseen)

    def take_back(self, example: Example) -> None:
        for plan in reversed(list(_plans(example))):
            plan.take_back()

    def statistics(self, example: Example) -> Statistics:
        statistics: Statistics = {}
        for plan in _plans(example):
            if plan.asked is not None:
                statistics |= plan.asked.statistics()
        return statistics

    def latest(self, example: Example) -> int | None:
        name = self._state.times
        if example.time is not None or name is None:
            return example.latest
        if not self._ready or self._state.signature is None:
            return None
        place = self._places[self._state.signature.names.index(name)]
        return _latest(dict(_tensors((example.arguments, example.keywords))).get(place or ()))

    # --- the first batch

    def _watch(self, example: Example) -> None:
        """Watch the step of the first batch, and learn from it when the next batch has come."""
        first = self._first
        self._first = None
        if first is not None:
            first.close()
        if first is not None and first.is_over:
            self._learn(first)
        else:
            self._first = _FirstCall(self._state, example)

    def _learn(self, first: _FirstCall) -> None:
        """Find out from the first batch what can be mapped ahead; log what cannot."""
        try:
            self._choose(first)
            self._locate(first)
        except HotbedError as error:
            self._problem = str(error)
            log.info("no batch is mapped ahead: %s", self._problem)
        else:
            self._ready = True

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
        blocked = {id(self._state.lookups[path].tables[0]) for path in reasons}
        maps = []
        for path, lookup in self._state.lookups.items():
            if seen[path] and id(lookup.tables[0]) not in blocked:
                maps.append(path)
                self._calls[path] = seen[path]
        self._maps = tuple(maps)
        for path, reason in reasons.items():
            log.info("the ids of %s are mapped in the forward pass: %s", path, reason)
        if not self._maps:
            raise ConfigError(next(iter(reasons.values()), "the model looks up nothing"))

    def _locate(self, first: _FirstCall) -> None:
        """Find the leaves of the model's arguments among the tensors of the first example.

        Raises:
            ConfigError: a leaf that the id graph needs is not one of them.
        """
        signature = self._state.signature
        assert signature is not None
        args, kwargs = first.arguments
        self._binds = len(args) == 1 and not kwargs and isinstance(args[0], Batch)
        if self._binds:
            return
        example = first.example
        tensors = list(_tensors((example.arguments, example.keywords)))
        needed = self._state.needed()
        leaves = signature.leaves(args, kwargs, needed)
        self._places = []
        for name, leaf in zip(signature.names, leaves, strict=True):
            place = None
            if name in needed:
                places = [path for path, tensor in tensors if _is_same(tensor, leaf)]
                place = next(iter(places), None)
                if place is None:
                    raise ConfigError(
                        f"argument {name!r} of the model is not a tensor of the batch"
                    )
            self._places.append(place)

    def _leaves(self, example: Example) -> list[Tensor]:
        signature = self._state.signature
        assert signature is not None
        if self._binds:
            assert example.batch is not None
            return signature.leaves(*self._state.bind(example.batch))
        tensors = dict(_tensors((example.arguments, example.keywords)))
        leaves = []
        for leaf, place in zip(signature.tensors, self._places, strict=True):
            if place is None:
                leaves.append(torch.empty(0, *leaf.shape, dtype=getattr(torch, leaf.dtype)))
            elif place in tensors:
                leaves.append(tensors[place].cpu())
            else:
                raise ConfigError(
                    f"Ahead: argument {leaf.name!r} of the model must lie in the batch where it "
                    f"lay in the first one, at {_written(place)}, got none. Yield batches of one "
                    "structure."
                )
        return leaves

    # --- checks

    def _trains(self) -> bool:
        """Return whether the next forward pass looks up ids in train mode, as they are mapped."""
        if not self._ready or not self._state.model.training:
            return False
        return all(self._state.lookups[path].training for path in self._maps)

    def _reason_of_tables(self, path: str) -> str:
        lookup = self._state.lookups[path]
        lookups = list(self._state.lookups.values())
        for module in table_modules(self._state.model):
            if module not in lookups and lookup.tables[0] in module.tables:
                return "another module looks up in its table"
        return obstacle_of(lookup.tables)

    def _num_performed(self) -> dict[str, int]:
        return {path: self._state.lookups[path].performed for path in self._maps}

    def _check_performed(self) -> None:
        """Raise ConfigError if a batch that was mapped ahead was looked up more than once."""
        before = self._performed
        self._performed = None
        if before is None:
            return
        for path, number in self._num_performed().items():
            lookups = number - before[path]
            expected = self._calls[path]
            if lookups > expected:
                raise ConfigError(
                    f"{path}: the ids of a batch that were mapped ahead are looked up once, got "
                    f"{lookups} lookups in one step instead of {expected}. "
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


def _plans(example: Example) -> Iterator[Plan]:
    for _, foreseen in example.foreseen or ():
        if foreseen.plan is not None:
            yield foreseen.plan


def _tensors(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors of nested values, each with its place."""
    if torch.is_tensor(value):
        yield place, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _tensors(value[key], (*place, key))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _tensors(item, (*place, number))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), (*place, field.name))


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same values in the same memory."""
    if tensor is other:
        return True
    if tensor.data_ptr() != other.data_ptr() or tensor.device != other.device:
        return False
    if tensor.shape != other.shape or tensor.stride() != other.stride():
        return False
    return tensor.dtype == other.dtype and tensor.numel() > 0


def _latest(times: Any) -> int | None:
    if times is None or not len(times):
        return None
    return int(times.max())


def _written(place: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in place[1:]) or "[0]"
