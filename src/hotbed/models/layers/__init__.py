# SPDX-License-Identifier: Apache-2.0
"""Building blocks of ranking models: `nn.Module`s that, except `inputs`, do not use tables.

They lie by kind: products of features in `interaction`, linear layers in `dense`.
"""

from hotbed.models.layers.dense import (
    MLP,
    BatchNorm,
    Dropout,
    LogitHead,
    ReLUDropout,
    xavier_,
)
from hotbed.models.layers.inputs import FeatureInputs, LinearTerm
from hotbed.models.layers.interaction import (
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    DotInteraction,
    FMInteraction,
)
from hotbed.models.layers.sequence import PadSequence

__all__ = [
    "MLP",
    "BatchNorm",
    "CrossNet",
    "CrossNetMix",
    "CrossNetV2",
    "DotInteraction",
    "Dropout",
    "FMInteraction",
    "FeatureInputs",
    "LinearTerm",
    "LogitHead",
    "PadSequence",
    "ReLUDropout",
    "xavier_",
]
