# SPDX-License-Identifier: Apache-2.0
"""Write the graph of a model as a JSON file, as `Model.graph_to_json` does.

HugeCTR leaves some parameters out. Here they are written too, so that a graph is the same once it
is read again: `projection_dim` of MultiCross, `shape` of Reshape, Select, weights of labels,
embedding collections, and `slot_size_array` of the reader, with `adds_slot_offsets` of Raw files.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hotbed.compat.hugectr.clauses import (
    DenseLayer,
    EmbeddingCollectionConfig,
    EmbeddingTableConfig,
    Graph,
    GroupDenseLayer,
    Input,
    OptParams,
    SparseEmbedding,
)
from hotbed.compat.hugectr.enums import Embedding_t, FcPosition_t, Layer_t
from hotbed.compat.hugectr.json.layers import HYBRID_KEYS, LAYER_KEYS, Keys
from hotbed.compat.hugectr.json.optimizer import write_optimizer

_ALWAYS: Mapping[Layer_t, tuple[str, ...]] = {
    Layer_t.Dropout: ("rate",),
    Layer_t.Concat: ("axis",),
    Layer_t.MultiHeadAttention: ("num_attention_heads", "transpose_b"),
    Layer_t.ReduceSum: ("axis",),
    Layer_t.ReduceMean: ("axis",),
    Layer_t.Softmax: ("factor",),
    Layer_t.PReLU_Dice: ("alpha", "eps"),
    Layer_t.FusedInnerProduct: ("position", "activation"),
    Layer_t.MLP: ("num_output", "num_outputs"),
}
"""Optional keys that HugeCTR writes also where they have their default."""
_SYNONYMS = ("elu_alpha", "epsilon")  # of PReLU_Dice


def write_graph(graph: Graph, optimizer: OptParams) -> dict[str, Any]:
    """Return the JSON object of a graph.

    Args:
        graph: of a model.
        optimizer: of the model, which embeddings without one of their own have.
    """
    layers = [_data(graph.input)]
    for embedding in graph.embeddings:
        if isinstance(embedding, SparseEmbedding):
            layers.append(_embedding(embedding, optimizer))
        else:
            layers.append(_collection(embedding))
    for layer in graph.layers:
        if isinstance(layer, GroupDenseLayer):
            layers += [_dense_layer(part) for part in _parts(layer)]
        else:
            layers.append(_dense_layer(layer))
    if graph.model_name:
        return {"layers": layers, "model_name": graph.model_name}
    return {"layers": layers}


def _data(data: Input) -> dict[str, Any]:
    label = {"top": _one_or_list(data.label_names), "label_dim": _one_or_list(data.label_dims)}
    if data.label_weights:
        label["label_weights"] = list(data.label_weights)
    sparse = []
    for param in data.data_reader_sparse_param_array:
        sparse.append(
            {
                "top": param.top_name,
                "nnz_per_slot": _plain(param.nnz_per_slot),
                "is_fixed_length": param.is_fixed_length,
                "slot_num": param.slot_num,
            }
        )
    dense = {"top": data.dense_name, "dense_dim": data.dense_dim}
    clause: dict[str, Any] = {"type": "Data", "label": label, "dense": dense, "sparse": sparse}
    if data.slot_size_array is not None:
        clause["slot_size_array"] = list(data.slot_size_array)
    if data.adds_slot_offsets:
        clause["adds_slot_offsets"] = True
    return clause


# --- embeddings -----------------------------------------------------------------------------------


def _embedding(embedding: SparseEmbedding, optimizer: OptParams) -> dict[str, Any]:
    hyper: dict[str, Any] = {
        "workspace_size_per_gpu_in_mb": embedding.workspace_size_per_gpu_in_mb,
        "max_vocabulary_size_global": embedding.max_vocabulary_size_global,
        "embedding_vec_size": embedding.embedding_vec_size,
        "combiner": embedding.combiner,
    }
    if embedding.max_vocabulary_size_per_gpu:
        hyper["max_vocabulary_size_per_gpu"] = embedding.max_vocabulary_size_per_gpu
    if embedding.slot_size_array:
        hyper["slot_size_array"] = list(embedding.slot_size_array)
    if embedding.embedding_type is Embedding_t.HybridSparseEmbedding:
        for key in HYBRID_KEYS:
            hyper[key] = _plain(getattr(embedding.hybrid_embedding_param, key))
    clause: dict[str, Any] = {
        "type": embedding.embedding_type.value,
        "bottom": embedding.bottom_name,
        "top": embedding.sparse_embedding_name,
        "sparse_embedding_hparam": hyper,
        "optimizer": write_optimizer(embedding.optimizer or optimizer),
    }
    if embedding.plan_file:
        clause["plan_file"] = _plain(embedding.plan_file)
    return clause


def _collection(collection: EmbeddingCollectionConfig) -> dict[str, Any]:
    """Return a clause of Hotbed's own: HugeCTR does not write embedding collections."""
    tables = {lookup.table.name: _table(lookup.table) for lookup in collection.lookups}
    lookups = []
    for lookup in collection.lookups:
        lookups.append(
            {
                "table": lookup.table.name,
                "bottom": lookup.bottom_name,
                "top": lookup.top_name,
                "combiner": lookup.combiner,
                "is_part": lookup.is_part,
            }
        )
    return {"type": "EmbeddingCollection", "tables": list(tables.values()), "lookups": lookups}


def _table(table: EmbeddingTableConfig) -> dict[str, Any]:
    clause: dict[str, Any] = {
        "name": table.name,
        "max_vocabulary_size": table.max_vocabulary_size,
        "ev_size": table.ev_size,
    }
    if table.opt_params_or_empty is not None:
        clause["optimizer"] = write_optimizer(table.opt_params_or_empty)
    params = table.init_param_or_empty
    if params is not None:
        clause["init"] = {"type": params.initializer_type.value, "up_bound": params.up_bound}
    return clause


# --- dense layers ---------------------------------------------------------------------------------


def _dense_layer(layer: DenseLayer) -> dict[str, Any]:
    kind = layer.layer_type
    keys = LAYER_KEYS.get(kind, Keys())
    clause = {
        "type": kind.value,
        "bottom": _one_or_list(layer.bottom_names),
        "top": _one_or_list(layer.top_names),
        **_written(layer, keys.outer),
    }
    values = {key: _plain(getattr(layer, name)) for key, name in keys.needed.items()}
    values |= _written(layer, keys.optional)
    if kind is Layer_t.Reshape and not (layer.selected or layer.shape):
        values |= {"leading_dim": layer.leading_dim, "time_step": layer.time_step}
    if kind is Layer_t.MLP:
        if not layer.biases:
            values["use_bias"] = layer.use_bias
        if not layer.activations:
            values["activation"] = layer.act_type.value
    if keys.inner:
        return {**clause, keys.inner: values}
    return {**clause, **values}


def _written(layer: DenseLayer, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the optional keys that are written: those without their default, and `_ALWAYS`."""
    always = _ALWAYS.get(layer.layer_type, ())
    values = {}
    for key, name in keys.items():
        if key in _SYNONYMS or (
            name in ("regularizer_type", "lambda_") and not layer.use_regularizer
        ):
            continue
        value = getattr(layer, name)
        default = DenseLayer.__dataclass_fields__[name].default
        if key in always or value != default or name in ("regularizer_type", "lambda_"):
            values[key] = _plain(value)
    return values


def _parts(layer: GroupDenseLayer) -> list[DenseLayer]:
    """Return a group of dense layers one by one, as HugeCTR adds them."""
    parts = []
    bottoms = layer.bottom_name_list
    last = len(layer.num_outputs) - 1
    for number, (width, top) in enumerate(zip(layer.num_outputs, layer.top_name_list, strict=True)):
        arguments: dict[str, Any] = {"num_output": width, "pos_type": FcPosition_t.Body}
        if number == last:
            arguments |= {"act_type": layer.last_act_type, "pos_type": FcPosition_t.Tail}
        if number == 0:
            arguments["pos_type"] = FcPosition_t.Head
        parts.append(DenseLayer(Layer_t.FusedInnerProduct, bottoms, (top,), **arguments))
        bottoms = (top,)
    return parts


def _one_or_list(values: tuple[Any, ...]) -> Any:
    """Return one value alone, several as a list."""
    return values[0] if len(values) == 1 else list(values)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
