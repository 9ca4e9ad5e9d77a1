# SPDX-License-Identifier: Apache-2.0
"""The id graph of a model: what computes the ids of its lookups from the batch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn

from hotbed import config
from hotbed.data.batch import Ids
from hotbed.errors import ConfigError
from hotbed.optim.modes import in_eval_mode, in_train_mode

from .signature import Signature
from .tracing.branches import Walk, Walks, default_arguments, walk
from .tracing.exporting import ExportedIds, export
from .tracing.recording import Recorder, TracedLookup, undisturbed
from .tracing.sources import IdSource, source_of
from .tracing.subgraph import Subgraph
from .tracing.tracer import LeafFacts

Range = tuple[tuple[int, int | None], ...]
"""The least and the most size of each axis of a leaf; None = any."""


@dataclass(frozen=True)
class Call:
    """One lookup of a forward pass.

    Attributes:
        path: the module that looks up.
        ids: number of the output of the id graph that holds its ids.
        offsets: number of the output that holds its offsets; None = it has none.
        weights: number of the output that holds its weights; None = it has none, or they depend on
            more than the batch.
        weighted: whether the lookup takes weights.
    """

    path: str
    ids: int
    offsets: int | None = None
    weights: int | None = None
    weighted: bool = False


@dataclass(frozen=True)
class IdGraph:
    """Computes the ids of every lookup from the leaves of a model's arguments.

    Attributes:
        module: the leaves, in the order of the signature -> a tuple of tensors. Its nodes are
            operators of ATen that change no tensor in place, and their devices are the CPU.
        calls: the lookups whose ids it computes, in the order of the forward pass.
        obstacles: of each module path whose ids it does not compute, the reason.
        sources: of each module path whose ids it computes, where they come from.
        ranges: of each leaf that it uses, by number, the sizes for which it holds.
    """

    module: fx.GraphModule
    calls: list[Call]
    obstacles: dict[str, str] = field(default_factory=dict)
    sources: dict[str, IdSource] = field(default_factory=dict)
    ranges: dict[int, Range] = field(default_factory=dict)

    def __call__(self, leaves: Sequence[Tensor]) -> list[tuple[str, Ids]]:
        """Return the module path and the ids of each lookup, in the order of the forward pass.

        The values, offsets and weights of the ids are the tensors that the module's forward
        function takes, in their own shapes.
        """
        outputs = self.module(*leaves)
        lookups = []
        for call in self.calls:
            offsets = None
            weights = None
            if call.offsets is not None:
                offsets = outputs[call.offsets]
            if call.weights is not None:
                weights = outputs[call.weights]
            lookups.append((call.path, Ids(outputs[call.ids], offsets, weights)))
        return lookups

    def misfit(self, leaves: Sequence[Tensor]) -> str:
        """Return why the ids of these leaves cannot be computed here; "" if they can.

        The code of a model may branch on shapes; then the graph holds for shapes on the same side.
        """
        names = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        for number, bounds in self.ranges.items():
            shape = leaves[number].shape
            for axis, (least, most) in enumerate(bounds):
                size = shape[axis]
                if size < least or (most is not None and size > most):
                    wanted = f"{least} or more" if most is None else f"{least} to {most}"
                    return (
                        f"the code of the model was traced for a size of {wanted} of axis {axis} "
                        f"of argument {names[number]!r}, got {size}"
                    )
        return ""

    def unbounded(self, paths: Sequence[str]) -> IdGraph:
        """Return the graph without the last `% bins` of the ids at `paths`.

        Raises:
            ConfigError: a path is unknown, or its ids do not end with `% bins`.
        """
        for path in paths:
            self._check_bins(path)
        return _without_bins(self, set(paths))

    def _check_bins(self, path: str) -> None:
        if path in self.obstacles:
            raise ConfigError(
                f"unbounded: the ids of this lookup do not depend on the batch alone, got {path!r} "
                f"({self.obstacles[path]}). Leave it out."
            )
        if path not in self.sources:
            advice = config.did_you_mean(path, self.sources)
            raise ConfigError(f"unbounded: no lookup has this path, got {path!r}. {advice}")
        source = self.sources[path]
        if source.bins is None:
            raise ConfigError(
                f"unbounded: the ids of this lookup do not end with '% bins', got {path!r} with "
                f"ids {source.text}. Leave it out."
            )


@dataclass(frozen=True)
class Findings:
    """What a look at the code of a model has shown, before anything is changed.

    Attributes:
        kept: of each module path whose weight is read outside a lookup, where it is read.
        refused: of each module path that cannot be moved, the reason: it lies in a branch that
            depends on data.
        sources: of each module path whose lookups were seen, where its ids come from.
        obstacles: of each module path whose ids depend on more than the batch, the reason.
        graph: the id graph; None without a signature, or if the model could not be traced.
        problem: why the model could not be traced; "" if it could.
        inputs: the names of the leaves; empty without a signature.
    """

    kept: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, IdSource] = field(default_factory=dict)
    obstacles: Mapping[str, str] = field(default_factory=dict)
    graph: IdGraph | None = None
    problem: str = ""
    inputs: tuple[str, ...] = ()


def inspect(
    model: nn.Module,
    lookups: Sequence[str] | Mapping[str, nn.Module],
    signature: Signature | None = None,
) -> Findings:
    """Return what the code of `model` does with its lookups. Change nothing.

    The model is traced in its current mode, train or eval: with a signature by torch.export, and by
    torch.fx where that cannot follow the code; without one by torch.fx alone.

    Args:
        model: before or after its conversion.
        lookups: the paths of its nn.Embedding and nn.EmbeddingBag modules, or of those that took
            their place; or modules by name, inside or outside of the model. A module of another
            kind says in `embedding_dim` how many lanes a row has, and returns a row for each id.
        signature: of the model's arguments; None before the first batch.
    """
    if isinstance(lookups, Mapping):
        modules = dict(lookups)
    else:
        modules = {path: model.get_submodule(path) for path in lookups}
    with undisturbed(model):
        if signature is None:
            return _by_code(model, modules)
        recorder = Recorder(modules)

        def compute(leaves: Sequence[Tensor]) -> list[TracedLookup]:
            args, kwargs = signature.arguments(leaves)
            recorder.lookups.clear()
            with recorder.recording():
                model(*args, **kwargs)
            return list(recorder.lookups)

        try:
            exported = export(model, compute, signature, _names(model))
        except Exception as error:  # of any type: torch.export cannot follow the code
            findings = _by_walks(model, modules, signature, _reason(error))
            reads = {**recorder.reads, **findings.kept}  # what was seen before the code stopped it
            return replace(findings, inputs=signature.names, kept=reads)
    graph = _id_graph(exported, signature)
    return Findings(
        inputs=signature.names,
        kept=recorder.reads,
        sources=graph.sources,
        obstacles=graph.obstacles,
        graph=graph,
    )


def inspect_both_modes(
    model: nn.Module, lookups: Sequence[str], signature: Signature | None = None
) -> Findings:
    """Return what `inspect` finds in the current mode, and the weights that either mode reads.

    A ranking of all items, for example, often reads their weight in eval mode only. Evaluation may
    leave arguments out, so that its code is also looked at without the signature.
    """
    findings = inspect(model, lookups, signature)
    trains = any(module.training for module in model.modules())
    other_mode, name = (in_eval_mode, "eval") if trains else (in_train_mode, "train")
    with other_mode(model):
        reads = dict(inspect(model, lookups, signature).kept)
        if signature is not None:
            reads = {**inspect(model, lookups).kept, **reads}
    in_other_mode = {path: f"{where} in {name} mode" for path, where in reads.items()}
    return replace(findings, kept={**in_other_mode, **findings.kept})


def _names(model: nn.Module) -> dict[int, str]:
    """Return the path of each parameter and buffer of a model by its `id()`."""
    names = {}
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names[id(tensor)] = path
    return names


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


# --- torch.fx -------------------------------------------------------------------------------------


def _by_code(model: nn.Module, modules: Mapping[str, nn.Module]) -> Findings:
    """Return what the code shows without a batch: parameters with defaults are left out, then in"""
    findings = Findings(problem="no path through its code was found")
    for optional in (False, True):
        arguments, names = default_arguments(model, optional=optional)
        walks = walk(model, modules, arguments, [None] * len(names))
        if walks.walks:
            other = _findings(walks, [repr(name) for name in names])
            findings = other if findings.problem else _merged(findings, other)
        elif findings.problem:
            findings = replace(findings, problem=walks.problem)
    return findings


def _merged(first: Findings, second: Findings) -> Findings:
    return Findings(
        kept={**second.kept, **first.kept},
        refused={**second.refused, **first.refused},
        sources={**second.sources, **first.sources},
        obstacles={**second.obstacles, **first.obstacles},
    )


def _findings(walks: Walks, names: Sequence[str]) -> Findings:
    """Return what the paths through the code show; `names`: of the leaves."""
    branched, differing = walks.hidden()
    refused = {}
    for path, where in branched.items():
        refused[path] = f"whether it is looked up depends on the data of the batch, {where}"
    reads: dict[str, str] = {}
    sources: dict[str, IdSource] = {}
    obstacles = {}
    for path, where in differing.items():
        obstacles[path] = f"a condition {where}"
    for walked in walks.walks:
        named = dict(zip(walked.leaves, names, strict=True))
        for path, where in walked.reads.items():
            reads.setdefault(path, where)
        nodes: dict[str, list[fx.Node]] = {}
        for lookup in walked.lookups:
            if isinstance(lookup.ids, fx.Node) and lookup.path not in obstacles:
                nodes.setdefault(lookup.path, []).append(lookup.ids)
        for path, of_path in nodes.items():
            sources.setdefault(path, source_of(of_path, named))
    return Findings(kept=reads, refused=refused, sources=sources, obstacles=obstacles)


def _by_walks(
    model: nn.Module, modules: Mapping[str, nn.Module], signature: Signature, problem: str
) -> Findings:
    """Return what the code shows for a batch that torch.export cannot follow."""
    walks = walk(
        model,
        modules,
        signature.arguments,
        [
            LeafFacts(len(leaf.shape) + (leaf.size is not None), getattr(torch, leaf.dtype))
            for leaf in signature.tensors
        ],
    )
    if not walks.walks:
        return Findings(problem=f"{problem}; torch.fx: {walks.problem}")
    findings = _findings(walks, [repr(name) for name in signature.names])
    first = walks.walks[0]
    hidden = {**findings.obstacles, **findings.refused}
    try:
        exported = _exported_walk(first, modules, signature, _names(model))
    except Exception as error:  # of any type, as above
        return replace(findings, problem=_reason(error))
    graph = _id_graph(exported, signature, hidden)
    return replace(findings, sources=graph.sources, obstacles=graph.obstacles, graph=graph)


def _exported_walk(
    path: Walk, modules: Mapping[str, nn.Module], signature: Signature, names: Mapping[int, str]
) -> ExportedIds:
    """Export the part of a path that computes ids: the rest is what torch.export cannot follow."""
    module, layout = path.ids()
    recorder = Recorder(modules)

    def compute(leaves: Sequence[Tensor]) -> list[TracedLookup]:
        with recorder.recording():
            results = module(*leaves)
        lookups = []
        for lookup in layout:
            numbers = (lookup.ids, lookup.offsets, lookup.weights)
            parts = [None if number is None else results[number] for number in numbers]
            lookups.append(TracedLookup(lookup.path, *parts))
        return lookups

    return export(module, compute, signature, names)


# --- the graph ------------------------------------------------------------------------------------


def _id_graph(
    exported: ExportedIds, signature: Signature, hidden: Mapping[str, str] | None = None
) -> IdGraph:
    """Return the part of an exported graph that depends on the batch alone.

    `hidden`: the reasons of paths whose ids must not be computed.
    """
    obstacles = dict(hidden or {})
    for lookup in exported.lookups:
        for part in (lookup.ids, lookup.offsets):
            if part in exported.obstacles:
                obstacles.setdefault(lookup.path, exported.obstacles[part])
    root = nn.Module()
    builder = Subgraph(root)
    for leaf, node in zip(signature.tensors, exported.leaves, strict=True):
        builder.copies[node, False] = builder.graph.placeholder(leaf.name)
    for number, (node, tensor) in enumerate(exported.constants.items()):
        root.register_buffer(f"constant_{number}", tensor.detach().cpu())
        builder.copies[node, False] = builder.graph.get_attr(f"constant_{number}")
    names = dict(exported.titles)
    for leaf, node in zip(signature.tensors, exported.leaves, strict=True):
        names[node] = repr(leaf.name)
    calls = []
    nodes: dict[str, list[fx.Node]] = {}
    for lookup in exported.lookups:
        if lookup.path in obstacles:
            continue
        offsets = builder.output(lookup.offsets)
        weights = None
        if lookup.weights not in exported.obstacles:
            weights = builder.output(lookup.weights)
        ids = builder.output(lookup.ids)
        assert ids is not None
        weighted = lookup.weights is not None
        calls.append(Call(lookup.path, ids, offsets, weights, weighted))
        nodes.setdefault(lookup.path, []).append(lookup.ids)
    module = builder.module(on_cpu=True)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    ranges = {}
    for number, node in enumerate(placeholders):
        if node.users:
            ranges[number] = exported.ranges[number]
    return IdGraph(
        module,
        calls,
        obstacles,
        {path: source_of(of_path, names) for path, of_path in nodes.items()},
        ranges,
    )


def _without_bins(graph: IdGraph, paths: set[str]) -> IdGraph:
    builder = Subgraph(graph.module)
    for node in graph.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            builder.copies[node, False] = builder.graph.node_copy(node)
    (results,) = (node.args[0] for node in graph.module.graph.nodes if node.op == "output")
    calls = []
    for call in graph.calls:
        offsets = None if call.offsets is None else builder.output(results[call.offsets])
        weights = None if call.weights is None else builder.output(results[call.weights])
        ids = builder.output(results[call.ids], drops=call.path in paths)
        assert ids is not None
        calls.append(replace(call, ids=ids, offsets=offsets, weights=weights))
    return replace(graph, module=builder.module(), calls=calls)
