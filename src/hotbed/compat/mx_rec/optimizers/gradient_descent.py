# SPDX-License-Identifier: Apache-2.0
"""Gradient descent without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.optimizers.rules import sgd

__all__ = ["create_hash_optimizer"]


def create_hash_optimizer(
    learning_rate: Any,
    use_locking: bool = False,
    name: str = "GradientDescent",
    use_fusion_optim: bool = False,
    weight_decay: float | None = None,
) -> HashOptimizer:
    """Return gradient descent.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        use_locking: not needed: one update at a time.
        name: for messages.
        use_fusion_optim: not needed: each update is one native call.
        weight_decay: times the row is added to its gradient, 1e-5 to 1e-2; None = 0.
    """
    if weight_decay is not None:
        checks.finite_number(f"{name}: weight_decay", weight_decay, least=1e-5, most=1e-2)
    rule = sgd(name, learning_rate, weight_decay or 0.0)
    log_no_effect("optimizer", use_locking=use_locking, use_fusion_optim=use_fusion_optim)
    return HashOptimizer(name, rule, by_address=False)
