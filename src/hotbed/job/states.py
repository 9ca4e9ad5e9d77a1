# SPDX-License-Identifier: Apache-2.0
"""The states of a job: where its newest is, exports of it, and the lock of its stream's states."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.connectors import DeadLetters, Journal, Live
from hotbed.errors import ConfigError
from hotbed.files import Lock, Where, free_name, resolve, sync_folder
from hotbed.job.events import MovedAside, Report, ignore
from hotbed.job.job import Job
from hotbed.job.ranks import from_first, num_ranks
from hotbed.persist.container.store import JOURNAL, LETTERS, open_store
from hotbed.persist.state.resume import refused_changes, shown
from hotbed.persist.upkeep.rollback import finish_first

if TYPE_CHECKING:
    from hotbed.models.two_tower import Tower
    from hotbed.persist.container.format import Reader
    from hotbed.persist.container.manifest import Manifest
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


@dataclass(frozen=True)
class Exported:
    """A folder or URL of an exported model, and its manifest."""

    manifest: Manifest
    path: Where

    def request(self) -> dict[str, Any]:
        """Return a request in JSON that a server of the model answers; its values are made up."""
        from hotbed.data import Schema
        from hotbed.serving.arguments import column_shapes
        from hotbed.serving.protocol.inputs import ModelInputs

        assert self.manifest.graph is not None
        shapes = column_shapes(self.manifest.graph.to_json())
        return ModelInputs(Schema.from_json(self.manifest.schema or {}), shapes).example()


def exported(model: RecModel, states: Where, out: Where, tower: str | None = None) -> Exported:
    """Freeze a model for servers.

    Args:
        model: with the newest state.
        states: the checkpoint of that state.
        out: where the export is written.
        tower: of a two-tower model, the side whose tower is frozen alone.

    Raises:
        ConfigError: the model has no towers.
    """
    from hotbed.models import TwoTower
    from hotbed.persist.container.format import open_checkpoint

    if tower is not None:
        if not isinstance(model.network, TwoTower):
            raise ConfigError(
                f"--tower: the model has no towers, got {type(model.network).__name__}. Leave it "
                "out, or train a two_tower model."
            )
        folder = _of_tower(model, model.network.tower(tower)).export(out)
    elif model.learner.shard.size == num_ranks():
        folder = model.export(out, states)
    else:  # a model without grains is whole on each rank
        folder = from_first(lambda: model.export(out, states))
    return Exported(open_checkpoint(folder).manifest, out)


def _of_tower(model: RecModel, tower: Tower) -> RecModel:
    """Return a model of a tower, with the types that the whole one learned from."""
    from hotbed.training.learned_types import typed
    from hotbed.training.model import RecModel

    if model.learner.shard.size > 1:
        raise ConfigError(
            f"--tower: the rows lie on several ranks, got {model.learner.shard.size}. Export the "
            "tower in one process."
        )
    part = RecModel(tower)
    part.schema = typed(tower.schema, model.schema, model.encoder)
    return part
