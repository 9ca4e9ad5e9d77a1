# SPDX-License-Identifier: Apache-2.0
"""Subgraph: some nodes of a graph, and what they are computed from, as a module of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from .sources import is_reshaping, own_bins, shaped_nodes


class Subgraph:
    """Builds the graph of some nodes of another one.

    Args:
        root: holds the modules and tensors that the nodes name.

    Attributes:
        graph: the new graph.
        copies: the copy of each node; with True, the copy without the last `% bins`.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.graph = fx.Graph()
        self.copies: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._numbers: dict[fx.Node, int] = {}

    def output(self, node: fx.Node | None, *, drops: bool = False) -> int | None:
        """Return the number of the output that holds a node's value; None for no node.

        `drops`: the value is wanted without its last `% bins`.
        """
        if node is None:
            return None
        copied = self._copy(node, drops=drops)
        return self._numbers.setdefault(copied, len(self._numbers))

    def module(self, *, on_cpu: bool = False) -> fx.GraphModule:
        """Return the module that computes the outputs, in the order of their numbers.

        `on_cpu`: tensors that the graph makes are made on the CPU, whatever the nodes say.
        """
        self.graph.output(tuple(self._numbers))
        if on_cpu:
            for node in self.graph.nodes:
                node.args = _on_cpu(node.args)
                node.kwargs = _on_cpu(node.kwargs)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def _copy(self, node: fx.Node, *, drops: bool) -> fx.Node:
        waiting = [(node, drops)]
        while waiting:
            wanted = waiting[-1]
            if wanted not in self.copies:
                missing = [need for need in _needs(*wanted) if need not in self.copies]
                if missing:
                    waiting += missing
                    continue
                self.copies[wanted] = self._made(*wanted)
            waiting.pop()
        return self.copies[node, drops]

    def _made(self, node: fx.Node, drops: bool) -> fx.Node:
        needs = dict(_needs(node, drops))
        if drops and own_bins(node) is not None:
            (source,) = needs
            return self.copies[source, False]
        return self.graph.node_copy(node, lambda need: self.copies[need, needs[need]])


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that these are computed from, and these themselves."""
    waiting = list(nodes)
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _needs(node: fx.Node, drops: bool) -> list[tuple[fx.Node, bool]]:
    """Return the nodes that a copy takes from, each with whether its `% bins` is dropped."""
    if not drops or own_bins(node) is not None:
        return [(need, False) for need in node.all_input_nodes]
    shaped = shaped_nodes(node) if is_reshaping(node) else []
    return [(need, need in shaped) for need in node.all_input_nodes]


def _on_cpu(value: Any) -> Any:
    """Return arguments of a node with the CPU in the place of other devices."""
    return fx.node.map_aggregate(
        value, lambda part: torch.device("cpu") if isinstance(part, torch.device) else part
    )
