# SPDX-License-Identifier: Apache-2.0
"""Gradient descent for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.optimizers.rules import sgd

__all__ = ["create_hash_optimizer_by_addr", "create_hash_optimizer_by_address"]


def create_hash_optimizer_by_addr(
    learning_rate: Any,
    weight_decay: float = 1e-4,
    use_locking: bool = False,
    name: str = "GradientDescentByAddr",
) -> HashOptimizer:
    """Return gradient descent.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        weight_decay: times the row is added to its gradient, 0 to 1.
        use_locking: not needed: one update at a time.
        name: for messages.
    """
    checks.finite_number(f"{name}: weight_decay", weight_decay, least=0, most=1)
    log_no_effect("optimizer", use_locking=use_locking)
    return HashOptimizer(name, sgd(name, learning_rate, weight_decay), by_address=True)


create_hash_optimizer_by_address = create_hash_optimizer_by_addr
"""The same; the chapter calls all factories so."""
