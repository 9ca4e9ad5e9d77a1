# SPDX-License-Identifier: Apache-2.0
"""Layers that only described networks use: plain operations on tensors.

arithmetic/  element by element, matrices, sums over a dimension
shape/       other shapes of the same values
"""
