# SPDX-License-Identifier: Apache-2.0
"""CheckpointSaverHook: saves at intervals."""

from __future__ import annotations

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.saver.saver import Saver
from hotbed.errors import ConfigError
from hotbed.files import Where
from hotbed.parallel import at
from hotbed.training.run import passed

__all__ = ["CheckpointSaverHook"]


class CheckpointSaverHook:
    """Saves every so many seconds or steps; the loop calls `after_run` after each training step.

    With `init(is_incremental_checkpoint=True)` it saves a base every `save_checkpoint_due_time`
    seconds and a delta every `save_delta_checkpoints_secs`, whatever its own interval is. A state
    is written while training continues.

    Args:
        checkpoint_dir: a folder, or a URL for fsspec.
        save_secs: seconds between two saves.
        save_steps: training steps between two saves.
        saver: what saves; None = `Saver()`.

    Raises:
        ConfigError: neither or both intervals are given.

    Example:
        >>> hook = mx.CheckpointSaverHook("runs/ranker", save_steps=1000, saver=saver)
        >>> for step, batch in enumerate(dataset, start=begin + 1):
        ...     learn(batch)
        ...     hook.after_run(global_step=step)
        >>> hook.end()
    """

    def __init__(
        self,
        checkpoint_dir: Where,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Saver | None = None,
    ) -> None:
        self._owner = framework.current()
        is_incremental = self._owner.options.is_incremental_checkpoint
        if (save_secs is None) == (save_steps is None) and not is_incremental:
            raise ConfigError(
                "CheckpointSaverHook: one of save_secs and save_steps is needed, got "
                f"save_secs={save_secs!r} and save_steps={save_steps!r}. Give one of them."
            )
        checks.above("CheckpointSaverHook: save_secs", save_secs, 0, "Give seconds.")
        if save_steps is not None:
            checks.whole_number("CheckpointSaverHook: save_steps", save_steps, 1)
        self.saver = Saver() if saver is None else saver
        self.saver.is_announced = True
        self._place = checkpoint_dir
        self._steps = save_steps
        self._seconds: float | None = save_secs
        if is_incremental:
            self._steps = None
            self._seconds = self._owner.options.save_delta_checkpoints_secs
        self._step = -1  # of the newest save
        self._at = self._owner.clock()
        self._owner.saver_hooks.append(self)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether this step may be saved."""
        return not self.saver.is_writing and self._is_due(step)

    @at("CheckpointSaverHook.after_run")
    def after_run(self, global_step: int) -> None:
        """Save if it is time to, after training step `global_step`.

        Raises:
            CallError: the step is not done.
            PersistError: the save before could not be written.
        """
        progress = self._owner.started("CheckpointSaverHook.after_run").progress
        if progress.step == 0 or progress.is_ahead:
            return  # nothing was learned, or the next step that can be saved is
        if self._owner.shard.from_first(lambda: self._saves_now(progress.step)):
            self._save(global_step, wait=False)

    @at("CheckpointSaverHook.end")
    def end(self, global_step: int | None = None) -> None:
        """Save the last step, and wait until it is on disk."""
        progress = self._owner.started("CheckpointSaverHook.end").progress
        if progress.step != self._step:
            self._save(global_step, wait=True)
        self.saver.wait()

    def _save(self, global_step: int | None, *, wait: bool) -> None:
        self.saver.save(self._place, global_step, wait=wait)
        self._step = self._owner.started("CheckpointSaverHook").progress.step
        self._at = self._owner.clock()

    def _saves_now(self, step: int) -> bool:
        if self.saver.is_writing:
            return False
        if self._step < 0:
            self._step = step - 1
        return step != self._step and self._is_due(step)

    def _is_due(self, step: int) -> bool:
        by_steps = passed(step, max(self._step, 0), self._steps)
        seconds = self._owner.clock() - self._at
        by_seconds = self._seconds is not None and seconds >= self._seconds
        return by_steps or by_seconds or (self._seconds is not None and self.saver.base_due())
