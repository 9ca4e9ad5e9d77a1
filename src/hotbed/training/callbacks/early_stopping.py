# SPDX-License-Identifier: Apache-2.0
"""EarlyStopping: end training when a metric makes no progress."""

from __future__ import annotations

from hotbed import checks
from hotbed.config import described
from hotbed.training.callbacks.validation import Judge, Mode
from hotbed.training.run import Run


@described
class EarlyStopping(Judge):
    """End training after `patience` judgements in a row without progress."""

    def __init__(
        self,
        metric: str | None = None,
        patience: int = 2,
        *,
        mode: Mode = "auto",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        checks.at_least("EarlyStopping.patience", patience, 1, "Give a positive integer.")
        self._patience = patience

    def on_epoch_begin(self, run: Run) -> None:
        self._stop(run)  # a run may be resumed after it had ended

    def judge(self, run: Run, better: bool) -> None:
        self._bad = 0 if better else self._bad + 1
        self._stop(run)

    def _stop(self, run: Run) -> None:
        if self._bad >= (self._patience or 1):
            metric = self._metric or "metric"
            run.stop(f"no better {metric} than {self.best:.6g} in {self._bad} validations")
