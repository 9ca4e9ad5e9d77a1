# SPDX-License-Identifier: Apache-2.0
"""The states of a job: the place of its newest model, and the lock of its stream's states."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotbed.connectors import DeadLetters, Journal, Live
from hotbed.errors import ConfigError
from hotbed.files import Lock, Where, free_name, resolve, sync_folder
from hotbed.job.events import MovedAside, Report, ignore
from hotbed.job.job import Job
from hotbed.persist.container.store import JOURNAL, LETTERS, open_store
from hotbed.persist.state.resume import refused_changes, shown
from hotbed.persist.upkeep.rollback import finish_first

if TYPE_CHECKING:
    from hotbed.persist.container.format import Reader
    from hotbed.training.model import RecModel


def has_state(where: Where) -> bool:
    """Return whether there is a newest checkpoint under `where`.

    Raises:
        FormatError: the file that names the newest checkpoint is torn or lost.
    """
    return open_store(where).newest_state() is not None


def newest(job: Job) -> str:
    """Return where the newest model of a job is: its stream's states, or its output folder."""
    if has_state(job.state_path):
        return job.state_path
    return job.output


def trained(job: Job) -> str:
    """Return where the newest model of a job is.

    Raises:
        ConfigError: the job has no model yet.
    """
    states = newest(job)
    if not has_state(states):
        raise ConfigError(
            f"job: not trained yet, got no checkpoint in {job.output}. Run `hotbed train` first."
        )
    return states


def with_grains_of(states: Where, job: Job) -> Job:
    """Return a job with the number of grains of its newest state, unless it has one."""
    from hotbed.persist.container.format import open_checkpoint

    if isinstance(job.grains, int):
        return job
    return replace(job, grains=(open_checkpoint(states).manifest.model or {}).get("grains", 1))


def check_unchanged(job: Job, reader: Reader, model: RecModel) -> None:
    """Raise ConfigError if the job says another model than the one in a state.

    Args:
        job: the job.
        reader: the state.
        model: of the job, before it is restored.
    """
    from hotbed.persist.state.restoring import meanings

    saved, here = meanings(reader, model.state())
    changed = refused_changes(saved, here, job.checkpoint.get("allow", ()))
    if changed:
        # the kind of a network explains its tables and their features
        name = min(changed, key=lambda name: not name.startswith("network"))
        others = [_key(other, reader) for other in changed if other != name]
        also = f" (also changed: {', '.join(dict.fromkeys(others))})" if others else ""
        raise ConfigError(
            f"job.{_key(name, reader)}: the model in {reader.folder} was trained with "
            f"{shown(name, saved)}{also}, got {shown(name, here)}. Give what it was trained with, "
            "as in the job.json of its output, or train the job again."
        )


def _key(field: str, reader: Reader) -> str:
    """Return the key of a job that a field of a state comes from, and its table."""
    section, _, rest = field.partition(".")
    tables = [name for name in reader.table_names if rest.startswith(f"{name}.")]
    if section == "tables" and tables:
        table = max(tables, key=len)
        return f"tables.{rest.removeprefix(f'{table}.')} of table {table!r}"
    name = {"network": "model", "loss_fn": "loss"}.get(section, section)
    return f"{name}.{rest}" if rest else name


@contextlib.contextmanager
def own_states(
    job: Job, *, restart: bool = False, report: Report = ignore
) -> Iterator[Live | None]:
    """Hold the lock of the stream's states while the job trains and follows its stream.

    Yields the journal and the dead letters, which are kept with the states. Yields None where
    nothing can be locked (an object store) or nothing needs a lock (a job without a stream).

    Args:
        restart: rename a folder that holds states first, and begin with an empty one.
        report: called with `MovedAside` when a folder was renamed.

    Raises:
        ConfigError: `restart` is set and the states are in an object store.
        PersistError: another run holds the lock.
    """
    folder = resolve(job.state_path)
    if isinstance(folder, str) or (job.stream is None and not folder.exists()):
        if restart and has_state(job.state_path):
            raise ConfigError(
                f"--restart: cannot move the state {job.state_path} aside, got an object store. "
                "Choose another output for the job."
            )
        yield None
        return
    if restart and folder.exists():
        aside = _move_aside(folder)
        if aside is not None:
            report(MovedAside(aside))
    with contextlib.closing(Journal(folder / JOURNAL)) as journal:
        finish_first(folder)
        yield Live(journal, DeadLetters(folder / LETTERS))


def _move_aside(folder: Path) -> Path | None:
    """Rename a folder of states under its lock; return its new path, None if it is empty."""
    with Lock(folder / JOURNAL):
        if not any(path.is_dir() or path.stat().st_size for path in folder.iterdir()):
            return None
        aside = free_name(folder)
        os.rename(folder, aside)
        sync_folder(folder.parent)
    return aside
