# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of tensors: element by element, matrices, sums over a dimension.

cast.py             other types of numbers
elementwise.py      sums, differences and products of tensors, element by element
matrix_multiply.py  products of matrices
reduce.py           sums and means over one dimension
scale.py            repeated elements and rows
weight_multiply.py  one learned vector for each number
"""

from hotbed.models.layers.arithmetic.cast import Cast
from hotbed.models.layers.arithmetic.elementwise import Add, ElementwiseMultiply, Sub
from hotbed.models.layers.arithmetic.matrix_multiply import MatrixMultiply
from hotbed.models.layers.arithmetic.reduce import ReduceMean, ReduceSum
from hotbed.models.layers.arithmetic.scale import Scale
from hotbed.models.layers.arithmetic.weight_multiply import WeightMultiply

__all__ = [
    "Add",
    "Cast",
    "ElementwiseMultiply",
    "MatrixMultiply",
    "ReduceMean",
    "ReduceSum",
    "Scale",
    "Sub",
    "WeightMultiply",
]
