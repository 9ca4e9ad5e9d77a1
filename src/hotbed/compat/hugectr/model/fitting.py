# SPDX-License-Identifier: Apache-2.0
"""What `fit` does between two iterations, as callbacks of the engine."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Protocol

from hotbed.compat.hugectr.clauses import FitParams, Solver
from hotbed.compat.hugectr.enums import MetricsType
from hotbed.compat.hugectr.model.callback import tell_end
from hotbed.compat.hugectr.model.console import say

if TYPE_CHECKING:
    from hotbed.compat.hugectr.model.metrics import Results
    from hotbed.compat.hugectr.model.schedule import LearningRateScheduler
    from hotbed.training.run import Run


class FittedModel(Protocol):
    """The model that `fit` trains, as its callbacks see it."""

    solver: Solver

    @property
    def can_evaluate(self) -> bool: ...

    def evaluated(self, prefix: str = "", iteration: int = 0) -> Results: ...

    def get_learning_rate_scheduler(self) -> LearningRateScheduler: ...

    def save_params_to_files(self, prefix: str, iter: int = 0) -> None: ...

    def set_learning_rate(self, lr: float) -> None: ...


class Rates:
    """Set the learning rate of each step by the scheduler of the model."""

    def __init__(self, model: FittedModel) -> None:
        self._model = model
        self._before = model.get_learning_rate_scheduler().get_step()

    def on_fit_begin(self, run: Run) -> None:
        self._set(run.step + 1)

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        self._set(run.step + 1)

    def on_fit_end(self, run: Run) -> None:
        self._model.get_learning_rate_scheduler().move_to(self._before + run.step)

    def _set(self, step: int) -> None:
        scheduler = self._model.get_learning_rate_scheduler()
        self._model.set_learning_rate(scheduler.at(self._before + step))


class Iterations:
    """Print lines, evaluate, call training callbacks and save snapshots.

    Attributes:
        position: in the data after the last iteration.
        steps: number of iterations.
        loss: of the last of them.
        ended_early: whether a callback or the AUC ended training.
    """

    def __init__(self, model: FittedModel, params: FitParams) -> None:
        self._model = model
        self._params = params
        self._callbacks = model.solver.training_callbacks if model.solver.repeat_dataset else ()
        self._rate_before = model.get_learning_rate_scheduler().get_step()
        self._began = 0.0
        self._shown = 0.0
        self.position: Any = None
        self.steps = 0
        self.loss = math.nan
        self._last: Any = None  # the loss on its device
        self.ended_early = False

    def on_fit_begin(self, run: Run) -> None:
        self._began = time.perf_counter()
        self._perf("epoch_start", 0)
        self._shown = self._began

    def on_epoch_begin(self, run: Run) -> None:
        if not self._model.solver.repeat_dataset:
            say(f"{f'Epoch {run.epoch - run.goal.first_epoch}':-^77}")

    def barrier(self, step: int, now: int | None) -> bool:
        return _is_due(step, self._params.eval_interval) or self._is_saved(step)

    def on_step_end(self, run: Run) -> None:
        self._last = run.loss
        if _is_due(run.step, self._params.display):
            self._show(run)
        if _is_due(run.step, self._params.eval_interval) and self._model.can_evaluate:
            self._evaluate(run)
        if self._is_saved(run.step) and not self.ended_early:
            self._model.save_params_to_files(self._params.snapshot_prefix, run.step)

    def on_fit_end(self, run: Run) -> None:
        self.position = run.position
        self.steps = run.step
        if self._last is not None:
            self.loss = float(self._last.item())
        self._perf("run_stop", "success" if self.ended_early else "aborted")
        self._perf("train_samples", run.samples)

    def _is_saved(self, step: int) -> bool:
        return step > 1 and _is_due(step, self._params.snapshot)

    def _show(self, run: Run) -> None:
        """Print the loss of the last iteration, its learning rate, and the time of those before."""
        now = time.perf_counter()
        seconds = now - self._shown
        self._shown = now
        scheduler = self._model.get_learning_rate_scheduler()
        rate = scheduler.at(self._rate_before + run.step)
        assert run.loss is not None
        say(
            f"Iter: {run.step} Time({self._params.display} iters): {seconds:g}s "
            f"Loss: {run.loss.item():g} lr:{rate:g}"
        )

    def _evaluate(self, run: Run) -> None:
        began = time.perf_counter()
        iteration = run.step - 1  # callbacks count from 0
        self._perf("eval_start", iteration)
        for callback in self._callbacks:
            callback.on_eval_start(iteration)
        prefix = self._params.export_predictions_prefix
        results = self._model.evaluated(prefix, run.step)
        stops = [callback.on_eval_end(iteration, results.by_name) for callback in self._callbacks]
        if any(stops):
            tell_end(self._callbacks, iteration)
            self.ended_early = True
            run.stop("a training callback asked for it")
            return
        results.say()
        for name, value in results.by_name.items():
            self._perf("eval_accuracy", f"{name} {value:g}", iteration)
        if self._has_hit(run, results):
            return
        seconds = time.perf_counter() - began
        say(f"Eval Time for {self._model.solver.max_eval_batches} iters: {seconds:g}s")

    def _perf(self, event: str, *values: Any) -> None:
        """Print an event of MLPerf with its milliseconds, if the solver asks for it."""
        if self._model.solver.perf_logging:
            milliseconds = 1000 * (time.perf_counter() - self._began)
            texts = ", ".join(str(value) for value in values)
            say(f"[{milliseconds:.2f}, {event}, {texts}]")

    def _has_hit(self, run: Run, results: Results) -> bool:
        """Return whether the AUC is above the threshold of the solver, which ends training."""
        threshold = (self._model.solver.metrics_spec or {}).get(MetricsType.AUC)
        auc = results.by_name.get(MetricsType.AUC.name)
        if threshold is None or auc is None or not auc > threshold:
            return False
        self.ended_early = True
        seconds = time.perf_counter() - self._began
        say(
            f"Hit target accuracy AUC {threshold:.5f} at iteration {run.step} with batchsize "
            f"{self._model.solver.batchsize} in {seconds:.2f}s. Average speed "
            f"{run.samples / seconds:f} records/s."
        )
        run.stop(f"AUC {auc:.5f} is above {threshold:.5f}")
        return True


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
