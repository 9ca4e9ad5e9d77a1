# SPDX-License-Identifier: Apache-2.0
"""The rules of the sparse optimizers, with the ranges that Rec SDK checks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotbed import checks
from hotbed.embedding.rule import Adagrad, Adam, Ftrl, Sgd
from hotbed.errors import ConfigError

MOST_RATE = 10.0
MOST_PENALTY = 1e4


def rate_of(where: str, learning_rate: Any) -> float:
    """Return a learning rate in [0, 10]: a number, or a tensor of one."""
    rate = learning_rate
    if isinstance(rate, Tensor) and rate.numel() == 1:
        rate = rate.item()
    checks.finite_number(f"{where}: learning_rate", rate, least=0, most=MOST_RATE)
    return float(rate)


def adagrad(name: str, learning_rate: Any, initial_accumulator_value: float) -> Adagrad:
    """Return Adagrad; its sum of squares starts in (0, 1]."""
    where = f"{name}: initial_accumulator_value"
    checks.finite_number(where, initial_accumulator_value, above=0, most=1)
    rate = rate_of(name, learning_rate)
    return Adagrad(rate, initial_accumulator=initial_accumulator_value)


def sgd(name: str, learning_rate: Any, weight_decay: float) -> Sgd:
    """Return gradient descent; `weight_decay` times the row is added to its gradient."""
    return Sgd(rate_of(name, learning_rate), l2=weight_decay)


def lazy_adam(name: str, learning_rate: Any, beta1: float, beta2: float, epsilon: float) -> Adam:
    """Return Adam of touched rows; epsilon is added before the correction of the bias."""
    checks.finite_number(f"{name}: beta1", beta1, above=0, below=1)
    checks.finite_number(f"{name}: beta2", beta2, least=0, most=1)
    checks.finite_number(f"{name}: epsilon", epsilon, above=0, most=1)
    return Adam(rate_of(name, learning_rate), beta1, beta2, epsilon, eps_hat=True)


def ftrl(
    name: str,
    learning_rate: Any,
    initial_accumulator_value: float,
    penalties: tuple[float, float, float],
    learning_rate_power: float,
) -> Ftrl:
    """Return Ftrl as TensorFlow writes it, whose l2 is twice the formula's.

    `penalties`: l1, l2 and the shrinkage of l2.
    """
    l1, l2, shrinkage = penalties
    checks.finite_number(
        f"{name}: initial_accumulator_value", initial_accumulator_value, above=0, most=1
    )
    for option, value in (
        ("l1_regularization_strength", l1),
        ("l2_regularization_strength", l2),
        ("l2_shrinkage_regularization_strength", shrinkage),
    ):
        checks.finite_number(f"{name}: {option}", value, least=0, most=MOST_PENALTY)
    if shrinkage:
        raise ConfigError(
            f"{name}: l2_shrinkage_regularization_strength: only 0 is built, got {shrinkage}. "
            "Use l2_regularization_strength."
        )
    return Ftrl(
        rate_of(name, learning_rate),
        power=learning_rate_power,
        initial_accumulator=initial_accumulator_value,
        l1=l1,
        l2=2 * l2,
    )
