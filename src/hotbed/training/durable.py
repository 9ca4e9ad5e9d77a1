# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: a stream that can be killed at any moment and started again, to the bits that an
unbroken run gives.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotbed.config import build, describe, described
from hotbed.connectors import DeadLetters, Journal, Position
from hotbed.data.dataset import Dataset
from hotbed.data.schema import Schema
from hotbed.embedding.rule import Rule
from hotbed.errors import ConfigError, MissingExtra, PersistError
from hotbed.files import Lock
from hotbed.metrics import Metric
from hotbed.metrics.windows import columns, rows_of
from hotbed.models.losses import Loss, MultiTask
from hotbed.optim.dense import NAMES, TorchOptimizer
from hotbed.optim.precision import Boost
from hotbed.persist.checkpoint import Saved, Saver, State, capture, open_checkpoint
from hotbed.persist.format import Reader
from hotbed.persist.publish import Publisher
from hotbed.persist.recover import DEAD_LETTER_BYTES, EPOCHS, STREAM, finish_first
from hotbed.persist.resume import compare
from hotbed.persist.store import JOURNAL, LETTERS, LocalStore, open_store
from hotbed.training.loop import Run, passed
from hotbed.training.online import TOPIC

log = logging.getLogger("hotbed")
PATIENCE = 1000
"""Steps that a due checkpoint waits for an eviction under way, which a snapshot finishes at once.
An idle stream has no steps that would finish it, and nothing that a pause would hold up: there a
due checkpoint does not wait.
"""


@described
class Checkpoint:
    """Keeps the state of a stream or a fit under `path`: the first call starts there, every later
    one
        resumes.

    It saves when training begins, every `every_steps` steps and `every_seconds` seconds, whichever
    is first, at the end of each epoch of a fit, and when training ends, is stopped or fails. The
    moment is caught at once and written on a thread of its own; a save that falls due meanwhile is
    made as soon as that one is written (`wait`: training waits for it). The first is a full, the
    next ones hold what changed, every `full_every`-th is a full again; `keep` fulls stay, with what
    rests on them. Tables whose rule moves idle rows are saved in full always. A save that fails is
    logged and tried again when the next is due; only a last one that fails is an error.

    A state holds model, optimizers, tables, callbacks, metrics, random state and the position in
    the stream. Beside the states lie `journal` (what the clock decided) and `dead_letters.jsonl`
    (rows that could not be used). After kill -9 at any moment the same call ends with the bits of a
    run that was never killed. A batch that fails half learned is not saved: the state before it is
    that of the newest checkpoint, and what lies between is learned again.

    A resume compares what the state means with what it is given: another rule, column, label, unit,
    order of ids, seed or dtype raises PersistError with its name; another learning rate, batch size
    or policy is accepted and logged. `allow`: names of fields that may change all the same, such as
    `"schema.clicked.threshold"`.

    `path`: a local path; or a URL for fsspec, where decisions of the clock are not journalled.
    `publish`: a `Publisher` that hands each saved version on, fulls with the network as a graph for
    servers. Needs a Dataset; a stream may be other data with `position` and `resume(position)`.

    Example:
        >>> model.fit(train, valid, epochs=10, callbacks=[EarlyStopping("auc"), Checkpoint("runs/ranker")])
        >>> model.online_train(dataset, [Evict(seconds_interval=3600), Checkpoint("runs/clicks", every_seconds=60)])
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
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("full_every", full_every),
            ("keep", keep),
        ):
            if value is not None and value < 1:
                raise ConfigError(
                    f"Checkpoint.{name}: must be at least 1 — received {value} — give a positive "
                    "integer"
                )
        if every_seconds is not None and not every_seconds > 0:
            raise ConfigError(
                f"Checkpoint.every_seconds: must be above 0 — received {every_seconds} — give "
                "seconds"
            )
        if isinstance(allow, str) or not all(isinstance(name, str) for name in allow):
            raise ConfigError(
                f"Checkpoint.allow: takes names of fields — received {allow!r} — give a list of "
                "texts"
            )
        self._allow = tuple(allow)
        self._path = path
        self._every = every_steps
        self._seconds = every_seconds
        self._full_every = full_every
        self._keep = keep
        self._publisher = publish
        self._wait = wait
        self._deltas = True
        self._since_full = 0
        self._due = False
        self._looked = 0
        self._at = 0.0
        self._saved_at: tuple[int, int] | None = None
        self._published_step = -1
        self._caught: list[tuple[int, Position]] = []  # what is being written
        self._saver: Saver | None = None
        self._ready = False
        # ... and what was in `live` before
        self._own: tuple[Any, Journal, DeadLetters] | None = None
        self._lock: Lock | None = None  # of the states, where the journal lies elsewhere
        self._thread: ThreadPoolExecutor | None = None
        self._published: list[Future[Any]] = []

    # --- events

    def on_fit_begin(self, run: Run) -> None:
        resumable = isinstance(run.dataset, Dataset)
        if run.online:
            resumable = callable(getattr(run.dataset, "resume", None))
        if not resumable:
            kind = type(run.dataset).__name__
            raise ConfigError(
                f"Checkpoint: the data cannot tell where they are — received {kind} — "
                "give a hb.Dataset, or leave Checkpoint out"
            )
        if any(isinstance(other, Checkpoint) and other is not self for other in run.callbacks.all):
            raise ConfigError(
                "Checkpoint: a run has one — received several — keep one, and copy or publish its "
                "states"
            )
        run.folder = self._path
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
        self._saver = Saver(self._path, self._keep)
        if self._publisher is not None:
            self._thread = ThreadPoolExecutor(1, "hotbed-publish")
            self._publisher.graph = _graph(run)
        self._saved_at = None
        self._caught = []
        finish_first(self._path)
        if open_store(self._path).newest() is not None:
            resume(run, open_checkpoint(self._path), self._allow)
            self._deltas = _tracks_changes(run)  # tables that were loaded begin anew
            self._saved_at = _moment(run)
        else:
            begun = run.online or run.dataset.resumed_epoch is not None
            run.position = run.dataset.position if begun else Position({})
            # servers refuse other types from the first version on
            if isinstance(run.dataset, Dataset):
                run.model.schema = run.model.schema.with_types(*run.dataset.raw_types())
            self._deltas = _tracks_changes(run)
            self._save(run)
            self._settle(run, raises=True)
        self._due = False
        self._looked = run.step
        self._at = run.clock()
        self._ready = True

    def on_step_end(self, run: Run) -> None:
        self._due = self._due or passed(run.step, self._looked, self._every)
        if not self._due:
            self._looked = run.step
        if run.stopped and not run.online:  # the end of an epoch that is not over changes no state
            self._finish(run, whole=True, raises=True)
        else:
            self._look(run)

    def on_epoch_end(self, run: Run) -> None:
        if run.online or run.model.counters["epochs"] == run.epoch:
            return
        if run.stopped or run.epoch + 1 == run.epochs:
            self._finish(run, whole=True, raises=True)
        else:
            self._due = True
            self._look(run)

    def on_idle(self, run: Run) -> None:
        self._look(run, idle=True)

    def on_stream_end(self, run: Run) -> None:
        self._finish(run, whole=run.whole, raises=True)

    def on_error(self, run: Run) -> None:
        if not self._ready:  # what is half resumed is no state
            return
        if not run.whole:
            log.error(
                "step %d failed half learned and is not saved; a new start goes on from the "
                "newest checkpoint in %s",
                run.step + 1,
                self._path,
            )
        self._finish(run, whole=run.whole, raises=False)

    def on_fit_end(self, run: Run) -> None:
        (saver, self._saver) = (self._saver, None)
        self._ready = False
        try:
            if saver is not None:
                saver.wait()
        except PersistError as error:
            log.error("%s", error)
        if self._thread is not None:
            self._thread.shutdown()
            self._hear_publisher()
        if self._own is not None:
            live, journal, letters = self._own
            run.journal.close()
            self._own = None
            if live is not None:
                live.journal = journal
                live.dead_letters = letters
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- saving

    def _look(self, run: Run, *, idle: bool = False) -> None:
        """Save, if a save is due and can be made now."""
        assert self._saver is not None
        if self._caught and not self._saver.busy:
            self._settle(run, raises=False)
        now = run.clock()
        self._at = min(self._at, now)  # a clock that goes back
        if not (self._due or (self._seconds is not None and now - self._at >= self._seconds)):
            return
        late = run.step - self._looked >= PATIENCE
        if _moment(run) == self._saved_at or (self._saver.busy and not self._wait):
            return
        if run.sweeping and not (late or idle):
            return
        self._settle(run, raises=False)
        try:
            self._save(run)
        except PersistError as error:
            log.error("not saved at step %d: %s", run.step, error)
        self._due = False
        self._looked = run.step
        self._at = now

    def _finish(self, run: Run, *, whole: bool, raises: bool) -> None:
        """The last save: of this step, if it is `whole` and not saved yet; wait until it is on
        disk.
        """
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
        run.count()
        changes = (
            self._deltas and not self._saver.needs_full and self._since_full < self._full_every - 1
        )
        state = state_of(run)
        self._saver.submit(capture(state, changes=changes))
        self._since_full = self._since_full + 1 if changes else 0
        self._saved_at = _moment(run)
        assert run.position is not None
        self._caught.append((run.step, run.position))

    def _settle(self, run: Run, *, raises: bool) -> None:
        """Wait for what is being written; then the source and the journal may forget what led
        there.
        """
        if not self._caught or self._saver is None:
            return
        step, position = self._caught.pop()
        try:
            saved = self._saver.wait()
        except PersistError as error:
            self._saved_at = None
            if raises:
                raise
            log.error("not saved at step %d, the state before stays: %s", step, error)
            return
        assert saved is not None
        run.model.parent = saved.digest
        if hasattr(run.dataset, "commit"):
            run.dataset.commit(position)
        run.journal.forget({TOPIC: step})
        # versions rise: the end of an epoch is no version of its own
        if step != self._published_step:
            self._published_step = step
            self._publish(saved)

    def _publish(self, saved: Saved) -> None:
        if self._publisher is not None and self._thread is not None:
            self._hear_publisher()
            self._published.append(self._thread.submit(self._publisher.publish, saved))

    def _hear_publisher(self) -> None:
        """What became of publishing so far. A version that failed is a gap that readers close with
        the next full.
        """
        while self._published and self._published[0].done():
            error = self._published.pop(0).exception()
            if error is not None:
                log.error("not published: %s", error)

    def _open(self, run: Run) -> None:
        """Journal and dead letters beside the states, before anything is read; those that the user
        gave stay.
        """
        store = open_store(self._path)
        folder = store.root if isinstance(store, LocalStore) else None
        live = getattr(run.dataset, "live", None)
        if live is not None and live.journal.path is not None:
            run.journal = live.journal
            if folder is not None and not _same_file(live.journal.path, folder / JOURNAL):
                self._lock = Lock(folder / JOURNAL)  # the states are written by one run, too
            return
        if folder is None:
            log.warning(
                "%s: no journal: after a kill the stream goes on without loss or repeat, but "
                "decisions of the "
                "clock may fall otherwise; put one on a local disk into dataset.live.journal",
                self._path,
            )
        run.journal = Journal(None if folder is None else folder / JOURNAL)
        letters = DeadLetters(None if folder is None else folder / LETTERS)
        self._own = (
            live,
            getattr(live, "journal", run.journal),
            getattr(live, "dead_letters", letters),
        )
        if live is not None:
            live.journal = run.journal
            live.dead_letters = letters


def _moment(run: Run) -> tuple[int, int]:
    """The step, and the epochs that are over: an epoch ends after its last step."""
    return run.step, run.model.counters["epochs"]


def _same_file(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def _graph(run: Run) -> Any:
    """The network for servers; None where it cannot become a graph here."""
    try:
        return run.model.graph()
    except (ConfigError, PersistError, MissingExtra) as error:
        log.warning("published versions bring no graph, servers need an export: %s", error)
        return None


def _tracks_changes(run: Run) -> bool:
    """Make every table remember what changes; False where a rule moves rows that nobody touched."""
    try:
        for table in run.tables.values():
            table.track()
    except ConfigError as error:
        log.info("every checkpoint is a full: %s", error)
        return False
    return True


def state_of(run: Run) -> State:
    """Everything that makes `run` go on to the same bits."""
    source = STREAM if run.online else EPOCHS
    position = {} if run.position is None else {source: run.position.to_json()}
    counts = {"step": run.step, "samples": run.samples, "skipped": run.skipped, "now": run.now}
    if not run.online:
        counts["epoch_began"] = run.epoch_began
    progress: dict[str, Any] = {
        "run": counts,
        "callbacks": run.callbacks.state(),
        "learner": run.learner.state(),
        "wall_caught": run.clock(),
        "wall_setting": setting_of(run),
    }
    live = getattr(run.dataset, "live", None)
    if live is not None:
        progress[DEAD_LETTER_BYTES] = live.dead_letters.num_bytes
    if not run.online:
        progress["metrics"] = columns([run.metrics])
    if hasattr(run.observer, "state"):
        progress["observer"] = run.observer.state()
    state: State = run.model.state()
    return replace(state, positions=position, progress=progress, random=_random_state())


def setting_of(run: Run) -> dict[str, Any]:
    """What a run has around its state: the results may depend on it, the meaning of the state does
    not.
    """
    return {
        "run.batch_size": getattr(run.dataset, "batch_size", None),
        "run.callbacks": run.callbacks.names(),
        "machine.torch": torch.__version__,
        "machine.torch_threads": torch.get_num_threads(),
        "machine.instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def resume(run: Run, reader: Reader, allow: Sequence[str] = ()) -> None:
    """Make `run`, which has not begun, go on from a checkpoint of the same stream or fit."""
    position = reader.manifest["positions"].get(STREAM if run.online else EPOCHS)
    if position is None:
        wanted = "stream" if run.online else "fit"
        raise PersistError(
            f"{reader.folder}: it holds a model, but no place in a {wanted} — received a "
            "checkpoint of another kind "
            "of training, or of save() — load it with hb.load(), and give Checkpoint a folder of "
            "its own"
        )
    progress: Mapping[str, Any] = reader.progress
    compare(reader.folder, progress.get("wall_setting", {}), setting_of(run), allow)
    run.model.restore(reader, allow)
    for name, value in progress["run"].items():
        setattr(run, name, value)
    run.counted = (run.step, run.samples)
    run.callbacks.load_state(progress["callbacks"])
    run.learner.load_state(progress["learner"])
    if run.observer is not None and "observer" in progress:
        run.observer.load_state(progress["observer"])
    run.position = Position.from_json(position)
    if not run.online:
        run.epoch = run.model.counters["epochs"]
        run.metrics.update(rows_of(progress["metrics"])[0])
    if run.online or run.position.state.get("epoch") == run.epoch:  # else the next epoch begins
        run.dataset.resume(run.position)
    for name, state in reader.random.items():
        _generator(name).set_state(torch.from_numpy(state))
    log.info("going on at step %d, from %s", run.step, reader.folder)


def _random_state() -> dict[str, torch.Tensor]:
    names = ["cpu"]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return {name: _generator(name).get_state() for name in names}


def _generator(name: str) -> torch.Generator:
    return (
        torch.default_generator
        if name == "cpu"
        else torch.cuda.default_generators[int(name.removeprefix("cuda:"))]
    )


# --- what a checkpoint says of a model ------------------------------------------------------------


def described_argument(value: Any) -> Any:
    """Plain values for the checkpoint; None for what only the user's own code can make."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, torch.optim.Optimizer):
        plain = {
            key: item
            for key, item in value.defaults.items()
            if isinstance(item, (int, float, bool, tuple))
        }
        return {"torch": type(value).__name__, **plain} if type(value) in NAMES.values() else None
    try:
        return describe(value)
    except ConfigError:
        return None


def typed(schema: Any, before: Any, encoder: Any) -> Any:
    """`schema`, knowing also what raw columns held that were learned from: by the schema `before`,
    and as `encoder` met them.
    """
    if not isinstance(schema, Schema):
        return schema
    for learned in (before, encoder):
        schema = schema.with_types(getattr(learned, "types", {}), getattr(learned, "shapes", {}))
    return schema


def given_tables(network: nn.Module) -> dict[str, Any] | None:
    tables = getattr(network, "_described", {}).get("tables")
    return (
        None if tables is None else {name: describe(table.config) for name, table in tables.items()}
    )


def rebuilt_argument(name: str, value: Any) -> Any:
    """The inverse of `described_argument`."""
    if name == "metrics":
        many = value.items() if isinstance(value, dict) and "kind" not in value else None
        if many is not None:
            return {key: rebuilt_argument(name, one) for key, one in many}
        if isinstance(value, list):
            return [rebuilt_argument(name, one) for one in value]
        return value if isinstance(value, str) else build(value, Metric, "metrics")
    if name == "optimizer" and isinstance(value, dict):
        if "torch" in value:
            return TorchOptimizer(
                value["torch"], {key: item for key, item in value.items() if key != "torch"}
            )
        return build(value, Rule, "optimizer")
    if name == "loss_fn" and isinstance(value, dict):
        if "kind" not in value:
            return {label: rebuilt_argument(name, one) for label, one in value.items()}
        return build(value, MultiTask if value["kind"] == "multi_task" else Loss, "loss_fn")
    return (
        build(value, Boost, "boost_level")
        if name == "boost_level" and isinstance(value, dict)
        else value
    )


def brief(value: Any) -> str:
    """A value as its constructor would be called, without what is left at its default."""
    try:
        plain = describe(value)
    except ConfigError:
        plain = repr(value).replace("\n", " ")
    if isinstance(plain, dict) and "kind" in plain:
        keywords = ", ".join(f"{key}={item}" for key, item in plain.items() if key != "kind")
        return f"{plain['kind']}({keywords})" if keywords else str(plain["kind"])
    text = str(plain)
    return text if len(text) <= 100 else text[:97] + "..."
