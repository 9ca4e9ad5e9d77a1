# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of a run, and how a later run resumes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch

from hotbed.connectors import Position
from hotbed.connectors.live import HeldRows, SavedRows
from hotbed.connectors.position import join_position
from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError, PersistError
from hotbed.persist.container.format import Reader
from hotbed.persist.state.checkpoint import State
from hotbed.persist.state.network import random_state, set_random_state
from hotbed.persist.state.open_rows import read_open_rows
from hotbed.persist.state.resume import DEAD_LETTER_BYTES, EPOCHS, STREAM, compare
from hotbed.training.ahead.cores import Cores
from hotbed.training.columns import columns, rows_of
from hotbed.training.run import Counts, Run
from hotbed.training.step.learner import SelfUpdating
from hotbed.training.step.scorer import Progressive

log = logging.getLogger("hotbed")


class Resumable(Protocol):
    """Data that a run can resume: a Dataset, or a stream of the user's own."""

    position: Position

    def resume(self, position: Position) -> Any:
        """Begin after `position`."""


def resumable(run: Run) -> Resumable:
    """Return the data of a run; raise ConfigError if they have no position to resume from."""
    data: Any = run.dataset
    if isinstance(data, Dataset) or (run.online and callable(getattr(data, "resume", None))):
        resumed: Resumable = data
        return resumed
    raise ConfigError(
        f"Checkpoint: the data have no position to resume from, got {type(data).__name__}. "
        "Give a hb.Dataset, or leave Checkpoint out."
    )


def state_of(run: Run) -> State:
    """Return everything from which `run` resumes to the same bits."""
    assert not run.ahead, "the tables hold ids of batches that are not learned"
    positions = {}
    if run.position is not None:
        positions[_source(run)] = _position_of_ranks(run, run.position).to_json()
    counts = asdict(run.counts)
    del counts["epoch"]  # it follows from the model's counters
    if run.online:
        del counts["epoch_began"]
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
    if isinstance(run.observer, Progressive):
        progress["observer"] = run.observer.state()
    return replace(run.model.state(), positions=positions, progress=progress, random=random_state())


def _position_of_ranks(run: Run, position: Position) -> Position:
    """Return a position that has the place of each grain from the rank that has read its rows.

    Of the rows of others, a rank has read some columns. Their chunks may have other bounds.
    """
    grains = run.goal.own
    if grains is None or "grains" not in position.state:
        return position
    places = run.learner.shard.gathered(position["grains"][grains.start : grains.stop])
    return Position({**position.state, "grains": [place for part in places for place in part]})


def _check_grains(run: Run, reader: Reader, position: Position) -> None:
    """Raise PersistError if rows were read by another number of grains, and an epoch has begun."""
    has_begun = run.online or position.state.get("epoch") == reader.manifest.counters.get("epochs")
    written = position.state.get("order", {}).get("grains", 1)
    if has_begun and written != run.learner.grains:
        raise PersistError(
            f"{reader.folder}: grains is {written} in the checkpoint, got {run.learner.grains}. "
            "Build it as it was when it was saved: rows that are read by grains go on with their "
            'number. After a whole epoch, allow=["grains"] accepts another one.'
        )


def _check_optimizers(folder: str, saved: Iterable[str], here: Collection[str]) -> None:
    """Raise PersistError if a network that updates itself would lose the state of an optimizer."""
    for name in saved:
        if name not in here:
            raise PersistError(
                f"{folder}: it holds the state of the optimizer {name!r}, got a model without it, "
                "which would lose it. Give RecModel an optimizer, or the network one of this path, "
                "or Checkpoint a folder of its own."
            )


def _source(run: Run) -> str:
    """Return the name of the position in a state."""
    return STREAM if run.online else EPOCHS


def setting_of(run: Run) -> dict[str, Any]:
    """Return settings that may change the results of a run, but not the meaning of its state."""
    torch_threads: int | str = torch.get_num_threads()
    for setting in run.callbacks.of(Cores):
        torch_threads = setting.torch_threads
    return {
        "run.batch_size": getattr(run.dataset, "batch_size", None),
        "run.callbacks": run.callbacks.names(),
        "machine.device": run.learner.device.type,
        **machine(torch_threads),
    }


def machine(torch_threads: int | str) -> dict[str, Any]:
    """Return what the bits of a training depend on, beside its seed and its data."""
    return {
        "machine.torch": torch.__version__,
        "machine.torch_threads": torch_threads,
        "machine.instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def _use_threads(number: Any) -> None:
    """Let torch use the number of threads that a state was learned with, if it is known."""
    now = torch.get_num_threads()
    if isinstance(number, int) and number != now:
        log.info("torch uses %d threads as before, not %d: the bits depend on them", number, now)
        torch.set_num_threads(number)


def resume(run: Run, reader: Reader, allow: Sequence[str], loaded: Callable[[], None]) -> None:
    """Resume `run`, which has not begun, from a checkpoint of the same stream or fit.

    `loaded` is called when the tables have the rows of the checkpoint, before anything else could
    change them.
    """
    position = reader.manifest.positions.get(_source(run))
    if position is None:
        kind = "stream" if run.online else "fit"
        raise PersistError(
            f"{reader.folder}: it holds a model, but no position in a {kind}, got a checkpoint of "
            "another kind of training, or of save(). Load it with hb.load(), and give Checkpoint a "
            "folder of its own."
        )
    _check_grains(run, reader, Position.from_json(position))
    progress: Mapping[str, Any] = reader.progress
    setting = progress.get("wall_setting", {})
    if run.learner.grains > 1:
        _use_threads(setting.get("machine.torch_threads"))
    compare(reader.folder, setting, setting_of(run), allow)
    dense = reader.manifest.dense
    if dense is not None and isinstance(run.learner, SelfUpdating):
        _check_optimizers(reader.folder, dense.optimizers, run.learner.optimizers)
    run.model.restore(reader, allow)
    loaded()
    run.counts = Counts(**progress["run"])
    run.callbacks.load_state(progress["callbacks"])
    run.learner.load_state(progress["learner"])
    if isinstance(run.observer, Progressive) and "observer" in progress:
        run.observer.load_state(progress["observer"])
    run.position = Position.from_json(position)
    if not run.online:
        run.counts.epoch = run.model.counters["epochs"]
        run.metrics.update(rows_of(progress["metrics"])[0])
    run.ask_join(replace(run.goal.wishes, saved=read_open_rows(reader)))
    if run.online or run.position.state.get("epoch") == run.epoch:  # else the next epoch begins
        resumable(run).resume(run.position)
    set_random_state(reader.random)
    log.info("resuming at step %d, from %s", run.step, reader.folder)


def open_rows(run: Run, since: Mapping[str, int] | None) -> SavedRows | None:
    """Return what a join of streams holds open at the position of a run; None without one.

    `since`: what it had opened at the state before, if only later rows are wanted.
    """
    place = None if run.position is None else join_position(run.position.state)
    if place is None:
        return None
    rows = held_rows(run)
    if rows is None:  # nothing was read since the resumption
        return run.goal.wishes.saved
    return rows.saved_at(place, since)


def held_rows(run: Run) -> HeldRows | None:
    """Return what the join of a stream holds open; None without one, or before it is read."""
    return run.dataset.status.open_rows if isinstance(run.dataset, Dataset) else None


def release(run: Run) -> None:
    """Let a join of streams forget what lies before the last step."""
    rows = held_rows(run)
    place = None if run.position is None else join_position(run.position.state)
    if rows is not None and place is not None:
        rows.release(place)
