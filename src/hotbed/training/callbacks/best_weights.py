# SPDX-License-Identifier: Apache-2.0
"""BestWeights: save the best state, and restore it when training ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotbed.config import described
from hotbed.persist import checkpoint
from hotbed.training.callbacks.validation import Judge, Mode
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.run import Run


@described
class BestWeights(Judge):
    """Save the best state (network, tables, optimizer) and restore it when training ends.

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
        self._step = -1  # of the best state; -1 = none yet

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        self._step = -1

    def judge(self, run: Run, better: bool) -> None:
        if better:
            checkpoint.save(self._folder(run), run.model.state())  # no version of the model's own
            self._step = run.step

    def state(self) -> dict[str, Any]:
        return super().state() | {"step": self._step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._step = state.get("step", -1)  # absent from states of earlier builds

    def on_fit_end(self, run: Run) -> None:
        try:
            if self._step not in (-1, run.step):
                run.model.restore(self._folder(run))  # ends when all have read the folder
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
