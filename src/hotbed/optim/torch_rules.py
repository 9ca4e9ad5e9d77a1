# SPDX-License-Identifier: Apache-2.0
"""Torch optimizers as rules of tables, and their state as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.embedding.rule import Rule


def rule_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, sparse: bool = False
) -> Rule:
    """Return the rule that moves rows as `optimizer` moves a weight of this parameter group.

    Args:
        optimizer: torch's.
        group: one of its parameter groups.
        sparse: whether the gradient of the weight is sparse, so that idle rows do not move.

    Raises:
        ConfigError: no rule equals this optimizer, or one of its settings.
    """
    raise NotImplementedError


def row_state(
    state: Mapping[str, Any], rule: Rule, weight: Tensor
) -> tuple[NDArray[np.float32], int]:
    """Return the optimizer state of `weight` as rows, [num rows, state width], and its step."""
    raise NotImplementedError
