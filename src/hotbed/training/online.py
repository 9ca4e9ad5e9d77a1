# SPDX-License-Identifier: Apache-2.0
"""Follow a stream: what `RecModel.online_train` adds to the loop."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hotbed import checks
from hotbed.memory_limit import warning_of_memory
from hotbed.optim.modes import in_train_mode
from hotbed.signals import ended_by_signals
from hotbed.training.loop import measure, pass_over, reported
from hotbed.training.run import Run

if TYPE_CHECKING:
    from hotbed.training.watching.history import History

log = logging.getLogger("hotbed")


def follow(run: Run, history: History) -> None:
    """Learn a stream until it ends, is stopped or fails.

    SIGINT and SIGTERM end it after the step under way; a second signal ends it at once.
    """
    learner = run.learner
    run.callbacks("on_fit_begin", run)
    with reported(run), warning_of_memory():
        with ended_by_signals(run.stop):
            run.callbacks("on_stream_begin", run)
            run.callbacks("on_epoch_begin", run)
            with in_train_mode(learner.network):
                pass_over(run.dataset, run, learner)
            measure(run, history)
            run.callbacks("on_stream_end", run)  # saves the last state before callbacks look back
            run.callbacks("on_epoch_end", run)
        if run.stopped:
            log.info("the stream was stopped at step %d: %s", run.step, run.stopped)


class StreamLimits:
    """End training after `max_steps` steps or `max_seconds` seconds.

    Steps before a resumption count. Seconds are those of this call.
    """

    def __init__(self, max_steps: int | None, max_seconds: float | None) -> None:
        advice = "Give a number, or None for no limit."
        if max_steps is not None:
            checks.whole_number("max_steps", max_steps, 0, advice=advice)
        checks.at_least("max_seconds", max_seconds, 0, advice)
        self.max_steps = max_steps
        self._seconds = max_seconds
        self._until = 0.0

    def on_epoch_begin(self, run: Run) -> None:
        self._until = time.monotonic() + (self._seconds or 0.0)
        if self.max_steps is not None and run.step >= self.max_steps:
            run.stop(f"{run.step} steps")

    def barrier(self, step: int, now: int | None) -> bool:
        return self.max_steps is not None and step >= self.max_steps

    def on_step_end(self, run: Run) -> None:
        if self.max_steps is not None and run.step >= self.max_steps:
            run.stop(f"{run.step} steps")
        self.on_idle(run)

    def on_idle(self, run: Run) -> None:
        if self._seconds is not None and time.monotonic() >= self._until:
            run.stop(f"{self._seconds:g} seconds")
