# SPDX-License-Identifier: Apache-2.0
"""FTRL-Proximal for dense parameters, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.embedding.rule import Ftrl
from hotbed.optim.closure import loss_of


class FtrlOptimizer(torch.optim.Optimizer):
    """`hb.Ftrl` for dense parameters: the same formula, and the state `n` and `z`.

    Args:
        params: the parameters.
        rule: the rule; its `gradient_l2` is the `weight_decay` of the groups. Keep its rate
            constant: the weights are computed from their whole past with the current rate. A step
            with rate 0 is skipped.
    """

    def __init__(self, params: Iterable[nn.Parameter], rule: Ftrl) -> None:
        defaults = {
            "lr": rule.lr,
            "beta": rule.beta,
            "l1": rule.l1,
            "l2": rule.l2,
            "initial_accumulator": rule.initial_accumulator,
            "eps": rule.eps,
            "weight_decay": rule.gradient_l2,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state of before `eps`, too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("eps", 0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if group["lr"] == 0:
                continue
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["n"] = torch.full_like(weight, group["initial_accumulator"])
            state["z"] = torch.zeros_like(weight)
        gradient = weight.grad
        assert gradient is not None
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * weight
        n = state["n"]
        z = state["z"]
        rate = group["lr"]
        eps = group["eps"]
        grown = n + gradient * gradient
        root = (grown + eps).sqrt()
        z += gradient - (root - (n + eps).sqrt()) / rate * weight
        n.copy_(grown)
        shrunk = -(z - z.sign() * group["l1"])
        dense = shrunk / ((root + group["beta"]) / rate + group["l2"])
        weight.copy_(torch.where(z.abs() <= group["l1"], torch.zeros_like(z), dense))
