# SPDX-License-Identifier: Apache-2.0
"""The learning-rate schedule: a schedule of the engine, read step by step."""

from __future__ import annotations

from hotbed.compat.hugectr.clauses import LearningRate
from hotbed.optim.schedule import Chain, Hold, Polynomial, Schedule, Warmup

__all__ = ["LearningRateScheduler"]


class LearningRateScheduler:
    """Returns the learning rate of one step after another.

    Warm-up from `base_lr / warmup_steps`, then `base_lr`; with `decay_start` above 0 a polynomial
    decay over `decay_steps` after it, never below `end_lr`.

    Example:
        >>> scheduler = LearningRateScheduler(0.1, warmup_steps=2)
        >>> scheduler.get_next(), scheduler.get_next(), scheduler.get_step()
        (0.05, 0.1, 2)
    """

    def __init__(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        rate = LearningRate(base_lr, warmup_steps, decay_start, decay_steps, decay_power, end_lr)
        self.reset(rate)

    @classmethod
    def of(cls, rate: LearningRate) -> LearningRateScheduler:
        """Return the scheduler of a solver's learning rate."""
        return cls(
            rate.lr,
            rate.warmup_steps,
            rate.decay_start,
            rate.decay_steps,
            rate.decay_power,
            rate.end_lr,
        )

    def reset(self, rate: LearningRate) -> None:
        """Begin anew with another learning rate."""
        self._base = rate.lr
        self._schedule = _schedule(rate)
        self._step = 0
        self._lr = 0.0

    def get_next(self) -> float:
        """Return the learning rate of the next step, and count it."""
        self.move_to(self._step + 1)
        return self._lr

    def get_lr(self) -> float:
        """Return the learning rate that `get_next` returned last; 0 before the first."""
        return self._lr

    def get_step(self) -> int:
        """Return how many steps there were."""
        return self._step

    def at(self, step: int) -> float:
        """Return the learning rate of step `step`, 1 for the first."""
        return self._base * self._schedule.factor(step - 1)

    def move_to(self, step: int) -> None:
        """Make `step` the step that `get_next` returned last."""
        self._step = step
        self._lr = self.at(step) if step else 0.0


def _schedule(rate: LearningRate) -> Chain:
    """Return the factor on the base rate, for each step."""
    parts: list[Schedule] = []
    if rate.warmup_steps:
        parts.append(Warmup(rate.warmup_steps))
    if not rate.decay_start:
        return Chain((*parts, Hold(1)))
    num_constant = rate.decay_start - rate.warmup_steps
    if num_constant > 0:
        parts.append(Hold(num_constant))
    floor = rate.end_lr / rate.lr if rate.lr else 0.0
    if not rate.decay_steps:
        return Chain((*parts, Hold(1, floor)))
    decay = Polynomial(
        rate.decay_steps, rate.decay_power, floor=floor, first=1 + max(-num_constant, 0)
    )
    return Chain((*parts, decay))
