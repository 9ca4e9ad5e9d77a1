# SPDX-License-Identifier: Apache-2.0
"""Progress: how far training has come, and what may be mapped ahead of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hotbed.compat.mx_rec.errors import CallError
from hotbed.connectors import Position
from hotbed.data.batch import Batch
from hotbed.training.stages.example import CPU, prepare

if TYPE_CHECKING:
    from hotbed.compat.mx_rec.framework import Framework

log = logging.getLogger("hotbed.compat.mx_rec")


class Progress:
    """How far training has come.

    Attributes:
        step: training batches handed to the loop so far.
        now: the newest event time among them, in microseconds; None without times.
        position: where the training data are after the newest batch; None if they have none.
        has_begun: whether training data are being read.
    """

    def __init__(self, owner: Framework) -> None:
        self.step = 0
        self.now: int | None = None
        self.position: Position | None = None
        self.has_begun = False
        self._owner = owner
        self._resume: Position | None = None
        self._cleared = -1  # the last step that ids may be mapped beyond

    def resume(self, step: int, now: int | None, position: Position | None) -> None:
        """Continue after training step `step`, with the data after `position`."""
        self.step = step
        self.now = now
        self.position = position
        self._resume = position

    def begin(self, dataset: Any) -> None:
        """Begin to read training data, after the position of a state that was restored.

        Raises:
            CallError: a state must be restored first.
        """
        if self._owner.options.if_load and not self._owner.restored:
            raise CallError(
                "dataset: init(if_load=True) loads a state before the first batch, got none. Call "
                "Saver.restore(path) after step 8, or leave if_load out."
            )
        is_first = not self.has_begun
        self.has_begun = True
        for saver in self._owner.savers:
            saver.begin()
        position = self._resume
        self._resume = None
        if position is not None:
            dataset.resume(position)
        elif is_first and self.step:
            log.warning(
                "the training data have no position: they begin anew after step %d; give a "
                "hb.Dataset, or leave out what was learned",
                self.step,
            )

    def advance(self, raw: Any, batch: Batch) -> None:
        """Count a training batch that the loop gets: as it gets it, and its ids and times."""
        self.step += 1
        self.position = getattr(raw, "position", None)
        times = [self.now, prepare(batch, CPU, labelled=False).latest]
        self.now = max((time for time in times if time is not None), default=None)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether tables are read or changed between this training step and the next one."""
        owner = self._owner
        intervals = (owner.options.max_steps, owner.options.train_steps, owner.options.save_steps)
        by_steps = any(interval > 0 and step % interval == 0 for interval in intervals)
        others = [hook.barrier(step, now) for hook in owner.hooks]  # each is asked
        others += [saver.barrier(step, now) for saver in owner.savers]
        others += [hook.barrier(step, now) for hook in owner.saver_hooks]
        is_barrier = by_steps or any(others)
        if not is_barrier:
            self._cleared = step
        return is_barrier

    @property
    def is_ahead(self) -> bool:
        """Whether ids of batches after the current one may be mapped."""
        return self._cleared >= self.step
