# SPDX-License-Identifier: Apache-2.0
"""Tensor: a torch tensor with MindSpore's `asnumpy`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Tensor(torch.Tensor):
    """A torch tensor with the method `asnumpy`."""

    def asnumpy(self) -> NDArray[Any]:
        """Return the values as a NumPy array on the host."""
        values: NDArray[Any] = self.detach().cpu().numpy()
        return values


def with_asnumpy(value: Any) -> Any:
    """Return a value whose tensors and NumPy arrays are `Tensor`, without gradients.

    A torch tensor becomes a `Tensor` without gradients, a NumPy array a `Tensor` over its memory,
    or over a copy if it cannot be written.
    Both also do so in tuples, named tuples, lists and dicts, which keep their kind; a dict comes
    back as a plain one. Every other value is returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(Tensor)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy()).as_subclass(
            Tensor
        )
    if isinstance(value, list):
        return [with_asnumpy(part) for part in value]
    if isinstance(value, tuple):
        parts = (with_asnumpy(part) for part in value)
        return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
    if isinstance(value, dict):
        return {name: with_asnumpy(part) for name, part in value.items()}
    return value
