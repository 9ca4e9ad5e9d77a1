# SPDX-License-Identifier: Apache-2.0
"""Callbacks that look on: history, progress bars, TensorBoard. Those that act are in `callbacks`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from hotbed.errors import MissingExtra
from hotbed.training.loop import Run

MAX_POINTS = 512


@dataclass
class Point:
    """State of training at one moment; `window` holds metrics since the last window, `tables` their statistics."""

    step: int
    epoch: int
    samples: int
    seconds: float
    time: int | None
    loss: float
    window: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, int]] = field(default_factory=dict)


class History:
    """What happened: `epochs` holds one dict an epoch, `points` at most 512 moments, thinned evenly as they grow.

    The first points are `every_steps` apart; the distance doubles whenever 512 are reached, so that a stream without
    end needs bounded memory. Windows of progressive metrics hold at least `window_samples`, and about a sixtieth of a
    stream of known length. `fit` returns it, and the report draws it.
    """

    def __init__(self, every_steps: int = 1, window_samples: int = 1000) -> None:
        self.epochs: list[dict[str, float]] = []
        self.points: list[Point] = []
        self.metrics: dict[str, float] = {}
        self._every, self._steps = max(1, every_steps), 0
        self._window_samples, self._window_began = window_samples, 0
        self._sum: Any = 0.0  # a tensor while steps are added: no wait for the device
        self._epoch_sum, self._epoch_steps, self._epoch_began = 0.0, 0, (0.0, 0)

    def on_epoch_begin(self, run: Run) -> None:
        self._epoch_sum, self._epoch_steps = 0.0, 0
        self._epoch_began = (time.perf_counter(), run.samples)

    def on_step_end(self, run: Run) -> None:
        if run.loss is not None:
            self._sum, self._steps = self._sum + run.loss.detach(), self._steps + 1
        if run.step % self._every == 0:
            self._record(run)

    def on_epoch_end(self, run: Run) -> None:
        if self._steps:
            self._record(run)
        run.window = {}
        if self.points:  # callbacks before this one may have evicted
            self.points[-1].tables = _stats(run)
        began, samples = self._epoch_began
        seconds = time.perf_counter() - began
        row: dict[str, float] = {"epoch": run.epoch + 1, "seconds": seconds}
        row["samples_per_second"] = (run.samples - samples) / max(seconds, 1e-9)
        if self._epoch_steps:
            row["loss"] = self._epoch_sum / self._epoch_steps
        self.epochs.append(row | run.metrics)

    def on_fit_end(self, run: Run) -> None:
        self.metrics = dict(run.metrics)

    def _record(self, run: Run) -> None:
        loss = float(self._sum) / self._steps if self._steps else float("nan")
        self._epoch_sum, self._epoch_steps = self._epoch_sum + float(self._sum), self._epoch_steps + self._steps
        self._sum, self._steps = 0.0, 0
        seconds = time.perf_counter() - run.began
        window = self._roll(run)
        self.points.append(Point(run.step, run.epoch, run.samples, seconds, run.now, loss, window, _stats(run)))
        if len(self.points) >= MAX_POINTS:  # windows grow with the distance of points
            self.points = _halve(self.points)
            self._every *= 2

    def _roll(self, run: Run) -> dict[str, float]:
        roll = getattr(run.observer, "roll", None)
        held = run.samples - self._window_began
        wanted = max(self._window_samples, run.samples // max(run.step, 1) * (run.total_steps or 0) // 60)
        if roll is None or held < wanted:
            return {}
        self._window_began = run.samples
        run.window = dict(roll())
        return run.window


def _stats(run: Run) -> dict[str, dict[str, int]]:
    return {name: dict(table.stats) for name, table in run.tables.items()}


def _halve(points: list[Point]) -> list[Point]:
    """Every second point; the loss of the one before is averaged into it, and its window kept where it has none."""
    for before, kept in zip(points[::2], points[1::2], strict=False):
        kept.loss = (before.loss + kept.loss) / 2
        kept.window = kept.window or before.window
    return points[1::2]


class ProgressBar:
    """A bar an epoch with time left, samples/s, loss and newest metrics; one plain line where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown = self._began = 0.0
        self._samples = self._step = 0

    def on_epoch_begin(self, run: Run) -> None:
        self._began, self._samples, self._step, self._shown = time.perf_counter(), run.samples, run.step, 0.0
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[rate]}"),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        title = f"epoch {run.epoch + 1}/{run.epochs}" if run.epochs > 1 or run.observer is None else "stream"
        self._task = self._bar.add_task(title, total=run.total_steps, rate="", values="")
        self._bar.start()

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        if self._bar is not None and now - self._shown > 0.1:
            self._shown = now
            self._draw(self._bar, run)

    def on_epoch_end(self, run: Run) -> None:
        if self._bar is not None:
            self._draw(self._bar, run)
            self._bar.stop()
            self._bar = None
        else:
            line = f"epoch {run.epoch + 1}/{run.epochs}  {self._rate(run)}  {self._values(run)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def on_fit_end(self, run: Run) -> None:
        if self._bar is not None:  # training ended by an error
            self._bar.stop()
            self._bar = None

    def _draw(self, bar: Progress, run: Run) -> None:
        done = run.step - self._step
        bar.update(self._task, completed=done, rate=self._rate(run), values=self._values(run))

    def _rate(self, run: Run) -> str:
        rate = (run.samples - self._samples) / max(time.perf_counter() - self._began, 1e-9)
        return f"{rate:,.0f} samples/s"

    def _values(self, run: Run) -> str:
        values = {f"{name} now": value for name, value in run.window.items() if name != "loss"} | run.metrics
        if run.loss is not None:
            values = {"loss": float(run.loss.detach())} | values
        return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


class TensorBoard:
    """Writes loss, metrics, learning rates and table sizes as TensorBoard event files every `every_steps` steps.

    Needs the extra: `pip install hotbed[tensorboard]`, else MissingExtra. Show them with `tensorboard --logdir DIR`.
    """

    def __init__(self, log_dir: str | Path, every_steps: int = 50) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "TensorBoard needs tensorboard — it is not installed — pip install hotbed[tensorboard]"
            ) from error
        self._writer: Any = SummaryWriter(str(log_dir))
        self._every = max(1, every_steps)

    def on_step_end(self, run: Run) -> None:
        if run.step % self._every == 0:
            self._write(run)

    def on_epoch_end(self, run: Run) -> None:
        self._write(run)

    def on_fit_end(self, run: Run) -> None:
        self._writer.close()

    def _write(self, run: Run) -> None:
        values = dict(run.metrics)
        if run.loss is not None:
            values["loss"] = float(run.loss.detach())
        for name, optimizer in (("dense", run.learner.dense), ("tables", run.learner.sparse)):
            if optimizer is not None and optimizer.param_groups:
                values[f"lr/{name}"] = float(optimizer.param_groups[0]["lr"])
        for table, stats in ((name, table.stats) for name, table in run.tables.items()):
            values |= {f"tables/{table}/{key}": float(value) for key, value in stats.items()}
        for name, value in values.items():
            self._writer.add_scalar(name, value, run.step)
