# SPDX-License-Identifier: Apache-2.0
"""What decides a run beside its model, as plain values, which ranks compare."""

from __future__ import annotations

from typing import Any

from hotbed.training.online import StreamLimits
from hotbed.training.run import Callbacks, Goal
from hotbed.training.step.compared import compared
from hotbed.training.step.scorer import Progressive
from hotbed.training.watching.history import History
from hotbed.training.watching.progress import ProgressBar
from hotbed.training.watching.prometheus import Prometheus

_OF_EACH_RUN = (StreamLimits, History, ProgressBar, Prometheus)
"""Callbacks that every run has, or that ask nothing of other ranks."""


def settings_of_run(
    goal: Goal, callbacks: Callbacks, observer: Progressive | None
) -> dict[str, Any]:
    """Return what all ranks must have alike before a training, beside the model."""
    of_hotbed = [
        callback
        for callback in callbacks.all
        if any(kind.__module__.startswith("hotbed.") for kind in type(callback).__mro__)
        and not isinstance(callback, _OF_EACH_RUN)
        and not getattr(callback, "is_of_program", False)
    ]
    limits = callbacks.of(StreamLimits)
    settings: dict[str, Any] = {
        "a stream": goal.online,
        "the numbers of the first and the last epoch": (goal.first_epoch, goal.end_epoch - 1),
        "batches of an epoch": goal.epoch_steps,
        "batches ahead": goal.depth,
        "validation data": goal.valid is not None,
        "scores before a batch is learned": None if observer is None else observer.by_training,
        "max_steps": [limit.max_steps for limit in limits],
        "callbacks": [type(callback).__name__ for callback in of_hotbed],
    }
    for number, callback in enumerate(of_hotbed):
        settings[f"callback {number}"] = compared(callback)
    return settings
