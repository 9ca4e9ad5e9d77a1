# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: resume a stream or a fit that was killed, to the bits of an uninterrupted run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotbed import checks
from hotbed.config import described
from hotbed.connectors import DeadLetters, Journal, Position
from hotbed.data.dataset import Dataset
from hotbed.embedding.tier import Ssd
from hotbed.errors import ConfigError, PersistError, RankLost
from hotbed.files import Lock, check_folder
from hotbed.parallel import WHOLE
from hotbed.persist.container.format import Reader, open_checkpoint
from hotbed.persist.container.store import JOURNAL, LETTERS, LocalStore, open_store
from hotbed.persist.publish import Publisher
from hotbed.persist.publish.gate import PublishGate
from hotbed.persist.state.checkpoint import capture, num_taken, track_changes
from hotbed.persist.state.restoring import continues
from hotbed.persist.state.saver import Saver
from hotbed.persist.upkeep.rollback import finish_first
from hotbed.training.ahead import cores
from hotbed.training.decisions.eviction_schedule import TOPIC, sweeping
from hotbed.training.gate.command import call
from hotbed.training.gate.gatekeeper import Gatekeeper, Reasons
from hotbed.training.learned_types import learn_types
from hotbed.training.publishing import Publishing, has_graph
from hotbed.training.run import Run, WallClock, passed
from hotbed.training.run_state import open_rows, release, resumable, resume, state_of
from hotbed.training.writes import Writes

log = logging.getLogger("hotbed")
PATIENCE = 1000
"""Steps that a due checkpoint waits for an eviction under way, which a snapshot finishes at once.

An idle stream has no steps that would finish the eviction, so a due checkpoint does not wait there.
"""
GATE = "wall_gate"
"""Member of the progress of a run: the state of its gate. It depends on when states are saved."""


@dataclass(frozen=True)
class _Write:
    """The write under way: the step, the position, and why its version is held."""

    step: int
    position: Position
    held: Reasons


@described
class Checkpoint:
    """Save the state of a stream or a fit under `path`; a later call with this path resumes it.

    It saves when training begins, every `every_steps` steps and every `every_seconds` seconds,
    whichever is first, at the end of each epoch of a fit, and when training ends, is stopped or
    fails. The state is captured at once and written on its own thread. A save that falls due
    meanwhile is made as soon as that write is done. The first save is a full; the next ones hold
    what changed, also those of a run that resumes. Tables whose rule moves idle rows are always
    saved in full. A save that fails is logged and retried when the next is due; an error is raised
    only if the last save fails.

    A state holds model, optimizers, tables, callbacks, metrics, random state and the position in
    the data. The folder also holds `journal` (decisions that depend on the clock) and
    `dead_letters.jsonl` (rows that could not be used). After kill -9 at any moment, the same call
    ends with the bits of a run that was never killed. A batch that fails half learned is not saved:
    training resumes from the newest checkpoint, and learns the batches after it again.

    Needs a Dataset; a stream may be other data with `position` and `resume(position)`.

    Args:
        path: a local path, or a URL for fsspec, where decisions of the clock are not journalled.
        every_steps: steps between two saves.
        every_seconds: seconds between two saves.
        full_every: every `full_every`-th save is a full. Tables on a disk whose changes are tracked
            are not read for it: it is made of the files before it.
        keep: number of fulls that are kept, with the deltas that build on them.
        publish: a `Publisher` that receives each saved version; fulls come with the network as a
            graph for servers.
        gate: rules that a version of a stream must keep to be published; one that breaks a rule is
            saved only. None: each version is published.
        wait: training waits for the write under way when a save falls due.
        allow: names of fields that may change at a resume, such as `"schema.clicked.threshold"`.

    Raises:
        PersistError: at a resume, a rule, column, label, unit, order of ids, seed or dtype differs
            from the state's; the message names it. Another learning rate, batch size or policy is
            accepted and logged.

    Example:
        >>> callbacks = [EarlyStopping("auc"), Checkpoint("runs/ranker")]
        >>> model.fit(train, valid, epochs=10, callbacks=callbacks)
        >>> callbacks = [Evict(seconds_interval=3600), Checkpoint("runs/clicks", every_seconds=60)]
        >>> model.online_train(dataset, callbacks)
    """

    runs_last = True

    def __init__(
        self,
        path: str | Path,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        full_every: int = 10,
        keep: int = 2,
        publish: Publisher | None = None,
        wait: bool = False,
        allow: Sequence[str] = (),
        gate: PublishGate | None = None,
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("full_every", full_every),
            ("keep", keep),
        ):
            if value is not None or name != "every_steps":
                where = f"Checkpoint.{name}"
                checks.whole_number(where, value, 1, advice="Give a positive integer.")
        checks.above("Checkpoint.every_seconds", every_seconds, 0, "Give a number of seconds.")
        _check_publishing(publish, gate)
        _check_allow(allow)
        self.gatekeeper = None if gate is None else Gatekeeper(gate)
        self.held_back = 0.0 if gate is None else gate.held_back
        self.reads_features = gate is not None
        self._allow = tuple(allow)
        self.path = path
        self._every = every_steps
        self._seconds = every_seconds
        self._full_every = full_every
        self._keep = keep
        self._publisher = publish
        self._publishing: Publishing | None = None  # of the first rank
        self._publishes = False  # whether the first rank does
        self._waits_for_graph = False
        self._wait = wait
        self._deltas = True
        self._since_full = 0
        self._taken: list[int] = []  # `num_taken` of the tables at the last save
        self._due = False
        self._looked = 0
        self._at = 0.0
        self._saved_at: tuple[int, int] | None = None
        self._published_step = -1
        self._caught: list[_Write] = []
        self._save_began = 0.0
        self.saves = Writes()
        self.publications: Writes | None = None if publish is None else Writes()
        self._opened_rows: Mapping[str, int] | None = None  # of a join, in the state before
        self._saver: Saver | None = None
        self._shard = WHOLE  # for the thread that saves
        self._ready = False
        self._clock = WallClock()
        self._opened = ExitStack()  # journal, dead letters and locks of the run

    def check_ready(self) -> None:
        """Raise an error if no state can be saved or published."""
        check_folder(self.path, "Checkpoint.path")
        check = getattr(self._publisher, "check_ready", None)
        if check is not None:
            check()

    # --- events

    def on_fit_begin(self, run: Run) -> None:
        resumable(run)
        if self.gatekeeper is not None and not run.online:
            raise ConfigError(
                "Checkpoint.gate: it decides of the versions of a stream, got a fit. Leave gate "
                "out, or call online_train()."
            )
        run.model.state()  # raises where the model cannot be saved
        if len(run.callbacks.of(Checkpoint)) > 1:
            raise ConfigError(
                "Checkpoint: a run takes one, got several. "
                "Keep one, and copy or publish its states."
            )
        self._open(run)
        if not run.online:
            try:
                self._begin(run)
            except BaseException:
                self.on_fit_end(run)
                raise

    def on_stream_begin(self, run: Run) -> None:
        self._begin(run)

    def _begin(self, run: Run) -> None:
        """Resume from the newest state, or save the first."""
        shard = run.learner.shard
        self._saver = Saver(self.path, self._keep)
        self._shard = shard.another()
        if self._publisher is not None and shard.is_first:
            assert self.publications is not None
            self._publishing = Publishing(self._publisher, self.publications)
        self._waits_for_graph = shard.from_first(lambda: self._publishing is not None)
        self._publishes = self._waits_for_graph
        self._export(run)
        self._saved_at = None
        self._caught = []
        if shard.from_first(lambda: _has_state(self.path)):
            with shard.together():
                reader = open_checkpoint(self.path)
            resume(run, reader, self._allow, lambda: self._continue(run, reader))
            self._resume_publishing(run, reader)
            self._saved_at = _moment(run)
            self.saves.resume(reader.saved, run.step)
        else:
            run.position = Position({})
            dataset = run.dataset
            if isinstance(dataset, Dataset):
                if run.online or dataset.resumed_epoch is not None:
                    run.position = dataset.begins
            elif run.online:
                run.position = resumable(run).position
            if self.gatekeeper is not None:
                self.gatekeeper.begin(run)
            try:
                if isinstance(dataset, Dataset):
                    # the first version brings them to servers
                    learn_types(run.model, dataset, *shard.from_first(dataset.raw_types))
            finally:  # if the data cannot be read, what the model has learned before is kept
                self._deltas = self._tracks_changes(run)
                self._save(run)
                self._settle(run, raises=True)
        self._due = False
        self._looked = run.step
        self._clock = run.clock
        self._at = run.clock()
        self._ready = True

    def barrier(self, step: int, now: int | None) -> bool:
        if self._saver is None or (self._saver.busy and not self._wait):
            return False  # a save that is due takes place when the write under way is done
        return self._is_due(self._clock()) or passed(step, self._looked, self._every)

    def on_gradients(self, run: Run) -> None:
        if self.gatekeeper is not None:
            self.gatekeeper.watch_training(run)

    def on_step_end(self, run: Run) -> None:
        if self.gatekeeper is not None:
            self.gatekeeper.add_held_back(run)
        self._export(run)
        release(run)
        self._due = self._due or passed(run.step, self._looked, self._every)
        if not self._due:
            self._looked = run.step
        self._look(run)

    def on_stop(self, run: Run) -> None:
        if not run.online:  # the end of an epoch that is not over changes no state
            self._finish(run, whole=True, raises=True)

    def on_epoch_end(self, run: Run) -> None:
        if run.online or run.model.counters["epochs"] == run.epoch:
            return
        if run.stopped or run.epoch + 1 == run.goal.end_epoch:
            self._finish(run, whole=True, raises=True)
        else:
            self._due = True
            self._look(run)

    def on_idle(self, run: Run) -> None:
        self._look(run, idle=True)

    def on_stream_end(self, run: Run) -> None:
        self._finish(run, whole=True, raises=True)

    def on_error(self, run: Run) -> None:
        if not self._ready:  # a half resumed run cannot be saved
            return
        if run.learner.shard.size > 1:  # the others may not have failed, and would not save
            log.error("ranks save no state after an error; the newest one in %s stays", self.path)
            return
        whole = run.ending is None or run.ending.whole
        if not whole:
            log.error(
                "step %d failed half learned and is not saved; a new start resumes from the newest "
                "checkpoint in %s",
                run.step + 1,
                self.path,
            )
        self._finish(run, whole=whole, raises=False)

    def on_fit_end(self, run: Run) -> None:
        saver = self._saver
        # after an error of one rank the others may not come here
        waits = self._ready and self._publishes and run.error is None
        self._saver = None
        self._ready = False
        try:
            if saver is not None:
                saver.wait()
        except (PersistError, RankLost) as error:
            log.error("%s", error)
        with run.learner.shard.together() if waits else nullcontext():
            if self._publishing is not None:
                self._publishing.close()
        self._publishing = None
        self._opened.close()

    def _export(self, run: Run) -> None:
        """Give the publisher the graph as soon as there is one; ranks wait for the first."""
        shard = run.learner.shard
        if not self._waits_for_graph or not shard.from_first(lambda: has_graph(run)):
            return
        with shard.together():
            if self._publishing is not None:
                self._publishing.export(run)
        self._waits_for_graph = False

    def _resume_publishing(self, run: Run, reader: Reader) -> None:
        """Publish the state that a run resumes from, unless that is done or a gate held it."""
        gatekeeper = self.gatekeeper
        if gatekeeper is not None:
            gatekeeper.begin(run)
            if GATE in reader.progress:
                gatekeeper.load_state(reader.progress[GATE])
        reasons = reader.manifest.held or ()
        if not reasons:
            if self._publishing is not None:
                # it may not be published, as after `hotbed rollback`
                self._publishing.publish(reader.saved, run.step)
        elif gatekeeper is not None and run.learner.shard.from_first(lambda: self._is_out(reader)):
            gatekeeper.overrule(run)
        else:
            self._report_held(run.step, reasons)

    def _is_out(self, reader: Reader) -> bool:
        """Return whether a state is the version that servers have."""
        ask = getattr(self._publisher, "newest_source", None)
        return ask is not None and ask() == reader.manifest.digest

    def _report_held(self, step: int, reasons: Reasons) -> None:
        """Log that a version is held, and call the command of the gate if it is time to."""
        if self._publishing is None:
            return
        texts = [entry.reason for entry in reasons]
        log.error("the version at step %d is saved, not published: %s", step, "; ".join(texts))
        gatekeeper = self.gatekeeper
        if gatekeeper is None or gatekeeper.gate.command is None:
            return
        if gatekeeper.in_a_row == gatekeeper.gate.hold_for:
            message = {
                "states": str(self.path),
                "step": step,
                "held": gatekeeper.in_a_row,
                "reasons": texts,
            }
            self._publishing.call(partial(call, gatekeeper.gate.command, message))

    def _continue(self, run: Run, reader: Reader) -> None:
        """Track what changes from the state on that the tables hold, if the next save may."""
        tables = run.tables
        saved = continues(reader, tables)
        self._deltas = self._full_every > 1 and track_changes(tables.values(), saved=saved)
        if saved:
            self._saver = Saver(self.path, self._keep, reader.saved)
            self._since_full = len(reader.links) - 1
            rows = reader.manifest.open_rows
            self._opened_rows = None if rows is None else rows.opened
            self._taken = num_taken(tables.values())

    def _tracks_changes(self, run: Run) -> bool:
        """Make the tables track their changes, if deltas are saved and rules allow it."""
        return self._full_every > 1 and track_changes(run.tables.values())

    # --- saving

    def _look(self, run: Run, *, idle: bool = False) -> None:
        """Save if a save is due and can be made now."""
        assert self._saver is not None
        if self._caught and not self._saver.busy:
            self._settle(run, raises=False)
        now = run.clock()
        self._at = min(self._at, now)  # the clock may be set back
        if not self._due and self._seconds is None:
            return
        if not run.learner.shard.from_first(lambda: self._saves_now(run, now, idle=idle)):
            return
        self._settle(run, raises=False)
        try:
            with self.saves.watching():
                self._save(run)
        except PersistError as error:
            log.error("not saved at step %d: %s", run.step, error)
        self._due = False
        self._looked = run.step
        self._at = now

    def _saves_now(self, run: Run, now: float, *, idle: bool) -> bool:
        assert self._saver is not None
        if run.ahead or not self._is_due(now):  # behind the next barrier, nothing is ahead
            return False
        if _moment(run) == self._saved_at or (self._saver.busy and not self._wait):
            return False
        late = run.step - self._looked >= PATIENCE
        return sweeping(run) is None or late or idle

    def _is_due(self, now: float) -> bool:
        return self._due or (self._seconds is not None and now - self._at >= self._seconds)

    def _finish(self, run: Run, *, whole: bool, raises: bool) -> None:
        """Save this step if it is `whole` and not saved yet, and wait until it is on disk."""
        try:
            self._settle(run, raises=False)
            if whole and _moment(run) != self._saved_at:
                self._save(run)
            self._settle(run, raises=raises)
        except PersistError as error:
            if raises:
                raise
            log.error("the last state could not be saved: %s", error)

    def _save(self, run: Run) -> None:
        assert self._saver is not None
        if run.position is None:
            raise ConfigError(
                "Checkpoint: the newest batch has no position to resume from, got data that are no "
                "hb.Batch. Yield batches with their position, or leave Checkpoint out."
            )
        self._save_began = time.perf_counter()
        full_due = self._saver.needs_full or self._since_full >= self._full_every - 1
        # another reader of the changes took some that a delta would need
        is_record_whole = self._taken == num_taken(run.tables.values())
        # of tables on a disk, a full is made of the files before it rather than read from them
        merges = (
            full_due
            and not self._saver.needs_full
            and self._shard.size == 1
            and any(isinstance(table.tier, Ssd) for table in run.tables.values())
        )
        changes = self._deltas and is_record_whole and (merges or not full_due)
        if self._deltas and not changes:
            self._tracks_changes(run)  # a table that was cleared does not any more
        rows = open_rows(run, self._opened_rows if changes else None)
        state = replace(state_of(run), shard=self._shard, open_rows=rows)
        reasons: Reasons = ()
        if self.gatekeeper is not None:
            reasons = self.gatekeeper.decide(run)
            progress = {**state.progress, GATE: self.gatekeeper.state()}
            state = replace(state, held=reasons, progress=progress)
        with ExitStack() as undo:
            if self.gatekeeper is not None:
                undo.callback(self.gatekeeper.take_back)
            with run.learner.shard.together():
                captured = capture(state, changes=changes, takes=self._deltas)
                undo.callback(captured.close, saved=False)
            undo.pop_all()
        self._saver.submit(captured, merges=merges and changes)
        self._opened_rows = None if rows is None else rows.opened
        self._taken = num_taken(run.tables.values())
        self._since_full = self._since_full + 1 if changes and not merges else 0
        self._saved_at = _moment(run)
        self._caught.append(_Write(run.step, run.position, reasons))

    def _settle(self, run: Run, *, raises: bool) -> None:
        """Wait for the write under way, then release the events and decisions before it."""
        if not self._caught or self._saver is None:
            return
        write = self._caught.pop()
        step = write.step
        try:
            with self.saves.watching():
                saved = self._saver.wait()
        except PersistError as error:
            self._saved_at = None
            if self.gatekeeper is not None:
                self.gatekeeper.take_back()
            if raises:
                raise
            log.error("not saved at step %d, the state before is kept: %s", step, error)
            return
        assert saved is not None
        self.saves.add(saved, step, time.perf_counter() - self._save_began)
        run.model.parent = saved.digest
        commit = getattr(run.dataset, "commit", None)
        if commit is not None and run.learner.shard.is_first:
            commit(write.position)
        if run.clock.journal is not None:
            run.clock.journal.forget({TOPIC: step, cores.TOPIC: step})
        # versions increase: the end of an epoch at the same step is not another version
        if step != self._published_step:
            self._published_step = step
            if write.held:
                self._report_held(step, write.held)
            elif self._publishing is not None:
                self._publishing.publish(saved, step)

    def _open(self, run: Run) -> None:
        """Open the journal and the dead letters next to the states, before data are read.

        A journal that the user set is kept.
        """
        with run.learner.shard.together():
            self._open_journal(run)

    def _open_journal(self, run: Run) -> None:
        if not run.learner.shard.is_first:  # which decides for all
            return
        store = open_store(self.path)
        folder = store.root if isinstance(store, LocalStore) else None
        run.ask_join(replace(run.goal.wishes, keeps_open=True))
        live = getattr(run.dataset, "live", None)
        if live is not None and live.journal.path is not None:
            run.clock.journal = live.journal
            if folder is not None and not _same_file(live.journal.path, folder / JOURNAL):
                # only one run may write the states
                self._opened.enter_context(Lock(folder / JOURNAL))
            return
        if folder is None:
            log.warning(
                "%s: a journal needs a local disk: without one a killed stream resumes without "
                "loss or repeat, but decisions of the clock may differ; assign dataset.live",
                self.path,
            )
            journal = Journal(None)
            letters = DeadLetters(None)
        else:
            journal = Journal(folder / JOURNAL)
            letters = DeadLetters(folder / LETTERS)
        self._opened.callback(journal.close)
        run.clock.journal = journal
        if live is not None:
            self._opened.enter_context(_recording(run.dataset, journal, letters))


def _check_publishing(publish: Publisher | None, gate: PublishGate | None) -> None:
    if publish is not None and not callable(getattr(publish, "publish", None)):
        raise ConfigError(
            f"Checkpoint.publish: must be a Publisher, got {publish!r:.60}. Give "
            "hb.PublishDirectory(path) or hb.PublishTopic(…)."
        )
    if gate is not None and (publish is None or not isinstance(gate, PublishGate)):
        raise ConfigError(
            f"Checkpoint.gate: must be a PublishGate, beside publish, got {gate!r:.60}. Give "
            "publish=hb.PublishDirectory(path) and gate=hb.checkpoints.PublishGate(), or leave it "
            "out."
        )


def _check_allow(allow: Sequence[str]) -> None:
    if not isinstance(allow, (list, tuple)) or not all(isinstance(name, str) for name in allow):
        raise ConfigError(
            f"Checkpoint.allow: must be names of fields, got {allow!r}. Give a list of strings."
        )


def _has_state(path: str | Path) -> bool:
    """Return whether there is a state to resume from; complete one whose writer was killed."""
    finish_first(path)
    return open_store(path).newest_state() is not None


@contextmanager
def _recording(dataset: Any, journal: Journal, letters: DeadLetters) -> Iterator[None]:
    """Let a dataset record in `journal` and `letters` within."""
    before = dataset.live
    dataset.live = replace(before, journal=journal, dead_letters=letters)
    try:
        yield
    finally:
        dataset.live = before


def _moment(run: Run) -> tuple[int, int]:
    """Return the step and the number of epochs that are over: an epoch ends after its last step."""
    return run.step, run.model.counters["epochs"]


def _same_file(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()
