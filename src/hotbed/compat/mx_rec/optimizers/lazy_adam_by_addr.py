# SPDX-License-Identifier: Apache-2.0
"""Lazy Adam for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.optimizers.lazy_adam import lazy_adam
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer

__all__ = ["create_hash_optimizer_by_address"]


def create_hash_optimizer_by_address(
    learning_rate: Any = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str = "LazyAdamByAddress",
) -> HashOptimizer:
    """Return Adam that updates touched rows only; its bias correction counts all updates."""
    rule = lazy_adam(name, learning_rate, beta1, beta2, epsilon)
    return HashOptimizer(name, rule, by_address=True)
