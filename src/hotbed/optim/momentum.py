# SPDX-License-Identifier: Apache-2.0
"""Momentum that contains the learning rate, for dense parameters; torch's does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.optim.closure import loss_of


class MomentumOptimizer(torch.optim.Optimizer):
    """`hb.Momentum` and `hb.Nesterov` with `lr_inside`, for dense parameters.

    Args:
        params: the parameters.
        lr: learning rate.
        momentum: as in the rule.
        nesterov: whether the rule is `hb.Nesterov`.
        weight_decay: the rule's `l2`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.01,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(weights, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        rate = float(group["lr"])
        gradients: Any = [weight.grad for weight in weights]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        momenta = []
        for weight in weights:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momenta.append(state["momentum_buffer"])
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients, alpha=rate)
        if not group["nesterov"]:
            torch._foreach_sub_(weights, momenta)
            return
        torch._foreach_add_(weights, gradients, alpha=-rate)
        torch._foreach_add_(weights, momenta, alpha=-group["momentum"])
