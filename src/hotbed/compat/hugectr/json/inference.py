# SPDX-License-Identifier: Apache-2.0
"""The `inference` clause of a model's file, and `ps.json` of a parameter server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hotbed.compat.hugectr.enums import (
    DatabaseHashMapAlgorithm_t,
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    UpdateSourceType_t,
)
from hotbed.compat.hugectr.json.keys import needed, read_clause
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.compat.hugectr.params import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
    check_names,
)
from hotbed.config import did_you_mean, parse_json
from hotbed.errors import ConfigError, PersistError

E = TypeVar("E", bound=Enum)

_KEYS = (
    "max_batchsize",
    "hit_rate_threshold",
    "dense_model_file",
    "sparse_model_file",
    "input_key_type",
    "mixed_precision",
    "algorithm_search",
    "cuda_graph",
)
_LOSSES = ("BinaryCrossEntropyLoss", "CrossEntropyLoss", "MultiCrossEntropyLoss")
_HPS = (
    "supportlonglong",
    "fuse_embedding_table",
    "models",
    "volatile_db",
    "persistent_db",
    "update_source",
)
_OLD_HPS = (
    "db_type",
    "redis_ip",
    "rocksdb_path",
    "cache_size_percentage_redis",
    "cpu_memory_db",
    "distributed_db",
)
"""Databases of v3.2 and v3.3."""
# Keys of `models` -> arguments of InferenceParams.
_MODEL = {
    "model": "model_name",
    "sparse_files": "sparse_model_files",
    "dense_file": "dense_model_file",
    "network_file": "network_file",
    "num_of_worker_buffer_in_pool": "number_of_worker_buffers_in_pool",
    "num_of_refresher_buffer_in_pool": "number_of_refresh_buffers_in_pool",
    "deployed_device_list": "deployed_devices",
    "mixed_precision": "use_mixed_precision",
    "max_batch_size": "max_batchsize",
    "gpucacheper": "cache_size_percentage",
    "gpucache": "use_gpu_embedding_cache",
    "default_value_for_each_table": "default_value_for_each_table",
    "maxnum_des_feature_per_sample": "maxnum_des_feature_per_sample",
    "maxnum_catfeature_query_per_table_per_sample": "maxnum_catfeature_query_per_table_per_sample",
    "embedding_vecsize_per_table": "embedding_vecsize_per_table",
    "embedding_table_names": "embedding_table_names",
    "refresh_delay": "refresh_delay",
    "refresh_interval": "refresh_interval",
    "hit_rate_threshold": "hit_rate_threshold",
    "cache_refresh_percentage_per_iteration": "cache_refresh_percentage_per_iteration",
    "label_dim": "label_dim",
    "slot_num": "slot_num",
    "use_static_table": "use_static_table",
    "embedding_cache_type": "embedding_cache_type",
    "use_context_stream": "use_context_stream",
    "fuse_embedding_table": "fuse_embedding_table",
    "use_hctr_cache_implementation": "use_hctr_cache_implementation",
    "thread_pool_size": "thread_pool_size",
    "init_ec": "init_ec",
    "enable_pagelock": "enable_pagelock",
    "fp8_quant": "fp8_quant",
}
# Other names of databases that HugeCTR reads.
_ALIASES = {
    "disable": "disabled",
    "none": "disabled",
    "hashmap": "hash_map",
    "hash": "hash_map",
    "map": "hash_map",
    "parallel_hashmap": "parallel_hash_map",
    "parallel_hash": "parallel_hash_map",
    "parallel_map": "parallel_hash_map",
    "multi_process_hashmap": "multi_process_hash_map",
    "multi_process_hash": "multi_process_hash_map",
    "multi_process_map": "multi_process_hash_map",
    "redis": "redis_cluster",
    "rocksdb": "rocks_db",
    "rocks": "rocks_db",
    "kafka_mq": "kafka_message_queue",
    "kafka": "kafka_message_queue",
    "random": "evict_random",
    "least_used": "evict_least_used",
    "oldest": "evict_oldest",
}
_ENUMS: Mapping[str, type[Enum]] = {
    "volatile_db.type": DatabaseType_t,
    "volatile_db.overflow_policy": DatabaseOverflowPolicy_t,
    "volatile_db.algorithm": DatabaseHashMapAlgorithm_t,
    "persistent_db.type": DatabaseType_t,
    "persistent_db.backend": DatabaseType_t,
    "update_source.type": UpdateSourceType_t,
}


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        PersistError: the file cannot be read.
        ConfigError: it does not hold one JSON object.
    """
    try:
        config = parse_json(Path(path).read_text())
    except OSError as error:
        raise PersistError(f"{path}: cannot be read, got {error}. Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON, got {error}. Correct the file.") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}: not an object, got {type(config).__name__}. Write its keys in braces."
        )
    return config


def read_inference(config: Mapping[str, Any], where: str | Path) -> InferenceParams:
    """Return the `inference` clause of a model's file of v3.0 and v3.0.1.

    Args:
        config: the whole file.
        where: its name, which is that of the model too.

    Raises:
        ConfigError: a key is wrong, or the file is still one of training: the message shows the
            edit to make.
    """
    for clause in ("solver", "optimizer"):
        if clause in config:
            raise ConfigError(
                f"{where}: {clause}: a clause of training, got it in a file of inference. Delete "
                f'the lines of "{clause}".'
            )
    if "inference" not in config:
        raise ConfigError(
            f"{where}: inference: missing clause, got {', '.join(config) or 'nothing'}. Add "
            '"inference": {"dense_model_file": "_dense_10000.model", "sparse_model_file": '
            '"0_sparse_10000.model"}.'
        )
    _check_last_layer(config.get("layers"), where)
    values = read_clause(config["inference"], "inference", _KEYS)
    needed(values, "inference", ("dense_model_file", "sparse_model_file"))
    sparse = values["sparse_model_file"]
    key_type = values.get("input_key_type", "I32")
    if key_type not in ("I32", "I64"):
        raise ConfigError(f"inference.input_key_type: not I32 or I64, got {key_type!r}. Use one.")
    for key in ("hit_rate_threshold", "mixed_precision", "algorithm_search", "cuda_graph"):
        if key in values:
            KNOBS.log_no_effect(f"inference_params.{_KNOBS[key]}")
    return InferenceParams(
        model_name=Path(where).stem,
        max_batchsize=values.get("max_batchsize", 1024),
        hit_rate_threshold=values.get("hit_rate_threshold", 0.5),
        dense_model_file=values["dense_model_file"],
        sparse_model_files=(sparse,) if isinstance(sparse, str) else tuple(sparse),
        use_gpu_embedding_cache=False,
        cache_size_percentage=1.0,
        i64_input_key=key_type == "I64",
    )


_KNOBS = {
    "hit_rate_threshold": "hit_rate_threshold",
    "mixed_precision": "use_mixed_precision",
    "algorithm_search": "use_algorithm_search",
    "cuda_graph": "use_cuda_graph",
}


def _check_last_layer(layers: Any, where: str | Path) -> None:
    """Raise ConfigError if the last layer is a loss."""
    if not isinstance(layers, Sequence) or not layers or not isinstance(layers[-1], Mapping):
        raise ConfigError(f"{where}: layers: not a list of layers, got {layers!r:.80}. Add them.")
    last = layers[-1]
    if last.get("type") not in _LOSSES:
        return
    bottom = last.get("bottom")
    logit = bottom[0] if isinstance(bottom, list) and bottom else bottom
    activation = "Softmax" if last["type"] == "CrossEntropyLoss" else "Sigmoid"
    edit = {"type": activation, "bottom": logit, "top": activation.lower()}
    raise ConfigError(
        f"{where}: layers[{len(layers) - 1}]: a loss as last layer, got {last['type']}. Write "
        f"{json.dumps(edit)} in its place."
    )


def read_ps_config(path: str | Path) -> ParameterServerConfig:
    """Return the configuration of a parameter server in a JSON file (`ps.json`).

    Raises:
        PersistError: the file cannot be read.
        ConfigError: a key is wrong; the message starts with its place.
    """
    config = read_clause(read_json(path), str(path), [*_HPS, *_OLD_HPS])
    needed(config, str(path), ("models", "supportlonglong"))
    databases: dict[str, Any] = {
        "volatile_db": VolatileDatabaseParams(**_database(config, "volatile_db")),
        "persistent_db": PersistentDatabaseParams(**_database(config, "persistent_db")),
        "update_source": UpdateSourceParams(**_database(config, "update_source")),
    }
    old = {key: config[key] for key in _OLD_HPS if key in config}
    models = []
    for number, spec in enumerate(config["models"]):
        where = f"{path}: models[{number}]"
        params = _model(spec, where, bool(config["supportlonglong"]))
        models.append(InferenceParams(**params, **databases, **old))
    check_names(f"{path}: models", [model.model_name for model in models])
    names = {model.model_name: model for model in models}
    return ParameterServerConfig(
        {name: model.embedding_table_names for name, model in names.items()},
        {name: model.embedding_vecsize_per_table for name, model in names.items()},
        {name: model.maxnum_catfeature_query_per_table_per_sample for name, model in names.items()},
        tuple(models),
        **databases,
    )


def _model(spec: Any, where: str, i64: bool) -> dict[str, Any]:
    """Return the arguments of InferenceParams for an entry of `models`."""
    values = read_clause(spec, where, _MODEL)
    needed(values, where, ("model", "sparse_files", "embedding_vecsize_per_table"))
    params: dict[str, Any] = {
        "max_batchsize": 64,
        "hit_rate_threshold": 0.9,
        "dense_model_file": "",
        "use_gpu_embedding_cache": True,
        "cache_size_percentage": 0.2,
        "i64_input_key": i64,
    }
    for key, value in values.items():
        params[_MODEL[key]] = value
    num_tables = len(params["sparse_model_files"])
    names = [f"sparse_embedding{number}" for number in range(num_tables)]
    params.setdefault("embedding_table_names", names)
    if "embedding_cache_type" in params:
        kind = params["embedding_cache_type"]
        params["embedding_cache_type"] = _named(
            EmbeddingCacheType_t, kind, f"{where}.embedding_cache_type"
        )
    return params


def _database(config: Mapping[str, Any], clause: str) -> dict[str, Any]:
    """Return the arguments of a database in the file."""
    values = dict(config.get(clause, {}))
    for key, value in values.items():
        enum = _ENUMS.get(f"{clause}.{key}")
        if enum is not None:
            values[key] = _named(enum, value, f"{clause}.{key}")
    if clause == "persistent_db" and "type" in values:
        values["backend"] = values.pop("type")
    return values


def _named(enum: type[E], value: Any, where: str) -> E:
    """Return the member of an enum that a file names, in one of its spellings."""
    name = _ALIASES.get(str(value), str(value))
    by_name = {
        member.lower(): name_of_member for member, name_of_member in enum.__members__.items()
    }
    if name.lower() not in by_name:
        advice = did_you_mean(name, enum.__members__)
        raise ConfigError(f"{where}: unknown name, got {value!r:.80}. {advice}")
    return by_name[name.lower()]
