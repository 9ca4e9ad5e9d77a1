# SPDX-License-Identifier: Apache-2.0
"""ProgressBar: what a run is doing, in a terminal or as lines."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

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

from hotbed.logs import logs_as_json
from hotbed.training.run import Run
from hotbed.training.watching.readings import observations

log = logging.getLogger("hotbed")


class ProgressBar:
    """Show a progress bar for each epoch, with time left, samples/s, loss and newest metrics.

    Without a terminal it prints lines: one an epoch, and one every `every_seconds` seconds of a
    stream, with its event time, freshness and lag. They are log lines where these are JSON.
    """

    def __init__(self, console: Console | None = None, every_seconds: float = 60.0) -> None:
        self._console = console or Console()
        self._every = every_seconds
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown = 0.0
        self._began = 0.0
        self._samples = 0
        self._step = 0

    def on_epoch_begin(self, run: Run) -> None:
        self._began = time.perf_counter()
        self._samples = run.samples
        self._step = run.step
        self._shown = 0.0
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
        self._task = self._bar.add_task(_title(run), total=run.goal.epoch_steps, rate="", values="")
        self._bar.start()

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        if self._bar is not None:
            if now - self._shown > 0.1:
                self._shown = now
                self._draw(self._bar, run)
        elif run.online and now - max(self._shown, self._began) >= self._every:
            self._shown = now
            self._print(run)

    def on_idle(self, run: Run) -> None:
        self.on_step_end(run)

    def on_epoch_end(self, run: Run) -> None:
        if self._bar is not None:
            self._draw(self._bar, run)
            self._bar.stop()
            self._bar = None
        else:
            self._print(run)

    def on_fit_end(self, run: Run) -> None:
        if self._bar is not None:  # training ended by an error
            self._bar.stop()
            self._bar = None

    def _print(self, run: Run) -> None:
        parts = [_title(run), self._rate(run), self._values(run)]
        if run.online:
            parts.insert(1, f"step {run.step:,}")
        line = "  ".join(part for part in parts if part)
        if logs_as_json():
            log.info("%s", line)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _draw(self, bar: Progress, run: Run) -> None:
        done = run.step - self._step
        bar.update(self._task, completed=done, rate=self._rate(run), values=self._values(run))

    def _rate(self, run: Run) -> str:
        rate = (run.samples - self._samples) / max(time.perf_counter() - self._began, 1e-9)
        return f"{rate:,.0f} samples/s"

    def _values(self, run: Run) -> str:
        values = {f"{name} now": value for name, value in run.window.items() if name != "loss"}
        values |= run.metrics
        if run.loss is not None:  # of this batch; at the end of an epoch, its mean
            values.pop("loss", None)
            values = {"loss": float(run.loss.detach())} | values
        parts = [f"{name} {value:.4f}" for name, value in values.items()]
        if run.online:
            parts += _stream_facts(run)
        return "  ".join(parts)


def _title(run: Run) -> str:
    single = run.goal.end_epoch - run.goal.first_epoch == 1
    streamed = run.online or (single and run.observer is not None)
    return "stream" if streamed else f"epoch {run.epoch + 1}/{run.goal.end_epoch}"


def _stream_facts(run: Run) -> list[str]:
    """Return the event time of a stream, its freshness and its lag, as far as there are any."""
    values = observations(run)
    facts = []
    if run.now is not None:
        event_time = datetime.fromtimestamp(run.now / 1e6, UTC)
        facts.append(f"event time {event_time:%Y-%m-%d %H:%M:%S}")
    if 0 <= values.get("freshness_seconds", -1.0) < 86_400:
        facts.append(f"fresh {values['freshness_seconds']:.1f} s")
    if "lag_rows" in values:
        facts.append(f"lag {values['lag_rows']:,.0f} rows")
    return facts
