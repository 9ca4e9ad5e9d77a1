# SPDX-License-Identifier: Apache-2.0
"""The closure of `Optimizer.step`, which torch's optimizers take, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that `closure` computes, with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
