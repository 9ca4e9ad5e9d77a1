# SPDX-License-Identifier: Apache-2.0
"""Every way through the code of a model: torch.fx, with both answers to each condition."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from .recording import Lookup, site, symbolic_len, takes_bags
from .sources import name_of
from .subgraph import Subgraph, ancestors

Arguments = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Builds positional and keyword arguments from leaves."""

MOST_PATHS = 64
MOST_CONDITIONS = 64  # of one path; a loop that waits for data would never end

# What depends on shapes and types of tensors, and not on their numbers.
_SHAPES = {
    "device",
    "dim",
    "dtype",
    "is_floating_point",
    "is_cuda",
    "layout",
    "length",
    "ndim",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad",
    "shape",
    "size",
}
_RANDOM = {
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.randperm,
}


@dataclass(frozen=True)
class Known:
    """What all batches have in common in a leaf."""

    num_axes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Condition:
    """A condition of the code, and the answer that a path takes.

    Attributes:
        where: "at model.py:12".
        on_data: whether it depends on the numbers of tensors; False = on shapes, types or plain
            arguments, which are as they are for a whole data set.
    """

    where: str
    on_data: bool
    answer: bool


@dataclass
class Walk:
    """One path through the code.

    Attributes:
        graph: all operations of the path.
        entry: the root of the graph's modules and buffers.
        leaves: the node of each leaf.
        lookups: with nodes of the graph in the place of tensors.
        conditions: in their order.
        reads: of each path whose weight is read outside a lookup, by what.
    """

    graph: fx.Graph
    entry: nn.Module
    leaves: list[fx.Node]
    lookups: list[Lookup]
    conditions: list[Condition]
    reads: dict[str, str]

    def keys(self) -> dict[str, list[Any]]:
        """Return by path what each lookup takes, as values that can be compared."""
        memo: dict[fx.Node, Any] = {}
        keys: dict[str, list[Any]] = {}
        for lookup in self.lookups:
            parts = _key([lookup.ids, lookup.offsets, lookup.weights], memo)
            keys.setdefault(lookup.path, []).append(parts)
        return keys

    def ids(self) -> tuple[fx.GraphModule, list[Lookup]]:
        """Return the module that computes the arguments of all lookups from the leaves.

        The arguments of the lookups that come with it are the numbers of its outputs.

        Raises:
            ValueError: the code changes a tensor in place that ids are computed from, and torch.fx
                does not show what that changes.
        """
        parts = [part for lookup in self.lookups for part in lookup.parts()]
        sources = ancestors(parts)
        for node in self.graph.nodes:
            if _is_in_place(node) and sources & _changed_by(node):
                raise ValueError(f"{name_of(node)}_() changes a tensor in place")
        subgraph = Subgraph(self.entry)
        lookups = []
        for lookup in self.lookups:
            numbers = map(subgraph.output, (lookup.ids, lookup.offsets, lookup.weights))
            lookups.append(Lookup(lookup.path, *numbers))
        return subgraph.module(), lookups


@dataclass
class Walks:
    """All paths through the code that end without an error, and why others did not."""

    walks: list[Walk] = field(default_factory=list)
    problem: str = ""

    def hidden(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the lookups that conditions decide on, and those whose ids they decide on.

        Returns:
            Two mappings of module paths. The lookups of the first are made or not, by a condition
            on data: "at model.py:12". The second has all others that differ between paths.
        """
        branched: dict[str, str] = {}
        differing: dict[str, str] = {}
        counts = [Counter(lookup.path for lookup in walk.lookups) for walk in self.walks]
        keys = [walk.keys() for walk in self.walks]
        for first, second in combinations(range(len(self.walks)), 2):
            condition = _parting(self.walks[first].conditions, self.walks[second].conditions)
            for path in counts[first].keys() | counts[second].keys():
                if condition is None or keys[first].get(path) == keys[second].get(path):
                    continue
                if path in branched:
                    continue
                if condition.on_data and counts[first][path] != counts[second][path]:
                    branched[path] = condition.where
                    differing.pop(path, None)
                else:
                    differing.setdefault(path, condition.where)
        return branched, differing


def walk(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    arguments: Arguments,
    leaves: Sequence[Known | None],
) -> Walks:
    """Return the paths through the code of `model`, at most 64.

    Args:
        model: in the mode, train or eval, whose code is wanted.
        modules: the lookups, by path.
        arguments: builds the arguments of the model from leaves.
        leaves: what is known of each leaf that `arguments` takes; None = nothing.
    """
    walks = Walks()
    waiting: list[tuple[bool, ...]] = [()]
    tries = 0
    while waiting and tries < MOST_PATHS:
        answers = waiting.pop()
        tries += 1
        tracer = _Tracer(modules, answers)
        entry = _Entry(model, arguments, leaves)
        try:
            with _Random(tracer), symbolic_len(), torch.no_grad():
                graph = tracer.trace(entry)
        except Exception as error:  # whatever the code raises: this path is not taken
            walks.problem = walks.problem or f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            walks.walks.append(_walk(graph, entry, tracer))
        asked = [condition.answer for condition in tracer.conditions]
        for number in range(len(answers), len(asked)):
            waiting.append((*asked[:number], not asked[number]))
    if walks.walks:
        walks.problem = ""
    return walks


def default_arguments(model: nn.Module, *, optional: bool) -> tuple[Arguments, list[str]]:
    """Return the arguments of a model of which no batch is known, and the names of its leaves.

    Args:
        model: whose parameters without a default are leaves.
        optional: whether those with the default None are leaves too.
    """
    parameters = inspect.signature(model.forward)
    names = []
    for name, parameter in parameters.parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.default is inspect.Parameter.empty or (optional and parameter.default is None):
            names.append(name)

    def arguments(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = parameters.bind_partial()
        bound.arguments.update(zip(names, leaves, strict=True))
        # in the order of the parameters, or `bound.args` would end too early
        bound.apply_defaults()
        return bound.args, bound.kwargs

    return arguments, names


# --- the tracer -----------------------------------------------------------------------------------


class _Entry(nn.Module):
    """The root of a trace: leaves -> the model's forward pass."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        known: Sequence[Known | None],
    ) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.known = known

    def forward(self, *leaves: Any) -> None:
        values = []
        for number, known in enumerate(self.known):
            values.append(leaves[number])
            values[-1].known = known
        args, kwargs = self.arguments(values)
        self.model(*args, **kwargs)


class _Value(fx.Proxy):
    """A tensor of a trace.

    Attributes:
        known: its number of axes and type, if they are the same for all batches.
    """

    known: Known | None = None

    def __getattr__(self, name: str) -> Any:
        if self.known is not None:
            if name == "ndim":
                return self.known.num_axes
            if name == "dtype":
                return self.known.dtype
            if name in ("dim", "ndimension"):
                return lambda: self.known.num_axes
            if name == "is_floating_point":
                return lambda: self.known.dtype.is_floating_point
        return super().__getattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy(
            "call_function",
            operator.setitem,
            (self, key, value),
            {},
        )


class _Tracer(fx.Tracer):
    """Keeps lookups as leaves, and answers conditions as it is told."""

    proxy_buffer_attributes = True

    def __init__(self, modules: Mapping[str, nn.Module], answers: Sequence[bool]) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in modules.items()}
        self.answers = answers
        self.conditions: list[Condition] = []
        self.lookups: list[tuple[str, nn.Module, fx.Node]] = []
        self.sites: dict[fx.Node, str] = {}
        self._known: dict[Any, bool] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.sites[node] = site()
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if any(id(part) in self.paths for part in m.modules()):
            return id(m) in self.paths
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        path = self.paths.get(id(m))
        if path is not None:
            self.lookups.append((path, m, result.node))
        return result

    def to_bool(self, obj: fx.Proxy) -> bool:
        key = _key(obj.node, {})
        if key in self._known:
            return self._known[key]
        number = len(self.conditions)
        if number >= MOST_CONDITIONS:
            raise RuntimeError(f"more than {MOST_CONDITIONS} conditions, the last one {site()}")
        answer = self.answers[number] if number < len(self.answers) else False
        self._known[key] = answer
        self.conditions.append(Condition(site(), _on_data(obj.node), answer))
        return answer


class _Random(TorchFunctionMode):
    """Keeps random numbers in the graph, which would otherwise be drawn once and be constants."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _RANDOM and hasattr(self.tracer, "graph"):
            return self.tracer.create_proxy(
                "call_function",
                func,
                tuple(args),
                kwargs,
            )
        return func(*args, **kwargs)


def _walk(graph: fx.Graph, entry: _Entry, tracer: _Tracer) -> Walk:
    leaves: dict[int, fx.Node] = {}
    for node in graph.nodes:
        of_leaves = node.target is operator.getitem and node.args[0].op == "placeholder"
        if of_leaves and isinstance(node.args[1], int):
            leaves.setdefault(node.args[1], node)
    lookups = []
    for path, module, node in tracer.lookups:
        names = ["input"]
        if takes_bags(module):
            names += ["offsets", "per_sample_weights"]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        lookups.append(Lookup(path, *(given.get(name) for name in names)))
    return Walk(
        graph,
        entry,
        [leaves[number] for number in range(len(entry.known))],
        lookups,
        tracer.conditions,
        _reads(graph, tracer),
    )


def _reads(graph: fx.Graph, tracer: _Tracer) -> dict[str, str]:
    """Return where the weights of lookups are read, by path."""
    weights = {}
    for number, path in tracer.paths.items():
        module = tracer.root.get_submodule(f"model.{path}" if path else "model")
        assert id(module) == number
        weights[id(module._parameters.get("weight"))] = path
    weights.pop(id(None), None)
    reads: dict[str, str] = {}
    parameters = dict(tracer.root.named_parameters(remove_duplicate=False))
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and id(parameters.get(target)) in weights:
            path = weights[id(parameters[target])]
            for user in node.users:
                if not _asks_shape(user):
                    reads.setdefault(path, f"by {name_of(user)}() {tracer.sites[user]}".strip())
        if node.op != "call_module" or id(tracer.root.get_submodule(target)) in tracer.paths:
            continue
        for parameter in tracer.root.get_submodule(target).parameters():
            if id(parameter) in weights:
                own_path = target.removeprefix("model.")
                reads.setdefault(weights[id(parameter)], f"by module {own_path!r}")
    return reads


def _on_data(node: fx.Node) -> bool:
    """Return True if a condition depends on the numbers of tensors."""
    waiting = [node]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen or _asks_shape(current):
            continue
        seen.add(current)
        if current.op in ("call_module", "get_attr") or current.target in _RANDOM:
            return True
        if current.op == "placeholder":
            return True
        waiting += current.all_input_nodes
    return False


def _is_in_place(node: fx.Node) -> bool:
    """Return True for `add_`, `values[…] = …`, `out=` and the like."""
    if node.target is operator.setitem:
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return "out" in node.kwargs


def _changed_by(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose values a node in place may change: those that it is a view of."""
    changed: set[fx.Node] = set()
    out = node.kwargs.get("out")
    waiting = [out] if isinstance(out, fx.Node) else node.all_input_nodes[:1]
    while waiting:
        current = waiting.pop()
        if current.op != "placeholder" and current not in changed:
            changed.add(current)
            # rows that were looked up share no memory with their ids
            waiting += current.all_input_nodes if current.op != "call_module" else []
    return changed


def _asks_shape(node: fx.Node) -> bool:
    name = name_of(node)
    if name == "getattr":
        name = str(node.args[1])
    return node.op in ("call_function", "call_method") and name in _SHAPES


def _parting(first: Sequence[Condition], second: Sequence[Condition]) -> Condition | None:
    """Return the condition at which two paths part."""
    for one, other in zip(first, second, strict=False):
        if one.answer != other.answer:
            return one
    return None


def _key(value: Any, memo: dict[fx.Node, Any]) -> Any:
    """Return what computes a value, such that equal code gives equal keys."""
    if isinstance(value, fx.Node):
        if value not in memo:
            parts = _key([value.args, value.kwargs], memo)
            memo[value] = hash((value.op, str(value.target), parts))
        return memo[value]
    if isinstance(value, (list, tuple)):
        return tuple(_key(part, memo) for part in value)
    if isinstance(value, dict):
        return tuple((key, _key(part, memo)) for key, part in value.items())
    return str(value)
