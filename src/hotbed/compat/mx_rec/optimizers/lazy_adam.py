# SPDX-License-Identifier: Apache-2.0
"""Lazy Adam without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer, check_rate
from hotbed.embedding.rule import Adam

__all__ = ["create_hash_optimizer"]


def create_hash_optimizer(
    learning_rate: Any = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str = "LazyAdam",
    use_fusion_optim: bool = False,
) -> HashOptimizer:
    """Return Adam that updates touched rows only; its bias correction counts all updates."""
    return HashOptimizer(
        name, lazy_adam(name, learning_rate, beta1, beta2, epsilon), by_address=False
    )


def lazy_adam(
    name: str,
    learning_rate: Any,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> Adam:
    """Return the rule; raise ConfigError for a value out of its range."""
    rate = check_rate(name, learning_rate)
    checks.finite_number(f"{name}: beta1", beta1, above=0, below=1)
    checks.finite_number(f"{name}: beta2", beta2, least=0, below=1)
    checks.finite_number(f"{name}: epsilon", epsilon, above=0, most=1)
    return Adam(
        rate,
        beta1,
        beta2,
        epsilon,
        eps_hat=True,
    )
