# SPDX-License-Identifier: Apache-2.0
"""Adagrad for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.optimizers.rules import adagrad

__all__ = ["create_hash_optimizer_by_addr", "create_hash_optimizer_by_address"]


def create_hash_optimizer_by_address(
    learning_rate: Any = 0.001,
    initial_accumulator_value: float = 0.9,
    use_locking: bool = False,
    name: str = "Adagrad",
) -> HashOptimizer:
    """Return Adagrad.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        initial_accumulator_value: where the sum of squares starts, in (0, 1].
        use_locking: not needed: one update at a time.
        name: for messages.
    """
    rule = adagrad(name, learning_rate, initial_accumulator_value)
    log_no_effect("optimizer", use_locking=use_locking)
    return HashOptimizer(name, rule, by_address=True)


create_hash_optimizer_by_addr = create_hash_optimizer_by_address
"""The same, by its older name."""
