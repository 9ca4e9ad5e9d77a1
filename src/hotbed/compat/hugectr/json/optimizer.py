# SPDX-License-Identifier: Apache-2.0
"""The `optimizer` clause, of a training file and of one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotbed import checks
from hotbed.compat.hugectr.clauses import LearningRate, OptParams
from hotbed.compat.hugectr.enums import Optimizer_t, Update_t
from hotbed.compat.hugectr.json.keys import member, needed, read_clause
from hotbed.errors import ConfigError

# Kind -> its clause of hyper-parameters, the keys it has to have, and those it may have.
_HYPER: Mapping[Optimizer_t, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    Optimizer_t.Adam: ("adam_hparam", ("beta1", "beta2", "epsilon"), ()),
    Optimizer_t.AdaGrad: ("adagrad_hparam", ("initial_accu_value", "epsilon"), ()),
    Optimizer_t.Ftrl: ("ftrl_hparam", ("beta", "lambda1", "lambda2"), ()),
    Optimizer_t.MomentumSGD: ("momentum_sgd_hparam", ("momentum_factor",), ()),
    Optimizer_t.Nesterov: ("nesterov_hparam", ("momentum_factor",), ()),
    Optimizer_t.RMSProp: ("rmsprop_hparam", ("beta", "epsilon"), ()),
    Optimizer_t.SGD: ("sgd_hparam", (), ("atomic_update",)),
}
_OLD_RATE = "alpha"  # the learning rate of Adam up to v2.1
_RATE = ("warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")


def read_optimizer(spec: Any, where: str = "optimizer", *, needs_rate: bool = True) -> OptParams:
    """Return the optimizer that a clause describes, with its learning rate.

    Args:
        spec: the clause.
        where: its place, in messages.
        needs_rate: the clause has to have a learning rate; that of an embedding has none from v3.1
            on.

    Raises:
        ConfigError: a key or a value is wrong; the message starts with its place.
    """
    clauses = [name for name, _, _ in _HYPER.values()]
    values = read_clause(spec, where, ["type", "update_type", "global_update", *clauses])
    needed(values, where, ["type"])
    kind = member(Optimizer_t, values["type"], f"{where}.type")
    name, keys, optional = _HYPER[kind]
    needed(values, where, [name])
    for other in clauses:
        if other != name and other in values:
            raise ConfigError(
                f"{where}.{other}: belongs to another type, got type {kind.name}. Remove it."
            )
    hyper = _hyper_parameters(values[name], f"{where}.{name}", keys, optional, needs_rate)
    rate = _learning_rate(hyper, f"{where}.{name}")
    return OptParams(
        optimizer_type=kind, update_type=_update_type(values, where), learning_rate=rate, **hyper
    )


def write_optimizer(optimizer: OptParams) -> dict[str, Any]:
    """Return the clause of an optimizer, without its learning rate, as graphs have it."""
    name, keys, optional = _HYPER[optimizer.optimizer_type]
    hyper = {key: getattr(optimizer, key) for key in (*keys, *optional)}
    return {
        "type": optimizer.optimizer_type.value,
        "update_type": optimizer.update_type.value,
        name: hyper,
    }


def _hyper_parameters(
    spec: Any, where: str, keys: tuple[str, ...], optional: tuple[str, ...], needs_rate: bool
) -> dict[str, Any]:
    names = [*keys, *optional, "learning_rate", *_RATE]
    if "beta1" in keys:
        names.append(_OLD_RATE)
    values = read_clause(spec, where, names)
    if _OLD_RATE in values:
        values.setdefault("learning_rate", values.pop(_OLD_RATE))
    needed(values, where, ["learning_rate", *keys] if needs_rate else keys)
    return values


def _learning_rate(hyper: dict[str, Any], where: str) -> LearningRate | None:
    """Take the keys of the learning rate out of `hyper`; None without a learning rate.

    The releases that read these keys take no warm-up and no decay of 0 steps.
    """
    rest = {key: hyper.pop(key) for key in _RATE if key in hyper}
    for key in ("warmup_steps", "decay_steps"):
        checks.whole_number(f"{where}.{key}", rest.get(key, 1), 1)
    if "learning_rate" not in hyper:
        return None
    rate = hyper.pop("learning_rate")
    checks.finite_number(f"{where}.learning_rate", rate, least=0)
    return LearningRate(lr=rate, **rest)


def _update_type(values: Mapping[str, Any], where: str) -> Update_t:
    """Return the update type; `global_update` is its name before v2.3. The default is Local."""
    if "update_type" in values:
        return member(Update_t, values["update_type"], f"{where}.update_type")
    is_global = values.get("global_update", False)
    if not isinstance(is_global, bool):
        raise ConfigError(
            f"{where}.global_update: not a bool, got {is_global!r:.80}. Write true or false."
        )
    return Update_t.Global if is_global else Update_t.Local
