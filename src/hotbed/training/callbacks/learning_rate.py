# SPDX-License-Identifier: Apache-2.0
"""LearningRate: learning rates by a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hotbed.config import described
from hotbed.optim.schedule import Chain, Schedule
from hotbed.training.run import Run

log = logging.getLogger("hotbed")


@described
class LearningRate:
    """Set the learning rates before each step by a schedule, for dense parameters and tables.

    Args:
        schedule: a value of `hotbed.optim.schedule`, such as `Warmup(1000)`, or a function that
            makes a torch scheduler from an optimizer: `lambda optimizer:
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)`.
    """

    def __init__(self, schedule: Schedule | Chain | Callable[[torch.optim.Optimizer], Any]) -> None:
        self._make = schedule.attach if isinstance(schedule, (Schedule, Chain)) else schedule
        self._schedulers: list[Any] = []
        self._made: list[dict[str, Any]] = []  # settings of the schedulers when they were made
        self._step = 0

    def on_fit_begin(self, run: Run) -> None:
        self._schedulers = []
        for optimizer in (run.learner.dense, run.learner.sparse):
            if optimizer is not None:
                self._schedulers.append(self._make(optimizer))
        self._made = [_settings(scheduler) for scheduler in self._schedulers]
        self._step = run.step

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        for _ in range(run.step - self._step):
            for scheduler in self._schedulers:
                scheduler.step()
        self._step = run.step

    def state(self) -> dict[str, Any]:
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        for state in states:
            if "lr_lambdas" in state:  # functions belong to the code, not to a state
                state["lr_lambdas"] = [None] * len(state["lr_lambdas"])
        return {"step": self._step, "schedulers": states, "made": self._made}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]
        before = state.get("made", self._made)  # absent from states of earlier builds
        if [item["kind"] for item in before] != [item["kind"] for item in self._made]:
            log.info("LearningRate: another kind of schedule begins at step %d", self._step)
            return
        if before != self._made:
            log.info("LearningRate: %s stay, received %s", before, self._made)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            # a resume may change the rates that a schedule starts from
            state_dict = {key: value for key, value in saved.items() if key != "base_lrs"}
            scheduler.load_state_dict(state_dict)


def _settings(scheduler: Any) -> dict[str, Any]:
    """Return the plain settings of a scheduler that was just made; rates are the optimizer's."""
    plain: dict[str, Any] = {"kind": type(scheduler).__name__}
    for name, value in scheduler.state_dict().items():
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
            plain[name] = value
    return plain
