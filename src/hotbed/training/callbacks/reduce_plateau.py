# SPDX-License-Identifier: Apache-2.0
"""ReducePlateau: lower learning rates when a metric makes no progress."""

from __future__ import annotations

import logging
from typing import Any

from hotbed import checks
from hotbed.config import described
from hotbed.training.callbacks.validation import Judge, Mode
from hotbed.training.run import Run

log = logging.getLogger("hotbed")


@described
class ReducePlateau(Judge):
    """Multiply the learning rates by `factor` when a metric makes no progress.

    It acts after `patience` judgements in a row without progress, on the rates of dense parameters
    and of tables, and sets none below `min_lr`. It does not end training: add `EarlyStopping`.
    """

    def __init__(
        self,
        metric: str | None = None,
        patience: int = 1,
        *,
        factor: float = 0.1,
        min_lr: float = 1e-8,
        mode: Mode = "auto",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        checks.finite_number("ReducePlateau.factor", factor, above=0, below=1)
        checks.at_least("ReducePlateau.patience", patience, 1, "Give a positive integer.")
        self._patience = patience
        self._factor = factor
        self._min_lr = min_lr

    def judge(self, run: Run, better: bool) -> None:
        self._bad = 0 if better else self._bad + 1
        if self._bad < (self._patience or 1):
            return
        self._bad = 0
        for group in groups_of(run):
            rate = float(group["lr"])
            group["lr"] = max(rate * self._factor, min(self._min_lr, rate))
        log.info(
            "step %d: no better %s, learning rates x %g", run.step, self._name(run), self._factor
        )


def groups_of(run: Run) -> list[dict[str, Any]]:
    """Return the param groups of both optimizers."""
    optimizers = [
        optimizer for optimizer in (run.learner.dense, run.learner.sparse) if optimizer is not None
    ]
    return [group for optimizer in optimizers for group in optimizer.param_groups]
