# SPDX-License-Identifier: Apache-2.0
"""The summary of a model: the table that HugeCTR prints, and what the model really takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hotbed.compat.hugectr.clauses import (
    DenseLayer,
    EmbeddingCollectionConfig,
    Graph,
    GroupDenseLayer,
    SparseEmbedding,
)
from hotbed.compat.hugectr.translate import Translation
from hotbed.models.graph.network import Graph as Network
from hotbed.optim.sparse import dense_parameters
from hotbed.parallel.world import trains_together

COLUMNS = (40, 30, 30, 30)
RULE = "-" * 113
MIB = 2**20


def summary_of(graph: Graph, translation: Translation, network: Network) -> str:
    """Return the summary of a model as text."""
    shapes = {}
    for name, tensor in translation.tensors.items():
        shapes[name] = network.shapes.get(tensor, "")
    return "\n".join((*_structure(graph, shapes), *_footprint(translation, network)))


def _structure(graph: Graph, shapes: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of layers with the names and shapes of their tensors."""
    clause = graph.input
    sparse = ",".join(param.top_name for param in clause.data_reader_sparse_param_array)
    yield "Model structure"
    yield _row("Label", "Dense", "Sparse")
    yield _row(",".join(clause.label_names), clause.dense_name, sparse)
    dims = ",".join(str(dim) for dim in clause.label_dims)
    yield _row(f"[n, {dims}]", f"[n, {clause.dense_dim}]")
    yield RULE
    yield _row("Layer Type", "Input Name", "Output Name", "Output Shape")
    yield RULE
    for kind, inputs, outputs in _layers(graph):
        for number in range(max(len(inputs), len(outputs))):
            output = _at(outputs, number)
            yield _row("" if number else kind, _at(inputs, number), output, shapes.get(output, ""))
        yield RULE


def _layers(graph: Graph) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield kind, inputs and outputs of each embedding and layer."""
    for embedding in graph.embeddings:
        if isinstance(embedding, SparseEmbedding):
            kind = embedding.embedding_type.name
            yield kind, (embedding.bottom_name,), (embedding.sparse_embedding_name,)
        elif isinstance(embedding, EmbeddingCollectionConfig):
            lookups = embedding.lookups
            tops = dict.fromkeys(lookup.top_name for lookup in lookups)
            bottoms = dict.fromkeys(lookup.bottom_name for lookup in lookups)
            yield "EmbeddingCollection", tuple(bottoms), tuple(tops)
    for layer in graph.layers:
        if isinstance(layer, DenseLayer):
            yield layer.layer_type.name, layer.bottom_names, layer.top_names
        elif isinstance(layer, GroupDenseLayer):
            kind = layer.group_layer_type.name
            yield kind, layer.bottom_name_list, layer.top_name_list


def _footprint(translation: Translation, network: Network) -> Iterator[str]:
    """Yield what dense parameters and tables take now, and what rows cost."""
    num_dense = sum(weight.numel() for weight in dense_parameters(network))
    size = f"{num_dense * 4 / MIB:,.1f} MiB without optimizer state"
    yield f"Dense parameters: {num_dense:,}, {size}"
    place = " on the first rank" if trains_together() else ""
    for name, table in translation.tables.items():
        row_bytes = int(table.native.row_bytes)
        num_rows = len(table)
        text = (
            f"Table {name}: rows of {table.dim} floats, {row_bytes:,} bytes each with optimizer "
            f"state; {num_rows:,} rows, {num_rows * row_bytes / MIB:,.1f} MiB now{place}"
        )
        expected = table.capacity
        if expected:
            text += f"; {expected * row_bytes / MIB:,.1f} MiB with {expected:,} rows"
        yield text
    if translation.tables:
        yield "Tables grow with their keys; workspace and slot sizes reserve nothing."


def _row(*texts: str) -> str:
    cells = [f"{text:<{width}}" for text, width in zip(texts, COLUMNS, strict=False)]
    return "".join(cells).rstrip()


def _at(names: tuple[str, ...], number: int) -> str:
    if number < len(names):
        return names[number]
    return ""
