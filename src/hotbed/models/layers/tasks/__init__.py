# SPDX-License-Identifier: Apache-2.0
"""Layers of models with several labels.

joint.py     the probability that two events both happen
mixture.py   experts, mixed by a gate
transfer.py  what an earlier event tells about a later one
"""

from hotbed.models.layers.tasks.joint import JointLogit
from hotbed.models.layers.tasks.mixture import ExpertMixture
from hotbed.models.layers.tasks.transfer import InformationTransfer

__all__ = ["ExpertMixture", "InformationTransfer", "JointLogit"]
