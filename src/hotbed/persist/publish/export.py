# SPDX-License-Identifier: Apache-2.0
"""Exports for servers: the dense half of a network as an ONNX graph, with the values of a state."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids, SideBySide
from hotbed.data.schema import Schema
from hotbed.embedding.modules import Lookup, TableModule, performed_by, table_modules
from hotbed.embedding.modules.lookup import Pooled
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.files import Where
from hotbed.optim.modes import in_eval_mode
from hotbed.persist.format import (
    CheckpointWriter,
    Reader,
    Saved,
    newest_link,
    read_newest,
    refuse_states,
)
from hotbed.persist.publish.version import Graph, write_published
from hotbed.persist.store import open_store

DENSE_INPUT = "dense"
TOLERANCE = 1e-5
_ROWS = 5  # of the batch that the graph is traced and checked with


def export(checkpoint: Where, to: Where, graph: Graph) -> Saved:
    """Freeze the newest state under `checkpoint` for servers: values of rows, weights, schema and
        `graph`, under `to`.

    `graph`: of the network that the checkpoint was made of. Raises PersistError where `to` cannot
    be written, or holds states.
    """
    refuse_states(newest_link(open_store(to)))

    def write(reader: Reader) -> Saved:
        with CheckpointWriter(to) as writer:
            return write_published(writer, reader, None, graph)

    return read_newest(checkpoint, write)


def export_graph(
    network: nn.Module, schema: Schema, activate: Callable[[Any], Any] | None = None
) -> Graph:
    """The network after its lookups, `activate` (a sigmoid, say) included, as a graph that is
    checked against torch.

    Raises ConfigError for networks that cannot be exported: those that look up something else than
    whole features, or that torch.export refuses; MissingExtra without onnx.
    """
    _check_installed()
    half = _DenseHalf(network, schema, activate or (lambda outputs: outputs))
    try:
        with torch.no_grad(), in_eval_mode(network), _quiet(), torch.random.fork_rng(devices=[]):
            inputs = half.record()
            half(*inputs.values())
            onnx, weights = _export(half, inputs)
            graph = Graph(
                onnx, weights, half.lookups, [column.name for column in schema.dense], half.outputs
            )
            # as it is, and a smaller request of another version
            for n, factor in ((_ROWS, 1.0), (3, 1.25)):
                values = {name: dense_state(half)[name] * factor for name in weights}
                asked = half.first(n, inputs)
                _check(
                    graph,
                    asked,
                    values,
                    torch.func.functional_call(half, values, tuple(asked.values())),
                )
    except (ConfigError, PersistError):
        raise
    except Exception as error:
        place = _place_of(error, half)
        raise ConfigError(
            f"export: {type(network).__name__} cannot become an ONNX graph, because of {place} — "
            "received "
            f"{_reason_of(error)} — compute with tensors of any size, without len(), int(), if "
            "and loops over values; "
            "or pad sequences to one length and mask them"
        ) from error
    return graph


class _DenseHalf(nn.Module):
    """The network with its lookups replaced by inputs: `record` finds out which they are, then
    `forward` takes them in order.
    """

    def __init__(self, network: nn.Module, schema: Schema, activate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.network = network
        self.lookups: dict[str, list[tuple[str, str, str]]] = {}
        self.outputs: list[str] = []
        self._names: list[str] = []
        self._sequences = {column.name: column.pooling == "none" for column in schema.ids}
        self._widths = {column.name: column.width for column in schema.dense}
        self._modules_with_tables = table_modules(network)
        self._activate = activate

    def record(self) -> dict[str, Tensor]:
        """Inputs by name, of made-up values; the network runs once to tell what it looks up."""
        draw = torch.Generator().manual_seed(0)  # what trains draws as if nothing had happened
        ids = {}
        inputs = dict[str, Tensor]()
        for number, (name, sequence) in enumerate(self._sequences.items()):
            m = _ROWS + 2 + number if sequence else _ROWS  # no two sequences have the same size
            offsets = torch.tensor([0, 2, 3, 3, 5, m]) if sequence else None
            ids[name] = Ids(torch.zeros(m, dtype=torch.int64), offsets)
        if self._widths:
            inputs[DENSE_INPUT] = torch.rand(_ROWS, sum(self._widths.values()), generator=draw)

        self._run(_Recording(self.lookups, ids, inputs, draw), ids, inputs)
        self._names = list(inputs)
        return inputs

    @property
    def inputs(self) -> list[str]:
        """Names of the graph's inputs, once they are recorded."""
        return self._names

    def first(self, n: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the first `n` candidates of those of `record`."""
        ends = {
            name: int(inputs[f"offsets/{name}"][n]) if f"offsets/{name}" in inputs else n
            for name in self._sequences
        }
        found = {}
        for name, values in inputs.items():
            kind, *rest = name.split("/", 2)
            found[name] = values[
                : n + 1 if kind == "offsets" else ends[rest[1]] if len(rest) == 2 else n
            ]
        return found

    def sizes(self) -> tuple[dict[int, Any], ...]:
        """Which dimension of each input changes, as torch.export has it."""
        rows = torch.export.Dim("rows")
        found = []
        items = {
            name: torch.export.Dim(f"items_{number}") for number, name in enumerate(self._sequences)
        }
        for name in self._names:
            kind, *rest = name.split("/", 2)
            sequence = len(rest) == 2 and self._sequences[rest[1]]
            found.append(
                {0: rows + 1 if kind == "offsets" else items[rest[1]] if sequence else rows}
            )
        return tuple(found)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._names, inputs, strict=True))
        nothing = torch.zeros(0, dtype=torch.int64)
        ids = {name: Ids(nothing, given.get(f"offsets/{name}")) for name in self._sequences}
        found = self._run(_Replaying(self.lookups, given), ids, given)
        self.outputs = list(found) if isinstance(found, dict) else ["prediction"]
        return tuple(found.values()) if isinstance(found, dict) else (found,)

    # If its own trace fails, torch.onnx tries Dynamo, which lets sizes depend on values.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, lookup: Lookup, ids: Mapping[str, Ids], inputs: Mapping[str, Tensor]) -> Any:
        dense = SideBySide(inputs[DENSE_INPUT], self._widths) if self._widths else {}
        each = next((name for name in inputs if name == DENSE_INPUT or name.count("/") == 1), "")
        n = inputs[each].shape[0] - each.startswith("offsets") if each else _ROWS
        with performed_by(lookup, self._modules_with_tables):
            return self._activate(self.network(Batch(ids, dense, num_samples=n)))


class _Recording(Lookup):
    """Records which features are looked up, and makes up the rows, as `inputs` of the graph."""

    def __init__(
        self,
        lookups: dict[str, list[tuple[str, str, str]]],
        ids: Mapping[str, Ids],
        inputs: dict[str, Tensor],
        generator: torch.Generator,
    ) -> None:
        self.lookups = lookups
        self.ids = ids
        self.inputs = inputs
        self.generator = generator

    def pool(self, module: TableModule, inputs: Sequence[Ids], time: Any, plan: Any) -> Pooled:
        names = [self._name_of(module, ids) for ids in inputs]
        lookup = f"lookup/{len(self.lookups)}"
        self.lookups[lookup] = [
            (name, feature.table, feature.pooling)
            for name, feature in zip(names, module.features, strict=True)
        ]
        flat = torch.rand(_ROWS, module.output_dim, generator=self.generator)
        if module.output_dim:
            self.inputs[lookup] = flat
        sequences = []
        for name, dim, pooled in zip(names, module.dims, module.pooled, strict=True):
            if pooled:
                continue
            ids = self.ids[name]
            rows = torch.rand(len(ids.values), dim, generator=self.generator)
            sequences.append(rows)
            self.inputs[f"{lookup}/{name}"] = rows
            if ids.offsets is not None:
                self.inputs[f"offsets/{name}"] = ids.offsets
        return flat, sequences

    def _name_of(self, module: TableModule, ids: Ids) -> str:
        for name, own in self.ids.items():
            if own is ids:
                return name
        raise ConfigError(
            f"export: {type(module).__name__} must look up features of the schema, got ids that "
            "the network made. Give it batch.ids[name] as it is."
        )


class _Replaying(Lookup):
    """Returns the inputs of the graph, for the recorded lookups in order."""

    def __init__(
        self,
        lookups: Mapping[str, Sequence[tuple[str, str, str]]],
        inputs: Mapping[str, Tensor],
    ) -> None:
        self.lookups = lookups
        self.inputs = inputs
        self._rest = iter(lookups)

    def pool(self, module: TableModule, inputs: Sequence[Ids], time: Any, plan: Any) -> Pooled:
        lookup = next(self._rest)
        flat = self.inputs.get(lookup, torch.zeros(_ROWS, 0))
        sequences = [
            self.inputs[f"{lookup}/{name}"]
            for name, _, pooling in self.lookups[lookup]
            if pooling == "none"
        ]
        return flat, sequences


def _export(half: _DenseHalf, inputs: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    program = torch.onnx.export(
        half,
        tuple(inputs.values()),
        dynamo=True,
        input_names=list(inputs),
        output_names=half.outputs,
        dynamic_shapes=(half.sizes(),),
        optimize=False,
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    known = {f"network.{name}" for name in dense_state(half.network)}
    weights = [one for one in model.graph.initializer if one.name in known]
    for one in weights:  # whoever loads the graph brings them, before anything is derived from them
        one.ClearField("raw_data")
        one.data_location = one.EXTERNAL
        one.external_data.add(key="location", value="weights")
    return model.SerializeToString(), [one.name for one in weights]


def _check(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    expected: Sequence[Tensor],
) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    make = onnxruntime.OrtValue.ortvalue_from_numpy
    options.log_severity_level = 3
    values = [make(value.detach().numpy()) for value in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = onnxruntime.InferenceSession(graph.onnx, options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    found = session.run(
        list(graph.outputs), {name: one.numpy() for name, one in inputs.items() if name in wanted}
    )
    for name, ours, theirs in zip(graph.outputs, expected, found, strict=True):
        apart = float(np.abs(ours.numpy() - theirs).max())
        if not apart <= TOLERANCE:
            raise PersistError(
                f"export: output {name!r} of the graph is not the network's — received a "
                "difference of "
                f"{apart:.2g} — do not serve it; report the network"
            )


def _check_installed() -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript

        del onnx, onnxruntime, onnxscript
    except ImportError as error:
        raise MissingExtra(
            f"export needs {error.name} — it is not installed — pip install hotbed[export]"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx tells its own deprecations and every library that it does not find."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what led to it, the first cause last."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


def _reason_of(error: BaseException) -> str:
    """The first line of the first cause, without colours."""
    cause = _causes(error)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
    return next((line.strip() for line in text.splitlines() if line.strip()), type(cause).__name__)


def _place_of(error: BaseException, half: _DenseHalf) -> str:
    """The feature or the layer that an error is about: by its text, else by where it was raised."""
    for name in half.inputs:
        if f"input: {name} " in f"{error} ":
            return f"feature {name.split('/')[-1]!r}, whose size the graph has fixed"
    layers = {id(module): name for name, module in half.network.named_modules()}
    place = ""
    for cause in reversed(_causes(error)):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            place = _layer_in(frame.f_locals, layers) or place
        if place:
            break
    return f"layer {place!r}" if place else "its operations"


def _layer_in(values: Mapping[str, Any], layers: Mapping[int, str]) -> str:
    """The layer that a frame runs, or that the node was traced from which it translates."""
    module = values.get("self")
    if id(module) in layers:
        return layers[id(module)] or type(module).__name__
    node = values.get("node")
    stack = getattr(node, "meta", {}).get("nn_module_stack", {})
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).rpartition("network.")[2]
