# SPDX-License-Identifier: Apache-2.0
"""The optimizers that learn the embeddings of a model, also inside of TorchRec's wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hotbed.errors import ConfigError

from .torchrec.fused import is_fused, is_fused_optimizer

Optimizer = torch.optim.Optimizer

_INSTEAD = {
    "GradientClippingOptimizer": "Give the optimizer inside of it, and clip with "
    "nn.utils.clip_grad_norm_ before each step",
    "WarmupOptimizer": "Give the optimizer inside of it, and make a scheduler of torch over the "
    "one that hb.auto returns",
}


@dataclass(frozen=True)
class Owner:
    """What learns a weight.

    Attributes:
        optimizer: the optimizer.
        group: its parameter group that holds the weight.
        is_in_backward: whether it steps in each backward pass; no loop steps it.
        is_fused: whether it was a kernel of FBGEMM, which moves only the rows of a batch.
    """

    optimizer: Optimizer
    group: Any
    is_in_backward: bool = False
    is_fused: bool = False


def owners_of(weight: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[Owner]:
    """Return what learns a weight: what steps in the backward pass, else what holds the weight."""
    in_backward = getattr(weight, "_in_backward_optimizers", ())
    if in_backward:
        return [
            Owner(optimizer, getattr(optimizer, "param_groups", [{}])[0], True, is_fused(weight))
            for optimizer in in_backward
        ]
    owners = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                owners.append(Owner(optimizer, group))
    return owners


def unwrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of torch inside of one of TorchRec's; another one is alone.

    An optimizer that stands for the kernel of a fused collection is left out.

    Raises:
        ConfigError: a wrapper does more than to name parameters.
    """
    kind = type(optimizer)
    if is_fused_optimizer(optimizer):
        return []
    if not kind.__module__.startswith("torchrec.optim."):
        return [optimizer]
    inside: Any = optimizer
    if kind.__name__ == "CombinedOptimizer":
        return [each for _, part in inside.optimizers for each in unwrapped(part)]
    if kind.__name__ == "KeyedOptimizerWrapper":
        return unwrapped(inside._optimizer)
    if hasattr(optimizer, "_optimizer") or not hasattr(optimizer, "defaults"):
        advice = _INSTEAD.get(kind.__name__, "Give an optimizer of torch.optim")
        raise ConfigError(
            f"hb.auto.optimizer: expected an optimizer of torch, alone or in a "
            f"KeyedOptimizerWrapper or CombinedOptimizer, got {kind.__name__}. {advice}."
        )
    return [optimizer]


def adopt(weights: Iterable[nn.Parameter], optimizer: Optimizer, others: Iterable[Any]) -> None:
    """Let an optimizer hold the weights that learned in the backward pass, a group for each.

    The settings of a group are those of the optimizer that stepped there, as far as both have them.

    Args:
        weights: some learn in the backward pass.
        optimizer: takes them over.
        others: all optimizers; none of them holds such a weight afterwards.
    """
    for weight in weights:
        in_backward = getattr(weight, "_in_backward_optimizers", ())
        if not in_backward:
            continue
        for other in others:
            for group in other.param_groups:
                _remove(weight, group)
        settings = {
            key: value
            for key, value in in_backward[0].param_groups[0].items()
            if key in optimizer.defaults
        }
        parameter: Any = weight
        if "param_names" in optimizer.param_groups[0]:
            parameter = (f"in_backward_{id(weight)}", weight)
        optimizer.add_param_group({**settings, "params": [parameter]})


def _remove(weight: nn.Parameter, group: dict[str, Any]) -> None:
    """Take a weight out of a parameter group that holds it."""
    stays = [parameter is not weight for parameter in group["params"]]
    for key in ("params", "param_names"):
        if key in group:
            pairs = zip(group[key], stays, strict=True)
            group[key] = [item for item, remains in pairs if remains]
