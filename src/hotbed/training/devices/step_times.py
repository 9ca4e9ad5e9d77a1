# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes on a device, and what would help: the line at the end of a fit."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass

from rich.console import Console

from hotbed.embedding.device import link_to
from hotbed.embedding.native import num_threads
from hotbed.logs import logs_as_json
from hotbed.training.run import Run
from hotbed.training.trained import TrainedModel

log = logging.getLogger("hotbed")

MOST_STEPS = 512
"""The last steps, of which the median counts."""
LEAST_STEPS = 4
EFFICIENCY = 0.8
"""Of twice the threads, in the native work on rows."""
OVERLAPS = 1.2
"""How many times as long as its longest part a step must take for an overlap to be worth it."""


@dataclass(frozen=True)
class StepParts:
    """Where the time of a training step on a device went: seconds, medians over the last steps.

    Parts that overlap add up to more than the step.

    Attributes:
        step: from the end of the step before to its own end.
        rows: in which the host mapped ids, pooled rows, summed their gradients and updated them.
        copies: up and down.
        device: the forward and backward pass of the network.
        threads: of the native core, which does the work on rows.
        cores: that this process may use.
    """

    step: float
    rows: float
    copies: float
    device: float
    threads: int = 1
    cores: int = 1

    @property
    def rest(self) -> float:
        """Everything else: reading, Python, launches, the dense optimizer, callbacks."""
        return max(self.step - self.rows - self.copies - self.device, 0.0)

    @property
    def limit(self) -> str:
        """The longest part: "rows", "copies", "device" or "rest"."""
        parts = {name: getattr(self, name) for name in ("rows", "copies", "device", "rest")}
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        parts = [f"{name} {1e3 * getattr(self, name):.2f}" for name in ("rows", "copies", "device")]
        text = f"a step took {1e3 * self.step:.2f} ms: {', '.join(parts)}, the rest "
        return f"{text}{1e3 * self.rest:.2f}. {self._limit_explained()}{self._overlap()}"

    def _limit_explained(self) -> str:
        if self.limit == "rows":
            return f"The work on rows limits: {self._with_more_threads()}."
        if self.limit == "device":
            return (
                'The device limits: rows on the host suffice. amp_level="O2" or a smaller network '
                "shortens it."
            )
        if self.limit == "copies":
            return (
                "The copies limit: narrower tables send less; hotbed doctor --device measures the "
                "bandwidth."
            )
        return "The rest limits: larger batches and hb.Ahead(train) shorten it."

    def _with_more_threads(self) -> str:
        if 2 * self.threads > self.cores:
            return f"a host with more cores than {self.cores} shortens it"
        shorter = self.step - self.rows * (1 - 1 / (2 * EFFICIENCY))
        factor = self.step / max(shorter, 1e-9)
        return (
            f"hb.set_num_threads({2 * self.threads}) instead of {self.threads} gives about "
            f"{factor:.1f}x"
        )

    def _overlap(self) -> str:
        """Return what grains may give: the host then pools and sums while the device computes."""
        least = max(self.rows + self.rest, self.copies, self.device, 1e-9)
        if self.step < OVERLAPS * least:
            return ""
        return f" With grains the parts overlap: at best {self.step / least:.1f}x."


class DeviceTimes:
    """A callback that measures where the time of steps on a device goes, and says it at the end.

    Args:
        shows: whether it is printed, or else logged.

    Attributes:
        times: at the end of training; None after too few steps.
    """

    runs_last = True
    reads_features = False

    def __init__(self, *, shows: bool) -> None:
        self.times: StepParts | None = None
        self._shows = shows and not logs_as_json()
        self._steps: deque[tuple[float, ...]] = deque(maxlen=MOST_STEPS)
        self._before: tuple[float, ...] = ()

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_epoch_begin(self, run: Run) -> None:
        self._before = _moment(run)

    def on_step_end(self, run: Run) -> None:
        now = _moment(run)
        self._steps.append(tuple(b - a for a, b in zip(self._before, now, strict=True)))
        self._before = now

    def on_fit_end(self, run: Run) -> None:
        if len(self._steps) < LEAST_STEPS:
            return
        parts = zip(*self._steps, strict=True)
        step, rows, copies, device = (statistics.median(part) for part in parts)
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        self.times = StepParts(step, rows, copies, device, num_threads(), cores)
        line = f"{run.learner.device}: {self.times}"
        if self._shows:
            Console().print(line, highlight=False, soft_wrap=True, markup=False)
        else:
            log.info("%s", line)


def device_times(model: TrainedModel, *, shows: bool) -> list[DeviceTimes]:
    """Return what measures the steps of a network whose rows travel to a device; else nothing."""
    travels = model.tables and model.learner.device.type != "cpu"
    return [DeviceTimes(shows=shows)] if travels else []


def _moment(run: Run) -> tuple[float, ...]:
    """Return the time, and the seconds of rows, copies and the device so far."""
    times = link_to(run.learner.device).times
    return (time.perf_counter(), times.rows, times.copies, times.device)
