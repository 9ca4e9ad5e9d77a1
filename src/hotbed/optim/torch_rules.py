# SPDX-License-Identifier: Apache-2.0
"""Torch optimizers as rules of tables, and their state as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed.embedding import rule as rules
from hotbed.embedding.rule import Rule, Scope
from hotbed.errors import ConfigError

Group = Mapping[str, Any]
"""A parameter group of a torch optimizer."""


def rule_of(optimizer: torch.optim.Optimizer, group: Group, *, sparse: bool = False) -> Rule:
    """Return the rule that moves rows as `optimizer` moves a weight of this parameter group.

    Its scope is "catch_up" if the optimizer moves rows without a gradient, else "touched".

    Args:
        optimizer: torch's own class, not one derived from it, or TorchRec's RowWiseAdagrad.
        group: one of its parameter groups.
        sparse: whether the gradient of the weight is sparse, as of nn.Embedding(sparse=True).

    Raises:
        ConfigError: no rule equals this optimizer, or one of its settings.
    """
    name = type(optimizer).__name__
    twin = _twin_of(optimizer)
    if twin is None:
        names = ", ".join(cls.__name__ for cls in _TWINS)
        raise ConfigError(
            f"{name}: no rule of a table equals this optimizer, got {type(optimizer).__module__}."
            f"{name}. Use one of torch.optim's {names} for embeddings."
        )
    for setting, plain in twin.plain.items():
        if setting in group and group[setting] != plain:
            raise ConfigError(
                f"{name}: no rule of a table has this setting, got {setting}={group[setting]!r}. "
                f"Use {setting}={plain!r}."
            )
    if twin.sparse not in (None, sparse):
        kind = "sparse" if sparse else "dense"
        raise ConfigError(
            f"{name}: it does not take {kind} gradients in torch either, got an embedding with "
            f"sparse={sparse}. Make the embedding with sparse={not sparse}."
        )
    if sparse and group.get("weight_decay"):
        raise ConfigError(
            f"{name}: its weight decay does not take sparse gradients in torch either, got "
            f"weight_decay={group['weight_decay']!r}. Use weight_decay=0 or sparse=False."
        )
    return twin.rule(group, sparse)


def row_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], weight: Tensor
) -> tuple[list[Tensor], int]:
    """Return the optimizer state of a weight by rows, and the number of steps it has taken.

    Args:
        optimizer: one that `rule_of` takes.
        state: its state of the weight; empty before the first step.
        weight: [num rows, dim].

    Returns:
        The slots of the rule in the order of `Rule.state_width`, each [num rows, dim], or
        [num rows, 1] where a row has one number; none before the first step; and the step.
    """
    step = int(state.get("step", 0))
    slots = []
    twin = _twin_of(optimizer)
    assert twin is not None, "rule_of refuses it"
    for name in twin.slots:
        slot = state.get(name)
        if slot is None:
            return [], step
        dense = slot.to_dense() if slot.is_sparse else slot
        slots.append(dense.detach().view(len(weight), -1))
    return slots, step


def saved_slots(rule: Rule) -> tuple[tuple[str, ...], ...]:
    """Return, for each slot of a rule, the names under which optimizers save it.

    The first name is that of torch, the others are those of TorchRec's fused optimizers.
    """
    return _SAVED.get(type(rule), ())


@dataclass(frozen=True)
class _Twin:
    """How a torch optimizer is written as a rule.

    Attributes:
        rule: the rule of a parameter group, by whether gradients are sparse.
        slots: names of its state, in the order of the rule's.
        plain: settings that the rule does not have, with the value that switches them off.
        sparse: whether it takes sparse gradients only, or dense ones only; None = both.
    """

    rule: Callable[[Group, bool], Rule]
    slots: tuple[str, ...]
    plain: Mapping[str, Any]
    sparse: bool | None = None


def _sgd(group: Group, sparse: bool) -> Rule:
    decay = float(group["weight_decay"])
    momentum = float(group["momentum"])
    rate = float(group["lr"])
    if not momentum:
        scope: Scope = "catch_up" if decay else "touched"
        return rules.Sgd(rate, l2=decay, scope=scope)
    kind = rules.Nesterov if group["nesterov"] else rules.Momentum
    return kind(rate, momentum, l2=decay, scope="catch_up")


def _adagrad(group: Group, sparse: bool) -> Rule:
    decay = float(group["weight_decay"])
    return rules.Adagrad(
        float(group["lr"]),
        float(group["eps"]),
        float(group["initial_accumulator_value"]),
        l2=decay,
        scope="catch_up" if decay else "touched",
    )


def _rowwise_adagrad(group: Group, sparse: bool) -> Rule:
    # also with decay, idle rows stay as they are: FBGEMM's kernel, which takes the place of this
    # optimizer when TorchRec shards a model, moves only the rows of a batch
    return rules.RowwiseAdagrad(
        float(group["lr"]),
        float(group["eps"]),
        float(group["initial_accumulator_value"]),
        l2=float(group["weight_decay"]),
    )


def _rms_prop(group: Group, sparse: bool) -> Rule:
    return rules.RmsProp(
        float(group["lr"]),
        float(group["alpha"]),
        float(group["eps"]),
        l2=float(group["weight_decay"]),
        scope="catch_up",
    )


def _adam(group: Group, sparse: bool) -> Rule:
    decay = float(group.get("weight_decay", 0.0))
    is_decoupled = bool(group.get("decoupled_weight_decay", False))
    beta1, beta2 = group["betas"]
    return rules.Adam(
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        decay if is_decoupled else 0.0,
        sparse,
        l2=0.0 if is_decoupled else decay,
        scope="touched" if sparse else "catch_up",
    )


def _adamw(group: Group, sparse: bool) -> Rule:
    return _adam({**group, "decoupled_weight_decay": True}, sparse)


_OFF = {"maximize": False, "differentiable": False}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_TWINS: Mapping[type[torch.optim.Optimizer], _Twin] = {
    torch.optim.SGD: _Twin(_sgd, ("momentum_buffer",), {**_OFF, "dampening": 0}),
    torch.optim.Adagrad: _Twin(_adagrad, ("sum",), {**_OFF, "lr_decay": 0}),
    torch.optim.RMSprop: _Twin(
        _rms_prop, ("square_avg",), {**_OFF, "momentum": 0, "centered": False}, sparse=False
    ),
    torch.optim.Adam: _Twin(_adam, _MOMENTS, {**_OFF, "amsgrad": False}, sparse=False),
    torch.optim.AdamW: _Twin(_adamw, _MOMENTS, {**_OFF, "amsgrad": False}, sparse=False),
    torch.optim.SparseAdam: _Twin(_adam, _MOMENTS, _OFF, sparse=True),
}
_NAMED_TWINS: Mapping[str, _Twin] = {
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _Twin(
        _rowwise_adagrad, ("sum",), {**_OFF, "lr_decay": 0}, sparse=False
    )
}
"""Of optimizers whose library is not imported here, by the place of their class."""


_SUM = ("sum", "momentum1", "momentum_1")
_SAVED: Mapping[type[Rule], tuple[tuple[str, ...], ...]] = {
    rules.Adagrad: (_SUM,),
    rules.RowwiseAdagrad: (_SUM,),
    rules.Momentum: (("momentum_buffer",),),
    rules.Nesterov: (("momentum_buffer",),),
    rules.RmsProp: (("square_avg",),),
    rules.Adam: (("exp_avg", "momentum1", "momentum_1"), ("exp_avg_sq", "momentum2", "momentum_2")),
}


def _twin_of(optimizer: torch.optim.Optimizer) -> _Twin | None:
    kind = type(optimizer)
    return _TWINS.get(kind) or _NAMED_TWINS.get(f"{kind.__module__}.{kind.__qualname__}")
