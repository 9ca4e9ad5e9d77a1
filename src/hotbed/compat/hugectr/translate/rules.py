# SPDX-License-Identifier: Apache-2.0
"""Optimizers of HugeCTR as rules of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hotbed.compat.hugectr.clauses import OptParams
from hotbed.compat.hugectr.clauses.training import NEWEST_RELEASE, release_number
from hotbed.compat.hugectr.enums import Optimizer_t, Update_t
from hotbed.embedding.rule import Adagrad, Adam, Ftrl, Momentum, Nesterov, RmsProp, Rule, Scope, Sgd

_SCOPES: Mapping[Update_t, Scope] = {
    Update_t.Local: "touched",
    Update_t.Global: "all",
    Update_t.LazyGlobal: "catch_up",
}
_SMALLEST = 1e-20
"""First accumulator of an Ftrl with other terms of 0, where HugeCTR up to v23.02 divides 0 by 0."""
_FLT_EPSILON = 2.0**-23
_RMS_PROP_BETA = 0.9
"""Decay of RMSProp, which no argument of HugeCTR's changes."""


def ftrl_eps(release: str) -> float:
    """Return what a release adds to n under each root of Ftrl: FLT_EPSILON from v23.04 on."""
    return _FLT_EPSILON if release_number(release) >= (23, 4) else 0.0


def dense_rule(
    optimizer: OptParams, lr: float, l1: float, l2: float, release: str = NEWEST_RELEASE
) -> Rule:
    """Return the rule of the dense parameters.

    Args:
        optimizer: of the model.
        lr: learning rate.
        l1: factor of the L1 regularizer.
        l2: factor of the L2 regularizer.
        release: of HugeCTR.
    """
    rule = _rule(optimizer, lr, release)
    if isinstance(rule, Ftrl):
        return replace(rule, gradient_l1=l1, gradient_l2=l2)
    return replace(rule, l1=l1, l2=l2)


def table_rule(optimizer: OptParams, lr: float, release: str = NEWEST_RELEASE) -> Rule:
    """Return the rule of a table: `Local`, `Global` and `LazyGlobal` are its scope.

    Sgd and Adagrad leave rows without a gradient as they are, so that their scope is `touched`.
    """
    rule = _rule(optimizer, lr, release)
    if isinstance(rule, (Sgd, Adagrad)):
        return rule
    return replace(rule, scope=_SCOPES[optimizer.update_type])


def _rule(optimizer: OptParams, lr: float, release: str) -> Rule:
    if optimizer.optimizer_type is Optimizer_t.Ftrl:
        return _ftrl(optimizer, lr, ftrl_eps(release))
    return _MAKERS[optimizer.optimizer_type](optimizer, lr)


def _ftrl(optimizer: OptParams, lr: float, eps: float) -> Rule:
    has_divisor = optimizer.beta > 0 or optimizer.lambda2 > 0 or eps > 0
    return Ftrl(
        lr,
        beta=optimizer.beta,
        initial_accumulator=0.0 if has_divisor else _SMALLEST,
        l1=optimizer.lambda1,
        l2=optimizer.lambda2,
        eps=eps,
    )


def _adam(optimizer: OptParams, lr: float) -> Rule:
    return Adam(lr, optimizer.beta1, optimizer.beta2, optimizer.epsilon, eps_hat=True)


def _adagrad(optimizer: OptParams, lr: float) -> Rule:
    return Adagrad(lr, optimizer.epsilon, optimizer.initial_accu_value)


def _rmsprop(optimizer: OptParams, lr: float) -> Rule:
    return RmsProp(lr, alpha=optimizer.beta or _RMS_PROP_BETA, eps=optimizer.epsilon)


def _momentum(optimizer: OptParams, lr: float) -> Rule:
    return Momentum(lr, optimizer.momentum_factor, lr_inside=True)


def _nesterov(optimizer: OptParams, lr: float) -> Rule:
    return Nesterov(lr, optimizer.momentum_factor, lr_inside=True)


def _sgd(optimizer: OptParams, lr: float) -> Rule:
    return Sgd(lr)


_MAKERS: Mapping[Optimizer_t, Callable[[OptParams, float], Rule]] = {
    Optimizer_t.Adam: _adam,
    Optimizer_t.RMSProp: _rmsprop,
    Optimizer_t.AdaGrad: _adagrad,
    Optimizer_t.MomentumSGD: _momentum,
    Optimizer_t.Nesterov: _nesterov,
    Optimizer_t.SGD: _sgd,
}
