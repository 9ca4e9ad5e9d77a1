# SPDX-License-Identifier: Apache-2.0
"""History: the course of a training in bounded memory, as a callback; the report draws it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotbed.metrics.reliability import Reliability
from hotbed.parallel import RankWork
from hotbed.training.columns import Tables, columns, rows_of
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.devices.step_times import StepParts
from hotbed.training.run import Kept, Run
from hotbed.training.step.learner import SelfUpdating, StepLearner
from hotbed.training.step.scorer import Progressive, watch_scores
from hotbed.training.watching.baselines import Baselines, Figures, findings
from hotbed.training.watching.points import Point, points_of, state_of_points
from hotbed.training.watching.readings import disk_totals, evictions, statistics
from hotbed.training.watching.segments import BySegment, SegmentTables, segment_findings
from hotbed.training.watching.window_log import Window
from hotbed.training.watching.windows import Windows

MAX_POINTS = 512
WALL = ("seconds", "samples_per_second")
"""The values of an epoch that the clock measures; no content digest covers them."""


class ReliabilityWatch:
    """Compare predicted probabilities with labels while a stream is predicted.

    Attributes:
        curves: a `Reliability` for each label; a single label has the name "".
    """

    def __init__(self) -> None:
        self.curves: dict[str, Reliability] = {}

    def on_predicted(self, run: Run) -> None:
        watch_scores(run.observer, self, lambda scorer: scorer.gives_probabilities)

    def watch(self, outputs: tuple[Any, ...], example: Any) -> None:
        """Take the scores of a batch: (loss, prediction, label) as NumPy arrays."""
        _, prediction, label = outputs
        if label is None:
            return
        weight = None
        if example.weight is not None:
            weight = np.asarray(example.weight.cpu())
        labels = label if isinstance(label, Mapping) else {"": label}
        for name, values in labels.items():
            probability = prediction[name] if isinstance(prediction, Mapping) else prediction
            curve = self.curves.setdefault(name, Reliability())
            curve.update(probability, values, weight)

    def state(self) -> dict[str, Any]:
        """Return the curve of each label."""
        return {name: curve.state() for name, curve in self.curves.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.curves = {}
        for name, curve in state.items():
            self.curves[name] = Reliability()
            self.curves[name].load_state(curve)


class History:
    """The course of a training, in bounded memory; `fit` and `online_train` return it.

    Args:
        every_steps: distance of the first points. It doubles whenever there are 512 points, so that
            an endless stream needs bounded memory.
        window_samples: least number of samples of a window of progressive metrics. Windows of a
            stream of known length hold about a sixtieth of it.

    Attributes:
        epochs: one dict for each epoch.
        points: at most 512 moments, thinned evenly as they grow.
        metrics: the value of each metric at the moment that was kept.
        kept: the moment that `BestWeights` chose, whose state the model has at the end. None: that
            of the last moment.
        baselines: metrics of the callback `Baselines` at the end, by name of the baseline.
        new_ids: what `Baselines.new_ids` says of the state at the end.
        segments: figures by the values of columns, as `BySegment.figures`, of the state at the end.
        windows: the windows of the callback `Windows`.
        compared: windows of its baseline by name; windows that you add are drawn with them.
        reliability: a `hotbed.metrics.reliability.Reliability` of the predictions before learning
            ("") and of the last validation ("valid"), followed by the label's name if there are
            several labels.
        evictions: rows that were evicted until the end, by table and by reason; see
            `hotbed.training.columns.is_counter` for why no state of a history holds them.
        held: step and reasons of the versions that the gate of `Checkpoint` held last, at most 100.
        learned: samples that the model had learned before this training, and at its end. If the
            same model is trained further, the next training begins with this end. None before it.
        ranks: what each of several processes did, at the end of training; empty for one process.
        step_times: where the time of a step went, at the end of training; None on the CPU.
    """

    def __init__(self, every_steps: int = 1, window_samples: int = 1000) -> None:
        self.epochs: list[dict[str, float]] = []
        self.points: list[Point] = []
        self.metrics: dict[str, float] = {}
        self.kept: Kept | None = None
        self.baselines: Figures = {}
        self.new_ids: Figures = {}
        self.segments: SegmentTables = {}
        self.windows: list[Window] = []
        self.compared: dict[str, list[Window]] = {}
        self.reliability: dict[str, Reliability] = {}
        self.evictions: Tables = {}
        self.held: list[tuple[int, list[str]]] = []
        self.learned: tuple[int, int] | None = None
        self.ranks: list[RankWork] = []
        self.step_times: StepParts | None = None
        self._tables_at_end: Tables = {}
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
        self._began = 0.0
        self._epoch_began = (0.0, 0)
        self._ended = False
        self._local: list[Point] = []  # their statistics are those of this rank alone
        self._learner: StepLearner | SelfUpdating | None = None  # while it trains
        self._whole_epochs = 0  # rows of `epochs` that ended; a stream adds a preliminary one

    def __repr__(self) -> str:
        steps = self.points[-1].step if self.points else 0
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        text = f"{len(self.epochs)} epochs, {steps:,} steps: {values or 'no metrics'}"
        return f"History({' '.join([text, *self.findings])})"

    @property
    def findings(self) -> list[str]:
        """Sentences that say which baseline is better than the model, and where; [] if none is."""
        return [*findings(self.metrics, self.baselines), *segment_findings(self.segments)]

    @property
    def epoch_loss(self) -> float | None:
        """Mean training loss of the current epoch; None before its first step."""
        steps = self._epoch_steps + self._steps
        if not steps:
            return None
        return (self._epoch_sum + float(self._sum)) / steps

    def on_fit_begin(self, run: Run) -> None:
        self._began = time.perf_counter()
        self._epoch_sum = 0.0
        self._epoch_steps = 0
        self._learner = run.learner

    def on_epoch_begin(self, run: Run) -> None:
        self._epoch_began = (time.perf_counter(), run.samples)

    def on_predicted(self, run: Run) -> None:
        self._watch.on_predicted(run)

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        if run.loss is not None:
            self._sum = self._sum + run.loss.detach()
            self._steps = self._steps + 1
        if run.example is not None and hasattr(run.example.labels, "sum"):
            self._label_sum = self._label_sum + run.example.labels.sum()
            self._labels += run.example.num_samples
        if run.step % self._every == 0:
            self._record(run)

    def on_epoch_end(self, run: Run) -> None:
        total = run.model.counters["samples"]
        self.learned = (total - run.samples, total)
        self.evictions = evictions(run)
        for windows in run.callbacks.of(Windows):
            self.windows = windows.points
            self.compared |= windows.baselines
        if run.online:
            self._add_preliminary_point(run)
        else:
            if self._steps:
                self._record(run)
            run.window = {}
            if self.points:  # callbacks before this one may have evicted
                self._count(self.points[-1], run)
        self._add_ranks()
        self.epochs.append(self._epoch_row(run))
        if not run.online:
            self._whole_epochs = len(self.epochs)
            self._epoch_sum = 0.0
            self._epoch_steps = 0

    def _add_preliminary_point(self, run: Run) -> None:
        """Add a point that no state holds: a stream that stops here must resume as if unbroken."""
        if not self._steps:
            return
        window = {}
        if isinstance(run.observer, Progressive):
            window = dict(run.observer.window())
        self._append(self._point(run, window), run)
        self._ended = True

    def _epoch_row(self, run: Run) -> dict[str, float]:
        began, samples = self._epoch_began
        seconds = time.perf_counter() - began
        row: dict[str, float] = {
            "epoch": run.epoch + 1,
            "seconds": seconds,
            "samples_per_second": (run.samples - samples) / max(seconds, 1e-9),
        }
        if self.epoch_loss is not None:
            row["loss"] = self.epoch_loss
        return row | run.metrics

    def on_fit_end(self, run: Run) -> None:
        self.metrics = dict(run.metrics)
        self.kept = run.callbacks.kept
        for baselines in run.callbacks.of(Baselines):
            self.baselines = {name: dict(values) for name, values in baselines.figures.items()}
            self.new_ids = baselines.new_ids(self.kept)
        for segments in run.callbacks.of(BySegment):
            self.segments |= segments.figures_at(self.kept)
        for checkpoint in run.callbacks.of(Checkpoint):
            if checkpoint.gatekeeper is not None:
                self.held = list(checkpoint.gatekeeper.log)
        if self.kept is not None and run.error is None:
            self._tables_at_end = run.learner.summed([statistics(run)])[0]
        if self.learned is not None:  # a state that came back has learned fewer samples
            self.learned = (self.learned[0], run.model.counters["samples"])
        self._learner = None
        valid = {f"valid.{name}".rstrip("."): curve for name, curve in run.reliability.items()}
        self.reliability = self._watch.curves | valid

    def follows(self, before: History) -> bool:
        """Return whether this is the training that came after `before`, of the same model."""
        if self.learned is None or before.learned is None:
            return True
        return self.learned[0] == before.learned[1]

    @property
    def tables(self) -> Tables:
        """Statistics of each table at the end of training; empty before there are any."""
        if self._tables_at_end:
            return self._tables_at_end
        return self.points[-1].tables if self.points else {}

    @property
    def mean_label(self) -> float:
        """Mean of the labels since training began, or since the last restart.

        It is nan if there are several labels or none.
        """
        if not self._labels:
            return math.nan
        return float(self._label_sum) / self._labels

    def state(self) -> dict[str, Any]:
        """Return points and sums, as JSON values and NumPy arrays.

        Content digests do not cover keys that begin with `wall_`. On several ranks, each must ask.
        """
        self._add_ranks()
        points = self.points[:-1] if self._ended else self.points
        epochs = []
        wall = []
        for row in self.epochs[: self._whole_epochs]:
            epochs.append({key: row[key] for key in row if key not in WALL})
            wall.append({key: row[key] for key in WALL if key in row})
        return {
            "epoch": np.array([self._epoch_sum, self._epoch_steps], np.float64),
            "epochs": columns(epochs),
            "wall_epochs": columns(wall),
            "every": self._every,
            "steps": self._steps,
            "sum": np.array([float(self._sum)]),
            "window_began": self._window_began,
            **state_of_points(points),
            "reliability": self._watch.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
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
        self.points = points_of(state)

    def _record(self, run: Run) -> None:
        self._sum = float(self._sum)  # the one wait for the device
        self._append(self._point(run, self._roll(run)), run)
        self._epoch_sum = self._epoch_sum + self._sum
        self._epoch_steps = self._epoch_steps + self._steps
        self._sum = 0.0
        self._steps = 0
        if len(self.points) >= MAX_POINTS:  # windows grow with the distance of points
            self._add_ranks()
            self.points = _halve(self.points)
            self._every *= 2

    def _point(self, run: Run, window: dict[str, float]) -> Point:
        loss = math.nan
        if self._steps:
            loss = float(self._sum) / self._steps
        return Point(
            run.step,
            run.epoch,
            run.samples,
            time.perf_counter() - self._began,
            run.now,
            loss,
            window,
            disk=disk_totals(run),
        )

    def _append(self, point: Point, run: Run) -> None:
        self._count(point, run)
        self.points.append(point)

    def _count(self, point: Point, run: Run) -> None:
        """Set the statistics of a point to those of now, on this rank."""
        point.tables = statistics(run)
        if not self._local or self._local[-1] is not point:
            self._local.append(point)

    def _add_ranks(self) -> None:
        """Add the statistics of other ranks to those of this one, of all points that wait for it.

        So a step needs no call of the other ranks.
        """
        if self._learner is not None and self._local:
            sums = self._learner.summed([point.tables for point in self._local])
            for point, tables in zip(self._local, sums, strict=True):
                point.tables = tables
            self._local = []

    def _roll(self, run: Run) -> dict[str, float]:
        """Return the metrics of the window if it is long enough, and begin the next one."""
        samples = run.samples - self._window_began
        samples_a_step = run.samples // max(run.step, 1)
        sixtieth = samples_a_step * (run.goal.epoch_steps or 0) // 60
        long_enough = samples >= max(self._window_samples, sixtieth)
        if not long_enough or not isinstance(run.observer, Progressive):
            return {}
        self._window_began = run.samples
        values = dict(run.observer.roll())
        if not run.callbacks.of(Windows):
            run.window = values
        return values


def _halve(points: list[Point]) -> list[Point]:
    """Return every second point, joined with the one before it.

    Losses are averaged; a point without a window takes the window of the one before.
    """
    for before, point in zip(points[::2], points[1::2], strict=False):
        point.loss = (before.loss + point.loss) / 2
        point.window = point.window or before.window
    return points[1::2]
