# SPDX-License-Identifier: Apache-2.0
"""Products of features: cross networks, inner products, factorization machines, attention.

cross.py        cross networks: explicit feature crosses of bounded degree
dot.py          inner products of field vectors
fm.py           factorization machines: products of all pairs of field vectors in linear time
fusion.py       two streams of one sample: gates of their features, and products that join them
interacting.py  self-attention over the fields of a sample
mask.py         masks that depend on the sample
mixing.py       tokens of a sample: exchange between them, and a perceptron of each
quadratic.py    quadratic networks: each layer multiplies its input by a map of itself
"""

from hotbed.models.layers.interaction.cross import CrossNet, CrossNetMix, CrossNetV2
from hotbed.models.layers.interaction.dot import DotInteraction
from hotbed.models.layers.interaction.fm import FMInteraction, FMOrder2
from hotbed.models.layers.interaction.fusion import BilinearProduct, FeatureGate
from hotbed.models.layers.interaction.interacting import InteractingLayer
from hotbed.models.layers.interaction.mask import FieldNorm, MaskBlock
from hotbed.models.layers.interaction.mixing import TokenFeedForward, TokenMixing
from hotbed.models.layers.interaction.quadratic import QuadraticNet

__all__ = [
    "BilinearProduct",
    "CrossNet",
    "CrossNetMix",
    "CrossNetV2",
    "DotInteraction",
    "FMInteraction",
    "FMOrder2",
    "FeatureGate",
    "FieldNorm",
    "InteractingLayer",
    "MaskBlock",
    "QuadraticNet",
    "TokenFeedForward",
    "TokenMixing",
]
