# SPDX-License-Identifier: Apache-2.0
"""Moving averages of dense parameters, which a network has between its training steps."""

from __future__ import annotations

import torch

from hotbed import checks
from hotbed.errors import ConfigError

WEIGHTS = "averaged_weights"
"""The entry of a parameter in an optimizer's state: its weights, or their average."""
LINE = 64
"""torch allocates at multiples of so many bytes; the bits of some products depend on it."""


class WeightAverage:
    """The exponential moving average of the parameters of an optimizer.

    Between two steps the parameters hold the averages, which are then scored, saved, published and
    exported. In a step they hold the weights that the optimizer learns. The optimizer's state holds
    whichever of the two the parameters do not, and is saved with it.

    Args:
        optimizer: of the parameters.
        decay: the share of the average that a step keeps: average = decay * average + (1 - decay) *
            weights. It begins with the first step that learns the parameter.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, decay: float) -> None:
        checks.finite_number("average", decay, above=0, below=1)
        if optimizer is None:
            raise ConfigError(
                f"average: there is no dense parameter that an optimizer learns, got {decay}. "
                "Leave it out, or give dense parameters and their optimizer."
            )
        self._optimizer = optimizer
        self._decay = decay
        self._is_within_step = False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        half = {str(p.dtype) for p in parameters if p.dtype != torch.float32}
        if half:
            raise ConfigError(
                f"average: the average of {', '.join(sorted(half))} weights would be lost in "
                f"rounding, got {decay}. Give another amp_level, such as O2."
            )
        self._parameters = parameters

    def begin_step(self) -> None:
        """Give the network the weights that are learned."""
        if not self._is_within_step:
            self._swap()
            self._is_within_step = True

    def end_step(self) -> None:
        """Add the weights that a step has learned to the averages, and give the network these."""
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            if WEIGHTS in state:
                state[WEIGHTS].lerp_(parameter.detach(), 1 - self._decay)
            elif parameter.grad is not None:
                # not before the optimizer learns it: optimizers take an empty state for new
                self._optimizer.state[parameter][WEIGHTS] = parameter.detach().clone()
        self.leave_step()

    def leave_step(self) -> None:
        """Give the network the averages, unless it has them."""
        if self._is_within_step:
            self._is_within_step = False
            self._swap()

    def _swap(self) -> None:
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            if WEIGHTS in state:
                others = state[WEIGHTS]
                if others.data_ptr() % LINE:  # so it may be after a state was loaded
                    others = others.clone()
                state[WEIGHTS] = parameter.data
                parameter.data = others
