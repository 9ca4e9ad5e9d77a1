# SPDX-License-Identifier: Apache-2.0
"""The state of a converted model, and what happens at each of its calls."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from hotbed.data.batch import Batch, CountedTimes, times_of
from hotbed.embedding.lookups import Plans
from hotbed.errors import ConfigError, HotbedError
from hotbed.training.step.network import ADAPTER, Arguments, NetworkAdapter
from hotbed.training.step.turns import Turns

from .binding import bind
from .conversion_report import EmbeddingEntry
from .lookups import MovedLookup
from .report import Report
from .signature import Signature
from .torchrec.pipeline import leaf_of
from .trace import IdGraph, inspect

STATE = "_hotbed"
"""The attribute of a model that holds its `Converted`."""


@dataclass
class Converted:
    """What a model carries after `hb.auto`.

    Attributes:
        model: the model.
        lookups: by module path, what its embeddings became.
        report: of the conversion.
        times: the name of the tensor, among the arguments, that holds the times of the samples, or
            None.
        unbounded: paths of the lookups whose ids are computed without the last `% bins`.
        signature: of the model's arguments; None before the first batch.
        problem: why the signature is missing; "" if nothing is known.
        is_traced: whether calls of the model are those of a trace, which look nothing up.
        expected: what the next forward pass in train mode takes; None = its lookups map their ids.
    """

    model: nn.Module
    lookups: dict[str, MovedLookup]
    report: Report[EmbeddingEntry]
    times: str | None = None
    unbounded: frozenset[str] = frozenset()
    signature: Signature | None = None
    problem: str = ""
    is_traced: bool = False
    expected: Plans | None = None
    _turns: Turns[Any] | None = None
    _graph: IdGraph | None = None
    _trained: bool = False  # whether the signature is that of a batch in training

    def id_graph(self) -> IdGraph:
        """Return the id graph of the model, traced when it is first needed.

        The ids of `unbounded` lookups end without `% bins`.

        Raises:
            ConfigError: the model was not called yet, or cannot be traced.
        """
        if self._graph is None:
            if self.signature is None:
                reason = self.problem or "it was not called yet"
                raise ConfigError(
                    f"hb.auto: the id graph comes from the arguments of the model, got none: "
                    f"{reason}. Call the model with a batch first."
                )
            with self.traced():
                findings = inspect(self.model, list(self.lookups), self.signature)
            if findings.graph is None:
                raise ConfigError(
                    f"hb.auto: the code of {type(self.model).__name__} cannot be traced, got: "
                    f"{findings.problem}. Write it so that torch.export can follow it, or train "
                    "without unbounded, hb.Ahead and grains."
                )
            self._graph = findings.graph.unbounded(sorted(self.unbounded))
        return self._graph

    def needed(self) -> set[str]:
        """Return the names of the leaves that are used before the forward pass."""
        signature = self._known_signature()
        nodes = self.id_graph().module.graph.find_nodes(op="placeholder")
        names = {name for name, node in zip(signature.names, nodes, strict=True) if node.users}
        if self._takes_times():
            names.add(str(self.times))
        return names

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Let calls of the model be those of a trace."""
        self.is_traced = True
        try:
            yield
        finally:
            self.is_traced = False

    def set_graph(self, graph: IdGraph, signature: Signature) -> None:
        """Take over a signature, and the id graph that was traced with it."""
        self.signature = signature
        self._trained = True
        self._graph = graph.unbounded(sorted(self.unbounded))

    def bind(self, batch: Batch) -> Arguments:
        """Return the arguments of the model that hold the columns of a batch, as the first one."""
        bags: Container[str] = ()
        if self.signature is not None:
            bags = [str(leaf.path[-1]) for leaf in self.signature.tensors if leaf.bag is not None]
        return bind(self.model, batch, bags)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Prepare the lookups for a forward pass, and return the arguments of the model."""
        times = None
        plans: Plans | None = None
        if takes_batch(args, kwargs):
            times = times_of(args[0])
            plans = args[0].plans
            args, kwargs = self.bind(args[0])
        self.learn_signature(args, kwargs)
        self._turns = self._turns_of(plans) if self.model.training else None
        times = self.times_of(args, kwargs, times)
        for path, lookup in self.lookups.items():
            has_turn = self._turns is not None and self._turns.serves(path)
            lookup.times = times
            lookup.turns = self._turns if has_turn else None
            lookup.computed.clear()
        if self.unbounded:
            leaves = self._known_signature().leaves(args, kwargs, self.needed())
            misfit = self.id_graph().misfit(leaves)
            if misfit:
                raise ConfigError(
                    f"hb.auto: ids without '% bins' cannot be computed for this batch, got: "
                    f"{misfit}. Bring batches of such sizes, or leave unbounded out."
                )
            for path, ids in self.id_graph()(leaves):
                if path in self.unbounded:
                    self.lookups[path].computed.append(ids.values)
        return args, kwargs

    def _turns_of(self, plans: Plans | None) -> Turns[Any] | None:
        """Return what the lookups of a forward pass take; `plans`: of its batch."""
        if plans is None:
            plans = self.expected
        self.expected = None
        return None if plans is None or plans.rows_of is None else plans.rows_of(plans)

    def times_in(self, leaves: Sequence[Tensor], others: Any) -> Any:
        """Return the times of the samples among leaves, else `others`, those of the batch."""
        if self.signature is None or self.times not in self.signature.names:
            return others
        return _with_times(others, leaves[self.signature.names.index(self.times)])

    def times_of(self, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any = None) -> Any:
        """Return the times of the samples among the arguments of a call; None if there are none.

        Args:
            args: positional arguments of the model.
            kwargs: its keyword arguments.
            others: times of the batch, for a model that does not take them.

        Raises:
            ConfigError: the arguments have no tensor of the name `times`.
        """
        signature = self.signature
        has_others = others is not None
        if isinstance(others, CountedTimes):
            has_others = others.time is not None
        if self.times is None or (has_others and not self._takes_times()):
            return others
        if signature is None:
            signature = Signature.of(self.model, args, kwargs)
        return _with_times(others, signature.find(self.times, args, kwargs))

    def _takes_times(self) -> bool:
        return self.signature is not None and self.times in self.signature.names

    def leave(self) -> None:
        """Raise ConfigError if a lookup whose ids were mapped before did not take place."""
        turns = self._turns
        self._turns = None
        for lookup in self.lookups.values():
            lookup.computed.clear()
            lookup.turns = None
        if turns is not None:
            turns.check_taken(may_skip=False)

    def learn_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn the signature from the first batch, and anew from the first one in training."""
        if self.signature is not None and (self._trained or not self.model.training):
            return
        self._trained = self.model.training
        self._graph = None
        try:
            self.signature = Signature.of(self.model, args, kwargs)
        except HotbedError as error:
            self.problem = str(error)

    def _known_signature(self) -> Signature:
        if self.signature is None:
            raise ConfigError(f"hb.auto: the model has no signature, got: {self.problem}")
        return self.signature


def _with_times(others: Any, times: Any) -> Any:
    """Return times that an argument holds; which samples count, the batch says."""
    return CountedTimes(times, others.counted) if isinstance(others, CountedTimes) else times


def converted(model: nn.Module) -> Converted | None:
    """Return the state of a model that `hb.auto` converted; None for other models."""
    state: Converted | None = model.__dict__.get(STATE)
    return state


def attach(state: Converted, adapter: NetworkAdapter) -> None:
    """Let a model carry its state and its adapter, and prepare its lookups at each call."""
    model = state.model
    has_hooks = converted(model) is not None  # since an earlier hb.auto kept every embedding
    model.__dict__[STATE] = state
    model.__dict__[ADAPTER] = adapter
    if has_hooks:
        return
    model.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
    model.register_forward_hook(_leave)


def takes_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a model is called with one `Batch`, whose columns are its arguments."""
    return len(args) == 1 and not kwargs and isinstance(args[0], Batch)


def arguments_of(model: nn.Module, batch: Any) -> Arguments:
    """Return how a loop calls `model` with a batch.

    A tuple or list is its positional arguments; a dict its keyword arguments if its keys are names
    of parameters, else one argument; anything else is one argument.
    """
    if isinstance(batch, Batch):
        return bind(model, batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        try:
            Signature.of(model, (), batch)
        except HotbedError:
            return (batch,), {}
        return (), dict(batch)
    return (batch,), {}


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    state = converted(model)
    if state is None or state.is_traced:
        return None
    leaf = leaf_of(model, args, kwargs)
    if leaf is not None:
        model.__dict__["forward"] = lambda *args, **kwargs: leaf  # for this call, see _leave
        return None
    return state.enter(args, kwargs)


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, fx.Proxy):
        model.__dict__.pop("forward", None)
    state = converted(model)
    if state is not None:
        state.leave()
