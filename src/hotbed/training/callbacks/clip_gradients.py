# SPDX-License-Identifier: Apache-2.0
"""ClipGradients: gradients scaled down to a norm before the update."""

from __future__ import annotations

from hotbed import checks
from hotbed.config import described
from hotbed.training.run import Run


@described
class ClipGradients:
    """Scale the gradients of a step so that their global norm is at most `max_norm`.

    The norm is that of all gradients together, of dense parameters and of rows. It is asked from
    the learner, which says in what order it is summed.
    """

    def __init__(self, max_norm: float) -> None:
        checks.above("ClipGradients.max_norm", max_norm, 0, "Give 10.0, for example.")
        self._max_norm = float(max_norm)

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_gradients(self, run: Run) -> None:
        run.learner.clip_gradients(self._max_norm)
