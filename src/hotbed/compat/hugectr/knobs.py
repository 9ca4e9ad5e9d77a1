# SPDX-License-Identifier: Apache-2.0
"""Arguments and keys of HugeCTR that have no effect here, and the log lines that say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hotbed.compat.no_effect import NoEffect


class Knob(NamedTuple):
    """An argument or a key without effect.

    Attributes:
        tag: the first release that takes it.
        reason: ends the sentence `has no effect, because ...`.
    """

    tag: str
    reason: str


_CUDA = "no CUDA kernels are compiled or captured"
_PLACED = "rows lie on processes by their ids"
_PIPELINE = "the training loop orders its own work"
_HINT = "a table grows with its rows"
_WORKSPACE = f"{_HINT}; where it is Cached, so many stay in memory"
_READER = "the data reader chooses its own threads and requests"
_ASYNC = f"{_READER}; its shuffle and its formats are used"
_SUMS = "gradients are summed in a fixed order"
_MOUNTED = "files are read and written at paths of this machine, where they are mounted"
_DECIDED = "the graph and the sparse files say it"
_ROW_BY_ROW = "rows come and go one by one, so that no pass is dropped"
_DATABASE = "rows lie in files that processes map and share"


def _inference(tags: Mapping[str, str], reason: str) -> dict[str, Knob]:
    """Return arguments of `InferenceParams` and of a server's configuration, with their tags."""
    return {f"inference_params.{key}": Knob(tag, reason) for key, tag in tags.items()}


NO_EFFECT: Mapping[str, Knob] = {
    "solver.use_algorithm_search": Knob("v2.3", _CUDA),
    "solver.use_cuda_graph": Knob("v2.3", _CUDA),
    "solver.enable_tf32_compute": Knob("v2.3", "matrix products use the precision of the device"),
    "solver.is_dlrm": Knob("v3.1", _CUDA),
    "solver.use_holistic_cuda_graph": Knob("v3.1", _CUDA),
    "solver.use_overlapped_pipeline": Knob("v3.1", _PIPELINE),
    "solver.device_layout": Knob("v3.1", _PLACED),
    "solver.all_reduce_algo": Knob("v3.1", _SUMS),
    "solver.grouped_all_reduce": Knob("v3.1", _SUMS),
    "solver.num_iterations_statistics": Knob("v3.1", _PLACED),
    "solver.async_mlp_wgrad": Knob("v3.2", _PIPELINE),
    "solver.scaler": Knob("v2.3", "the scale of losses adapts by itself"),
    "solver.gen_loss_summary": Knob("v3.3", "the loss is always known"),
    "solver.overlap_lr": Knob("v3.3", _PIPELINE),
    "solver.overlap_init_wgrad": Knob("v3.3", _PIPELINE),
    "solver.overlap_ar_a2a": Knob("v3.3", _PIPELINE),
    "solver.eval_overlap": Knob("v3.9", _PIPELINE),
    "solver.train_intra_iteration_overlap": Knob("v4.0", _PIPELINE),
    "solver.train_inter_iteration_overlap": Knob("v4.0", _PIPELINE),
    "solver.eval_intra_iteration_overlap": Knob("v4.0", _PIPELINE),
    "solver.eval_inter_iteration_overlap": Knob("v4.0", _PIPELINE),
    "solver.use_embedding_collection": Knob("v3.7", "tables of all kinds are looked up together"),
    "solver.use_model_oversubscriber": Knob("v2.3", "a model keeps its rows in memory"),
    "solver.data_source_params": Knob("v3.5", _MOUNTED),
    "solver.enable_overlap": Knob("v3.1", _PIPELINE),
    "solver.holistic_cuda_graph": Knob("v3.1", _CUDA),
    "config.all_reduce": Knob("v3.1", _SUMS),
    "config.inference": Knob("v3.0", "nothing reads it in training"),
    "solver.kafka_brockers": Knob("v3.7", "a callback, hb.callbacks.Checkpoint, publishes rows"),
    "solver.auc_threshold": Knob("v3.1", "no release reads it; eval_metrics has the threshold"),
    "solver.temp_embedding_dir": Knob("v2.3", "a model keeps its rows in memory"),
    "optimizer.atomic_update": Knob("v2.3", _SUMS),
    "reader.num_workers": Knob("v2.3", _READER),
    "reader.keyset": Knob("v3.1", "a table keeps its rows, so that no pass needs its keys before"),
    "sparse.is_fixed_length": Knob("v3.1", "it saves transfers to a GPU"),
    "hmem_cache.target_hit_rate": Knob("v3.3", _ROW_BY_ROW),
    "hmem_cache.max_num_evict": Knob("v3.3", _ROW_BY_ROW),
    "data_generator.num_threads": Knob("v3.2", "files are generated one after another"),
    "reader.async_param": Knob("v3.1", _ASYNC),
    "reader.data_source_params": Knob("v3.4", _MOUNTED),
    "fit.data_source_params": Knob("v3.4", _MOUNTED),
    "files.data_source_params": Knob("v3.4", _MOUNTED),
    "reader.read_file_sequentially": Knob("v4.0", "files are read in their order"),
    "sparse_embedding.max_vocabulary_size_per_gpu": Knob("v2.3", _WORKSPACE),
    "sparse_embedding.max_vocabulary_size_global": Knob("v2.3", _HINT),
    "sparse_embedding.workspace_size_per_gpu_in_mb": Knob("v3.1", _WORKSPACE),
    "sparse_embedding.load_factor": Knob("v2.0", _HINT),
    "sparse_embedding.hybrid_embedding_param": Knob("v3.1", _PLACED),
    "sparse_embedding.plan_file": Knob("v2.3", _PLACED),
    "sparse_embedding.plan_file1": Knob("v2.3", _PLACED),
    "dense_layer.pos_type": Knob("v3.1", "layers are not fused by their position"),
    "dense_layer.dense_layer_switches": Knob("v3.9", _CUDA),
    "dense_layer.compute_config": Knob("v4.3", _CUDA),
    "embedding_collection.use_exclusive_keys": Knob("v23.04", _HINT),
    "embedding_collection.indices_only": Knob("v4.3.1", _HINT),
    "embedding_collection.comm_strategy": Knob("v4.1", _PLACED),
    "embedding_collection.shard": Knob("v4.1", _PLACED),
    **_inference(
        {
            "use_mixed_precision": "v3.1",
            "scaler": "v3.1",
            "use_algorithm_search": "v3.1",
            "use_cuda_graph": "v3.1",
            "use_context_stream": "v23.02",
            "enable_pagelock": "v23.08",
            "fp8_quant": "v23.12",
        },
        _CUDA,
    ),
    **_inference(
        {"device_id": "v3.1", "use_gpu_embedding_cache": "v3.1", "deployed_devices": "v3.2"},
        "requests are scored on the CPU",
    ),
    **_inference(
        {
            "hit_rate_threshold": "v3.1",
            "number_of_worker_buffers_in_pool": "v3.2",
            "number_of_refresh_buffers_in_pool": "v3.2",
            "thread_pool_size": "v3.6",
            "cache_refresh_percentage_per_iteration": "v3.2",
            "refresh_delay": "v3.7",
            "refresh_interval": "v3.7",
            "maxnum_des_feature_per_sample": "v3.7",
            "use_static_table": "v4.3",
            "embedding_cache_type": "v23.09",
            "fuse_embedding_table": "v23.04",
            "use_hctr_cache_implementation": "v23.06",
            "init_ec": "v23.06",
        },
        "a score never depends on the content of the cache",
    ),
    **_inference(
        {
            "label_dim": "v3.7",
            "slot_num": "v3.7",
            "network_file": "v3.7",
            "embedding_table_names": "v3.7",
            "maxnum_catfeature_query_per_table_per_sample": "v3.7",
        },
        _DECIDED,
    ),
    **_inference(
        {
            "volatile_db": "v3.2",
            "persistent_db": "v3.2",
            "db_type": "v3.2",
            "redis_ip": "v3.2",
            "rocksdb_path": "v3.2",
            "cache_size_percentage_redis": "v3.2",
            "cpu_memory_db": "v3.3",
            "distributed_db": "v3.3",
        },
        _DATABASE,
    ),
    **_inference(
        {"update_source": "v3.3"},
        "no Kafka is read: the rows stay as they are; hotbed serve --watch takes new versions",
    ),
}

WARNED = (
    "solver.use_model_oversubscriber",
    "solver.temp_embedding_dir",
    "solver.kafka_brockers",
    "solver.scaler",
    "solver.data_source_params",
    "reader.data_source_params",
    "fit.data_source_params",
    "files.data_source_params",
    "sparse_embedding.hybrid_embedding_param",
    "sparse_embedding.plan_file",
    "sparse_embedding.plan_file1",
    "embedding_collection.shard",
    "inference_params.use_mixed_precision",
    "inference_params.device_id",
    "inference_params.use_gpu_embedding_cache",
    "inference_params.deployed_devices",
    "inference_params.cache_refresh_percentage_per_iteration",
    "inference_params.refresh_delay",
    "inference_params.refresh_interval",
    "inference_params.volatile_db",
    "inference_params.persistent_db",
    "inference_params.db_type",
    "inference_params.redis_ip",
    "inference_params.rocksdb_path",
    "inference_params.cache_size_percentage_redis",
    "inference_params.cpu_memory_db",
    "inference_params.distributed_db",
    "inference_params.update_source",
)
"""What concerns rows, updates, devices or databases: these lines are warnings."""

KNOBS = NoEffect("hugectr", {name: knob.reason for name, knob in NO_EFFECT.items()}, WARNED)
