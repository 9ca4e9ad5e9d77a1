# SPDX-License-Identifier: Apache-2.0
"""The enumerations of HugeCTR, with the members of all its releases.

The value of a member is its spelling in JSON files where it has one there.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "Activation_t",
    "Alignment_t",
    "AllReduceAlgo",
    "CPUMemoryHashMapAlgorithm_t",
    "Check_t",
    "CommunicationStrategy",
    "CommunicationType",
    "CompressionStrategy",
    "DataReaderSparse_t",
    "DataReaderType_t",
    "DataSourceType_t",
    "DatabaseHashMapAlgorithm_t",
    "DatabaseOverflowPolicy_t",
    "DatabaseType_t",
    "Database_t",
    "DeviceLayout",
    "Distribution_t",
    "EmbeddingCacheType_t",
    "Embedding_t",
    "Error_t",
    "FcPosition_t",
    "FileSystemType_t",
    "GroupLayer_t",
    "HybridEmbeddingType",
    "Initializer_t",
    "Layer_t",
    "LrPolicy_t",
    "MetricsRawType",
    "MetricsType",
    "Optimizer_t",
    "PowerLaw_t",
    "Regularizer_t",
    "SourceType_t",
    "Tensor_t",
    "TrainPSType_t",
    "UpdateSourceType_t",
    "Update_t",
]


class Alignment_t(Enum):
    """Alignment of the reads of an asynchronous reader."""

    Auto = "Auto"
    Non = "Non"


class Check_t(Enum):
    """Whether a Norm file has a checksum behind each sample."""

    Sum = "Sum"
    Non = "None"


class DataReaderSparse_t(Enum):
    """Placement of a sparse input, v2.3 to v3.0.1."""

    Distributed = "DistributedSlot"
    Localized = "LocalizedSlot"


class DataReaderType_t(Enum):
    """Format of the data."""

    Norm = "Norm"
    Raw = "Raw"
    Parquet = "Parquet"
    RawAsync = "RawAsync"


class FileSystemType_t(Enum):
    """Where files lie."""

    Local = "Local"
    HDFS = "HDFS"
    S3 = "S3"
    GCS = "GCS"
    Other = "Other"


DataSourceType_t = FileSystemType_t  # its name in v3.9 and v4.0


class SourceType_t(Enum):
    """Kind of a source of data."""

    FileList = "FileList"
    Mmap = "Mmap"
    Parquet = "Parquet"


class TrainPSType_t(Enum):
    """Where an embedding training cache keeps its rows."""

    Staged = "Staged"
    Cached = "Cached"


class Embedding_t(Enum):
    """Placement of an embedding table."""

    DistributedSlotSparseEmbeddingHash = "DistributedSlotSparseEmbeddingHash"
    LocalizedSlotSparseEmbeddingHash = "LocalizedSlotSparseEmbeddingHash"
    LocalizedSlotSparseEmbeddingOneHot = "LocalizedSlotSparseEmbeddingOneHot"
    HybridSparseEmbedding = "HybridSparseEmbedding"


class Initializer_t(Enum):
    """Distribution of initial weights."""

    Default = "Default"
    Uniform = "Uniform"
    XavierNorm = "XavierNorm"
    XavierUniform = "XavierUniform"
    Zero = "Zero"
    Sinusoidal = "Sinusoidal"


class GroupLayer_t(Enum):
    """Kind of a group of dense layers."""

    GroupFusedInnerProduct = "GroupFusedInnerProduct"


class Layer_t(Enum):
    """Kind of a dense layer or of a loss, of all releases."""

    BatchNorm = "BatchNorm"
    LayerNorm = "LayerNorm"
    BinaryCrossEntropyLoss = "BinaryCrossEntropyLoss"
    Reshape = "Reshape"
    Select = "Select"
    Concat = "Concat"
    CrossEntropyLoss = "CrossEntropyLoss"
    Dropout = "Dropout"
    ElementwiseMultiply = "ElementwiseMultiply"
    ELU = "ELU"
    InnerProduct = "InnerProduct"
    FusedInnerProduct = "FusedInnerProduct"
    MLP = "MLP"
    Interaction = "Interaction"
    MultiCrossEntropyLoss = "MultiCrossEntropyLoss"
    ReLU = "ReLU"
    ReLUHalf = "ReLUHalf"
    Sigmoid = "Sigmoid"
    Slice = "Slice"
    WeightMultiply = "WeightMultiply"
    FmOrder2 = "FmOrder2"
    Add = "Add"
    ReduceSum = "ReduceSum"
    Softmax = "Softmax"
    Gather = "Gather"
    PReLU_Dice = "PReLU_Dice"
    GRU = "GRU"
    MatrixMultiply = "MatrixMultiply"
    MultiHeadAttention = "MultiHeadAttention"
    Scale = "Scale"
    FusedReshapeConcat = "FusedReshapeConcat"
    FusedReshapeConcatGeneral = "FusedReshapeConcatGeneral"
    Sub = "Sub"
    ReduceMean = "ReduceMean"
    MultiCross = "MultiCross"
    Cast = "Cast"
    SequenceMask = "SequenceMask"
    DotProduct = "DotProduct"
    Multiply = WeightMultiply  # its name up to v2.3


class LrPolicy_t(Enum):
    """Policy of the learning rate."""

    fixed = "fixed"


class Optimizer_t(Enum):
    """Kind of an optimizer."""

    Ftrl = "Ftrl"
    Adam = "Adam"
    RMSProp = "RMSProp"
    AdaGrad = "AdaGrad"
    MomentumSGD = "MomentumSGD"
    Nesterov = "Nesterov"
    SGD = "SGD"


class Update_t(Enum):
    """Which rows of a table an optimizer updates at a step."""

    Local = "Local"
    Global = "Global"
    LazyGlobal = "LazyGlobal"


class Activation_t(Enum):
    """Activation behind a linear layer."""

    Relu = "Relu"
    Non = "None"


class FcPosition_t(Enum):
    """Position of a fused layer in a chain."""

    Non = "None"
    Head = "Head"
    Body = "Body"
    Tail = "Tail"
    Isolated = "Isolated"


class Regularizer_t(Enum):
    """Kind of a regularizer."""

    L1 = "L1"
    L2 = "L2"


class MetricsRawType(Enum):
    """Input of a metric."""

    Loss = "Loss"
    Pred = "Pred"
    Label = "Label"


class MetricsType(Enum):
    """Kind of a metric."""

    AUC = "AUC"
    AverageLoss = "AverageLoss"
    HitRate = "HitRate"
    NDCG = "NDCG"
    SMAPE = "SMAPE"


class DeviceLayout(Enum):
    """Order of processes and devices."""

    LocalFirst = "LocalFirst"
    NodeFirst = "NodeFirst"


class AllReduceAlgo(Enum):
    """How gradients are summed over devices."""

    OneShot = "OneShot"
    NCCL = "NCCL"


class HybridEmbeddingType(Enum):
    """Kind of a hybrid embedding."""

    Distributed = "Distributed"


class CommunicationType(Enum):
    """How the devices of a hybrid embedding are connected."""

    IB_NVLink_Hier = "IB_NVLink_Hier"
    IB_NVLink = "IB_NVLink"
    NVLink_SingleNode = "NVLink_SingleNode"


class CommunicationStrategy(Enum):
    """How an embedding collection communicates."""

    Uniform = "Uniform"
    Hierarchical = "Hierarchical"


class CompressionStrategy(Enum):
    """How an embedding collection compresses what it sends."""

    Reduction = "Reduction"
    Unique = "Unique"


class Distribution_t(Enum):
    """Distribution of generated keys."""

    Uniform = "Uniform"
    PowerLaw = "PowerLaw"


class PowerLaw_t(Enum):
    """Tail of a power law of generated keys."""

    Long = "Long"
    Medium = "Medium"
    Short = "Short"
    Specific = "Specific"


class Tensor_t(Enum):
    """Which values of a tensor are asked for."""

    Train = "Train"
    Evaluate = "Evaluate"


class DatabaseType_t(Enum):
    """Where a hierarchical parameter server keeps its rows."""

    disabled = "disabled"
    hash_map = "hash_map"
    parallel_hash_map = "parallel_hash_map"
    multi_process_hash_map = "multi_process_hash_map"
    redis_cluster = "redis_cluster"
    rocks_db = "rocks_db"
    Disabled = disabled
    HashMap = hash_map
    ParallelHashMap = parallel_hash_map
    MultiProcessHashMap = multi_process_hash_map
    RedisCluster = redis_cluster
    RocksDB = rocks_db


class Database_t(Enum):
    """Where a parameter server of v3.2 keeps its rows."""

    Redis = "redis"
    RocksDB = "rocksdb"
    Local = "local"
    Hierarchy = "hierarchy"


class DatabaseHashMapAlgorithm_t(Enum):
    """The hash table of a database, of v3.3.1 to v3.6."""

    stl = "stl"
    phm = "phm"
    STL = stl
    PHM = phm


CPUMemoryHashMapAlgorithm_t = DatabaseHashMapAlgorithm_t  # its name in v3.3


class DatabaseOverflowPolicy_t(Enum):
    """Which rows leave a full database."""

    evict_random = "evict_random"
    evict_least_used = "evict_least_used"
    evict_oldest = "evict_oldest"
    EvictRandom = evict_random
    EvictLeastUsed = evict_least_used
    EvictOldest = evict_oldest


class UpdateSourceType_t(Enum):
    """Where a server takes updates from."""

    null = "null"
    kafka_message_queue = "kafka_message_queue"
    Null = null
    KafkaMessageQueue = kafka_message_queue


class EmbeddingCacheType_t(Enum):
    """Kind of an embedding cache."""

    Dynamic = "Dynamic"
    UVM = "UVM"
    Static = "Static"
    Stochastic = "Stochastic"


class Error_t(Enum):
    """Codes of errors."""

    Success = "Success"
    FileCannotOpen = "FileCannotOpen"
    BrokenFile = "BrokenFile"
    OutOfMemory = "OutOfMemory"
    OutOfBound = "OutOfBound"
    WrongInput = "WrongInput"
    IllegalCall = "IllegalCall"
    NotInitialized = "NotInitialized"
    UnSupportedFormat = "UnSupportedFormat"
    InvalidEnv = "InvalidEnv"
    MpiError = "MpiError"
    CublasError = "CublasError"
    CudnnError = "CudnnError"
    CudaDriverError = "CudaDriverError"
    CudaRuntimeError = "CudaRuntimeError"
    CudaError = "CudaError"
    NcclError = "NcclError"
    DataCheckError = "DataCheckError"
    UnspecificError = "UnspecificError"
    EndOfFile = "EndOfFile"
