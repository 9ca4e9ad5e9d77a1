# SPDX-License-Identifier: Apache-2.0
"""Validate, and the base of callbacks that judge its results."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hotbed import checks
from hotbed.config import described, did_you_mean
from hotbed.errors import ConfigError
from hotbed.metrics import smaller_is_better
from hotbed.training.run import Run, passed
from hotbed.training.watching.baselines import Baselines
from hotbed.training.watching.history import ReliabilityWatch
from hotbed.training.watching.segments import BySegment

log = logging.getLogger("hotbed")
VALID = "valid."
Mode = Literal["auto", "max", "min"]


@described
class Validate:
    """Evaluate the model after each epoch, and every `every_steps` steps.

    The data are `data`, by default the `valid` of `fit`. Results are in `run.metrics["valid.…"]`.
    `run.validated` is true for the callbacks that run after this one when the results are new.
    """

    def __init__(self, every_steps: int | None = None, data: Iterable[Any] | None = None) -> None:
        checks.at_least("Validate.every_steps", every_steps, 1, "Give a positive integer.")
        self._every = every_steps
        self.data = data
        self._at = -1
        self._step = 0

    def on_fit_begin(self, run: Run) -> None:
        self._at = -1
        self._step = run.step
        if self.data is None and run.goal.valid is None:
            raise ConfigError(
                "Validate: it needs data to evaluate, got fit() without valid. "
                "Give fit(valid=…) or data=…."
            )

    def barrier(self, step: int, now: int | None) -> bool:
        return passed(step, self._step, self._every)

    def on_step_end(self, run: Run) -> None:
        run.validated = False
        if passed(run.step, self._step, self._every):
            self._validate(run)
        self._step = run.step

    def on_epoch_end(self, run: Run) -> None:
        run.validated = False
        if self._at != run.step:
            self._validate(run)
        if run.online:  # a stream that resumes later must judge as if this call had not been
            run.validated = False

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "at": self._at}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]
        self._at = state.get("at", -1)  # absent from states of earlier builds

    def _validate(self, run: Run) -> None:
        curves = ReliabilityWatch()
        data = self.data
        if data is None:
            data = run.goal.valid
        assert data is not None
        compared = {baselines: baselines.comparison() for baselines in run.callbacks.of(Baselines)}
        divided = {segments: segments.another_pass() for segments in run.callbacks.of(BySegment)}
        watching = [curves, *compared.values(), *divided.values()]
        results = run.model.evaluate(data, watching)
        for segments, validation in divided.items():
            segments.record(validation, run, VALID)
        for baselines, comparison in compared.items():
            baselines.record(comparison, run, VALID)
        run.reliability = curves.curves
        run.metrics.update({VALID + name: value for name, value in results.items()})
        run.validated = True
        self._at = run.step


class Judge(ABC):
    """Base of the callbacks that watch a metric.

    They judge after each validation, or after each epoch where nothing validates.

    Args:
        metric: its name; None = the first metric of the model.
        mode: "max" or "min", whichever is better; "auto" knows the metrics of `hb.metrics`.
        min_delta: only a change above this counts as progress. nan is never better.
    """

    def __init__(self, metric: str | None, mode: Mode, min_delta: float) -> None:
        checks.one_of("mode", mode, ("auto", "max", "min"))
        self._metric = metric
        self._mode = mode
        self._delta = min_delta
        self.best = math.nan
        self._bad = 0

    def on_fit_begin(self, run: Run) -> None:
        self.best = math.nan
        self._bad = 0

    @abstractmethod
    def judge(self, run: Run, better: bool) -> None:
        """Act on a new value, which is `better` than the best so far or not."""

    def state(self) -> dict[str, Any]:
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "bad": self._bad, "judged": [self._metric, self._mode]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        judged = state.get("judged", [self._metric, self._mode])  # absent from earlier builds
        if list(judged) != [self._metric, self._mode]:
            log.info(
                "%s: judged %s before, and begins anew with %s",
                type(self).__name__,
                judged,
                [self._metric, self._mode],
            )
            return
        self.best = math.nan if state["best"] is None else state["best"]
        self._bad = state["bad"]

    def barrier(self, step: int, now: int | None) -> bool:
        return False  # it acts at the barriers of `Validate`

    def on_step_end(self, run: Run) -> None:
        if run.validated:
            self._look(run)

    def on_epoch_end(self, run: Run) -> None:
        validates = bool(run.callbacks.of(Validate))
        if run.validated or not (validates or run.online):
            self._look(run)

    def _look(self, run: Run) -> None:
        name = self._name(run)
        value = run.learner.shard.from_first(lambda: run.metrics[name])  # all ranks judge alike
        gain = value - self.best
        if self._smaller(name):
            gain = -gain
        better = gain > self._delta or (math.isnan(self.best) and not math.isnan(value))
        if better:
            self.best = value
        self.judge(run, better)

    def _name(self, run: Run) -> str:
        wanted = self._metric or self._first_name(run)
        for name in (VALID + wanted, wanted):
            if name in run.metrics:
                return name
        advice = "Give fit(valid=…) and metrics."
        if run.metrics:
            advice = did_you_mean(wanted, run.metrics)
        raise ConfigError(
            f"{type(self).__name__}.metric: there is nothing to watch, got {wanted!r}. {advice}"
        )

    def _first_name(self, run: Run) -> str:
        """Return the model's first metric: one of validation before others, the loss last."""
        names = [name for name in run.metrics if name.rpartition(".")[2] != "loss"]
        names = names or list(run.metrics) or ["loss"]
        return next((name for name in names if name.startswith(VALID)), names[0])

    def _smaller(self, name: str) -> bool:
        if self._mode == "auto":
            return smaller_is_better(name)
        return self._mode == "min"
