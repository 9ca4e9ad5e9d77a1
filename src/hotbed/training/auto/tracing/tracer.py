# SPDX-License-Identifier: Apache-2.0
"""A torch.fx tracer that keeps lookups whole, and takes the answers to conditions from a list."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from .recording import site
from .sources import name_of

Arguments = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Builds positional and keyword arguments from leaves."""

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
_COMPARISONS = {
    operator.eq,
    operator.ge,
    operator.gt,
    operator.le,
    operator.lt,
    operator.ne,
    operator.not_,
}
KNOWN = "known"
"""The key of a node's meta data for what is known of a leaf."""


@dataclass(frozen=True)
class LeafFacts:
    """The number of axes and the type of a leaf: they are the same for all batches."""

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


class TracedRoot(nn.Module):
    """The root of a trace: leaves -> the model's forward pass.

    `modules`: the lookups; torch.fx asks for the path of each, also of one outside of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        arguments: Arguments,
        known: Sequence[LeafFacts | None],
    ) -> None:
        super().__init__()
        self.model = model
        inside = set(model.modules())
        self.outside = nn.ModuleList(module for module in modules.values() if module not in inside)
        self.arguments = arguments
        self.known = known

    def forward(self, *leaves: Any) -> None:
        values = []
        for number, facts in enumerate(self.known):
            leaf = leaves[number]
            if facts is not None:
                leaf.node.meta[KNOWN] = facts
            values.append(leaf)
        args, kwargs = self.arguments(values)
        self.model(*args, **kwargs)


class _Value(fx.Proxy):
    """A tensor of a trace, which knows its axes and type if they are the same for all batches."""

    def __getattr__(self, name: str) -> Any:
        facts: LeafFacts | None = self.node.meta.get(KNOWN)
        if facts is not None:
            if name == "ndim":
                return facts.num_axes
            if name == "dtype":
                return facts.dtype
            if name in ("dim", "ndimension"):
                return lambda: facts.num_axes
            if name == "is_floating_point":
                return lambda: facts.dtype.is_floating_point
        return super().__getattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


class Tracer(fx.Tracer):
    """Keeps lookups as leaves, and takes the answers to conditions from a list."""

    proxy_buffer_attributes = True

    def __init__(self, modules: Mapping[str, nn.Module], answers: Sequence[bool]) -> None:
        super().__init__()
        self.modules = modules
        self.paths = {id(module): path for path, module in modules.items()}
        self.answers = answers
        self.conditions: list[Condition] = []
        self.lookups: list[tuple[str, nn.Module, fx.Node]] = []
        self.sites: dict[fx.Node, str] = {}
        self._known: dict[Any, bool] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        self.sites[node] = site()
        return _Value(node, self)

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
        key = key_of(obj.node, {})
        if key in self._known:
            return self._known[key]
        number = len(self.conditions)
        if number >= MOST_CONDITIONS:
            raise RuntimeError(f"more than {MOST_CONDITIONS} conditions, the last one {site()}")
        answer = self.answers[number] if number < len(self.answers) else False
        self._known[key] = answer
        self.conditions.append(Condition(site(), _on_data(obj.node), answer))
        return answer


class RandomNumbers(TorchFunctionMode):
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
            return self.tracer.create_proxy("call_function", func, tuple(args), kwargs)
        return func(*args, **kwargs)


def _on_data(node: fx.Node) -> bool:
    """Return True if a condition depends on the numbers of tensors."""
    if _is_plain(node):
        return False
    waiting = [node]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen or asks_shape(current):
            continue
        seen.add(current)
        if current.op in ("call_module", "get_attr", "placeholder") or current.target in _RANDOM:
            return True
        waiting += current.all_input_nodes
    return False


def _is_plain(node: fx.Node) -> bool:
    """Return True for an argument itself and for a comparison with it: it is a flag or a number.

    Nobody knows before the first batch which arguments are tensors. But the condition of a tensor
    of several numbers needs a reduction, such as `any` or `max`.
    """
    if node.op == "placeholder":
        return True
    if node.op != "call_function" or KNOWN in node.meta:
        return False
    if node.target in (operator.getitem, getattr):
        return not isinstance(node.args[1], (fx.Node, slice, tuple)) and _is_plain_of(node)
    return node.target in _COMPARISONS and _is_plain_of(node)


def _is_plain_of(node: fx.Node) -> bool:
    return all(_is_plain(source) for source in node.all_input_nodes)


def asks_shape(node: fx.Node) -> bool:
    """Return True if a node gives a shape, type or device, and no numbers."""
    name = name_of(node)
    if name == "getattr":
        name = str(node.args[1])
    return node.op in ("call_function", "call_method") and name in _SHAPES


def key_of(value: Any, memo: dict[fx.Node, Any]) -> Any:
    """Return what computes a value, such that equal code gives equal keys."""
    if isinstance(value, fx.Node):
        if value not in memo:
            parts = key_of([value.args, value.kwargs], memo)
            memo[value] = hash((value.op, str(value.target), parts))
        return memo[value]
    if isinstance(value, (list, tuple)):
        return tuple(key_of(part, memo) for part in value)
    if isinstance(value, dict):
        return tuple((key, key_of(part, memo)) for key, part in value.items())
    return str(value)
