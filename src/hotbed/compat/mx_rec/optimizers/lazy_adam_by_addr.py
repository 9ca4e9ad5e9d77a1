# SPDX-License-Identifier: Apache-2.0
"""Lazy Adam for dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed.compat.mx_rec.no_effect import log_no_effect
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer
from hotbed.compat.mx_rec.optimizers.rules import lazy_adam

__all__ = ["create_hash_optimizer_by_addr", "create_hash_optimizer_by_address"]


def create_hash_optimizer_by_address(
    learning_rate: Any = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str = "LazyAdamByAddress",
    use_fusion_optim: bool = False,
) -> HashOptimizer:
    """Return Adam that moves touched rows only; its bias correction counts all updates.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        beta1: in (0, 1).
        beta2: in [0, 1).
        epsilon: in (0, 1], added to the root before the correction of its bias.
        name: for messages.
        use_fusion_optim: not needed: each update is one native call.
    """
    rule = lazy_adam(name, learning_rate, beta1, beta2, epsilon)
    log_no_effect("optimizer", use_fusion_optim=use_fusion_optim)
    return HashOptimizer(name, rule, by_address=True)


create_hash_optimizer_by_addr = create_hash_optimizer_by_address
"""The same, by its older name."""
