# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotbed.errors import MissingExtra
from hotbed.files import check_folder
from hotbed.training.run import Run
from hotbed.training.watching.endpoint import Reading
from hotbed.training.watching.readings import counters_of, readings
from hotbed.training.watching.windows import Windows

log = logging.getLogger("hotbed")


class TensorBoard:
    """Write TensorBoard event files every `every_steps` steps.

    They hold loss, metrics, windows, learning rates, tables and the state of a stream. A window is
    written when it closes, with the event time of its end as TensorBoard's "wall" time. On several
    ranks, the first writes the numbers of all. Show the files with `tensorboard --logdir DIR`.

    Raises:
        MissingExtra: TensorBoard is not installed; `pip install hotbed[tensorboard]`.
    """

    def __init__(self, log_dir: str | Path, every_steps: int = 50) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "TensorBoard: the package tensorboard is not installed. Run pip install "
                "hotbed[tensorboard]."
            ) from error
        self._make: Callable[[], Any] = lambda: SummaryWriter(str(log_dir))
        self._log_dir = log_dir
        self._writer: Any = None
        self._every = max(1, every_steps)
        self._window = -1

    def check_ready(self) -> None:
        """Raise ConfigError if no file can be written."""
        check_folder(self._log_dir, "TensorBoard.log_dir")

    def barrier(self, step: int, now: int | None) -> bool:
        return step % self._every == 0

    def on_step_end(self, run: Run) -> None:
        if run.step // self._every != (run.step - 1) // self._every:
            self._write(run)

    def on_epoch_end(self, run: Run) -> None:
        self._write(run)

    def on_fit_end(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, run: Run) -> None:
        (tables,) = run.learner.summed([counters_of(run)])
        if run.learner.shard.rank:
            return
        if self._writer is None:
            self._writer = self._make()
        for reading in readings(run, tables):
            if reading.name != "window_metric" and math.isfinite(reading.value):
                self._writer.add_scalar(_tag(reading), reading.value, run.step)
        newest = None
        for windows in run.callbacks.of(Windows):
            newest = windows.newest
        if newest is not None and newest.samples > self._window:
            self._window = newest.samples
            when = None if newest.end is None else newest.end / 1e6
            for name, value in newest.values.items():
                if math.isfinite(value):
                    self._writer.add_scalar(f"window/{name}", value, run.step, walltime=when)


def _tag(reading: Reading) -> str:
    """Return a tag: loss, valid.auc, lr/dense, tables/user/rows, stream/freshness_seconds.

    The metrics of a segment have segments/country/DE/auc. The disk of a folder has
    disk/read_bytes and the folder behind it.
    """
    labels = reading.labels
    if reading.name == "metric":
        return {"loss": "epoch/loss"}.get(labels["metric"], labels["metric"])
    if "table" in labels:
        table, *reason = labels.values()
        return "/".join(["tables", table, reading.name.removeprefix("table_"), *reason])
    if "segment" in labels:
        column, *rest = labels.values()
        return "/".join(["segments", column, *rest, *([] if len(rest) > 1 else ["rows"])])
    if "folder" in labels:
        return f"disk/{reading.name.removeprefix('disk_')}{labels['folder']}"
    name = {"learning_rate": "lr", "loss": "loss"}.get(reading.name, f"stream/{reading.name}")
    return "/".join([name, *labels.values()])
