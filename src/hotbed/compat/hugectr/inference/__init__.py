# SPDX-License-Identifier: Apache-2.0
"""`hugectr.inference`: serve a model that HugeCTR or this package trained."""

from hotbed.compat.hugectr.inference.hps import HPS
from hotbed.compat.hugectr.inference.params import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from hotbed.compat.hugectr.inference.session import (
    CreateEmbeddingCache,
    CreateInferenceSession,
    CreateParameterServer,
    InferenceModel,
    InferenceSession,
)

__all__ = [
    "HPS",
    "CreateEmbeddingCache",
    "CreateInferenceSession",
    "CreateParameterServer",
    "InferenceModel",
    "InferenceParams",
    "InferenceSession",
    "ParameterServerConfig",
    "PersistentDatabaseParams",
    "UpdateSourceParams",
    "VolatileDatabaseParams",
]
