# SPDX-License-Identifier: Apache-2.0
"""`hugectr.inference`: serve a model that HugeCTR or this package trained.

session.py  sessions of all releases
served.py   ServedModel: files of HugeCTR as an exported model
hps.py      HPS: vectors of keys from several models
"""

from hotbed.compat.hugectr.inference.hps import HPS
from hotbed.compat.hugectr.inference.session import (
    CreateEmbeddingCache,
    CreateInferenceSession,
    CreateParameterServer,
    InferenceModel,
    InferenceSession,
)
from hotbed.compat.hugectr.params import (
    CPUMemoryDatabaseParams,
    DistributedDatabaseParams,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)

__all__ = [
    "HPS",
    "CPUMemoryDatabaseParams",
    "CreateEmbeddingCache",
    "CreateInferenceSession",
    "CreateParameterServer",
    "DistributedDatabaseParams",
    "InferenceModel",
    "InferenceParams",
    "InferenceSession",
    "ParameterServerConfig",
    "PersistentDatabaseParams",
    "UpdateSourceParams",
    "VolatileDatabaseParams",
]
