# SPDX-License-Identifier: Apache-2.0
"""Ftrl, which is for tables without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.optimizers.rules import ftrl

__all__ = ["create_hash_optimizer"]


def create_hash_optimizer(
    learning_rate: Any,
    use_locking: bool = False,
    name: str = "Ftrl",
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    accum_name: str | None = None,
    linear_name: str | None = None,
    l2_shrinkage_regularization_strength: float = 0.0,
) -> HashOptimizer:
    """Return Ftrl as TensorFlow writes it.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one. Keep it constant.
        use_locking: not needed: one update at a time.
        name: for messages.
        learning_rate_power: -0.5.
        initial_accumulator_value: where the sum of squares starts, in (0, 1].
        l1_regularization_strength: 0 to 1e4.
        l2_regularization_strength: 0 to 1e4.
        accum_name: not needed: state has no name of its own.
        linear_name: not needed either.
        l2_shrinkage_regularization_strength: 0.
    """
    penalties = (
        l1_regularization_strength,
        l2_regularization_strength,
        l2_shrinkage_regularization_strength,
    )
    rule = ftrl(name, learning_rate, initial_accumulator_value, penalties, learning_rate_power)
    log_no_effect(
        "optimizer",
        use_locking=use_locking,
        accum_name=accum_name is not None,
        linear_name=linear_name is not None,
    )
    return HashOptimizer(name, rule, by_address=False)
