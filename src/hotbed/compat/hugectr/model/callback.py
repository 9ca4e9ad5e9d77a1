# SPDX-License-Identifier: Apache-2.0
"""Training callbacks: the calls that `fit` makes to a solver's `training_callbacks`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TrainingCallback"]


class TrainingCallback:
    """Base of training callbacks; define the methods that you need.

    Iterations count from 0, as HugeCTR counts them here. Callbacks are called in iteration mode
    only (`repeat_dataset=True`).

    Example:
        >>> class StopAt(hugectr.TrainingCallback):
        ...     def on_eval_end(self, current_iter, eval_results):
        ...         return eval_results["AUC"] > 0.8
    """

    def on_training_start(self) -> None:
        """Act before the first iteration."""

    def on_training_end(self, current_iter: int) -> None:
        """Act after the last iteration; a method without `current_iter` is called without it."""

    def on_eval_start(self, current_iter: int) -> bool:
        """Act before an evaluation; what it returns is not read, as in HugeCTR."""
        return False

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        """Act on the metrics by name; return True to end training."""
        return False


def tell_end(callbacks: Sequence[Any], iteration: int) -> None:
    """Call `on_training_end` of each callback, in the form that it has."""
    for callback in callbacks:
        takes = inspect.signature(callback.on_training_end).parameters
        callback.on_training_end(*[iteration][: len(takes)])
