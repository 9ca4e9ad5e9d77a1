# SPDX-License-Identifier: Apache-2.0
"""BestWeights: save the best state, and restore it when training ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotbed.config import described
from hotbed.files import check_folder
from hotbed.metrics.reliability import Reliability
from hotbed.persist.state import checkpoint
from hotbed.training.callbacks.validation import Judge, Mode
from hotbed.training.columns import columns, rows_of
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.run import Kept, Run


@described
class BestWeights(Judge):
    """Save the best state (network, tables, optimizer) and restore it when training ends.

    Metrics and the reliability curve of the history are those of the best state, too.

    The state is saved to `path`. Without a path it is saved to the folder `best` in the folder of
    the run's `Checkpoint`; without one, to a temporary folder that is removed afterwards.
    """

    def __init__(
        self,
        metric: str | None = None,
        path: str | Path | None = None,
        *,
        mode: Mode = "auto",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        self._path = path
        self._temporary: TemporaryDirectory[str] | None = None  # of several ranks, the first's
        self._temporary_name = ""
        self.kept: Kept | None = None  # the moment of the best state

    def check_ready(self) -> None:
        """Raise ConfigError if no state can be saved."""
        if self._path is not None:
            check_folder(self._path, "BestWeights.path")

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        self.kept = None

    def judge(self, run: Run, better: bool) -> None:
        if better:
            checkpoint.save(self._folder(run), run.model.state())  # no version of the model's own
            metrics = dict(run.metrics)
            self.kept = Kept(run.step, run.epoch + 1, run.samples, metrics, run.reliability)

    def state(self) -> dict[str, Any]:
        state = super().state()
        moment = self.kept
        if moment is None:
            return state | {"step": -1}
        curves = {name: curve.state() for name, curve in moment.reliability.items()}
        return state | {
            "step": moment.step,
            "epoch": moment.epoch,
            "samples": moment.samples,
            "metrics": columns([moment.metrics]),
            "reliability": curves,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.kept = None
        step = state.get("step", -1)  # absent from states of earlier builds, as are the metrics
        if step == -1 or math.isnan(self.best):  # nothing is kept, or another metric is judged
            return
        curves = {}
        for name, curve in state.get("reliability", {}).items():
            curves[name] = Reliability()
            curves[name].load_state(curve)
        metrics = rows_of(state["metrics"])[0] if "metrics" in state else {}
        self.kept = Kept(step, state.get("epoch", 0), state.get("samples", 0), metrics, curves)

    def on_fit_end(self, run: Run) -> None:
        moment = self.kept
        try:
            if moment is not None and moment.step != run.step:
                run.model.restore(self._folder(run))  # ends when all have read the folder
                run.metrics = dict(moment.metrics)
                run.reliability = moment.reliability
        finally:
            self._temporary_name = ""
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _folder(self, run: Run) -> str:
        if self._path is not None:
            return str(self._path)
        for saves in run.callbacks.of(Checkpoint):
            return f"{str(saves.path).rstrip('/')}/best"
        if not self._temporary_name:
            self._temporary_name = run.learner.shard.from_first(self._make_temporary)
        return self._temporary_name

    def _make_temporary(self) -> str:
        self._temporary = TemporaryDirectory(prefix="hotbed-best-", ignore_cleanup_errors=True)
        return self._temporary.name
