# SPDX-License-Identifier: Apache-2.0
"""Progress: how far training has come, and what may be mapped ahead of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.options import Options
from hotbed.connectors import Position
from hotbed.data.batch import Batch
from hotbed.embedding.table import Table
from hotbed.parallel import Shard, at
from hotbed.training.step.example import CPU, prepare

log = logging.getLogger("hotbed.compat.mx_rec")


class BarrierHook(Protocol):
    """Reads or changes tables after some training steps."""

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether it does so after this step."""


class EvictionHook(BarrierHook, Protocol):
    """Removes stale rows."""

    @property
    def decides_by_clock(self) -> bool:
        """Whether the clock of this machine decides when it evicts."""

    @property
    def intervals(self) -> list[int | None]:
        """The seconds and the steps between two evictions; [] if it removes nothing."""

    def begin(self, tables: Mapping[str, Table]) -> None:
        """Make the schedule; step 8 calls it."""

    def check_done(self, caller: str, step: int) -> None:
        """Raise CallError if it has not run after this step."""

    def state(self) -> dict[str, Any] | None:
        """Return what a resumed program needs of it."""

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` returned."""


class SavingHook(BarrierHook, Protocol):
    """Saves the program."""

    def begin(self) -> None:
        """Repeat the decisions of the clock that a restored state depends on."""

    def wait(self) -> None:
        """Wait until the newest save is on disk."""


class Progress:
    """How far training has come.

    Args:
        options: the keywords of `init`.
        hooks: those that evict; a program may add to them while it trains, as to the next two.
        savers: those that save.
        saver_hooks: those that call savers.
        shard: the rows that this process owns.

    Attributes:
        step: training batches handed to the loop so far.
        now: the newest event time among them, in microseconds; None without times.
        position: where the training data are after the newest batch; None if they have none.
        has_begun: whether training data are being read.
        restored: whether a checkpoint was loaded.
        dataset: the training data that are read; None before.
        check: compares training data with those of the state that was restored, before they are
            read; None = there is nothing to compare.
    """

    def __init__(
        self,
        options: Options,
        hooks: Sequence[EvictionHook],
        savers: Sequence[SavingHook],
        saver_hooks: Sequence[BarrierHook],
        shard: Shard,
    ) -> None:
        self.step = 0
        self.now: int | None = None
        self.position: Position | None = None
        self.has_begun = False
        self.restored = False
        self.dataset: Any = None
        self.check: Callable[[Any], object] | None = None
        self._options = options
        self._hooks = hooks
        self._savers = savers
        self._saver_hooks = saver_hooks
        self._shard = shard
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
            PersistError: the state that was restored is of other data, or of other features.
        """
        if self._options.if_load and not self.restored:
            raise CallError(
                "dataset: init(if_load=True) loads a state before the first batch, got none. Call "
                "Saver.restore(path) after step 8, or leave if_load out."
            )
        if self.check is not None:
            self.check(dataset)
            self.check = None
        is_first = not self.has_begun
        self.has_begun = True
        self.dataset = dataset
        for saver in self._savers:
            saver.begin()
        position = self._resume
        self._resume = None
        if position is not None and callable(getattr(dataset, "resume", None)):
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

    def together(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches as long as each rank has one: a step is that of all of them."""
        source = iter(batches)
        while True:
            with at("next batch"):
                batch = next(source, None)
                has_ended = self._shard.any(batch is None)
            if has_ended:
                if batch is not None:
                    log.info("the data of another rank have ended: a batch is left out here")
                return
            assert batch is not None
            yield batch

    def newest(self) -> int | None:
        """Return the newest event time of the batches of all ranks; each rank must ask."""
        times = [now for now in self._shard.gathered(self.now) if now is not None]
        return max(times, default=None)

    def check_hooks(self, caller: str) -> None:
        """Raise CallError if a hook that evicts has not run after this step."""
        for hook in self._hooks:
            hook.check_done(caller, self.step)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether tables are read or changed between this training step and the next one."""
        options = self._options
        intervals = (options.max_steps, options.train_steps, options.save_steps)
        by_steps = any(interval > 0 and step % interval == 0 for interval in intervals)
        others = [hook.barrier(step, now) for hook in self._hooks]  # each is asked
        others += [saver.barrier(step, now) for saver in self._savers]
        others += [hook.barrier(step, now) for hook in self._saver_hooks]
        is_barrier = by_steps or any(others)
        if not is_barrier:
            self._cleared = step
        return is_barrier

    @property
    def is_ahead(self) -> bool:
        """Whether ids of batches after the current one may be mapped."""
        return self._cleared >= self.step
