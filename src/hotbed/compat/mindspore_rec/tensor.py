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
    """Return tensors as `Tensor` without gradients, also in tuples, lists and dicts.

    Other values are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(Tensor)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).as_subclass(Tensor)
    if isinstance(value, (tuple, list)):
        return tuple(with_asnumpy(part) for part in value)
    if isinstance(value, dict):
        return {name: with_asnumpy(part) for name, part in value.items()}
    return value
