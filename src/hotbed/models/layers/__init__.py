# SPDX-License-Identifier: Apache-2.0
"""Building blocks of ranking models: `nn.Module`s that, except `inputs`, do not use tables."""

from hotbed.models.layers.cross import CrossNet, CrossNetMix, CrossNetV2
from hotbed.models.layers.dropout import Dropout, ReLUDropout
from hotbed.models.layers.inputs import FeatureInputs, LinearTerm
from hotbed.models.layers.interaction import DotInteraction, FMInteraction
from hotbed.models.layers.linear import LogitHead, xavier_
from hotbed.models.layers.mlp import MLP, BatchNorm

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
    "ReLUDropout",
    "xavier_",
]
