# SPDX-License-Identifier: Apache-2.0
"""Products of features: cross networks, inner products, factorization machines.

cross.py  cross networks: explicit feature crosses of bounded degree
dot.py    inner products of field vectors
fm.py     factorization machines: products of all pairs of field vectors in linear time
"""

from hotbed.models.layers.interaction.cross import CrossNet, CrossNetMix, CrossNetV2
from hotbed.models.layers.interaction.dot import DotInteraction
from hotbed.models.layers.interaction.fm import FMInteraction, FMOrder2

__all__ = ["CrossNet", "CrossNetMix", "CrossNetV2", "DotInteraction", "FMInteraction", "FMOrder2"]
