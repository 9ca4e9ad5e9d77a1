# SPDX-License-Identifier: Apache-2.0
"""Linear layers and what stands between them: perceptrons, normalization, dropout.

batch_norm.py  batch normalization
dropout.py     Dropout that takes few random bits and few passes over memory on a CPU
linear.py      linear pieces
mlp.py         multi-layer perceptrons
"""

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
