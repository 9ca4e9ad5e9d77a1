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

__all__ = [
    "HPS",
    "InferenceParams",
    "ParameterServerConfig",
    "PersistentDatabaseParams",
    "UpdateSourceParams",
    "VolatileDatabaseParams",
]
