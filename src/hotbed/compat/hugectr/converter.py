# SPDX-License-Identifier: Apache-2.0
"""A graph and weight files of HugeCTR as one ONNX file.

python -m hotbed.compat.hugectr2onnx.converter --onnx_model_path wdl.onnx --graph_config wdl.json \
    --dense_model _dense_2000.model

The engine's export gives the network behind the lookups. The inputs get HugeCTR's names and shapes
in front of it, and the labels behind it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hotbed.compat.hugectr.clauses import Graph, OptParams, SparseEmbedding
from hotbed.compat.hugectr.inference.served import learner_of, tables_of
from hotbed.compat.hugectr.json.inference import read_json
from hotbed.compat.hugectr.json.layers import read_graph
from hotbed.compat.hugectr.params import InferenceParams
from hotbed.compat.hugectr.paths import check_local
from hotbed.compat.hugectr.translate import Translation, translate
from hotbed.compat.hugectr.weights.rows import rows_of
from hotbed.embedding.modules.state import dense_state
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError, HotbedError
from hotbed.files import new_file, writing
from hotbed.persist.publish.export import DENSE_INPUT
from hotbed.persist.publish.version import OnnxGraph

FLOAT = 1
INT64 = 7
"""Types of tensors, as ONNX numbers them."""
MOST_KEYS = 1 << 26
"""Keys from 0 on that the table of places in an ONNX file may have: 512 MiB."""
_NETWORK = "network/"


def convert(
    onnx_model_path: str,
    graph_config: str,
    dense_model: str,
    convert_embedding: bool = False,
    sparse_models: Sequence[str] | None = None,
    ntp_file: str | None = None,
    graph_name: str = "hugectr",
) -> None:
    """Write a model as an ONNX file.

    Its inputs are the dense tensor, float32 [n, dense_dim], and for each embedding its rows,
    float32 [n, slots, vec], under its name; with `convert_embedding` the keys, int64 [n, slots,
    keys], under the name of the sparse slots. A key without a row reads zeros, and -1 fills slots
    with fewer keys. Its outputs are the labels, float32 [n, label_dim].

    Args:
        onnx_model_path: where the file is written.
        graph_config: the graph of `Model.graph_to_json`.
        dense_model: the file of the dense parameters.
        convert_embedding: whether the file holds the rows.
        sparse_models: the files of the tables, which `convert_embedding` needs.
        ntp_file: the means and variances of batches; None = beside the dense file.
        graph_name: of the ONNX graph.

    Raises:
        ConfigError: the graph has an embedding collection, or keys that are too large for a table
            of places.
        PersistError, FormatError: a weight file is missing, or not that of this model.
        MissingExtra: onnx is not installed.
    """
    graph = _read_graph(graph_config)
    params = InferenceParams(
        model_name=graph_name,
        max_batchsize=1,
        hit_rate_threshold=1.0,
        dense_model_file=dense_model,
        sparse_model_files=tuple(sparse_models or ()),
        use_gpu_embedding_cache=False,
        cache_size_percentage=1.0,
        i64_input_key=True,
        non_trainable_params_file=ntp_file or "",
    )
    translation = translate(graph, OptParams())
    tables = tables_of(params, translation) if convert_embedding else translation.tables
    learner = learner_of(graph, params, translation, tables)
    exported = learner.graph()
    builder = _Builder(graph_name)
    builder.add_inputs(graph, exported, tables if convert_embedding else None)
    builder.add_network(exported, dense_state(learner.network))
    builder.add_outputs(graph, translation, exported)
    check_local("convert.onnx_model_path", onnx_model_path)
    with writing(onnx_model_path):
        Path(onnx_model_path).parent.mkdir(parents=True, exist_ok=True)
    with writing(onnx_model_path), new_file(Path(onnx_model_path)) as file:
        file.write(builder.model().SerializeToString())
    print(f"[HUGECTR2ONNX][INFO]: The model is saved at {onnx_model_path}")


def _read_graph(path: str) -> Graph:
    """Return the graph of a file; raise ConfigError if it has an embedding collection."""
    graph = read_graph(read_json(path))
    for embedding in graph.embeddings:
        if not isinstance(embedding, SparseEmbedding):
            raise ConfigError(
                f"{path}: expected embeddings of their own, got an embedding collection. "
                "Export model.learner, and serve it by hotbed serve."
            )
    return graph


class _Builder:
    """Puts an ONNX graph together, with the engine's network in its middle.

    Args:
        name: of the graph.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._opsets: Any = None

    def add_inputs(
        self, graph: Graph, exported: OnnxGraph, tables: Mapping[str, Table] | None
    ) -> None:
        """Add HugeCTR's inputs, and nodes from them to those of the network.

        Args:
            graph: of HugeCTR.
            exported: the network.
            tables: with their rows; None = the inputs are rows.
        """
        if exported.dense:
            self._input(graph.input.dense_name, FLOAT, [graph.input.dense_dim])
            self._node("Identity", [graph.input.dense_name], f"{_NETWORK}{DENSE_INPUT}")
        clauses = {
            embedding.sparse_embedding_name: embedding
            for embedding in graph.embeddings
            if isinstance(embedding, SparseEmbedding)
        }
        for lookup, features in exported.lookups.items():
            flat = []
            for table in dict.fromkeys(table for _, table, _ in features):
                clause = clauses[table]
                num_slots = sum(name == table for _, name, _ in features)
                top = clause.sparse_embedding_name
                if tables is None:
                    self._input(top, FLOAT, [num_slots, clause.embedding_vec_size])
                else:
                    self._input(clause.bottom_name, INT64, [num_slots, "keys"])
                    self._add_rows(clause, tables[table])
                flat.append(self._node("Reshape", [top, self._constant([0, -1])], f"{top}/flat"))
            self._node("Concat", flat, f"{_NETWORK}{lookup}", axis=1)

    def _add_rows(self, clause: SparseEmbedding, table: Table) -> None:
        """Add the nodes from keys to pooled rows, with the table as a constant."""
        keys, vectors = (np.concatenate(parts) for parts in zip(*rows_of(table), strict=True))
        top = clause.sparse_embedding_name
        if keys.min() < 0 or keys.max() >= MOST_KEYS:
            raise ConfigError(
                f"convert.convert_embedding: expected keys from 0 to {MOST_KEYS - 1} in {top!r}, "
                f"got {keys.min()} to {keys.max()}. Convert without embeddings."
            )
        size = int(keys.max()) + 1
        places = np.zeros(size + 2, np.int64)  # the first and the last are of keys without a row
        places[keys + 1] = np.arange(1, len(keys) + 1)
        rows = np.concatenate([np.zeros((1, table.dim), np.float32), vectors])
        ends = [self._constant(-1), self._constant(size)]
        inside = self._node("Clip", [clause.bottom_name, *ends], f"{top}/inside")
        shifted = self._node("Add", [inside, self._constant(1)], f"{top}/shifted")
        place = self._node("Gather", [self._constant(places), shifted], f"{top}/place")
        looked_up = self._node("Gather", [self._constant(rows), place], f"{top}/rows")
        axes = self._constant([2])
        if clause.combiner == "sum":
            self._node("ReduceSum", [looked_up, axes], top, keepdims=0)
            return
        total = self._node("ReduceSum", [looked_up, axes], f"{top}/sum", keepdims=0)
        is_key = self._node("GreaterOrEqual", [clause.bottom_name, self._constant(0)], f"{top}/is")
        ones = self._node("Cast", [is_key], f"{top}/ones", to=FLOAT)
        count = self._node("ReduceSum", [ones, axes], f"{top}/count", keepdims=1)
        divisor = self._node("Max", [count, self._constant(1.0)], f"{top}/divisor")
        self._node("Div", [total, divisor], top)

    def add_network(self, exported: OnnxGraph, state: Mapping[str, Tensor]) -> None:
        """Add the engine's network with its weights.

        Args:
            exported: the network.
            state: its weights by name.
        """
        import onnx

        model = onnx.load_from_string(exported.onnx)
        for tensor in model.graph.initializer:
            if tensor.name in exported.weights:
                value = state[tensor.name.removeprefix("network.")].detach().numpy()
                tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        model = onnx.compose.add_prefix(model, _NETWORK)
        self._nodes += model.graph.node
        self._constants += model.graph.initializer
        self._opsets = model.opset_import
        self._ir_version = model.ir_version

    def add_outputs(self, graph: Graph, translation: Translation, exported: OnnxGraph) -> None:
        """Add HugeCTR's labels, float32 [n, label_dim]."""
        labels = [label.name for label in translation.schema.labels]
        names = dict(zip(labels, exported.outputs, strict=True))
        for label, dim in zip(graph.input.label_names, graph.input.label_dims, strict=True):
            columns = []
            for part in translation.labels[label]:
                if part in names:
                    scores = f"{_NETWORK}{names[part]}"
                    shape = self._constant([-1, 1])
                    columns.append(self._node("Reshape", [scores, shape], f"{part}/column"))
            if columns:
                self._node("Concat", columns, label, axis=1)
                self._outputs.append(_value(label, FLOAT, [dim]))

    def model(self) -> Any:
        """Return the ONNX model."""
        from onnx import helper

        inputs = list(self._inputs.values())
        graph = helper.make_graph(self._nodes, self._name, inputs, self._outputs, self._constants)
        return helper.make_model(graph, opset_imports=self._opsets, ir_version=self._ir_version)

    def _input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._inputs[name] = _value(name, kind, shape)

    def _node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _constant(self, value: Any) -> str:
        """Add a constant and return its name; whole numbers are int64, others float32."""
        from onnx import numpy_helper

        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        name = f"constant/{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(array, name))
        return name


def _value(name: str, kind: int, shape: Sequence[int | str]) -> Any:
    """Return the description of an input or output with rows in front of its shape."""
    from onnx import helper

    return helper.make_tensor_value_info(name, kind, ["rows", *shape])


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments of HugeCTR's converter; return the exit code, 2 for a deliberate error."""
    parser = argparse.ArgumentParser(
        prog="python -m hotbed.compat.hugectr2onnx.converter",
        description="Convert a model of HugeCTR to ONNX.",
        allow_abbrev=False,
    )
    for name in ("onnx_model_path", "graph_config", "dense_model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--convert_embedding", action="store_true")
    parser.add_argument("--sparse_models", nargs="*")
    parser.add_argument("--ntp_file")
    parser.add_argument("--graph_name", default="hugectr")
    try:
        convert(**vars(parser.parse_args(arguments)))
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
