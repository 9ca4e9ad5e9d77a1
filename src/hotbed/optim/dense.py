# SPDX-License-Identifier: Apache-2.0
"""The optimizer of the dense parameters: a torch optimizer, built from a name or a rule value."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hotbed import checks
from hotbed.config import did_you_mean
from hotbed.embedding import rule as rules
from hotbed.errors import ConfigError
from hotbed.optim.ftrl import FtrlOptimizer
from hotbed.optim.momentum import MomentumOptimizer

log = logging.getLogger("hotbed")

NAMES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer by class name and keywords.

    A checkpoint describes an optimizer that the user built in this way.
    """

    name: str
    keywords: Mapping[str, Any]


def dense_optimizer(
    spec: str | rules.Rule | TorchOptimizer | torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
) -> torch.optim.Optimizer | None:
    """Return the torch optimizer that `spec` stands for, fused on a CPU.

    Returns None if all parameters are rows of tables.

    Args:
        spec: a torch optimizer (returned as it is), a name such as "adam" (torch's defaults), or a
            rule value such as `hb.Adam(lr=1e-3)`. Its l2 becomes torch's weight_decay, and its l1
            adds l1 * sign(w) to the gradients, as for rows: together they minimize the loss plus
            l1 * sum(abs(w)) + l2 / 2 * sum(w^2).
        parameters: the dense parameters; those that require no gradient are left out.

    Raises:
        ConfigError: torch does not have such a name or rule.
    """
    if isinstance(spec, torch.optim.Optimizer):
        unfuse_half(spec)
        return spec
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(spec, TorchOptimizer):
        cls = next(cls for cls in NAMES.values() if cls.__name__ == spec.name)
        accepted = inspect.signature(cls).parameters
        keywords = {key: value for key, value in spec.keywords.items() if key in accepted}
    elif isinstance(spec, rules.Rule):
        cls, keywords = _from_rule(spec)
    elif isinstance(spec, str) and spec in NAMES:
        cls = NAMES[spec]
        keywords = {}
    else:
        raise ConfigError(
            f"optimizer: unknown optimizer, got {spec!r:.60}. Give a torch optimizer over "
            f"hb.dense_parameters(network), a rule, or a name. {did_you_mean(str(spec), NAMES)}"
        )
    # one native call for all parameters; by default torch fuses on a GPU only
    if _can_fuse(cls, trained):
        keywords = {"fused": True, **keywords}
    if not trained:
        return None
    optimizer = cls(trained, **keywords)
    unfuse_half(optimizer)
    if isinstance(spec, rules.Rule) and spec.penalties[0]:
        optimizer.register_step_pre_hook(partial(_add_l1, l1=spec.penalties[0]))
    if isinstance(spec, rules.Adam) and spec.eps_hat:
        optimizer.register_step_pre_hook(partial(_set_eps, eps_hat=spec.eps, beta2=spec.beta2))
    return optimizer


def _can_fuse(cls: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether one native call of torch may step all parameters, on a CPU."""
    if "fused" not in inspect.signature(cls).parameters:
        return False
    if issubclass(cls, torch.optim.SGD) and any(map(_is_half, parameters)):
        return False
    return all(parameter.is_cpu and parameter.is_floating_point() for parameter in parameters)


def _is_half(parameter: nn.Parameter) -> bool:
    return parameter.is_cpu and parameter.dtype in (torch.bfloat16, torch.float16)


def unfuse_half(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` step half-precision weights on a CPU without torch's fused SGD.

    Fused, torch converts copies of such weights: the weights stay as they are, and their momenta
    are never set. The first step without it is logged.
    """
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_unfuse)


def _unfuse(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    # before each step: a state that was loaded, or a network that was converted, may need it
    fused = [
        group
        for group in optimizer.param_groups
        if group["fused"] and any(map(_is_half, group["params"]))
    ]
    for group in fused:
        group["fused"] = False
    if fused:
        log.warning(
            "optimizer: torch's SGD(fused=True) does not move weights of bfloat16 or float16 on a "
            "CPU, got such weights; it steps with fused=False. Make it without fused"
        )


def _add_l1(optimizer: torch.optim.Optimizer, *arguments: Any, l1: float) -> None:
    """Add the gradient of l1 * sum(abs(w)) to the gradients, before a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(torch.sign(parameter.detach()), alpha=l1)


def _set_eps(
    optimizer: torch.optim.Optimizer, *arguments: Any, eps_hat: float, beta2: float
) -> None:
    """Set torch's eps before a step so that it is the paper's epsilon hat.

    Torch adds it after the correction of the bias: it is divided by the root of that correction.
    """
    steps = [float(state["step"]) for state in optimizer.state.values()]
    step = max(steps, default=0.0) + 1.0
    for group in optimizer.param_groups:
        group["eps"] = eps_hat / math.sqrt(1.0 - beta2**step)


def set_dense_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of a dense optimizer.

    Raises:
        ConfigError: `rate` is not a number >= 0.
    """
    checks.finite_number("learning rate of the dense parameters", rate, least=0)
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = float(rate)
        if "initial_lr" in group:  # a schedule that is attached later starts from this rate
            group["initial_lr"] = float(rate)


def _from_rule(rule: rules.Rule) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    common: dict[str, Any] = {"lr": rule.lr, "weight_decay": rule.l2}
    if rule.clip is not None or rule.scope != "touched":
        raise ConfigError(
            f"optimizer: clip and scope apply to rows of tables only, got {rule}. "
            "Leave them out for the dense parameters; ClipGradients clips both."
        )
    if isinstance(rule, rules.Adam):
        adam: dict[str, Any] = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps}
        if rule.decay and rule.l2:
            raise ConfigError(
                f"optimizer: decay and l2 exclude each other, got {rule}. "
                "Choose one for dense parameters."
            )
        if rule.decay:
            return torch.optim.AdamW, common | adam | {"weight_decay": rule.decay}
        return torch.optim.Adam, common | adam
    if isinstance(rule, rules.Ftrl):
        return FtrlOptimizer, {"rule": rule}
    if isinstance(rule, rules.Adagrad):
        start = {"eps": rule.eps, "initial_accumulator_value": rule.initial_accumulator}
        return torch.optim.Adagrad, common | start
    if isinstance(rule, rules.RmsProp):
        return torch.optim.RMSprop, common | {"alpha": rule.alpha, "eps": rule.eps}
    if isinstance(rule, (rules.Momentum, rules.Nesterov)):
        kind: type[torch.optim.Optimizer] = torch.optim.SGD
        if rule.lr_inside:
            kind = MomentumOptimizer
        is_nesterov = isinstance(rule, rules.Nesterov)
        return kind, common | {"momentum": rule.momentum, "nesterov": is_nesterov}
    if isinstance(rule, rules.Sgd):
        return torch.optim.SGD, common
    raise ConfigError(
        f"optimizer: {type(rule).__name__} updates rows of tables only, got {rule}. "
        "Use adam, adagrad, ftrl, rms_prop, momentum, nesterov or sgd for the dense parameters."
    )
