# SPDX-License-Identifier: Apache-2.0
"""History: what happened in training, in bounded memory. It is a callback that looks on; the report
draws it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotbed.metrics.reliability import Reliability
from hotbed.training.watching.columns import Tables, columns, counters, rows_of, tables_of
from hotbed.training.watching.readings import statistics
from hotbed.training.watching.window_log import Window

MAX_POINTS = 512
WALL = ("seconds", "samples_per_second")
"""What the clock measured of an epoch; no content digest covers it."""


@dataclass
class Point:
    """State of training at one moment; `window` holds metrics since the last window, `tables` their
    statistics.

    `seconds`: since training began, or since the restart before it.
    """

    step: int
    epoch: int
    samples: int
    seconds: float
    time: int | None
    loss: float
    window: dict[str, float] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)


class ReliabilityWatch:
    """Keeps a `Reliability` of each label, by name, while an observer predicts probabilities; a
    callback that looks on.

    A single label has the name "".
    """

    def __init__(self) -> None:
        self.curves: dict[str, Reliability] = {}

    def on_predicted(self, run: Any) -> None:
        scorer = getattr(run.observer, "total", run.observer)
        if self not in run.observer.watchers and getattr(scorer, "gives_probabilities", False):
            run.observer.watchers.append(self)

    def watch(self, outputs: tuple[Any, ...], example: Any) -> None:
        """Take the scores of a batch: (loss, prediction, label) as NumPy arrays."""
        _, prediction, label = outputs
        if label is None:
            return
        weight = None if example.weight is None else np.asarray(example.weight.cpu())
        labels = label if isinstance(label, Mapping) else {"": label}
        for name, values in labels.items():
            probability = prediction[name] if isinstance(prediction, Mapping) else prediction
            self.curves.setdefault(name, Reliability()).update(probability, values, weight)

    def state(self) -> dict[str, Any]:
        """The curve of each label."""
        return {name: curve.state() for name, curve in self.curves.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.curves = {}
        for name, curve in state.items():
            self.curves[name] = Reliability()
            self.curves[name].load_state(curve)


class History:
    """What happened in training, in bounded memory.

    `epochs` holds one dict an epoch, `points` at most 512 moments, thinned evenly as they grow.

    The first points are `every_steps` apart; the distance doubles whenever 512 are reached, so that
    a stream without end needs bounded memory. Windows of progressive metrics hold at least
    `window_samples`, and about a sixtieth of a stream of known length. Where the callback `Windows`
    cuts the stream, `windows` holds its windows, and `compared` those of its baseline; add others
    by name, and they are drawn beside them. `reliability` holds a
    `hotbed.metrics.reliability.Reliability` of the predictions before learning ("") and of the last
    validation ("valid"), followed by the label's name where there are several. `fit` and
    `online_train` return the history, and the report draws it.
    """

    def __init__(self, every_steps: int = 1, window_samples: int = 1000) -> None:
        self.epochs: list[dict[str, float]] = []
        self.points: list[Point] = []
        self.metrics: dict[str, float] = {}
        self.windows: list[Window] = []
        self.compared: dict[str, list[Window]] = {}
        self.reliability: dict[str, Reliability] = {}
        self._watch = ReliabilityWatch()
        self._label_sum: Any = 0.0
        self._labels = 0
        self._every = max(1, every_steps)
        self._steps = 0
        self._window_samples = window_samples
        self._window_began = 0
        self._sum: Any = 0.0  # a tensor while steps are added: no wait for the device
        self._epoch_sum = 0.0
        self._epoch_steps = 0
        self._epoch_began = (0.0, 0)
        self._ended = False
        self._whole_epochs = 0  # rows of `epochs` that are no mere look at a stream

    def __repr__(self) -> str:
        steps = self.points[-1].step if self.points else 0
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return f"History({len(self.epochs)} epochs, {steps:,} steps: {values or 'no metrics'})"

    @property
    def epoch_loss(self) -> float | None:
        """Mean training loss of the epoch under way; None before its first step."""
        steps = self._epoch_steps + self._steps
        return (self._epoch_sum + float(self._sum)) / steps if steps else None

    def on_fit_begin(self, run: Any) -> None:
        self._epoch_sum = 0.0
        self._epoch_steps = 0

    def on_epoch_begin(self, run: Any) -> None:
        self._epoch_began = (time.perf_counter(), run.samples)

    def on_predicted(self, run: Any) -> None:
        self._watch.on_predicted(run)

    def on_step_end(self, run: Any) -> None:
        if run.loss is not None:
            self._sum = self._sum + run.loss.detach()
            self._steps = self._steps + 1
        if run.example is not None and hasattr(run.example.labels, "sum"):
            self._label_sum = self._label_sum + run.example.labels.sum()
            self._labels += run.example.num_samples
        if run.step % self._every == 0:
            self._record(run)

    def on_epoch_end(self, run: Any) -> None:
        if run.windows is not None:
            self.windows = run.windows.points
            self.compared |= run.windows.baselines
        if run.online:  # only a look: a stream that is stopped here goes on as if it had not been
            if self._steps:
                self.points.append(
                    self._point(
                        run, dict(run.observer.window()) if run.observer is not None else {}
                    )
                )
                self._ended = True
        else:
            if self._steps:
                self._record(run)
            run.window = {}
            if self.points:  # callbacks before this one may have evicted
                self.points[-1].tables = statistics(run)
        began, samples = self._epoch_began
        seconds = time.perf_counter() - began
        row: dict[str, float] = {"epoch": run.epoch + 1, "seconds": seconds}
        row["samples_per_second"] = (run.samples - samples) / max(seconds, 1e-9)
        if self.epoch_loss is not None:
            row["loss"] = self.epoch_loss
        self.epochs.append(row | run.metrics)
        if not run.online:
            self._whole_epochs = len(self.epochs)
            self._epoch_sum = 0.0
            self._epoch_steps = 0

    def on_fit_end(self, run: Any) -> None:
        self.metrics = dict(run.metrics)
        valid = {f"valid.{name}".rstrip("."): curve for name, curve in run.reliability.items()}
        self.reliability = self._watch.curves | valid

    @property
    def mean_label(self) -> float:
        """Mean of the labels since training began, or since the restart before it; nan for several
        labels or none.
        """
        return float(self._label_sum) / self._labels if self._labels else math.nan

    def state(self) -> dict[str, Any]:
        """Points and sums, as JSON values and NumPy arrays; `wall_…` is what no content digest
        covers.
        """
        points = self.points[:-1] if self._ended else self.points
        numbers = [[p.step, p.epoch, p.samples, p.time is not None, p.time or 0] for p in points]
        epochs = self.epochs[: self._whole_epochs]
        wall = [{key: row[key] for key in WALL if key in row} for row in epochs]
        return {
            "epoch": np.array([self._epoch_sum, self._epoch_steps], np.float64),
            "epochs": columns(
                [{key: row[key] for key in row if key not in WALL} for row in epochs]
            ),
            "wall_epochs": columns(wall),
            "every": self._every,
            "steps": self._steps,
            "sum": np.array([float(self._sum)]),
            "window_began": self._window_began,
            "numbers": np.array(numbers, np.int64).reshape(-1, 5),
            "loss": np.array([p.loss for p in points], np.float64),
            "wall_seconds": np.array([p.seconds for p in points], np.float64),
            "windows": columns([p.window for p in points]),
            "tables": counters([p.tables for p in points]),
            "reliability": self._watch.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._every = int(state["every"])
        self._steps = int(state["steps"])
        self._sum = float(np.asarray(state["sum"])[0])
        self._window_began = int(state["window_began"])
        self._ended = False
        if "epoch" in state:  # absent from states of earlier builds
            epoch_sum, epoch_steps = np.asarray(state["epoch"]).tolist()
            self._epoch_sum = epoch_sum
            self._epoch_steps = int(epoch_steps)
            pairs = zip(rows_of(state["epochs"]), rows_of(state["wall_epochs"]), strict=True)
            self.epochs = [row | wall for row, wall in pairs]
            self._whole_epochs = len(self.epochs)
        self._watch.load_state(state.get("reliability", {}))
        columns_ = (
            np.asarray(state[name]).tolist() for name in ("numbers", "loss", "wall_seconds")
        )
        rows = zip(*columns_, rows_of(state["windows"]), tables_of(state["tables"]), strict=True)
        self.points = [
            Point(step, epoch, samples, seconds, when if timed else None, loss, window, tables)
            for (step, epoch, samples, timed, when), loss, seconds, window, tables in rows
        ]

    def _record(self, run: Any) -> None:
        self.points.append(self._point(run, self._roll(run)))
        self._epoch_sum = self._epoch_sum + float(self._sum)
        self._epoch_steps = self._epoch_steps + self._steps
        self._sum = 0.0
        self._steps = 0
        if len(self.points) >= MAX_POINTS:  # windows grow with the distance of points
            self.points = _halve(self.points)
            self._every *= 2

    def _point(self, run: Any, window: dict[str, float]) -> Point:
        loss = float(self._sum) / self._steps if self._steps else float("nan")
        seconds = time.perf_counter() - run.began
        return Point(
            run.step, run.epoch, run.samples, seconds, run.now, loss, window, statistics(run)
        )

    def _roll(self, run: Any) -> dict[str, float]:
        roll = getattr(run.observer, "roll", None)
        held = run.samples - self._window_began
        wanted = max(
            self._window_samples, run.samples // max(run.step, 1) * (run.total_steps or 0) // 60
        )
        if roll is None or held < wanted:
            return {}
        self._window_began = run.samples
        values: dict[str, float] = dict(roll())
        if run.windows is None:
            run.window = values
        return values


def _halve(points: list[Point]) -> list[Point]:
    """Every second point; the loss of the one before is averaged into it, and its window kept where
    it has none.
    """
    for before, kept in zip(points[::2], points[1::2], strict=False):
        kept.loss = (before.loss + kept.loss) / 2
        kept.window = kept.window or before.window
    return points[1::2]
