# SPDX-License-Identifier: Apache-2.0
"""Linear layers and what stands between them: perceptrons, normalization, dropout."""

from hotbed.models.layers.dense.batch_norm import BatchNorm
from hotbed.models.layers.dense.dropout import Dropout, ReLUDropout
from hotbed.models.layers.dense.linear import LogitHead, xavier_
from hotbed.models.layers.dense.mlp import MLP, Activation

__all__ = [
    "MLP",
    "Activation",
    "BatchNorm",
    "Dropout",
    "LogitHead",
    "ReLUDropout",
    "xavier_",
]
