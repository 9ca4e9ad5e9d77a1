# SPDX-License-Identifier: Apache-2.0
"""Adagrad for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.optimizers.adagrad import adagrad
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer

__all__ = ["create_hash_optimizer_by_address"]


def create_hash_optimizer_by_address(
    learning_rate: Any = 0.001,
    initial_accumulator_value: float = 0.9,
    name: str = "Adagrad",
) -> HashOptimizer:
    """Return Adagrad, whose sum of squares starts at `initial_accumulator_value`, in (0, 1]."""
    rule = adagrad(name, learning_rate, initial_accumulator_value)
    return HashOptimizer(name, rule, by_address=True)
