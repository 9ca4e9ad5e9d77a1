# SPDX-License-Identifier: Apache-2.0
"""Adagrad without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer, check_rate
from hotbed.embedding.rule import Adagrad

__all__ = ["create_hash_optimizer"]


def create_hash_optimizer(
    learning_rate: Any = 0.001,
    initial_accumulator_value: float = 0.9,
    use_locking: bool = False,
    name: str = "Adagrad",
) -> HashOptimizer:
    """Return Adagrad, whose sum of squares starts at `initial_accumulator_value`, in (0, 1]."""
    rule = adagrad(name, learning_rate, initial_accumulator_value)
    return HashOptimizer(name, rule, by_address=False)


def adagrad(name: str, learning_rate: Any, initial_accumulator_value: float) -> Adagrad:
    """Return the rule; raise ConfigError for a value out of its range."""
    rate = check_rate(name, learning_rate)
    where = f"{name}: initial_accumulator_value"
    checks.finite_number(where, initial_accumulator_value, above=0, most=1)
    return Adagrad(rate, initial_accumulator=initial_accumulator_value)
