# SPDX-License-Identifier: Apache-2.0
"""Other shapes: parts of tensors, tensors side by side, the same elements in another shape.

concat.py   tensors side by side
reshape.py  other shapes of the same elements
slice.py    parts of a tensor
"""

from hotbed.models.layers.shape.concat import Concat, FusedReshapeConcat, FusedReshapeConcatGeneral
from hotbed.models.layers.shape.reshape import Reshape
from hotbed.models.layers.shape.slice import Gather, Slice

__all__ = [
    "Concat",
    "FusedReshapeConcat",
    "FusedReshapeConcatGeneral",
    "Gather",
    "Reshape",
    "Slice",
]
