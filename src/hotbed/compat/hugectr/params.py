# SPDX-License-Identifier: Apache-2.0
"""The values of HugeCTR's inference calls."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence

from hotbed import checks
from hotbed.compat.hugectr.clause import clause, required
from hotbed.compat.hugectr.enums import (
    DatabaseHashMapAlgorithm_t,
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    UpdateSourceType_t,
)
from hotbed.compat.hugectr.knobs import KNOBS
from hotbed.errors import ConfigError

__all__ = [
    "CPUMemoryDatabaseParams",
    "DistributedDatabaseParams",
    "InferenceParams",
    "ParameterServerConfig",
    "PersistentDatabaseParams",
    "UpdateSourceParams",
    "VolatileDatabaseParams",
]

_FILTERS = ("^hps_.+$",)


def check_share(where: str, value: float) -> None:
    """Raise ConfigError unless a percentage or a rate is a number from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(
            f"{where}: not from 0 to 1, got {value!r:.80}. Give a share, such as 0.5."
        )


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise ConfigError if two models have one name."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"{where}: expected a name of its own for each model, got {name!r} of models "
                f"{names.index(name)} and {place}. Rename one of them."
            )


@clause("volatile_db")
class VolatileDatabaseParams:
    """A volatile database. Rows lie in files that processes map and share: none is used.

    The last four arguments are of v3.3.1 to v4.3.
    """

    type: DatabaseType_t = DatabaseType_t.ParallelHashMap
    address: str = "127.0.0.1:7000"
    user_name: str = "default"
    password: str = ""
    num_partitions: int = 16
    allocation_rate: int = 256 << 20
    shared_memory_size: int = 16 << 30
    shared_memory_name: str = "hctr_mp_hash_map_database"
    shared_memory_auto_remove: bool = True
    num_node_connections: int = 5
    max_batch_size: int = 64 << 10
    enable_tls: bool = False
    tls_ca_certificate: str = "cacertbundle.crt"
    tls_client_certificate: str = "client_cert.pem"
    tls_client_key: str = "client_key.pem"
    tls_server_name_identification: str = "redis.localhost"
    overflow_margin: int = 2 * sys.maxsize + 1
    overflow_policy: DatabaseOverflowPolicy_t = DatabaseOverflowPolicy_t.EvictRandom
    overflow_resolution_target: float = 0.8
    initialize_after_startup: bool = True
    initial_cache_rate: float = 1.0
    cache_missed_embeddings: bool = False
    update_filters: tuple[str, ...] = _FILTERS
    algorithm: DatabaseHashMapAlgorithm_t = DatabaseHashMapAlgorithm_t.PHM
    max_get_batch_size: int = 10_000
    max_set_batch_size: int = 10_000
    refresh_time_after_fetch: bool = False

    def __post_init__(self) -> None:
        for key in ("overflow_resolution_target", "initial_cache_rate"):
            check_share(f"volatile_db.{key}", getattr(self, key))


CPUMemoryDatabaseParams = DistributedDatabaseParams = VolatileDatabaseParams  # names in v3.3


@clause("persistent_db")
class PersistentDatabaseParams:
    """A persistent database. Rows lie in files already: none is used."""

    backend: DatabaseType_t = DatabaseType_t.Disabled
    path: str = f"{tempfile.gettempdir()}/rocksdb"
    num_threads: int = 16
    read_only: bool = False
    max_batch_size: int = 64 << 10
    initialize_after_startup: bool = True
    update_filters: tuple[str, ...] = _FILTERS
    max_get_batch_size: int = 10_000
    max_set_batch_size: int = 10_000


@clause("update_source")
class UpdateSourceParams:
    """Where newer rows come from. `hotbed serve --watch` follows a trainer."""

    type: UpdateSourceType_t = UpdateSourceType_t.Null
    brokers: str = "127.0.0.1:9092"
    metadata_refresh_interval_ms: int = 30_000
    receive_buffer_size: int = 256 << 10
    poll_timeout_ms: int = 500
    max_batch_size: int = 8 << 10
    failure_backoff_ms: int = 50
    max_commit_interval: int = 32
    max_receive_buffer_size: int = 2000


@clause("inference_params")
class InferenceParams:
    """What to serve: `hugectr.inference.InferenceParams` of v3.1 to v23.12."""

    model_name: str = required()
    max_batchsize: int = required()
    hit_rate_threshold: float = required()
    dense_model_file: str = required()
    sparse_model_files: tuple[str, ...] = required()
    device_id: int = 0
    use_gpu_embedding_cache: bool = required()
    cache_size_percentage: float = required()
    i64_input_key: bool = required()
    use_mixed_precision: bool = False
    scaler: float = 1.0
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    number_of_worker_buffers_in_pool: int = 2
    number_of_refresh_buffers_in_pool: int = 1
    thread_pool_size: int = 16
    cache_refresh_percentage_per_iteration: float = 0.0
    deployed_devices: tuple[int, ...] = (0,)
    default_value_for_each_table: tuple[float, ...] = (0.0,)
    volatile_db: VolatileDatabaseParams = VolatileDatabaseParams()
    persistent_db: PersistentDatabaseParams = PersistentDatabaseParams()
    update_source: UpdateSourceParams = UpdateSourceParams()
    maxnum_des_feature_per_sample: int = 26
    refresh_delay: float = 0.0
    refresh_interval: float = 0.0
    maxnum_catfeature_query_per_table_per_sample: tuple[int, ...] = (26,)
    embedding_vecsize_per_table: tuple[int, ...] = (128,)
    embedding_table_names: tuple[str, ...] = ("",)
    network_file: str = ""
    label_dim: int = 1
    slot_num: int = 10
    non_trainable_params_file: str = ""
    use_static_table: bool = False
    embedding_cache_type: EmbeddingCacheType_t = EmbeddingCacheType_t.Dynamic
    use_context_stream: bool = True
    fuse_embedding_table: bool = False
    use_hctr_cache_implementation: bool = True
    init_ec: bool = True
    enable_pagelock: bool = False
    fp8_quant: bool = False

    def __post_init__(self) -> None:
        if self.max_batchsize < 1:
            raise ConfigError(
                f"inference_params.max_batchsize: below 1, got {self.max_batchsize}. Give a number "
                "of samples."
            )
        for key in ("cache_size_percentage", "cache_refresh_percentage_per_iteration"):
            check_share(f"inference_params.{key}", getattr(self, key))
        checks.finite_number(
            "inference_params.hit_rate_threshold", self.hit_rate_threshold, least=0
        )
        for number, value in enumerate(self.default_value_for_each_table):
            checks.finite_number(f"inference_params.default_value_for_each_table[{number}]", value)


@clause("ps_config")
class ParameterServerConfig:
    """Tables of several models: `hugectr.inference.ParameterServerConfig` of v3.2 to v23.12.

    Attributes:
        emb_table_name: names of the tables of each model.
        embedding_vec_size: of each table of each model.
        max_feature_num_per_sample_per_emb_table: the most keys of a sample.
        inference_params_array: the models.
    """

    emb_table_name: Mapping[str, tuple[str, ...]] = required()
    embedding_vec_size: Mapping[str, tuple[int, ...]] = required()
    max_feature_num_per_sample_per_emb_table: Mapping[str, tuple[int, ...]] = required()
    inference_params_array: tuple[InferenceParams, ...] = required()
    volatile_db: VolatileDatabaseParams = VolatileDatabaseParams()
    persistent_db: PersistentDatabaseParams = PersistentDatabaseParams()
    update_source: UpdateSourceParams = UpdateSourceParams()

    def __post_init__(self) -> None:
        names = [params.model_name for params in self.inference_params_array]
        check_names("ps_config.inference_params_array", names)
        for key in ("volatile_db", "persistent_db", "update_source"):
            differs = getattr(self, key) != type(self).__dataclass_fields__[key].default
            KNOBS.log_no_effect(f"inference_params.{key}", when=differs)
