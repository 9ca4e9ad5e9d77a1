# SPDX-License-Identifier: Apache-2.0
"""CombinedOptimizer: one torch optimizer over dense parameters and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hotbed.embedding.modules import TableRows
from hotbed.embedding.modules.parameter import StepsTables


class CombinedOptimizer(torch.optim.Optimizer, StepsTables):
    """A torch optimizer whose embedding weights became rows of tables.

    Args:
        optimizer: the optimizer before the conversion; it becomes `dense`.
        model: after the conversion: its table modules hold `rows`.
        rows: of each weight that moved, the parameter that took its place.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        rows: Mapping[nn.Parameter, TableRows],
    ) -> None:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError
