# SPDX-License-Identifier: Apache-2.0
"""FTRL without dynamic expansion."""

from __future__ import annotations

from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec.optimizers.optimizer import HashOptimizer, check_rate
from hotbed.embedding.rule import Ftrl
from hotbed.errors import ConfigError

__all__ = ["create_hash_optimizer"]

MOST_STRENGTH = 1e4


def create_hash_optimizer(
    learning_rate: Any,
    use_locking: bool = False,
    name: str = "Ftrl",
    *,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    accum_name: str | None = None,
    linear_name: str | None = None,
    l2_shrinkage_regularization_strength: float = 0.0,
) -> HashOptimizer:
    """Return FTRL, by the formula of TensorFlow.

    Args:
        learning_rate: in [0, 10].
        use_locking: not needed.
        name: of the optimizer.
        learning_rate_power: must be -0.5.
        initial_accumulator_value: where the sum of squares starts, in (0, 1].
        l1_regularization_strength: in [0, 10000].
        l2_regularization_strength: in [0, 10000].
        accum_name: not needed.
        linear_name: not needed.
        l2_shrinkage_regularization_strength: must be 0.

    Raises:
        ConfigError: a value is out of its range, or another power or shrinkage is given.
    """
    rate = check_rate(name, learning_rate)
    _check_built(f"{name}: learning_rate_power", learning_rate_power, -0.5)
    shrinkage = l2_shrinkage_regularization_strength
    _check_built(f"{name}: l2_shrinkage_regularization_strength", shrinkage, 0.0)
    for argument, strength in (
        ("l1_regularization_strength", l1_regularization_strength),
        ("l2_regularization_strength", l2_regularization_strength),
    ):
        checks.finite_number(f"{name}: {argument}", strength, least=0, most=MOST_STRENGTH)
    where = f"{name}: initial_accumulator_value"
    checks.finite_number(where, initial_accumulator_value, above=0, most=1)
    rule = Ftrl(
        rate,
        l1=l1_regularization_strength,
        l2=2 * l2_regularization_strength,  # TensorFlow adds the square times its strength
        initial_accumulator=initial_accumulator_value,
    )
    return HashOptimizer(name, rule, by_address=False)


def _check_built(where: str, value: float, only: float) -> None:
    if value != only:
        raise ConfigError(f"{where}: only {only} is built, got {value!r}. Leave it out.")
