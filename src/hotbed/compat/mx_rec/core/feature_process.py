# SPDX-License-Identifier: Apache-2.0
"""EvictHook: when stale rows leave the tables."""

from __future__ import annotations

import logging

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.embedding.table import Table
from hotbed.training.evict import EvictionSchedule

__all__ = ["EvictHook"]

log = logging.getLogger("hotbed.compat.mx_rec")

MOST = 2**31 - 1


class EvictHook:
    """Removes stale rows at intervals of seconds, of steps, or of both.

    The loop calls `after_run` after each training step. Nothing is removed in evaluation.

    Args:
        evict_enable: whether anything is removed.
        evict_time_interval: seconds of this machine's clock between two evictions; None = not by
            seconds.
        evict_step_interval: training steps between two evictions; None = not by steps.
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
                checks.whole_number(f"EvictHook: {name}", value, 1, MOST)
        self.evict_enable = evict_enable
        self.evict_time_interval = evict_time_interval
        self.evict_step_interval = evict_step_interval
        self.schedule: EvictionSchedule | None = None
        owner = framework.current()
        owner.hooks.append(self)
        if owner.pipeline is not None:
            self.begin(owner.pipeline.tables)

    def begin(self, tables: dict[str, Table]) -> None:
        """Make the schedule; step 8 calls it."""
        if self.evict_enable:
            self.schedule = EvictionSchedule(
                tables,
                self.evict_step_interval,
                self.evict_time_interval,
                clock="wall",
            )

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether rows are removed after this step."""
        return self.schedule is not None and self.schedule.barrier(step, now)

    def after_run(self, global_step: int) -> None:
        """Remove stale rows if it is time to, after training step `global_step`."""
        if self.schedule is not None:
            pipeline = framework.current().started("EvictHook.after_run")
            self.schedule.step(global_step, pipeline.now)
