# SPDX-License-Identifier: Apache-2.0
"""Activations that torch does not have; `nn.PReLU`, `nn.ELU` and `nn.Sigmoid` are torch's own.

dice.py     Dice: PReLU whose bend follows the data
softmax.py  Softmax over the entries that a mask keeps
"""

from hotbed.models.layers.activation.dice import Dice
from hotbed.models.layers.activation.softmax import Softmax, masked_softmax

__all__ = ["Dice", "Softmax", "masked_softmax"]
