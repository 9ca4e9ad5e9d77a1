# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as values: a factor on each group's own learning rate.

They apply to dense parameters and to tables:

    schedule = Chain((Warmup(1000), Hold(20_000), Polynomial(10_000, power=2.0)))
    scheduler = schedule.attach(optimizer)  # a torch LambdaLR; step it after each training step

The objects of torch.optim.lr_scheduler have the same shapes, but are bound to one optimizer and
count steps by themselves. A value can be written in a job and attached to both optimizers. Any
torch scheduler works as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hotbed import checks
from hotbed.errors import ConfigError

__all__ = ["Chain", "Cosine", "Hold", "Polynomial", "Schedule", "Warmup"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor on the learning rate for each of `steps` steps; after them the last factor stays."""

    steps: int

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}.steps"
        checks.at_least(where, self.steps, 1, "Give a number of steps.")

    @abstractmethod
    def at(self, progress: float) -> float:
        """Return the factor at `progress` in [0, 1] through the steps."""

    def factor(self, step: int) -> float:
        """Return the factor for step `step`, 0 for the first."""
        return self.at(min(step, self.steps) / self.steps)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return a torch scheduler on `optimizer`, whose current learning rates are the base."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)


@dataclass(frozen=True)
class Warmup(Schedule):
    """Linear from `start` (of the base) to 1.

    The factor of the first step is `start + (1 - start) / steps`.
    """

    start: float = 0.0

    def at(self, progress: float) -> float:
        return self.start + (1.0 - self.start) * min(1.0, progress + 1.0 / self.steps)


@dataclass(frozen=True)
class Hold(Schedule):
    """`value` of the base throughout."""

    value: float = 1.0

    def at(self, progress: float) -> float:
        return self.value


@dataclass(frozen=True)
class Polynomial(Schedule):
    """From 1 to `end` as (1 - progress) ** power, but never below `floor`.

    The first step is number `first` of the decay: with 1, its factor is already below 1, as in
    HugeCTR.

    Source: HugeCTR's LearningRateScheduler (decay_power, end_lr = floor times the base).
    """

    power: float = 1.0
    end: float = 0.0
    floor: float = 0.0
    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite_number("Polynomial.floor", self.floor, least=0)
        checks.whole_number("Polynomial.first", self.first, 0)

    def at(self, progress: float) -> float:
        factor = self.end + (1.0 - self.end) * math.pow(1.0 - progress, self.power)
        return max(self.floor, factor)

    def factor(self, step: int) -> float:
        return super().factor(step + self.first)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 to `end` along half a cosine."""

    end: float = 0.0

    def at(self, progress: float) -> float:
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Chain:
    """Schedules one after another; the last factor of the last one stays.

    >>> schedule = Chain((Warmup(4), Hold(2), Polynomial(4)))
    >>> [schedule.factor(step) for step in (0, 3, 5, 8, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """

    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("Chain.parts: it is empty, got (). Give one schedule or more.")

    def factor(self, step: int) -> float:
        """Return the factor for step `step`, 0 for the first."""
        for part in self.parts[:-1]:
            if step < part.steps:
                return part.factor(step)
            step -= part.steps
        return self.parts[-1].factor(step)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return a torch scheduler on `optimizer`, whose current learning rates are the base."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
