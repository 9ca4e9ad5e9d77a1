# SPDX-License-Identifier: Apache-2.0
"""Gradient descent without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer, check_rate
from hotbed.embedding.rule import Sgd

__all__ = ["create_hash_optimizer"]


def create_hash_optimizer(
    learning_rate: Any,
    use_locking: bool = False,
    name: str = "GradientDescent",
    use_fusion_optim: bool = False,
    weight_decay: float | None = None,
) -> HashOptimizer:
    """Return gradient descent; `weight_decay`, in [1e-5, 1e-2], times the row is added to it."""
    rate = check_rate(name, learning_rate)
    if weight_decay is not None:
        checks.finite_number(f"{name}: weight_decay", weight_decay, least=1e-5, most=1e-2)
    return HashOptimizer(name, Sgd(rate, l2=weight_decay or 0.0), by_address=False)
