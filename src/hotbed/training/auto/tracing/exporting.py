# SPDX-License-Identifier: Apache-2.0
"""From a function of leaves to ATen operators: torch.export, cut down to what computes ids."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from hotbed.training.auto.signature import Signature

from .packed import packed_stand_ins
from .recording import TracedLookup, stand_in, symbolic_len
from .sources import name_of

Compute = Callable[[Sequence[Tensor]], Sequence[TracedLookup]]
"""Runs a forward pass for leaves, and returns its lookups."""


@dataclass(frozen=True)
class ExportedIds:
    """The id tensors of all lookups as one graph of ATen operators.

    Attributes:
        graph: the nodes.
        leaves: the node of each leaf.
        constants: the tensor of each node that stands for one: buffers and literals.
        titles: their names.
        lookups: with nodes of the graph in the place of tensors.
        obstacles: of each node whose value depends on more than the batch, the reason.
        ranges: of each leaf and axis, the least and the most size for which the graph holds.
    """

    graph: fx.Graph
    leaves: list[fx.Node]
    constants: dict[fx.Node, Tensor]
    titles: dict[fx.Node, str]
    lookups: list[TracedLookup]
    obstacles: dict[fx.Node, str]
    ranges: list[tuple[tuple[int, int | None], ...]]


def export(
    model: nn.Module, compute: Compute, signature: Signature, names: Mapping[int, str]
) -> ExportedIds:
    """Return the graph of the ids that `compute` records, for any number of samples.

    Args:
        model: holds all parameters and buffers that `compute` uses.
        compute: the forward pass.
        signature: of the leaves.
        names: the path of each parameter and buffer by its `id()`, for messages.

    Raises:
        Exception: torch.export cannot follow the code; of any type.
        ValueError: the code holds for one number of samples only.
    """
    layout: list[TracedLookup] = []

    def ids(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        layout[:] = compute(leaves)
        return tuple(part for lookup in layout for part in lookup.parts())

    root = _Root(model, ids)
    examples = list(example_leaves(signature))
    axes = [tuple(Dim.AUTO for _ in example.shape) for example in examples]
    with _quiet(), symbolic_len(), packed_stand_ins(model), torch.no_grad():
        program = torch.export.export(
            root, (examples,), dynamic_shapes={"leaves": axes}, strict=False
        )
        program = program.run_decompositions({})  # no operator changes a tensor in place from here
    return _read(program, layout, signature, names)


def example_leaves(signature: Signature) -> Iterator[Tensor]:
    """Yield a tensor for each leaf, of the shapes of the first batch but two samples or more.

    A size of 1 would be taken for a constant.
    """
    num_samples = max(signature.num_samples, 2)
    for leaf in signature.tensors:
        dtype = getattr(torch, leaf.dtype)
        if leaf.size is None:
            yield torch.zeros((), dtype=dtype)
            continue
        size = leaf.size
        if leaf.axis == "samples":
            size = num_samples
        elif leaf.axis == "ends":
            size = num_samples + 1
        elif leaf.axis == "values":
            size = max(size, 2)
        yield torch.zeros((size, *leaf.shape), dtype=dtype)


class _Root(nn.Module):
    """Returns the id tensors of all lookups, side by side."""

    def __init__(
        self, model: nn.Module, ids: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    ) -> None:
        super().__init__()
        self.model = model
        self.ids = ids

    def forward(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return self.ids(leaves)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no warnings and log lines of torch.export: what it cannot follow is reported here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _read(
    program: ExportedProgram,
    layout: Sequence[TracedLookup],
    signature: Signature,
    names: Mapping[int, str],
) -> ExportedIds:
    graph = program.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    leaves: list[fx.Node] = []
    constants: dict[fx.Node, Tensor] = {}
    titles: dict[fx.Node, str] = {}
    obstacles: dict[fx.Node, str] = {}
    changed = set(program.graph_signature.buffers_to_mutate.values())
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            leaves.append(node)
            continue
        tensor = _tensor(program, spec)
        reason = _learned(spec, tensor, names, changed)
        if reason or tensor is None:
            obstacles[node] = reason or f"the object {spec.target!r}"
        else:
            constants[node] = tensor
            titles[node] = names.get(id(tensor), "a constant")
    _spread(graph, obstacles)
    (output,) = (node for node in graph.nodes if node.op == "output")
    # results that are not the caller's come first: changed buffers
    num_results = sum(len(lookup.parts()) for lookup in layout)
    results = iter(output.args[0][len(output.args[0]) - num_results :])
    lookups = [_with_nodes(lookup, results) for lookup in layout]
    ranges = [_range(program, leaf) for leaf in leaves]
    for leaf, bounds in zip(signature.tensors, ranges, strict=True):
        if leaf.axis in ("samples", "ends", "values") and bounds and bounds[0][0] == bounds[0][1]:
            raise ValueError(f"the code holds for a size of {bounds[0][0]} of {leaf.name!r} only")
    _check_unbinds(graph)
    return ExportedIds(graph, leaves, constants, titles, lookups, obstacles, ranges)


def _check_unbinds(graph: fx.Graph) -> None:
    """Raise ValueError if a tensor was taken apart along an axis whose size differs by batch.

    `tolist()` does so. torch.export notes no guard for it.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.unbind.int):
        tensor, axis = (*node.args, 0)[:2]
        size = tensor.meta["val"].shape[axis]
        if not isinstance(size, int):
            raise ValueError(f"the code takes a tensor apart, as for a size of {len(node.users)}")


def _with_nodes(lookup: TracedLookup, results: Iterator[fx.Node]) -> TracedLookup:
    nodes = []
    for part in (lookup.ids, lookup.offsets, lookup.weights):
        nodes.append(None if part is None else _original(next(results)))
    return TracedLookup(lookup.path, *nodes)


def _original(node: fx.Node) -> fx.Node:
    """Return what a recorded copy was made of."""
    if node.target is torch.ops.aten.clone.default:
        (source,) = node.all_input_nodes
        return source
    return node


def _tensor(program: ExportedProgram, spec: InputSpec) -> Tensor | None:
    target = str(spec.target)
    value = program.state_dict.get(target, program.constants.get(target))
    return value if isinstance(value, Tensor) else None


def _learned(
    spec: InputSpec, tensor: Tensor | None, names: Mapping[int, str], changed: set[str]
) -> str:
    """Return why a parameter or a buffer is not constant; "" if it is."""
    name = names.get(id(tensor), spec.target)
    if spec.kind == InputKind.PARAMETER and tensor is not None and tensor.requires_grad:
        return f"the parameter {name!r}, which learns"
    if spec.target in changed:
        return f"the buffer {name!r}, which the forward pass changes"
    return ""


def _spread(graph: fx.Graph, obstacles: dict[fx.Node, str]) -> None:
    """Add the nodes that depend on obstacles, or are one themselves."""
    for node in graph.nodes:
        if node in obstacles or node.op in ("placeholder", "output"):
            continue
        reason = _own_obstacle(node)
        for source in node.all_input_nodes:
            reason = reason or obstacles.get(source, "")
        if reason:
            obstacles[node] = reason


def _own_obstacle(node: fx.Node) -> str:
    if node.op != "call_function":
        return "a branch that torch.export keeps"
    if node.target == stand_in._opoverload:
        return str(node.args[3])
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"torch.{node.target}"
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return f"random numbers ({name_of(node)})"
    return ""


def _range(program: ExportedProgram, leaf: fx.Node) -> tuple[tuple[int, int | None], ...]:
    """Return the least and the most size of each axis for which the graph holds; None = any."""
    bounds: list[tuple[int, int | None]] = []
    for size in leaf.meta["val"].shape:
        if isinstance(size, int):
            bounds.append((size, size))
            continue
        limits = program.range_constraints.get(size.node.expr)
        least = 0
        most = None
        if limits is not None:
            # torch.export leaves 0 and 1 out, also as the size of `x[1:]`; operators take them
            least = 0 if limits.lower <= 3 else int(limits.lower)
            most = int(limits.upper) if limits.upper < 2**31 else None
        bounds.append((least, most))
    return tuple(bounds)
