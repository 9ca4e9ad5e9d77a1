# SPDX-License-Identifier: Apache-2.0
"""Gradient descent for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer, check_rate
from hotbed.embedding.rule import Sgd

__all__ = ["create_hash_optimizer_by_addr", "create_hash_optimizer_by_address"]


def create_hash_optimizer_by_addr(
    learning_rate: Any,
    weight_decay: float = 0.0001,
    use_locking: bool = False,
    name: str = "GradientDescentByAddr",
) -> HashOptimizer:
    """Return gradient descent; `weight_decay`, in [0, 1], times the row is added to it."""
    rate = check_rate(name, learning_rate)
    checks.finite_number(f"{name}: weight_decay", weight_decay, least=0, most=1)
    return HashOptimizer(name, Sgd(rate, l2=weight_decay), by_address=True)


create_hash_optimizer_by_address = create_hash_optimizer_by_addr
"""The name by which the chapter calls every factory for dynamic expansion."""
