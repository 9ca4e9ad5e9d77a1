# SPDX-License-Identifier: Apache-2.0
"""Layers over histories: tensors [n, length, dim] with a mask [n, length]."""

from hotbed.models.layers.sequence.pad import PadSequence

__all__ = ["PadSequence"]
