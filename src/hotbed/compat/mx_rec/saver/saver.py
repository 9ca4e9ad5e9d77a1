# SPDX-License-Identifier: Apache-2.0
"""Saver: whole and incremental checkpoints of a program, by path and global step."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.compat.mx_rec import framework
from hotbed.compat.mx_rec.errors import CallError
from hotbed.compat.mx_rec.saver.program import Program
from hotbed.connectors import Journal
from hotbed.errors import ConfigError, FormatError, PersistError
from hotbed.files import Where
from hotbed.parallel import at
from hotbed.persist.container.format import Reader, Saved, open_checkpoint
from hotbed.persist.container.store import JOURNAL, LocalStore, open_store
from hotbed.persist.state.checkpoint import capture, num_taken, track_changes
from hotbed.persist.state.restoring import continues
from hotbed.persist.state.saver import Saver as Writer
from hotbed.training.decisions.eviction_schedule import TOPIC

__all__ = ["Saver", "latest_checkpoint"]

log = logging.getLogger("hotbed.compat.mx_rec")

NUMBERED = re.compile(r"(.+)-(\d+)")
"""What `save` returns: the path and the global step."""


class Saver:
    """Saves and restores a program: tables, networks, optimizers, hooks, the position in the data.

    After `restore` the loop gives the bits of a loop without a stop, also after kill -9. A save is
    complete or invisible. With `init(is_incremental_checkpoint=True)` a save holds what
    changed since the save before, and the first one a base; a new base follows when
    `save_checkpoint_due_time` seconds have passed.

    Save when a step is done, after the optimizers and `EvictHook.after_run`. With
    `init(save_steps=N)` saves come at multiples of N, and ids are mapped ahead between them.
    Without it no ids are mapped ahead.

    Args:
        var_list: one or several networks, dense optimizers, and other objects with `state_dict`,
            such as schedulers. None = the models that `get_dense_and_sparse_variable` got.
        max_to_keep: bases that are kept, with the deltas on them; None or 0 = all.
        prefix_name: not needed: a checkpoint is found by its path.

    Example:
        >>> saver = mx.Saver([net, dense_optimizer])
        >>> begin = saver.restore("runs/ranker") if mx.latest_checkpoint("runs/ranker") else 0
        >>> for step, batch in enumerate(dataset, start=begin + 1):
        ...     learn(batch)
        ...     if step % 100 == 0:
        ...         saver.save("runs/ranker", global_step=step)
    """

    def __init__(
        self, var_list: Any = None, max_to_keep: int | None = 3, prefix_name: str = "checkpoint"
    ) -> None:
        if max_to_keep is not None:
            checks.whole_number("Saver: max_to_keep", max_to_keep, 0)
        self._owner = framework.current()
        self._program = Program(self._owner, var_list)
        self._keep = max_to_keep or sys.maxsize
        self._shard = self._owner.shard.another()  # for the thread that writes
        self._place: Where | None = None  # of the newest save or restoration
        self._writer: Writer | None = None
        self._parent: str | None = None  # digest of the state that was restored
        self._last: Saved | None = None  # the restored state, if the next save may be a delta on it
        self._tracks = False
        self._taken: list[int] = []  # `num_taken` of the tables at the newest save
        self._base_at = self._owner.clock()
        self._pending: int | None = None  # the step that is being written
        self.is_announced = False  # a hook says when it saves
        self._was_told = False  # that no ids are mapped ahead
        self._owner.savers.append(self)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether a save may come after this step, of which `init` does not know."""
        if self.is_announced or self._owner.options.save_steps > 0:
            return False
        if not self._was_told:
            self._was_told = True
            log.info(
                "Saver: a save may follow each step, so no ids are mapped ahead; give "
                "init(save_steps=N) to save every N steps"
            )
        return True

    @at("Saver.save")
    def save(
        self,
        save_path: Where,
        global_step: int | None = None,
        save_delta: bool | None = None,
        *,
        wait: bool = True,
    ) -> str:
        """Save the step that was learned last.

        Args:
            save_path: a folder, or a URL for fsspec.
            global_step: number of the state; None = the training batches so far.
            save_delta: whether to save only what changed; None = as `init` says.
            wait: return when it is on disk. Otherwise the next call raises the error of this one.

        Returns:
            "<save_path>-<global_step>", which `restore` takes.

        Raises:
            CallError: the step is not done, or ids of later batches are mapped.
            PersistError: it cannot be written; the state before it is kept.
        """
        _check_path("Saver.save", save_path)
        pipeline = self._owner.started("Saver.save")
        step = pipeline.progress.step if global_step is None else global_step
        checks.whole_number("Saver.save: global_step", step, 0)
        self.wait()
        pipeline.check_done("Saver.save")
        writer = self._writer_at(save_path)
        changes = self._is_delta(writer, save_delta)
        tables = self._program.tables().values()
        if self._owner.options.is_incremental_checkpoint and not changes:
            self._tracks = track_changes(tables)
        state = self._program.state(int(step), self._parent, self._shard)
        with ExitStack() as undo:
            with self._owner.shard.together():
                captured = capture(state, changes=changes)
                undo.callback(captured.close, saved=False)
            undo.pop_all()
        writer.submit(captured)
        self._taken = num_taken(tables)
        self._pending = pipeline.progress.step
        if not changes:
            self._base_at = self._owner.clock()
        self._owner.last_save = f"{save_path}-{step}"
        if wait:
            self.wait()
        return self._owner.last_save

    @property
    def is_writing(self) -> bool:
        """Whether a state is being written."""
        return self._writer is not None and self._writer.busy

    def wait(self) -> None:
        """Wait until the newest save is on disk.

        Raises:
            PersistError: it cannot be written.
        """
        if self._writer is None or self._pending is None:
            return
        step = self._pending
        self._pending = None
        self._writer.wait()
        journal = self._owner.clock.journal
        if journal is not None:
            journal.forget({TOPIC: step})

    def base_due(self) -> bool:
        """Return whether the next incremental save is a base."""
        due = self._owner.options.save_checkpoint_due_time
        return due is not None and self._owner.clock() - self._base_at >= due

    @at("Saver.restore")
    def restore(self, save_path: Where, allow: Sequence[str] = ()) -> int:
        """Load a state, before the first batch, and return its global step.

        Args:
            save_path: what `save` got, or what it returned. The first is the newest state there, or
                that of `init(restore_model_version=...)`; the second that of its global step.
            allow: an argument of Hotbed: names of settings that may differ from those that were
                saved, although the state means something else with them.

        Raises:
            ConfigError: the path holds no checkpoint of this step.
            FormatError: a file is torn or changed; the message names it.
            PersistError: it is of another program; the message names what differs. Columns and
                features are compared when the training data are read.
            CallError: step 8 has not run, or a batch was learned already.
        """
        progress = self._owner.started("Saver.restore").progress
        if progress.has_begun:
            raise CallError(
                "Saver.restore: a state is loaded before the first batch, got step "
                f"{progress.step}. Call it right after step 8."
            )
        with self._owner.shard.together():
            reader = opened(save_path, self._owner.options.restore_model_version)
        self._program.load(reader, allow)
        self._parent = reader.manifest.digest
        self._place = _located(save_path)[0]
        self._writer = None
        if self._owner.options.is_incremental_checkpoint:
            self._continue(reader)
        self._owner.last_save = f"{self._place}-{reader.manifest.version}"
        progress.restored = True
        log.info("resuming at global step %d, from %s", reader.manifest.version, reader.folder)
        return reader.manifest.version

    def _continue(self, reader: Reader) -> None:
        """Track what changes from the restored state on; the next save may be a delta on it."""
        tables = self._program.tables()
        newest = self._owner.shard.from_first(reader.store.newest_state)
        is_newest = newest is not None and newest.folder == reader.newest_link.folder
        follows = is_newest and continues(reader, tables)
        self._last = reader.saved if follows else None
        self._tracks = track_changes(tables.values(), saved=follows)
        self._taken = num_taken(tables.values())
        base: Any = reader.links[0].tree("tree")
        self._base_at = base["wall_caught"]

    def begin(self) -> None:
        """Repeat the decisions of the clock that the place of the restored state keeps."""
        by_clock = any(hook.decides_by_clock for hook in self._owner.hooks)
        if self._place is not None and by_clock:
            self._open_journal(self._place)

    def _writer_at(self, place: Where) -> Writer:
        """Return what writes to a place; the first save there is a base, unless it follows one."""
        if self._writer is None or place != self._place:
            journal = self._open_journal(place)
            if place != self._place and journal is not None:
                journal.cut({TOPIC: -1})  # decisions of another program
            self._writer = Writer(place, self._keep, self._last if place == self._place else None)
            self._place = place
        return self._writer

    def _open_journal(self, place: Where) -> Journal | None:
        """Let the clock keep its decisions in a place, and repeat those that are there.

        The first process keeps those of all.
        """
        clock = self._owner.clock
        if not clock.shard.is_first:
            return None
        store = open_store(place)
        if not isinstance(store, LocalStore):
            log.warning("%s: decisions of the clock are kept on local disks only", place)
            return clock.journal
        path = store.root / JOURNAL
        if clock.journal is None or clock.journal.path != path:
            journal = Journal(path)
            if clock.journal is not None:
                clock.journal.close()
            clock.journal = journal
        return clock.journal

    def _is_delta(self, writer: Writer, save_delta: bool | None) -> bool:
        """Return whether the next save holds only what changed."""
        is_incremental = self._owner.options.is_incremental_checkpoint
        if save_delta and not is_incremental:
            raise ConfigError(
                "Saver.save: save_delta needs incremental checkpoints, got save_delta=True. Give "
                "init(is_incremental_checkpoint=True, ...)."
            )
        # a save elsewhere took the changes since then with it
        is_record_whole = self._taken == num_taken(self._program.tables().values())
        if writer.needs_full or not is_incremental or not self._tracks or not is_record_whole:
            return False
        if save_delta is None:
            return not self._owner.shard.from_first(self.base_due)
        return save_delta


def _check_path(where: str, path: Any) -> None:
    """Raise ConfigError unless a path is given where Rec SDK has a session."""
    if not isinstance(path, str | Path):
        raise ConfigError(
            f"{where}: the first argument is the path, got {type(path).__name__}. Leave the "
            "session out."
        )


def _located(save_path: Where) -> tuple[Where, int | None]:
    """Return the place of a checkpoint, and its global step if the path names one."""
    numbered = NUMBERED.fullmatch(str(save_path))
    if open_store(save_path).newest_state() is not None or numbered is None:
        return save_path, None
    return numbered[1], int(numbered[2])


def opened(save_path: Where, version: int | None = None) -> Reader:
    """Open a checkpoint by its path, with or without a global step at its end.

    Args:
        save_path: what `Saver.restore` takes.
        version: the global step, if the path has none; None = the newest state.

    Raises:
        ConfigError: the path holds no checkpoint, or no state of this step.
    """
    _check_path("Saver.restore", save_path)
    place, step = _located(save_path)
    version = version if step is None else step
    if open_store(place).newest_state() is None:
        raise ConfigError(
            f"{save_path}: no checkpoint lies at this path, got neither a folder of states nor one "
            "with a global step. Give the path of save(), or what it returned."
        )
    try:
        return open_checkpoint(place, version)
    except FormatError:
        raise
    except PersistError as error:  # no state of this version
        raise ConfigError(str(error)) from error


def latest_checkpoint(checkpoint_dir: Where) -> str | None:
    """Return the newest checkpoint in a place as `Saver.restore` takes it; None if it has none.

    Example: `mx.latest_checkpoint("runs/ranker")` is "runs/ranker-200".
    """
    newest = open_store(checkpoint_dir).newest_state()
    if newest is None:
        return None
    return f"{checkpoint_dir}-{open_checkpoint(checkpoint_dir).manifest.version}"
