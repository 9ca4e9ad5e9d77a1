# SPDX-License-Identifier: Apache-2.0
"""What the factories of sparse optimizers describe: arguments, rules and ranges of Rec SDK."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotbed import checks
from hotbed.compat.mx_rec.no_effect import ARGUMENTS
from hotbed.embedding.rule import Adagrad, Adam, Ftrl, Rule, Sgd
from hotbed.errors import ConfigError

MOST_RATE = 10.0
MOST_PENALTY = 1e4

NamedRule = tuple[str, Rule]
"""The name of an optimizer for messages, and its rule."""


def rate_of(where: str, learning_rate: Any) -> float:
    """Return a learning rate in [0, 10]: a number, or a tensor of one."""
    rate = learning_rate
    if isinstance(rate, Tensor) and rate.numel() == 1:
        rate = rate.item()
    checks.finite_number(f"{where}: learning_rate", rate, least=0, most=MOST_RATE)
    return float(rate)


def adagrad(
    learning_rate: Any = 0.001,
    initial_accumulator_value: float = 0.9,
    use_locking: bool = False,
    name: str = "Adagrad",
) -> NamedRule:
    """Return Adagrad.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        initial_accumulator_value: where the sum of squares starts, in (0, 1].
        use_locking: not needed: one update at a time.
        name: for messages.
    """
    where = f"{name}: initial_accumulator_value"
    checks.finite_number(where, initial_accumulator_value, above=0, most=1)
    rate = rate_of(name, learning_rate)
    ARGUMENTS.log_no_effect("optimizer.use_locking", when=use_locking)
    return name, Adagrad(rate, initial_accumulator=initial_accumulator_value)


def gradient_descent(
    learning_rate: Any,
    use_locking: bool = False,
    name: str = "GradientDescent",
    use_fusion_optim: bool = False,
    weight_decay: float | None = None,
) -> NamedRule:
    """Return gradient descent.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        use_locking: not needed: one update at a time.
        name: for messages.
        use_fusion_optim: not needed: each update is one native call.
        weight_decay: times the row is added to its gradient, 1e-5 to 1e-2; None = 0.
    """
    if weight_decay is not None:
        checks.finite_number(f"{name}: weight_decay", weight_decay, least=1e-5, most=1e-2)
    rule = Sgd(rate_of(name, learning_rate), l2=weight_decay or 0.0)
    ARGUMENTS.log_no_effect("optimizer.use_locking", when=use_locking)
    ARGUMENTS.log_no_effect("optimizer.use_fusion_optim", when=use_fusion_optim)
    return name, rule


def gradient_descent_by_address(
    learning_rate: Any,
    weight_decay: float = 1e-4,
    use_locking: bool = False,
    name: str = "GradientDescentByAddr",
) -> NamedRule:
    """Return gradient descent.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        weight_decay: times the row is added to its gradient, 0 to 1.
        use_locking: not needed: one update at a time.
        name: for messages.
    """
    checks.finite_number(f"{name}: weight_decay", weight_decay, least=0, most=1)
    ARGUMENTS.log_no_effect("optimizer.use_locking", when=use_locking)
    return name, Sgd(rate_of(name, learning_rate), l2=weight_decay)


def lazy_adam(
    learning_rate: Any = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str = "LazyAdam",
    use_fusion_optim: bool = False,
) -> NamedRule:
    """Return Adam that moves touched rows only; its bias correction counts all updates.

    Args:
        learning_rate: 0 to 10, a number or a tensor of one.
        beta1: in (0, 1).
        beta2: in [0, 1).
        epsilon: in (0, 1], added to the root before the correction of its bias.
        name: for messages.
        use_fusion_optim: not needed: each update is one native call.
    """
    checks.finite_number(f"{name}: beta1", beta1, above=0, below=1)
    checks.finite_number(f"{name}: beta2", beta2, least=0, most=1)
    checks.finite_number(f"{name}: epsilon", epsilon, above=0, most=1)
    rule = Adam(rate_of(name, learning_rate), beta1, beta2, epsilon, eps_hat=True)
    ARGUMENTS.log_no_effect("optimizer.use_fusion_optim", when=use_fusion_optim)
    return name, rule


def lazy_adam_by_address(
    learning_rate: Any = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str = "LazyAdamByAddress",
    use_fusion_optim: bool = False,
) -> NamedRule:
    """Return what `lazy_adam` returns; only the default of `name` differs."""
    return lazy_adam(learning_rate, beta1, beta2, epsilon, name, use_fusion_optim)


def ftrl(
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
) -> NamedRule:
    """Return Ftrl as TensorFlow writes it, whose l2 is twice the formula's.

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
    where = f"{name}: initial_accumulator_value"
    checks.finite_number(where, initial_accumulator_value, above=0, most=1)
    for option, value in (
        ("l1_regularization_strength", l1_regularization_strength),
        ("l2_regularization_strength", l2_regularization_strength),
        ("l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength),
    ):
        checks.finite_number(f"{name}: {option}", value, least=0, most=MOST_PENALTY)
    if l2_shrinkage_regularization_strength:
        raise ConfigError(
            f"{name}: l2_shrinkage_regularization_strength: only 0 is built, got "
            f"{l2_shrinkage_regularization_strength}. Use l2_regularization_strength."
        )
    rule = Ftrl(
        rate_of(name, learning_rate),
        power=learning_rate_power,
        initial_accumulator=initial_accumulator_value,
        l1=l1_regularization_strength,
        l2=2 * l2_regularization_strength,
    )
    ARGUMENTS.log_no_effect("optimizer.use_locking", when=use_locking)
    ARGUMENTS.log_no_effect("optimizer.accum_name", when=accum_name is not None)
    ARGUMENTS.log_no_effect("optimizer.linear_name", when=linear_name is not None)
    return name, rule
