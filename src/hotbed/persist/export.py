# SPDX-License-Identifier: Apache-2.0
"""The dense half of a network as an ONNX graph, for servers that have no torch."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.data.batch import Batch, Ids, SideBySide
from hotbed.data.schema import Schema
from hotbed.embedding.module import TableModule, table_modules
from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.persist.chain import write_version
from hotbed.persist.format import Saved, Writer, open_checkpoint
from hotbed.persist.store import Where

DENSE = "dense"
TOLERANCE = 1e-5
_ROWS = 5  # of the batch that the graph is traced and checked with


@dataclass(frozen=True)
class Graph:
    """An ONNX graph and what it is fed with.

    `weights`: parameters of the network that the graph holds by name; later versions bring new values. `lookups`: for
    each lookup of the network, its name and its features (name, table, pooling); the graph's input of that name takes
    the pooled ones side by side, float32 [n, width]. `dense`: columns that the input `dense` takes side by side, float32
    [n, sum of widths]. `outputs`: names of the predictions, one a label.
    """

    file: ClassVar[str] = "graph.onnx"
    onnx: bytes
    weights: Sequence[str]
    lookups: Mapping[str, Sequence[tuple[str, str, str]]]
    dense: Sequence[str]
    outputs: Sequence[str]

    def describe(self) -> dict[str, Any]:
        """Everything but the graph itself, as JSON values."""
        lookups = [{"name": name, "features": [list(one) for one in found]} for name, found in self.lookups.items()]
        plain = {"weights": list(self.weights), "dense": list(self.dense), "outputs": list(self.outputs)}
        return {"file": self.file, "lookups": lookups, **plain}


def export(checkpoint: Where, to: Where, graph: Graph) -> Saved:
    """Freeze the newest state under `checkpoint` for servers: values of rows, weights, schema and `graph`, under `to`.

    `graph`: of the network that the checkpoint was made of. Raises PersistError where `to` cannot be written.
    """
    with Writer(to) as writer:
        return write_version(writer, open_checkpoint(checkpoint), None, graph)


def export_graph(network: nn.Module, schema: Schema, activate: Callable[[Any], Any] | None = None) -> Graph:
    """The network after its lookups, `activate` (a sigmoid, say) included, as a graph that is checked against torch.

    Raises ConfigError for networks that cannot be exported: those with sequence features, or that torch.export refuses;
    MissingExtra without onnx.
    """
    _check_installed()
    modules = {f"lookup/{number}": module for number, module in enumerate(table_modules(network))}
    for module in modules.values():
        if not all(module.pooled):
            raise ConfigError("export: sequence features are not served yet — received pooling 'none' — pool them")
    columns = {column.name: column.width for column in schema.dense}
    shapes = {name: [module.output_dim] for name, module in modules.items()}
    shapes |= {DENSE: [sum(columns.values())]} if columns else {}
    draw = torch.Generator().manual_seed(0)  # what trains draws as if nothing had happened
    inputs = {name: torch.rand(_ROWS, *shape, generator=draw) for name, shape in shapes.items()}
    half = _DenseHalf(network, list(modules.values()), columns, activate or (lambda outputs: outputs))
    training = network.training
    network.eval()
    try:
        with torch.no_grad(), _quiet(), torch.random.fork_rng(devices=[]):
            expected = half(*inputs.values())
            onnx, weights = _export(half, inputs, half.outputs)
    except Exception as error:
        raise ConfigError(f"export: {type(network).__name__} cannot become an ONNX graph — {_first(error)} — keep to "
                          "tensor operations that do not depend on values") from error  # fmt: skip
    finally:
        network.train(training)
        half.release()
    graph = Graph(onnx, weights, {name: [(f.name, f.table, f.pooling) for f in module.features] for name, module in modules.items()},
                  list(columns), half.outputs)  # fmt: skip
    _check(graph, inputs, expected)
    return graph


class _DenseHalf(nn.Module):
    """The network with its lookups replaced by inputs."""

    def __init__(
        self, network: nn.Module, modules: list[TableModule], dense: Mapping[str, int], activate: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.network = network
        self.outputs: list[str] = []
        self._modules_with_tables, self._dense, self._activate = modules, dense, activate

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(inputs)
        for module in self._modules_with_tables:
            module.pool = _given(given.pop(0))  # type: ignore[method-assign]
        features = [feature.name for module in self._modules_with_tables for feature in module.features]
        nothing = Ids(torch.zeros(0, dtype=torch.int64))
        dense = SideBySide(given.pop(), self._dense) if self._dense else {}
        batch = Batch(dict.fromkeys(features, nothing), dense, num_samples=_ROWS)
        found = self._activate(self.network(batch))
        self.outputs = list(found) if isinstance(found, dict) else ["prediction"]
        return tuple(found.values()) if isinstance(found, dict) else (found,)

    def release(self) -> None:
        """Give the lookups back."""
        for module in self._modules_with_tables:
            module.__dict__.pop("pool", None)


def _given(flat: Tensor) -> Any:
    return lambda inputs, time: (flat, [])


def _export(half: _DenseHalf, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> tuple[bytes, list[str]]:
    rows = torch.export.Dim("rows")
    program = torch.onnx.export(
        half, tuple(inputs.values()), dynamo=True, input_names=list(inputs), output_names=list(outputs),
        dynamic_shapes=(tuple({0: rows} for _ in inputs),), optimize=False, verbose=False,
    )  # fmt: skip
    assert program is not None
    model = program.model_proto
    known = {f"network.{name}" for name in half.network.state_dict()}
    return model.SerializeToString(), [one.name for one in model.graph.initializer if one.name in known]


def _check(graph: Graph, inputs: Mapping[str, Tensor], expected: Sequence[Tensor]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(graph.onnx, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    found = session.run(list(graph.outputs), {name: one.numpy() for name, one in inputs.items() if name in wanted})
    for name, ours, theirs in zip(graph.outputs, expected, found, strict=True):
        apart = float(np.abs(ours.numpy() - theirs).max())
        if not apart <= TOLERANCE:
            raise PersistError(f"export: output {name!r} of the graph is not the network's — received a difference of "
                               f"{apart:.2g} — do not serve it; report the network")  # fmt: skip


def _check_installed() -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript

        del onnx, onnxruntime, onnxscript
    except ImportError as error:
        raise MissingExtra(f"export needs {error.name} — it is not installed — pip install hotbed[export]") from error


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


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
