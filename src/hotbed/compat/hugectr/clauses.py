# SPDX-License-Identifier: Apache-2.0
"""The clauses of a HugeCTR model: frozen values with HugeCTR's arguments and defaults.

Every face of the door ends in these values: the calls of all releases, and both dialects of JSON.
Fields that a later or an earlier release names differently are documented at their class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hotbed.compat.hugectr.clause import by_order, clause, required
from hotbed.compat.hugectr.enums import (
    Activation_t,
    Alignment_t,
    AllReduceAlgo,
    Check_t,
    CommunicationStrategy,
    CommunicationType,
    CompressionStrategy,
    DataReaderSparse_t,
    DataReaderType_t,
    DeviceLayout,
    Embedding_t,
    FcPosition_t,
    FileSystemType_t,
    GroupLayer_t,
    HybridEmbeddingType,
    Initializer_t,
    Layer_t,
    LrPolicy_t,
    MetricsType,
    Optimizer_t,
    Regularizer_t,
    TrainPSType_t,
    Update_t,
)
from hotbed.errors import ConfigError

__all__ = [
    "AsyncParam",
    "Clause",
    "DataReaderParams",
    "DataReaderSparseParam",
    "DataSourceParams",
    "DenseLayer",
    "DenseLayerComputeConfig",
    "DenseLayerSwitchs",
    "EmbeddingCollectionConfig",
    "EmbeddingLookup",
    "EmbeddingPlanner",
    "EmbeddingTableConfig",
    "EmbeddingTrainingCacheParams",
    "FitParams",
    "Graph",
    "GroupDenseLayer",
    "HMemCacheConfig",
    "HybridEmbeddingParam",
    "InitParams",
    "Input",
    "LearningRate",
    "OptParams",
    "ParamFiles",
    "Solver",
    "SparseEmbedding",
]

# --- solver and optimizer -------------------------------------------------------------------------


@clause("learning_rate")
class LearningRate:
    """The learning rate: warm-up, constant, decay. hugectr.md 6.6 of the reference has formulas."""

    lr: float = 0.001
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0


@clause("fit")
class FitParams:
    """The arguments of `Model.fit`; up to v3.0.1 the solver has them.

    `export_predictions_prefix` is a key of JSON files.
    """

    num_epochs: int = 0
    max_iter: int = 2000
    display: int = 200
    eval_interval: int = 1000
    snapshot: int = 10000
    snapshot_prefix: str = ""
    export_predictions_prefix: str = ""


@clause("files")
class ParamFiles:
    """Files of weights that a run starts from; up to v3.0.1 the solver names them."""

    dense_model_file: str = ""
    dense_opt_states_file: str = ""
    sparse_model_files: tuple[str, ...] = ()
    sparse_opt_states_files: tuple[str, ...] = ()


@clause("solver")
class Solver:
    """How to train: `CreateSolver` of v3.1 and later.

    Attributes:
        fit: arguments of `fit` that a solver of v2.3 to v3.0.1 or a JSON file holds, else None.
        files: files of weights that such a solver holds, else None.
    """

    model_name: str = ""
    seed: int = 0
    lr_policy: LrPolicy_t = LrPolicy_t.fixed
    lr: float = 0.001
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end_lr: float = 0.0
    max_eval_batches: int = 100
    batchsize_eval: int = 2048
    batchsize: int = 2048
    vvgpu: tuple[tuple[int, ...], ...] = ((0,),)
    repeat_dataset: bool = True
    use_mixed_precision: bool = False
    enable_tf32_compute: bool = False
    scaler: float = 1.0
    metrics_spec: Mapping[MetricsType, float] | None = None
    i64_input_key: bool = False
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    gen_loss_summary: bool = True
    train_intra_iteration_overlap: bool = False
    train_inter_iteration_overlap: bool = False
    eval_intra_iteration_overlap: bool = False
    eval_inter_iteration_overlap: bool = False
    device_layout: DeviceLayout = DeviceLayout.LocalFirst
    use_embedding_collection: bool = False
    all_reduce_algo: AllReduceAlgo = AllReduceAlgo.NCCL
    grouped_all_reduce: bool = False
    num_iterations_statistics: int = 20
    perf_logging: bool = False
    drop_incomplete_batch: bool = True
    kafka_brockers: str = ""
    training_callbacks: tuple[Any, ...] = ()
    fit: FitParams | None = None
    files: ParamFiles | None = None

    def __post_init__(self) -> None:
        if self.metrics_spec is None:
            object.__setattr__(self, "metrics_spec", {MetricsType.AUC: 1.0})
        if self.use_mixed_precision and self.enable_tf32_compute:
            raise ConfigError(
                "solver.enable_tf32_compute: cannot be combined with use_mixed_precision, got "
                "True. Remove one of the two."
            )
        for key in ("batchsize", "batchsize_eval"):
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"solver.{key}: below 1, got {getattr(self, key)}. Give a number of samples."
                )

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of the run."""
        return LearningRate(
            self.lr,
            self.warmup_steps,
            self.decay_start,
            self.decay_steps,
            self.decay_power,
            self.end_lr,
        )


@clause("optimizer")
class OptParams:
    """An optimizer: `CreateOptimizer`.

    Attributes:
        learning_rate: that a call or a JSON file of v2.3 to v3.0.1 gives here, else None.
    """

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Global
    beta: float = 0.0
    lambda1: float = 0.0
    lambda2: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    initial_accu_value: float = 0.0
    momentum_factor: float = 0.0
    atomic_update: bool = True
    learning_rate: LearningRate | None = None

    def __post_init__(self) -> None:
        is_adam = self.optimizer_type is Optimizer_t.Adam
        if self.update_type is Update_t.LazyGlobal and not is_adam:
            raise ConfigError(
                "optimizer.update_type: LazyGlobal is an update type of Adam only, got "
                f"{self.optimizer_type.name}. Use Local or Global."
            )


# --- data -----------------------------------------------------------------------------------------


@clause("data_source_params")
class DataSourceParams:
    """A file system: `hugectr.data.DataSourceParams`."""

    source: FileSystemType_t = FileSystemType_t.Local
    server: str = "localhost"
    port: int = 9000


@clause("async_param")
class AsyncParam:
    """Settings of the asynchronous reader. `io_block_size` is a name of v3.1."""

    num_threads: int = required()
    num_batches_per_thread: int = required()
    max_num_requests_per_thread: int = 0
    io_depth: int = 0
    io_alignment: int = 0
    shuffle: bool = required()
    aligned_type: Alignment_t = Alignment_t.Non
    multi_hot_reader: bool = True
    is_dense_float: bool = True
    io_block_size: int = 0


@clause("reader")
class DataReaderParams:
    """What to read: `DataReaderParams` of v3.1 and later."""

    data_reader_type: DataReaderType_t = required()
    source: str | tuple[str, ...] = required()
    keyset: str | tuple[str, ...] = ""
    eval_source: str = required()
    check_type: Check_t = Check_t.Non  # required by HugeCTR, though a sample of v23.12 lacks it
    cache_eval_data: int = 0
    num_samples: int = 0
    eval_num_samples: int = 0
    float_label_dense: bool = False
    read_file_sequentially: bool = False
    num_workers: int = 12
    slot_size_array: tuple[int, ...] = ()
    data_source_params: DataSourceParams = DataSourceParams()
    async_param: AsyncParam = AsyncParam(
        16, 4, 512000, 4, 512, False, Alignment_t.Non, False, False
    )


def _sparse_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `(type, max_feature_num, max_nnz, slot_num)` of v2.3 to v3.0.1 too."""
    is_old = bool(args) and isinstance(args[0], DataReaderSparse_t)
    if is_old or "type" in keywords or "max_feature_num" in keywords:
        order = ["type", "max_feature_num", "max_nnz", "slot_num"]
        values = by_order("sparse", order, args, keywords)
        most = values.get("max_feature_num", 1)
        values["nnz_per_slot"] = values.pop("max_nnz", values.pop("nnz_per_slot", most))
        return {"top_name": "", "is_fixed_length": False, **values}
    order = ["top_name", "nnz_per_slot", "is_fixed_length", "slot_num"]
    return by_order("sparse", order, args, keywords)


@clause("sparse", _sparse_form)
class DataReaderSparseParam:
    """Sparse slots that are read together.

    Attributes:
        type: placement, which v2.3 to v3.0.1 and old JSON files give here, else None.
        max_feature_num: ids of a sample in all slots, which they give here too.
    """

    top_name: str = required()
    nnz_per_slot: int | tuple[int, ...] = required()
    is_fixed_length: bool = required()
    slot_num: int = required()
    type: DataReaderSparse_t | None = None
    max_feature_num: int | None = None

    def __post_init__(self) -> None:
        if self.slot_num < 1:
            raise ConfigError(
                f"sparse.slot_num: below 1, got {self.slot_num}. Give the number of slots."
            )
        if isinstance(self.nnz_per_slot, tuple) and len(self.nnz_per_slot) != self.slot_num:
            raise ConfigError(
                f"sparse.nnz_per_slot: expected one number for each of {self.slot_num} slots, "
                f"got {list(self.nnz_per_slot)}. Give a number or a list of that length."
            )

    @property
    def hotness(self) -> tuple[int, ...]:
        """The most ids of a sample in each slot."""
        if isinstance(self.nnz_per_slot, tuple):
            return self.nnz_per_slot
        return (self.nnz_per_slot,) * self.slot_num


_READER_OF_INPUT = (
    "data_reader_type",
    "source",
    "eval_source",
    "check_type",
    "cache_eval_data",
    "num_samples",
    "eval_num_samples",
    "float_label_dense",
    "num_workers",
    "slot_size_array",
)
_OLD_INPUT = [
    *_READER_OF_INPUT[:5],
    "label_dim",
    "label_name",
    "dense_dim",
    "dense_name",
    *_READER_OF_INPUT[5:],
    "data_reader_sparse_param_array",
    "sparse_names",
]


def _input_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take the signatures with one label and with several, and that of v3.0."""
    is_old = bool(args) and isinstance(args[0], DataReaderType_t)
    if is_old or "data_reader_type" in keywords:
        return _old_input(by_order("input", _OLD_INPUT, args, keywords))
    order = ["label_dim", "label_name", "dense_dim", "dense_name", "data_reader_sparse_param_array"]
    if args and isinstance(args[0], (list, tuple)):
        order = ["label_dims", "label_names", *order[2:]]
    if len(args) > 5 or "label_weights" in keywords:
        order.insert(2, "label_weights")
    values = by_order("input", order, args, keywords)
    return _one_label(values)


def _one_label(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for one label as those for a list of labels."""
    for key in ("label_dim", "label_name"):
        if key in values:
            value = values.pop(key)
            several = isinstance(value, (list, tuple))
            values[f"{key}s"] = value if several else (value,)
    return values


def _old_input(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an input that holds its reader and names of its sparse slots."""
    values = _one_label(values)
    reader = {key: values.pop(key) for key in _READER_OF_INPUT if key in values}
    reader = {"float_label_dense": True, **reader}  # the default of v3.0
    params = values.pop("data_reader_sparse_param_array", ())
    names = values.pop("sparse_names", ())
    if len(params) != len(names):
        raise ConfigError(
            f"input.sparse_names: expected one name for each of {len(params)} entries of "
            f"data_reader_sparse_param_array, got {list(names)}. Name each of them."
        )
    sparse = []
    for param, name in zip(params, names, strict=True):
        sparse.append(dataclasses.replace(param, top_name=name))
    values["data_reader_sparse_param_array"] = tuple(sparse)
    return {**values, "reader": DataReaderParams(**reader)}


@clause("input", _input_form)
class Input:
    """The tensors of a batch: labels, dense values and sparse slots.

    Attributes:
        label_dims: number of columns of each label.
        label_weights: of the losses; empty if not given.
        reader: what to read, which v3.0 and JSON files give here, else None.
    """

    label_dims: tuple[int, ...] = required()
    label_names: tuple[str, ...] = required()
    label_weights: tuple[float, ...] = ()
    dense_dim: int = required()
    dense_name: str = required()
    data_reader_sparse_param_array: tuple[DataReaderSparseParam, ...] = required()
    reader: DataReaderParams | None = None

    def __post_init__(self) -> None:
        if len(self.label_dims) != len(self.label_names):
            raise ConfigError(
                f"input.label_dims: expected one number for each of {list(self.label_names)}, "
                f"got {list(self.label_dims)}. Give as many numbers as names."
            )


# --- embeddings -----------------------------------------------------------------------------------


def _hybrid_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `use_train_precompute_indices` and `use_eval_…` of v3.3.1 to v3.9.1, too."""
    order = [
        "max_num_frequent_categories",
        "max_num_infrequent_samples",
        "p_dup_max",
        "max_all_reduce_bandwidth",
        "max_all_to_all_bandwidth",
        "efficiency_bandwidth_ratio",
        "communication_type",
        "hybrid_embedding_type",
    ]
    precomputed = ["use_train_precompute_indices", "use_eval_precompute_indices"]
    if len(args) > len(order):
        order[6:6] = precomputed
    values = by_order("hybrid_embedding_param", order, args, keywords)
    return {key: value for key, value in values.items() if key not in precomputed}


@clause("hybrid_embedding_param", _hybrid_form)
class HybridEmbeddingParam:
    """Settings of a hybrid embedding; all of them are placement."""

    max_num_frequent_categories: int = required()
    max_num_infrequent_samples: int = required()
    p_dup_max: float = required()
    max_all_reduce_bandwidth: float = required()
    max_all_to_all_bandwidth: float = required()
    efficiency_bandwidth_ratio: float = required()
    communication_type: CommunicationType = required()
    hybrid_embedding_type: HybridEmbeddingType = required()


_HYBRID = HybridEmbeddingParam(
    1,
    -1,
    0.01,
    1.3e11,
    2.6e11,
    1.0,
    CommunicationType.NVLink_SingleNode,
    HybridEmbeddingType.Distributed,
)
_COMBINERS = ("sum", "mean")


@clause("sparse_embedding")
class SparseEmbedding:
    """A table and its lookup.

    Attributes:
        combiner: "sum" or "mean"; 0 and 1 mean the same, as up to v3.0.1.
        optimizer: of the table; None takes that of the model.
        max_vocabulary_size_per_gpu: rows, the name up to v3.0.1.
        max_vocabulary_size_global: rows in all, a key of JSON files.
        plan_file: of a JSON file.
    """

    embedding_type: Embedding_t = required()
    workspace_size_per_gpu_in_mb: int = 0
    embedding_vec_size: int = required()
    combiner: str | int = required()
    sparse_embedding_name: str = required()
    bottom_name: str = required()
    slot_size_array: tuple[int, ...] = ()
    optimizer: OptParams | None = None
    hybrid_embedding_param: HybridEmbeddingParam = _HYBRID
    max_vocabulary_size_per_gpu: int = 0
    max_vocabulary_size_global: int = 0
    plan_file: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.combiner in (0, 1):
            object.__setattr__(self, "combiner", _COMBINERS[int(self.combiner)])
        if self.combiner not in _COMBINERS:
            raise ConfigError(
                f"sparse_embedding.combiner: unknown combiner, got {self.combiner!r}. Use 'sum' "
                "or 'mean'."
            )
        if not 1 <= self.embedding_vec_size <= 1024:
            raise ConfigError(
                "sparse_embedding.embedding_vec_size: not between 1 and 1024, got "
                f"{self.embedding_vec_size}. Give the length of a row."
            )


@clause("init_param")
class InitParams:
    """Initial rows of a table of an embedding collection."""

    initializer_type: Initializer_t = Initializer_t.Default
    up_bound: float | None = None


def _table_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `(table_id, max_vocabulary_size, ev_size, min_key, max_key, opt_params_py)` of v4.0."""
    order = ["name", "max_vocabulary_size", "ev_size", "opt_params_or_empty", "init_param_or_empty"]
    is_old = bool(args) and not isinstance(args[0], str)
    if is_old or "table_id" in keywords:
        order = ["table_id", *order[1:3], "min_key", "max_key", "opt_params_py"]
    values = by_order("embedding_table", order, args, keywords)
    if "table_id" in values:
        values["name"] = f"table{values.pop('table_id')}"
    values.pop("min_key", None)
    values.pop("max_key", None)
    if "opt_params_py" in values:
        values["opt_params_or_empty"] = values.pop("opt_params_py")
    return values


@clause("embedding_table", _table_form)
class EmbeddingTableConfig:
    """A table of an embedding collection. `max_vocabulary_size` -1: the table grows."""

    name: str = required()
    max_vocabulary_size: int = required()
    ev_size: int = required()
    opt_params_or_empty: OptParams | None = None
    init_param_or_empty: InitParams | None = None


@clause("embedding_lookup")
class EmbeddingLookup:
    """A lookup of an embedding collection.

    Attributes:
        table: that is looked up.
        bottom_name: of the sparse slots, of which there is one.
        top_name: of the result.
        combiner: "sum", "mean" (also "average") or "concat".
        is_part: whether the call gave lists: its results are one tensor, side by side.
    """

    table: EmbeddingTableConfig = required()
    bottom_name: str = required()
    top_name: str = required()
    combiner: str = required()
    is_part: bool = False

    def __post_init__(self) -> None:
        if self.combiner not in ("sum", "mean", "average", "concat"):
            raise ConfigError(
                f"embedding_lookup.combiner: unknown combiner, got {self.combiner!r}. Use 'sum', "
                "'mean' or 'concat'."
            )


class EmbeddingCollectionConfig:
    """Tables of an embedding collection and their lookups, which calls add.

    Attributes:
        lookups: in the order of the calls.
        shards: matrix, strategy and compression of the last `shard`; they are placement.
    """

    def __init__(
        self,
        use_exclusive_keys: bool = False,
        comm_strategy: CommunicationStrategy = CommunicationStrategy.Uniform,
    ) -> None:
        self.use_exclusive_keys = use_exclusive_keys
        self.comm_strategy = comm_strategy
        self.lookups: list[EmbeddingLookup] = []
        self.shards: tuple[Any, ...] = ()

    def embedding_lookup(
        self,
        table_config: EmbeddingTableConfig | list[EmbeddingTableConfig],
        bottom_name: str | list[str],
        top_name: str,
        combiner: str | list[str],
    ) -> None:
        """Add one lookup, or several whose results lie side by side in one tensor."""
        tables = table_config if isinstance(table_config, (list, tuple)) else [table_config]
        bottoms = [bottom_name] if isinstance(bottom_name, str) else bottom_name
        combiners = [combiner] if isinstance(combiner, str) else combiner
        if not len(tables) == len(bottoms) == len(combiners):
            sizes = f"{len(tables)}, {len(bottoms)} and {len(combiners)}"
            raise ConfigError(
                "embedding_lookup: expected lists of one length for table_config, bottom_name "
                f"and combiner, got {sizes} entries. Give one of each for each lookup."
            )
        is_part = not isinstance(bottom_name, str)
        for table, bottom, pooling in zip(tables, bottoms, combiners, strict=True):
            self.lookups.append(EmbeddingLookup(table, bottom, top_name, pooling, is_part))

    def shard(
        self,
        shard_matrix: Any,
        shard_strategy: Any,
        compression_strategy: Mapping[CompressionStrategy, Any] | None = None,
    ) -> None:
        """Say which devices hold which tables; here one process holds all."""
        self.shards = (shard_matrix, shard_strategy, compression_strategy)


class EmbeddingPlanner(EmbeddingCollectionConfig):
    """The builder of an embedding collection in v3.7 to v4.0."""

    def create_embedding_collection(self, plan_file: str = "") -> EmbeddingCollectionConfig:
        """Return the collection; the plan of devices is not read."""
        return self


# --- dense layers ---------------------------------------------------------------------------------


@clause("compute_config")
class DenseLayerComputeConfig:
    """How an MLP computes its gradients."""

    async_wgrad: bool = False
    fuse_wb: bool = False


@clause("dense_layer_switches")
class DenseLayerSwitchs:
    """How a fused layer computes its gradients, in v3.9 to v4.1; its spelling."""

    fuse_wb: bool = False


_DENSE_LAYER: list[str] = []  # names of fields in their order; filled below the class


def _dense_form(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Take `lambda`, a keyword of Python, and `max_sequence_len` of v4.3 to v23.08."""
    values = by_order("dense_layer", _DENSE_LAYER, args, keywords)
    if "lambda" in values:
        values["lambda_"] = values.pop("lambda")
    if "max_sequence_len" in values:
        length = values.pop("max_sequence_len")
        values = {"max_sequence_len_from": 1, "max_sequence_len_to": length, **values}
    for key in ("bottom_names", "top_names"):
        if isinstance(values.get(key), str):
            values[key] = (values[key],)
    return values


@clause("dense_layer", _dense_form)
class DenseLayer:
    """A dense layer or a loss. The argument `lambda` is the field `lambda_`."""

    layer_type: Layer_t = required()
    bottom_names: tuple[str, ...] = required()
    top_names: tuple[str, ...] = required()
    factor: float = 1.0
    eps: float = 0.00001
    gamma_init_type: Initializer_t = Initializer_t.Default
    beta_init_type: Initializer_t = Initializer_t.Default
    dropout_rate: float = 0.5
    elu_alpha: float = 1.0
    num_output: int = 1
    weight_init_type: Initializer_t = Initializer_t.Default
    bias_init_type: Initializer_t = Initializer_t.Default
    num_layers: int = 0
    leading_dim: int = 0
    time_step: int = 0
    batchsize: int = 1
    SeqLength: int = 1
    vector_size: int = 1
    selected: bool = False
    selected_slots: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    indices: tuple[int, ...] = ()
    weight_dims: tuple[int, ...] = ()
    projection_dim: int = 0
    out_dim: int = 0
    axis: int = 1
    max_sequence_len_from: int = 1
    max_sequence_len_to: int = 1
    num_attention_heads: int = 1
    transpose_b: bool = False
    target_weight_vec: tuple[float, ...] = ()
    use_regularizer: bool = False
    regularizer_type: Regularizer_t = Regularizer_t.L1
    lambda_: float = 0.0
    pos_type: FcPosition_t = FcPosition_t.Non
    act_type: Activation_t = Activation_t.Relu
    num_outputs: tuple[int, ...] = ()
    use_bias: bool = True
    activations: tuple[Activation_t, ...] = ()
    biases: tuple[bool, ...] = ()
    compute_config: DenseLayerComputeConfig = DenseLayerComputeConfig()
    shape: tuple[int, ...] = ()
    dim: int = 0
    index: tuple[int, ...] = ()


_DENSE_LAYER += DenseLayer.__dataclass_fields__


@clause("group_dense_layer")
class GroupDenseLayer:
    """Linear layers in a row, of v3.3.1 to v23.08."""

    group_layer_type: GroupLayer_t = required()
    bottom_name_list: tuple[str, ...] = required()
    top_name_list: tuple[str, ...] = required()
    num_outputs: tuple[int, ...] = required()
    last_act_type: Activation_t = Activation_t.Relu


# --- embedding training cache ---------------------------------------------------------------------


@clause("hmem_cache")
class HMemCacheConfig:
    """Blocks of rows in host memory: `CreateHMemCache`."""

    num_blocks: int = 1
    target_hit_rate: float = 0.5
    max_num_evict: int = 0


@clause("etc")
class EmbeddingTrainingCacheParams:
    """Training over passes of a data set: `CreateETC`; `CreateMOS` up to v3.2."""

    ps_types: tuple[TrainPSType_t, ...] = ()
    sparse_models: tuple[str, ...] = ()
    local_paths: tuple[str, ...] = ()
    hmem_cache_configs: tuple[HMemCacheConfig, ...] = ()


# --- the network ----------------------------------------------------------------------------------

Clause = Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer | GroupDenseLayer
"""What `Model.add` takes."""


@clause("graph")
class Graph:
    """A network: its clauses in their order.

    Attributes:
        input: the tensors of a batch.
        embeddings: tables with their lookups.
        layers: dense layers and losses.
        model_name: as a JSON file gives it.
    """

    input: Input = required()
    embeddings: tuple[SparseEmbedding | EmbeddingCollectionConfig, ...] = ()
    layers: tuple[DenseLayer | GroupDenseLayer, ...] = ()
    model_name: str = ""
