# SPDX-License-Identifier: Apache-2.0
"""What a measuring that never ends resumes from: its position, and what is open there."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.connectors.live import HeldRows, SavedRows
from hotbed.connectors.position import Position
from hotbed.errors import PersistError
from hotbed.persist.container.format import CheckpointWriter, Saved, holds_nothing, open_checkpoint
from hotbed.persist.container.manifest import Manifest, ProgressEntry, encode
from hotbed.persist.container.retention import retain
from hotbed.persist.container.store import open_store
from hotbed.persist.state.open_rows import read_open_rows, write_open_rows

log = logging.getLogger("hotbed")

FULL_EVERY = 32
"""States from one full to the next; the others hold what came since the one before."""
_STREAM = "measured"
_SAMPLES = "samples.arrow"


@dataclass(frozen=True)
class SavedWindows:
    """A state that was read.

    Attributes:
        position: of the join.
        settings: how windows are measured, as plain values.
        samples: of the windows that were open.
        open_rows: what the join held open.
    """

    position: Position
    settings: Mapping[str, Any]
    samples: list[pa.Table]
    open_rows: SavedRows | None


class WindowStates:
    """States in a folder, each a full or what came since the one before.

    Args:
        folder: of the states.
        settings: how windows are measured, as plain values.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = dict(settings)
        self._parent: Saved | None = None
        self._opened: Mapping[str, int] | None = None
        self._number = 0

    def read(self) -> SavedWindows | None:
        """Return the newest state; None where there is none.

        Raises:
            PersistError: it was written with other settings.
            FormatError: a file of it is torn or changed.
        """
        if holds_nothing(self._folder):
            return None
        reader = open_checkpoint(self._folder)
        settings = reader.progress["settings"]
        if settings != self._settings:
            changed = sorted(
                name
                for name in {**settings, **self._settings}
                if settings.get(name) != self._settings.get(name)
            )
            raise PersistError(
                f"{self._folder}: its windows were measured with other {', '.join(changed)}, got "
                f"{ {name: self._settings.get(name) for name in changed} }. Keep them, or give "
                "another output."
            )
        samples = []
        for link in reader.links:
            if _SAMPLES in link.manifest.files:
                samples += [pa.Table.from_batches([batch]) for batch in link.batches(_SAMPLES)]
        rows = read_open_rows(reader)
        self._parent = reader.saved
        self._opened = None if rows is None else rows.opened
        self._number = reader.manifest.version
        position = Position.from_json(reader.manifest.positions[_STREAM])
        return SavedWindows(position, settings, samples, rows)

    def write(
        self, position: Position, rows: HeldRows, samples: list[pa.Table], new: list[pa.Table]
    ) -> None:
        """Write a state, which is on disk when this returns.

        Args:
            position: of the join.
            rows: what the join holds open.
            samples: of all open windows.
            new: those of them that came since the last state.

        Raises:
            PersistError: the disk refuses. The state before stays the newest.
        """
        is_full = self._parent is None or len(self._parent.chain) >= FULL_EVERY
        tree, _ = encode({"settings": self._settings}, "progress")
        manifest = Manifest(
            package_version=version("hotbed"),
            kind="full" if is_full else "delta",
            version=self._number + 1,
            parent=None if self._parent is None else self._parent.digest,
            chain=() if is_full or self._parent is None else self._parent.chain,
            model=None,
            schema=None,
            positions={_STREAM: position.to_json()},
            counters={},
            dense=None,
            progress=ProgressEntry(file=None, tree=tree, random={}),
            tables=(),
        )
        saved_rows = rows.saved_at(position.state, None if is_full else self._opened)
        with CheckpointWriter(self._folder) as writer:
            tables = samples if is_full else new
            batches = itertools.chain.from_iterable(table.to_batches() for table in tables)
            writer.write_batches(_SAMPLES, batches)
            entry = write_open_rows(writer, saved_rows)
            self._parent = writer.commit(replace(manifest, open_rows=entry))
        self._opened = saved_rows.opened
        self._number += 1
        if is_full:
            self._retain()

    def _retain(self) -> None:
        try:
            retain(open_store(self._folder), 1)
        except (PersistError, OSError) as error:
            log.warning("%s: older states are kept: %s", self._folder, error)
