# SPDX-License-Identifier: Apache-2.0
"""The `layers` of JSON files: the data, embeddings, dense layers and losses, of all releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotbed.compat.hugectr.clauses import (
    AsyncParam,
    DataReaderParams,
    DataReaderSparseParam,
    DenseLayer,
    EmbeddingCollectionConfig,
    EmbeddingLookup,
    EmbeddingTableConfig,
    Graph,
    HybridEmbeddingParam,
    InitParams,
    Input,
    SparseEmbedding,
)
from hotbed.compat.hugectr.enums import (
    Activation_t,
    Check_t,
    CommunicationType,
    DataReaderSparse_t,
    DataReaderType_t,
    Embedding_t,
    FcPosition_t,
    HybridEmbeddingType,
    Initializer_t,
    Layer_t,
    Regularizer_t,
)
from hotbed.compat.hugectr.json.keys import member, needed, read_clause
from hotbed.compat.hugectr.json.optimizer import read_optimizer
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.config import did_you_mean
from hotbed.errors import ConfigError


def read_graph(spec: Mapping[str, Any]) -> Graph:
    """Return the network of a JSON file.

    Args:
        spec: the file, of which `layers` and `model_name` are read.

    Raises:
        ConfigError: a key or a value is wrong; the message starts with its place.
    """
    layers = spec.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"layers: not a list of layers, got {layers!r:.80}. Write the layers.")
    embeddings: list[SparseEmbedding | EmbeddingCollectionConfig] = []
    dense: list[DenseLayer] = []
    for number, layer in enumerate(layers[1:], 1):
        where = f"layers.{number}"
        kind = _type_of(layer, where)
        if kind in Embedding_t.__members__:
            embeddings.append(_read_embedding(layer, where))
        elif kind == "EmbeddingCollection":
            embeddings.append(_read_collection(layer, where))
        else:
            dense.append(_read_dense_layer(layer, where))
    return Graph(
        _read_data(layers[0]),
        tuple(embeddings),
        tuple(dense),
        model_name=spec.get("model_name", ""),
    )


def _type_of(layer: Any, where: str) -> str:
    if not isinstance(layer, Mapping) or not isinstance(layer.get("type"), str):
        raise ConfigError(
            f"{where}.type: missing key, got {layer!r:.80}. Add the type of the layer."
        )
    return str(layer["type"])


# --- data -----------------------------------------------------------------------------------------

_READER = {
    "format": "data_reader_type",
    "source": "source",
    "eval_source": "eval_source",
    "check": "check_type",
    "cache_eval_data": "cache_eval_data",
    "num_samples": "num_samples",
    "eval_num_samples": "eval_num_samples",
    "float_label_dense": "float_label_dense",
    "num_workers": "num_workers",
    "slot_size_array": "slot_size_array",
}


_OLD_SIZES = "slot_size"  # the key slot_size_array of v2.1 for A100


def _read_data(layer: Any) -> Input:
    where = "layers.0"
    if _type_of(layer, where) != "Data":
        raise ConfigError(f"{where}.type: not Data, got {layer['type']!r}. Put the data first.")
    others = ["name", "type", "label", "dense", "sparse", "adds_slot_offsets", "async_param"]
    others += ["num_iterations_statistics", _OLD_SIZES]
    values = read_clause(layer, where, [*others, *_READER])
    name = "num_iterations_statistics"
    KNOBS.log_no_effect(f"solver.{name}", when=name in values)
    if _OLD_SIZES in values:
        values.setdefault("slot_size_array", values[_OLD_SIZES])
    needed(values, where, ["label", "dense", "sparse"])
    label_keys = ["top", "label_dim", "label_weights"]
    label = read_clause(values["label"], f"{where}.label", label_keys)
    needed(label, f"{where}.label", ["label_dim"])
    dense = read_clause(values["dense"], f"{where}.dense", ["top", "dense_dim", "aligned"])
    needed(dense, f"{where}.dense", ["top", "dense_dim"])
    sparse = []
    for number, entry in enumerate(_listed(values["sparse"], f"{where}.sparse")):
        sparse.append(_read_sparse(entry, f"{where}.sparse.{number}"))
    return Input(
        label_dims=_as_tuple(label["label_dim"]),
        label_names=_as_tuple(label.get("top", "label")),  # files for inference have no name
        label_weights=tuple(label.get("label_weights", ())),
        dense_dim=dense["dense_dim"],
        dense_name=dense["top"],
        data_reader_sparse_param_array=tuple(sparse),
        reader=_read_reader(values, where),
        slot_size_array=values.get("slot_size_array"),
        adds_slot_offsets=values.get("adds_slot_offsets", False),
    )


def _read_reader(values: Mapping[str, Any], where: str) -> DataReaderParams | None:
    """Return what to read; None for a graph, which v3.1 and later write without it."""
    if "source" not in values:
        return None
    needed(values, where, ["check"])
    reader = {new: values[old] for old, new in _READER.items() if old in values}
    reader["data_reader_type"] = member(
        DataReaderType_t, values.get("format", "Norm"), f"{where}.format"
    )
    reader["check_type"] = member(Check_t, values["check"], f"{where}.check")
    reader.setdefault("eval_source", "")
    reader["cache_eval_data"] = int(values.get("cache_eval_data", 0))
    if "async_param" in values:
        reader["async_param"] = _read_async(values["async_param"], f"{where}.async_param")
    return DataReaderParams(**reader, adds_slot_offsets=True)


_ASYNC = ("num_threads", "num_batches_per_thread", "io_block_size", "io_depth", "io_alignment")


def _read_async(spec: Any, where: str) -> AsyncParam:
    """Return the settings of the one-hot RawAsync reader of v3.1 and v3.2."""
    values = read_clause(spec, where, [*_ASYNC, "shuffle"])
    needed(values, where, _ASYNC)
    KNOBS.log_no_effect("reader.async_param")
    return AsyncParam(**{"shuffle": False, **values}, multi_hot_reader=False, is_dense_float=False)


_SPARSE = (
    "top",
    "type",
    "max_feature_num_per_sample",
    "max_nnz",
    "nnz_per_slot",
    "is_fixed_length",
    "slot_num",
)


def _read_sparse(entry: Any, where: str) -> DataReaderSparseParam:
    """Return sparse slots; v2.3 to v3.0.1 have `max_feature_num_per_sample` and `max_nnz`."""
    values = read_clause(entry, where, _SPARSE)
    needed(values, where, ["top", "slot_num"])
    most = values.get("max_feature_num_per_sample")
    names = ("nnz_per_slot", "max_nnz", "max_feature_num_per_sample")
    present = [name for name in names if name in values]
    if not present:
        needed(values, where, ["nnz_per_slot"])
    placement = None
    if "type" in values:
        placement = member(DataReaderSparse_t, values["type"], f"{where}.type")
    return DataReaderSparseParam(
        top_name=values["top"],
        nnz_per_slot=values[present[0]],
        is_fixed_length=values.get("is_fixed_length", False),
        slot_num=values["slot_num"],
        type=placement,
        max_feature_num=most,
    )


# --- embeddings -----------------------------------------------------------------------------------

_OLD_EMBEDDING = {"vocabulary_size": "max_vocabulary_size_global"}  # up to v2.1
_EMBEDDING = (
    "max_vocabulary_size_per_gpu",
    "workspace_size_per_gpu_in_mb",
    "max_vocabulary_size_global",
    "embedding_vec_size",
    "combiner",
    "slot_size_array",
)
HYBRID_KEYS: Mapping[str, Any] = {
    "max_num_frequent_categories": 1,
    "max_num_infrequent_samples": -1,
    "p_dup_max": 0.01,
    "max_all_reduce_bandwidth": 1.3e11,
    "max_all_to_all_bandwidth": 1.9e11,
    "efficiency_bandwidth_ratio": 1.0,
    "communication_type": "IB_NVLink",
    "hybrid_embedding_type": "Distributed",
}


def _read_embedding(layer: Any, where: str) -> SparseEmbedding:
    keys = ["name", "type", "bottom", "top", "sparse_embedding_hparam", "optimizer", "plan_file"]
    # `plan_file1` is in samples of v2.3 and v3.0
    values = read_clause(layer, where, [*keys, "plan_file1", _OLD_SIZES])
    needed(values, where, ["bottom", "top", "sparse_embedding_hparam"])
    if "plan_file1" in values:
        KNOBS.log_no_effect("sparse_embedding.plan_file1")
    place = f"{where}.sparse_embedding_hparam"
    names = [*_EMBEDDING, *HYBRID_KEYS, *_OLD_EMBEDDING, "load_factor"]
    hyper = read_clause(values["sparse_embedding_hparam"], place, names)
    needed(hyper, place, ["embedding_vec_size", "combiner"])
    KNOBS.log_no_effect("sparse_embedding.load_factor", when="load_factor" in hyper)
    arguments = {key: hyper[key] for key in _EMBEDDING if key in hyper}
    for old, new in _OLD_EMBEDDING.items():
        if old in hyper:
            arguments.setdefault(new, hyper[old])
    if _OLD_SIZES in values:
        arguments.setdefault("slot_size_array", values[_OLD_SIZES])
    if "optimizer" in values:
        arguments["optimizer"] = read_optimizer(
            values["optimizer"], f"{where}.optimizer", needs_rate=False
        )
    if any(key in hyper for key in HYBRID_KEYS):
        arguments["hybrid_embedding_param"] = _read_hybrid({**HYBRID_KEYS, **hyper}, place)
    return SparseEmbedding(
        embedding_type=Embedding_t[values["type"]],
        sparse_embedding_name=values["top"],
        bottom_name=values["bottom"],
        plan_file=values.get("plan_file", ""),
        **arguments,
    )


def _read_hybrid(hyper: Mapping[str, Any], where: str) -> HybridEmbeddingParam:
    arguments = {key: hyper[key] for key in HYBRID_KEYS}
    enums = (
        ("communication_type", CommunicationType),
        ("hybrid_embedding_type", HybridEmbeddingType),
    )
    for key, enum in enums:
        arguments[key] = member(enum, arguments[key], f"{where}.{key}")
    return HybridEmbeddingParam(**arguments)


def _read_collection(layer: Any, where: str) -> EmbeddingCollectionConfig:
    """Return an embedding collection, in the clause that `json.graph` writes."""
    values = read_clause(layer, where, ["type", "tables", "lookups"])
    needed(values, where, ["tables", "lookups"])
    tables = {}
    for number, entry in enumerate(_listed(values["tables"], f"{where}.tables")):
        table = _read_table(entry, f"{where}.tables.{number}")
        tables[table.name] = table
    collection = EmbeddingCollectionConfig()
    for number, entry in enumerate(_listed(values["lookups"], f"{where}.lookups")):
        place = f"{where}.lookups.{number}"
        keys = ["table", "bottom", "top", "combiner"]
        lookup = read_clause(entry, place, [*keys, "is_part"])
        needed(lookup, place, keys)
        if lookup["table"] not in tables:
            advice = did_you_mean(str(lookup["table"]), tables)
            raise ConfigError(f"{place}.table: no such table, got {lookup['table']!r}. {advice}")
        collection.lookups.append(
            EmbeddingLookup(
                tables[lookup["table"]],
                lookup["bottom"],
                lookup["top"],
                lookup["combiner"],
                lookup.get("is_part", False),
            )
        )
    return collection


def _read_table(entry: Any, where: str) -> EmbeddingTableConfig:
    keys = ["name", "max_vocabulary_size", "ev_size"]
    values = read_clause(entry, where, [*keys, "optimizer", "init"])
    needed(values, where, keys)
    optimizer = None
    if "optimizer" in values:
        place = f"{where}.optimizer"
        optimizer = read_optimizer(values["optimizer"], place, needs_rate=False)
    init = None
    if "init" in values:
        place = f"{where}.init"
        params = read_clause(values["init"], place, ["type", "up_bound"])
        needed(params, place, ["type"])
        init = InitParams(
            member(Initializer_t, params["type"], f"{place}.type"), params.get("up_bound")
        )
    return EmbeddingTableConfig(
        values["name"], values["max_vocabulary_size"], values["ev_size"], optimizer, init
    )


# --- dense layers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The keys of a type of layer, and the arguments of `DenseLayer` that they are.

    Args:
        inner: the key of the object that holds them; "" = they are keys of the layer.
        needed: keys that have to be there.
        optional: keys that may be there.
        outer: keys of the layer itself beside `inner`.
    """

    inner: str = ""
    needed: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> Mapping[str, str]:
        """All keys of the object with the arguments that they are."""
        return {**self.needed, **self.optional}


_INIT = {"weight_init": "weight_init_type", "bias_init": "bias_init_type"}
_NORM_INIT = {"gamma_init": "gamma_init_type", "beta_init": "beta_init_type"}
_LOSS = {"regularizer": "regularizer_type", "lambda": "lambda_"}

LAYER_KEYS: Mapping[Layer_t, Keys] = {
    Layer_t.BatchNorm: Keys("bn_param", {"factor": "factor", "eps": "eps"}, _NORM_INIT),
    Layer_t.LayerNorm: Keys("ln_param", {"eps": "eps"}, _NORM_INIT),
    Layer_t.Dropout: Keys(optional={"rate": "dropout_rate"}),
    Layer_t.ELU: Keys("elu_param", {"alpha": "elu_alpha"}),
    Layer_t.SequenceMask: Keys(
        needed={
            "max_sequence_len_from": "max_sequence_len_from",
            "max_sequence_len_to": "max_sequence_len_to",
        }
    ),
    Layer_t.MLP: Keys(
        "mlp_param",
        optional={
            "num_output": "num_output",
            "num_outputs": "num_outputs",
            "use_bias": "use_bias",
            "biases": "biases",
            "activation": "act_type",
            "activations": "activations",
            **_INIT,
        },
    ),
    Layer_t.InnerProduct: Keys("fc_param", {"num_output": "num_output"}, _INIT),
    Layer_t.FusedInnerProduct: Keys(
        "fc_param",
        {"num_output": "num_output"},
        _INIT,
        outer={"position": "pos_type", "activation": "act_type"},
    ),
    Layer_t.Concat: Keys(optional={"axis": "axis"}),
    Layer_t.MultiHeadAttention: Keys(
        optional={"num_attention_heads": "num_attention_heads", "transpose_b": "transpose_b"}
    ),
    Layer_t.MultiCross: Keys(
        "mc_param", {"num_layers": "num_layers"}, {"projection_dim": "projection_dim", **_INIT}
    ),
    Layer_t.Reshape: Keys(
        optional={
            "leading_dim": "leading_dim",
            "time_step": "time_step",
            "selected": "selected_slots",
            "shape": "shape",
        }
    ),
    Layer_t.Select: Keys(needed={"dim": "dim", "index": "index"}),
    Layer_t.Slice: Keys(needed={"ranges": "ranges"}),
    Layer_t.ReduceSum: Keys(optional={"axis": "axis"}),
    Layer_t.ReduceMean: Keys(optional={"axis": "axis"}),
    Layer_t.Gather: Keys(needed={"indices": "indices"}),
    Layer_t.GRU: Keys(
        "gru_param",
        {
            "num_output": "num_output",
            "batchsize": "batchsize",
            "SeqLength": "SeqLength",
            "vector_size": "vector_size",
        },
        _INIT,
    ),
    Layer_t.PReLU_Dice: Keys(
        "prelu_dice_param",
        optional={"alpha": "elu_alpha", "elu_alpha": "elu_alpha", "eps": "eps", "epsilon": "eps"},
    ),
    Layer_t.Scale: Keys("scale_param", {"axis": "axis", "factor": "factor"}),
    Layer_t.Softmax: Keys(optional={"factor": "factor"}),
    Layer_t.WeightMultiply: Keys(
        needed={"weight_dims": "weight_dims"}, optional={"weight_init": "weight_init_type"}
    ),
    Layer_t.FmOrder2: Keys(needed={"out_dim": "out_dim"}),
    Layer_t.BinaryCrossEntropyLoss: Keys(optional=_LOSS),
    Layer_t.CrossEntropyLoss: Keys(optional=_LOSS),
    Layer_t.MultiCrossEntropyLoss: Keys(
        needed={"target_weight": "target_weight_vec"}, optional=_LOSS
    ),
}
"""Keys of the types of layers that have keys of their own."""

_ENUMS = {
    "gamma_init_type": Initializer_t,
    "beta_init_type": Initializer_t,
    "weight_init_type": Initializer_t,
    "bias_init_type": Initializer_t,
    "act_type": Activation_t,
    "pos_type": FcPosition_t,
    "regularizer_type": Regularizer_t,
}
_OLD_NAMES = {"Multiply": Layer_t.WeightMultiply}  # up to v2.3


def _read_dense_layer(layer: Any, where: str) -> DenseLayer:
    name = layer["type"]
    kind = _OLD_NAMES[name] if name in _OLD_NAMES else member(Layer_t, name, f"{where}.type")
    keys = LAYER_KEYS.get(kind, Keys())
    inside = [keys.inner] if keys.inner else list(keys.arguments)
    values = read_clause(layer, where, ["name", "type", "bottom", "top", *inside, *keys.outer])
    needed(values, where, ["bottom", "top"])
    arguments = _arguments(values, where, keys.outer)
    if keys.inner:
        needed(values, where, [keys.inner])
        place = f"{where}.{keys.inner}"
        values = read_clause(values[keys.inner], place, keys.arguments)
    else:
        place = where
    needed(values, place, keys.needed)
    arguments |= _arguments(values, place, keys.arguments)
    if "regularizer_type" in arguments:
        needed(values, place, ["lambda"])
        arguments["use_regularizer"] = True
    if "selected_slots" in arguments:
        arguments["selected"] = True
    return DenseLayer(
        layer_type=kind,
        bottom_names=_as_tuple(layer["bottom"]),
        top_names=_as_tuple(layer["top"]),
        **arguments,
    )


def _arguments(values: Mapping[str, Any], where: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a dense layer that the keys of a clause are."""
    arguments: dict[str, Any] = {}
    for key, argument in keys.items():
        if key not in values:
            continue
        value = values[key]
        if argument in _ENUMS:
            value = member(_ENUMS[argument], value, f"{where}.{key}")
        elif argument == "activations":
            value = [member(Activation_t, name, f"{where}.{key}") for name in value]
        arguments[argument] = value
    return arguments


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: not a list, got {value!r:.80}. Write it in brackets.")
    return value
