# SPDX-License-Identifier: Apache-2.0
"""hb.auto: an ordinary torch model becomes one whose embeddings are tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .report import Report

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def auto(
    model: nn.Module,
    optimizer: Optimizers,
    tables: Mapping[str, Mapping[str, Any] | None] | None = None,
    times: str | None = None,
    *,
    unbounded: Sequence[str] = (),
    batch: Any = None,
) -> tuple[nn.Module, Any, Report]:
    """Turn the embeddings of `model` into tables, in place.

    Returns:
        The model, its optimizer (a list of them if a list was given), and the report.
    """
    raise NotImplementedError
