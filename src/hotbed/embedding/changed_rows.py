# SPDX-License-Identifier: Apache-2.0
"""ChangeReader: what changed in a table since the last read, for a copy that is kept elsewhere."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import TableError

from .snapshot import Snapshot
from .table import Table


@dataclass(frozen=True)
class Changes:
    """Rows of a table, and the ids whose rows are gone.

    Attributes:
        ids: int64 [n].
        values: float32 [n, dim], the rows of `ids`.
        removed: int64 [m], in rising order; none of them is among `ids`.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    removed: NDArray[np.int64]


class ChangeReader:
    """Reads the rows of a table, and later those that changed or were removed since.

    A table records changes for one reader. If a `Checkpoint` with deltas, or another reader, took
    the record meanwhile, `changes` raises TableError, and `all` begins anew. `Checkpoint` then
    saves a full. `Checkpoint(full_every=1)` and `model.save` leave the record alone.

    Args:
        table: the table.
        wait_seconds: how long a read waits while a checkpoint of the table is being written.
        own_rows: whether it reads the rows of this process alone, where several have a part.

    Example:
        >>> reader = ChangeReader(table)
        >>> copy = reader.all()
        >>> news = reader.changes()
        >>> copied.remove(news.removed)
    """

    def __init__(self, table: Table, wait_seconds: float = 60.0, *, own_rows: bool = False) -> None:
        self.table = table
        self._wait = wait_seconds
        self._own_rows = own_rows
        self._taken = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ChangeReader:
        """Return a reader of the table's copy, which has read nothing yet."""
        copied = copy.deepcopy(self.table, memo)
        return ChangeReader(copied, self._wait, own_rows=self._own_rows)

    @property
    def has_read(self) -> bool:
        """Whether the table was read, so that changes since then are known."""
        return self._taken >= 0

    def all(self) -> Changes:
        """Return all rows.

        Raises:
            PersistError: a snapshot of the table stays open.
        """
        if self.table.rule.scope == "touched":
            self.table.track()
        return self._read(changes=False)

    def changes(self) -> Changes:
        """Return the rows that changed, and the ids that were removed, since the last read.

        Raises:
            ConfigError: the rule moves rows without gradients, see `Table.track`.
            TableError: the table was not read yet, it was restored or cleared since, or another
                reader took the record of its changes.
            PersistError: a snapshot of the table stays open.
        """
        self.table.track()
        if self._taken != self.table.num_taken:
            raise TableError(
                f"table {self.table.name!r}: its changes since the last read are not known, got a "
                "restored table, or another reader of its changes. Read all rows, and save "
                "checkpoints with full_every=1 beside this reader."
            )
        return self._read(changes=True)

    def _read(self, *, changes: bool) -> Changes:
        if self.table.is_spread and not self._own_rows:
            raise TableError(
                f"table {self.table.name!r}: several ranks hold its rows, got a reader on one of "
                "them. Read the states that all ranks save, such as by hb.checkpoints.Replica."
            )
        until = time.monotonic() + self._wait
        while self.table.native.has_snapshot and time.monotonic() < until:
            time.sleep(0.001)  # the thread that writes a checkpoint ends its snapshot
        with self.table.snapshot(changes=changes) as snapshot:
            read = _changes_of(snapshot, self.table.dim)
        self._taken = self.table.num_taken
        return read


def _changes_of(snapshot: Snapshot, dim: int) -> Changes:
    ids = [np.empty(0, np.int64)]
    values = [np.empty((0, dim), np.float32)]
    for batch in snapshot.rows():
        ids.append(_column(batch, "id"))
        values.append(batch.column("value").flatten().to_numpy().reshape(-1, dim))
    removed = [np.empty(0, np.int64)]
    if snapshot.changes:
        removed += [_column(batch, "id") for batch in snapshot.removed()]
    present = np.concatenate(ids)
    gone = np.setdiff1d(np.concatenate(removed), present)
    return Changes(present, np.concatenate(values), gone)


def _column(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    column: NDArray[Any] = batch.column(name).to_numpy()
    return column
