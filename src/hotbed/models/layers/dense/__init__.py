# SPDX-License-Identifier: Apache-2.0
"""Linear layers and what stands between them: perceptrons, normalization, dropout."""

from hotbed.models.layers.dense.batch_norm import BatchNorm
from hotbed.models.layers.dense.dropout import Dropout, ReLUDropout
from hotbed.models.layers.dense.linear import LogitHead, xavier_
from hotbed.models.layers.dense.mlp import MLP, Activation, GroupDense

__all__ = [
    "MLP",
    "Activation",
    "BatchNorm",
    "Dropout",
    "GroupDense",
    "LogitHead",
    "ReLUDropout",
    "xavier_",
]
