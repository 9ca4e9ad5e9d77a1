# SPDX-License-Identifier: Apache-2.0
"""The clauses of a HugeCTR model: frozen values with HugeCTR's arguments and defaults.

Every face of the door ends in these values: the calls of all releases, and both dialects of JSON.
Fields that a later or an earlier release names differently are documented at their class.

data.py        readers, labels, dense values, sparse slots
dense.py       dense layers, losses, the graph
embeddings.py  tables and lookups, alone and in collections
training.py    solver, optimizer, learning rate, passes
"""

from hotbed.compat.hugectr.clauses.data import (
    AsyncParam,
    DataReaderParams,
    DataReaderSparseParam,
    DataSourceParams,
    Input,
)
from hotbed.compat.hugectr.clauses.dense import (
    Clause,
    DenseLayer,
    DenseLayerComputeConfig,
    DenseLayerSwitchs,
    Graph,
    GroupDenseLayer,
)
from hotbed.compat.hugectr.clauses.embeddings import (
    EmbeddingCollectionConfig,
    EmbeddingLookup,
    EmbeddingPlanner,
    EmbeddingTableConfig,
    HybridEmbeddingParam,
    InitParams,
    SparseEmbedding,
)
from hotbed.compat.hugectr.clauses.training import (
    EmbeddingTrainingCacheParams,
    FitParams,
    HMemCacheConfig,
    LearningRate,
    OptParams,
    ParamFiles,
    Solver,
)

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
