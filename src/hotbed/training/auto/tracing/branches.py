# SPDX-License-Identifier: Apache-2.0
"""Every way through the code of a model: torch.fx, with both answers to each condition."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn

from hotbed.training.auto.lookups import ASKED

from .recording import TracedLookup, symbolic_len, takes_bags
from .sources import name_of
from .subgraph import ancestors
from .tracer import (
    Arguments,
    Condition,
    LeafFacts,
    RandomNumbers,
    TracedRoot,
    Tracer,
    asks_shape,
    key_of,
)

MOST_PATHS = 64


@dataclass
class Walk:
    """One path through the code.

    Attributes:
        graph: all operations of the path.
        entry: the root of the graph's modules and buffers.
        leaves: the node of each leaf.
        lookups: with nodes of the graph in the place of tensors.
        places: the node of each lookup.
        conditions: in their order.
        reads: of each path whose weight is read outside a lookup, by what.
    """

    graph: fx.Graph
    entry: nn.Module
    leaves: list[fx.Node]
    lookups: list[TracedLookup]
    places: list[fx.Node]
    conditions: list[Condition]
    reads: dict[str, str]

    def keys(self) -> dict[str, list[Any]]:
        """Return by path what each lookup takes, as values that can be compared."""
        memo: dict[fx.Node, Any] = {}
        keys: dict[str, list[Any]] = {}
        for lookup in self.lookups:
            parts = key_of([lookup.ids, lookup.offsets, lookup.weights], memo)
            keys.setdefault(lookup.path, []).append(parts)
        return keys

    def ids(self) -> tuple[fx.GraphModule, list[TracedLookup]]:
        """Return the module that computes the arguments of all lookups from the leaves.

        The arguments of the lookups that come with it are the numbers of its outputs.
        """
        wanted = self._wanted()
        lookup_at: dict[fx.Node, TracedLookup] = {}
        for node, lookup in zip(self.places, self.lookups, strict=True):
            lookup_at[node] = lookup
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        outputs: list[fx.Node] = []
        lookups = []
        for node in self.graph.nodes:
            if node in lookup_at:
                lookup = lookup_at[node]
                numbers: list[int | None] = []
                for part in (lookup.ids, lookup.offsets, lookup.weights):
                    numbers.append(None if part is None else len(outputs))
                    if part is not None:  # a copy: the code may change its tensors afterwards
                        outputs.append(graph.call_method("clone", (copies[part],)))
                lookups.append(TracedLookup(lookup.path, *numbers))
            if node in wanted:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(outputs))
        return fx.GraphModule(self.entry, graph), lookups

    def _wanted(self) -> set[fx.Node]:
        """Return the nodes that ids are computed from, and those that change them in place."""
        wanted = ancestors([part for lookup in self.lookups for part in lookup.parts()])
        changes = []
        for node in self.graph.nodes:
            if node in self.places[-1:]:
                break
            if _is_in_place(node):
                changes.append(node)
        size = -1
        while size != len(wanted):
            size = len(wanted)
            for node in changes:
                if wanted & _changed_by(node):
                    wanted |= ancestors([node])
        return wanted


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
            for path in sorted((counts[first] | counts[second]).keys() - branched.keys()):
                if condition is None or keys[first].get(path) == keys[second].get(path):
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
    leaves: Sequence[LeafFacts | None],
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
        tracer = Tracer(modules, answers)
        entry = TracedRoot(model, modules, arguments, leaves)
        try:
            with RandomNumbers(tracer), symbolic_len(), torch.no_grad():
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


def _walk(graph: fx.Graph, entry: TracedRoot, tracer: Tracer) -> Walk:
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
        arguments = dict(zip(names, node.args, strict=False))
        arguments.update(node.kwargs)
        parts = [arguments.get(name) for name in names]
        lookups.append(TracedLookup(path, *parts))
    return Walk(
        graph,
        entry,
        [leaves[number] for number in range(len(entry.known))],
        lookups,
        [node for _, _, node in tracer.lookups],
        tracer.conditions,
        _reads(graph, tracer),
    )


def _reads(graph: fx.Graph, tracer: Tracer) -> dict[str, str]:
    """Return where the weights of lookups are read, by path."""
    weights = {}
    for path, module in tracer.modules.items():
        weights[id(module._parameters.get("weight"))] = path
    weights.pop(id(None), None)
    reads: dict[str, str] = {}
    parameters = dict(tracer.root.named_parameters(remove_duplicate=False))
    for node in graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and id(parameters.get(target)) in weights:
            path = weights[id(parameters[target])]
            for user in node.users:
                if not asks_shape(user) and name_of(user) not in ASKED:
                    where = f"by {name_of(user)}() {tracer.sites[user]}"
                    reads.setdefault(path, where.strip())
        if node.op != "call_module" or id(tracer.root.get_submodule(target)) in tracer.paths:
            continue
        for parameter in tracer.root.get_submodule(target).parameters():
            if id(parameter) in weights:
                own_path = target.removeprefix("model.")
                reads.setdefault(weights[id(parameter)], f"by module {own_path!r}")
    return reads


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


def _parting(first: Sequence[Condition], second: Sequence[Condition]) -> Condition | None:
    """Return the condition at which two paths part."""
    for condition, other in zip(first, second, strict=False):
        if condition.answer != other.answer:
            return condition
    return None
