# SPDX-License-Identifier: Apache-2.0
"""Windows: metrics of a stream in windows of event time or samples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hotbed import checks
from hotbed.config import described
from hotbed.errors import ConfigError
from hotbed.metrics import get_metric
from hotbed.metrics.metric_set import metric_set
from hotbed.training.run import Run
from hotbed.training.step.example import Example
from hotbed.training.step.scorer import Scorer, bounded_form, scorer_of, scores_of_training
from hotbed.training.watching.baselines import Baselines, scorer_beside, scores_of
from hotbed.training.watching.readings import observations, statistics_of_ranks
from hotbed.training.watching.shown_scores import ShownScores
from hotbed.training.watching.window_log import Window, WindowCuts, WindowLog

log = logging.getLogger("hotbed")


FOUR = ("auc", "log_loss", "calibration", "normalized_entropy")


@described
class Windows:
    """Compute metrics in windows of a stream, with statistics of its tables and of the machine.

    A sample belongs to the window of the newest event time so far. If batches are predicted before
    they are learned, metrics are those of these predictions, else those of the training forward
    pass. `points` are the windows, the open one last. They depend on the stream only and are
    part of checkpoints. Freshness (the clock minus the event time of a batch), lag, bytes and
    skipped rows are observations: they are saved in checkpoints, but no digest covers them.

    Args:
        seconds: length of a window in event time, in seconds; windows begin at its whole multiples
            (86400: days of UTC).
        samples: length of a window in samples, instead of seconds.
        metrics: names; None = AUC, log loss, calibration and normalized entropy where predictions
            are probabilities, and the model's own metrics, each in the form whose memory does not
            grow (`hb.metrics.bounded`).
        most: number of windows that are kept; when there are more, neighbours are joined.
        scored: "learned": a sample is scored when it is learned. "shown": an impression of a join
            of streams is scored when it arrives, before anything is learned of it. It counts once
            for each of its labels, when the final label is known. An open impression takes 9 bytes
            and 4 a label, in memory and in each checkpoint. Ids are not mapped ahead then.

    With the callback `Baselines`, `baselines` holds their metrics in the same windows.

    Example: `model.online_train(stream, [hb.callbacks.Windows(seconds=3600)])`
    """

    reads_features = True  # for metrics of groups

    def __init__(
        self,
        seconds: float | None = None,
        samples: int | None = None,
        metrics: Sequence[str] | None = None,
        most: int = 512,
        scored: Literal["learned", "shown"] = "learned",
    ) -> None:
        checks.one_of("Windows.scored", scored, ("learned", "shown"))
        self._shown = ShownScores() if scored == "shown" else None
        self._cuts = WindowCuts(seconds, samples)
        self._log = WindowLog(most)
        self._most = most
        self._beside: dict[str, _Beside] = {}
        self._names = None if metrics is None else tuple(metrics)
        for name in self._names or ():
            get_metric(name.partition("@")[0])
        self._scorer: Scorer | None = None
        self._saved: Mapping[str, Any] | None = None
        self._run: Run | None = None
        self._open: int | None = None
        self._rows = 0
        self._samples = 0
        self._span: tuple[int, int] | None = None
        self._fresh = 0.0
        self._weight = 0.0

    def on_stream_begin(self, run: Run) -> None:
        if self._shown is not None:
            self._shown.begin(run)

    def on_step_begin(self, run: Run) -> None:
        if self._shown is not None:
            self._begin(run)
            if self._scorer is None or self._scorer.has_own_outputs:
                raise ConfigError(
                    "Windows.scored: 'shown' needs predictions, got a network that computes its "
                    "own loss or an eval_network. Give RecModel a loss_fn alone, or leave it out."
                )
            self._shown.score(run, self._scorer)

    def on_predicted(self, run: Run) -> None:
        self._begin(run)
        if run.observer is not None and self not in run.observer.watchers:
            run.observer.watchers.append(self)  # `watch` is called once the batch is learned

    def on_gradients(self, run: Run) -> None:
        if run.observer is None and run.example is not None:
            self._begin(run)
            self.watch(scores_of_training(run.learner, run.example, run.loss), run.example)

    def barrier(self, step: int, now: int | None) -> bool:
        # a window that closes takes the statistics of the tables; impressions come at any step
        return self._shown is not None or now is None or self._cuts.window_at(now) != self._open

    @property
    def newest(self) -> Window | None:
        """The window that closed last."""
        return self._log.windows[-1] if self._log.windows else None

    @property
    def points(self) -> list[Window]:
        """The windows so far, oldest first; the last one may still be open.

        On several ranks, each must ask: the rows of the open window are those of all of them.
        """
        if not self._rows:
            return list(self._log.windows)
        return [*self._log.windows, self._window()]

    @property
    def baselines(self) -> dict[str, list[Window]]:
        """Closed windows of each baseline, by its name, oldest first."""
        return {name: beside.log.windows for name, beside in self._beside.items()}

    def watch(self, outputs: tuple[Any, ...], example: Example) -> None:
        """Take the scores of a batch; the observer that made them calls this."""
        if self._shown is not None and outputs:
            outputs, example = self._shown.take(outputs, example)
        times = None if example.time is None else np.asarray(example.time)
        compared = self._compared(outputs, example)
        for number, rows in self._cuts.pieces(times, example.num_samples):
            if self._open is not None and number != self._open:
                self._close()
            self._open = number
            self._rows = self._rows + rows.stop - rows.start
            self._samples = self._samples + rows.stop - rows.start
            if times is not None:
                self._extend_span(times[rows])
            if self._scorer is not None and outputs:
                self._scorer.feed(outputs, example, rows)
                for name, scores in compared.items():
                    self._beside[name].feed(scores, example, rows, self._scorer)
        self._observe_freshness(times)
        if self._open is not None and self._cuts.is_full(self._open):
            self._close()

    def _compared(self, outputs: tuple[Any, ...], example: Example) -> dict[str, tuple[Any, ...]]:
        """Return what to feed for each baseline of the run."""
        compared: dict[str, tuple[Any, ...]] = {}
        if self._run is not None and self._scorer is not None and outputs:
            for baselines in self._run.callbacks.of(Baselines):
                compared |= scores_of(baselines, self._scorer, outputs, example)
        for name in compared:
            self._beside.setdefault(name, _Beside(name, self._most))
        return compared

    def _extend_span(self, times: Any) -> None:
        """Extend the event times of the open window to those of further rows."""
        first = int(times[0])
        last = int(times.max())
        if self._span is not None:
            first = self._span[0]
            last = max(self._span[1], last)
        self._span = (first, last)

    def state(self) -> dict[str, Any]:
        """Return the closed windows and the open one, as JSON values and NumPy arrays."""
        scorer = None
        if self._saved:
            scorer = self._saved["scorer"]
        elif self._scorer is not None:
            scorer = self._scorer.state()
        state = {
            "cuts": {
                "watermark": self._cuts.watermark,
                "seen": self._cuts.seen,
                "every": self._cuts.every,
            },
            "open": {
                "number": self._open,
                "rows": self._rows,
                "samples": self._samples,
                "span": None if self._span is None else list(self._span),
            },
            "log": self._log.state(),
            "scorer": scorer,
            "wall_fresh": np.array([self._fresh, self._weight], np.float64),
            "names": None if self._names is None else list(self._names),
        }
        if self._beside:
            state["wall_beside"] = {name: beside.state() for name, beside in self._beside.items()}
        if self._shown is not None:
            state["shown"] = self._shown.state()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._cuts.watermark = state["cuts"]["watermark"]
        self._cuts.seen = int(state["cuts"]["seen"])
        window = state["open"]
        span = window["span"]
        self._open = window["number"]
        self._rows = int(window["rows"])
        self._samples = int(window["samples"])
        self._span = None if span is None else (int(span[0]), int(span[1]))
        self._log.load_state(state["log"])
        self._fresh, self._weight = np.asarray(state["wall_fresh"]).tolist()
        self._saved = state if state["scorer"] is not None else None
        self._scorer = None
        every = state["cuts"].get("every", self._cuts.every)  # absent from states of earlier builds
        names = None if self._names is None else list(self._names)
        if list(every) != self._cuts.every or state.get("names", names) != names:
            log.info("Windows: a window begins anew, because other ones or metrics are asked for")
            self._open = None
            self._rows = 0
            self._span = None
            self._saved = None
        self._beside = {}
        for name, beside in state.get("wall_beside", {}).items():  # absent without baselines
            self._beside[name] = _Beside(name, self._most)
            self._beside[name].load_state(beside)
            if self._open is None:
                self._beside[name].forget()
        if self._shown is not None and "shown" in state:
            self._shown.load_state(state["shown"])

    def _begin(self, run: Run) -> None:
        self._run = run
        if self._scorer is None:
            self._scorer = _window_scorer(run, self._names)
            if self._saved is not None and self._scorer is not None:
                self._scorer.load_state(self._saved["scorer"])
            self._saved = None

    def _close(self) -> None:
        window = self._window()
        self._log.append(window)
        for beside in self._beside.values():
            beside.close(window)
        if self._scorer is not None:
            self._scorer = self._scorer.again()
        self._open = None
        self._rows = 0
        self._span = None
        self._fresh = 0.0
        self._weight = 0.0
        if self._run is not None:
            self._run.window = window.values

    def _window(self) -> Window:
        bounds = None if self._open is None else self._cuts.bounds(self._open)
        begin, end = bounds or self._span or (None, None)
        values = {}
        if self._scorer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                values = self._scorer.results()
        window = Window(begin, end, self._rows, self._samples, values)
        if self._run is not None:
            window.tables = statistics_of_ranks(self._run)
            window.observed = dict(observations(self._run))
        if self._weight:
            window.observed["freshness_seconds"] = self._fresh / self._weight
        return window

    def _observe_freshness(self, times: Any) -> None:
        if times is not None and len(times) and self._run is not None:
            self._fresh += (self._run.clock() - int(times.max()) / 1e6) * len(times)
            self._weight += len(times)


class _Beside:
    """The windows of a baseline beside those of the model."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self.log = WindowLog(most)
        self.scorer: Scorer | None = None  # of the open window
        self._saved: Mapping[str, Any] | None = None

    def feed(self, scores: tuple[Any, ...], example: Example, rows: slice, model: Scorer) -> None:
        """Take the scores of some rows; `model`: the scorer of the model."""
        if self.scorer is None:
            self.scorer = scorer_beside(model, self._name, learns=True)
            if self._saved is not None:
                self.scorer.load_state(self._saved)
                self._saved = None
        self.scorer.feed(scores, example, rows)

    def close(self, window: Window) -> None:
        """Record the metrics as those of `window`, and begin the next one."""
        self._saved = None
        if self.scorer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                values = self.scorer.results()
            self.log.append(Window(window.begin, window.end, window.rows, window.samples, values))
            self.scorer = None

    def state(self) -> dict[str, Any]:
        """Return the open window and the closed ones."""
        scorer = self._saved if self.scorer is None else self.scorer.state()
        return {"log": self.log.state(), "scorer": scorer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.log.load_state(state["log"])
        self.scorer = None
        self._saved = state["scorer"]

    def forget(self) -> None:
        """Begin the open window anew."""
        self.scorer = None
        self._saved = None


def _window_scorer(run: Run, names: Sequence[str] | None) -> Scorer | None:
    """Return a scorer for the metrics of windows.

    None where the network computes its own loss and nothing predicts.
    """
    scorer = scorer_of(run.observer)
    if scorer is None:
        criterion = run.learner.criterion
        if criterion is None:
            return None
        scorer = Scorer(run.learner.network, criterion, run.model.metrics)
    if names is not None:
        return bounded_form(scorer.again(metric_set({name: name for name in names})))
    if not scorer.gives_probabilities:
        return bounded_form(scorer)
    metrics = metric_set({name: name for name in FOUR})
    for name, metric in scorer.metrics.items():
        if isinstance(metric, Mapping):  # of a label
            metric = {key: inner for key, inner in metric.items() if key not in FOUR}
        metrics[name] = metric
    return bounded_form(scorer.again(metrics))
