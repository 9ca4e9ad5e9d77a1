# SPDX-License-Identifier: Apache-2.0
"""Other types of numbers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hotbed import checks

FloatType = Literal["float16", "bfloat16", "float32", "float64"]

_TYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Cast(nn.Module):
    """The same values as numbers of another type.

    Args:
        dtype: float16, bfloat16, float32 or float64.

    Source: `Cast` of HugeCTR, between float32 and float16.

    >>> Cast("float16")(torch.ones(1))
    tensor([1.], dtype=torch.float16)
    """

    def __init__(self, dtype: FloatType = "float32") -> None:
        super().__init__()
        checks.one_of("Cast.dtype", dtype, _TYPES)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return x.to(_TYPES[self.dtype])

    def extra_repr(self) -> str:
        """Return the type, for `repr`."""
        return repr(self.dtype)
