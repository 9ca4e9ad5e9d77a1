# SPDX-License-Identifier: Apache-2.0
"""EvictHook: when stale rows leave the tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.checks import MOST_INT, boolean
from hotbed.compat.mx_rec.errors import CallError
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.parallel import at
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

__all__ = ["EvictHook"]

log = logging.getLogger("hotbed.compat.mx_rec")


class EvictHook:
    """Removes stale rows at intervals of seconds, of steps, or of both.

    The loop calls `after_run` after each training step. In evaluation and prediction nothing is
    removed, which is logged once. A row is stale by the times of the data; the intervals are those
    of this machine's clock and of the training steps.

    Args:
        evict_enable: whether anything is removed.
        evict_time_interval: seconds of this machine's clock between two evictions; None = not by
            seconds.
        evict_step_interval: training steps between two evictions; None = not by steps.

    Raises:
        ConfigError: an interval is out of its range, or `evict_enable` is not a Boolean.
    """

    def __init__(
        self,
        evict_enable: bool = False,
        evict_time_interval: int | None = 24 * 60 * 60,
        evict_step_interval: int | None = None,
    ) -> None:
        for name, value in (
            ("evict_time_interval", evict_time_interval),
            ("evict_step_interval", evict_step_interval),
        ):
            if value is not None:
                checks.whole_number(f"EvictHook: {name}", value, 1, MOST_INT)
        self.evict_enable = boolean("EvictHook: evict_enable", evict_enable)
        self.evict_time_interval = evict_time_interval
        self.evict_step_interval = evict_step_interval
        self.schedule: EvictionSchedule | None = None
        self._owner = framework.current()
        self._step = 0  # the training step that it ran after
        self._was_told = False  # that it does nothing in evaluation
        self._owner.hooks.append(self)
        if self._owner.pipeline is not None:
            self.begin(self._owner.pipeline.tables)

    @property
    def decides_by_clock(self) -> bool:
        """Whether the clock of this machine decides when it evicts."""
        return self.evict_enable and self.evict_time_interval is not None

    @property
    def intervals(self) -> list[int | None]:
        """The seconds and the steps between two evictions; [] if it removes nothing."""
        if not self.evict_enable:
            return []
        return [self.evict_time_interval, self.evict_step_interval]

    def begin(self, tables: Mapping[str, Table]) -> None:
        """Make the schedule; step 8 calls it."""
        if self.evict_enable:
            self.schedule = EvictionSchedule(
                tables,
                self.evict_step_interval,
                self.evict_time_interval,
                clock="wall",
                wall_clock=self._owner.clock,
            )
            if self._owner.ranks is not None:
                self.schedule.summed = self._owner.ranks.summed

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether rows are removed after this step."""
        return self.schedule is not None and self.schedule.barrier(step, now)

    @at("EvictHook.after_run")
    def after_run(self, global_step: int | None = None) -> None:
        """Remove stale rows if it is time to, after a training step.

        Args:
            global_step: the number of the step, counted from 1 over all restorations. None = the
                number of training batches so far, which it must be.

        Raises:
            ConfigError: the loop counts its steps otherwise.
            CallError: step 8 has not run.
        """
        pipeline = self._owner.started("EvictHook.after_run")
        if self.schedule is None:
            return
        progress = pipeline.progress
        # a batch of evaluation between the training step and this call does not take the step away
        is_of_step = pipeline.has_trained and not pipeline.is_evaluating
        if not is_of_step or progress.step == self._step:
            if not pipeline.is_training and not self._was_told:
                log.info("EvictHook: rows are removed in training only, not in evaluation")
                self._was_told = True
            return
        if global_step not in (None, progress.step):
            raise ConfigError(
                f"EvictHook.after_run: this is training step {progress.step}, got "
                f"global_step={global_step}. Count training batches from 1, and after a "
                "restoration from the restored step on."
            )
        self.schedule.step(progress.step, progress.newest())
        self._step = progress.step

    def check_done(self, caller: str, step: int) -> None:
        """Raise CallError if it has not run after this step."""
        if self.schedule is not None and self._step < step:
            raise CallError(
                f"{caller}: a step is saved when it is done, got an EvictHook that did not run "
                f"after step {step}. Call its after_run(global_step) first, after each step."
            )

    def state(self) -> dict[str, Any] | None:
        """Return what a resumed program needs of it; None if it removes nothing."""
        return None if self.schedule is None else self.schedule.state()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` returned."""
        if self.schedule is not None and state is not None:
            self.schedule.load_state(state)
            self._step = state["step"]
