# SPDX-License-Identifier: Apache-2.0
"""Files of rows that no longer change: written once, mapped into memory, shared by processes.

They hold the tables that servers read, and what transforms learned. docs/format.md describes the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import _core
from hotbed.errors import FormatError
from hotbed.files import new_file, writing

RowDtype = Literal["float32", "float16", "int8"]
IdArray: TypeAlias = NDArray[np.int64]
RowArray: TypeAlias = NDArray[np.float32]
_PIECE_BYTES = 2 << 20


def write_rows(
    path: Path,
    dim: int,
    batches: Iterable[pa.RecordBatch],
    removed: Iterable[pa.RecordBatch] = (),
    dtype: RowDtype = "float32",
) -> int:
    """Write one file of rows and return their number. It appears whole or not at all.

    Args:
        path: the file.
        dim: lanes of a row; 0 for ids alone, whose slots are their places.
        batches: record batches with columns `id` and, unless `dim` is 0, `value`; each id once.
        removed: record batches with a column `id`: ids that older files hold and that have no row
            any more.
        dtype: type of the rows; int8 rows have one scale each.

    Raises:
        NotWritten: the disk is full or refuses.
    """
    id_parts = list[IdArray]()
    with writing(path), new_file(path) as file:
        pieces = _Pieces(file)
        for batch in sliced(batches, dim):
            id_parts.append(batch.column("id").to_numpy().copy())  # a view would keep the batch
            if dim == 0:
                continue
            lanes = np.ascontiguousarray(batch.column("value").flatten().to_numpy())
            rows = _core.frozen_rows(lanes.view(np.float32), dim, dtype)
            pieces.write(np.asarray(rows))
        ids = _joined(id_parts)
        removed_ids = id_column(removed)
        if len(removed_ids):  # an id that came back has a row
            removed_ids = np.setdiff1d(removed_ids, ids)
        padding = bytes(-pieces.size % 64)
        index = _core.frozen_index(ids, removed_ids)
        footer = _core.frozen_footer(len(ids), len(removed_ids), dim, dtype)
        pieces.write(padding)
        pieces.write(np.asarray(index))
        pieces.write(footer)
        pieces.flush()
    return len(ids)


class _Pieces:
    """Write a file in pieces as large as a huge page.

    File systems with large folios then map it by huge pages, which saves a lookup of rows a third
    of its time.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._piece = bytearray()
        self.size = 0

    def write(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        self.size += len(rest)
        while len(rest):
            room = _PIECE_BYTES - len(self._piece)
            self._piece += rest[:room]
            rest = rest[room:]
            if len(self._piece) == _PIECE_BYTES:
                self.flush()

    def flush(self) -> None:
        self._file.write(self._piece)
        self._piece.clear()


def rows_at_once(dim: int) -> int:
    """Return how many rows are copied at once: the memory of it is the same for each dim."""
    return max(1, _PIECE_BYTES // (4 * max(1, dim)))


def sliced(batches: Iterable[pa.RecordBatch], dim: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of record batches, which may hold a million each, `rows_at_once` at a time."""
    num_rows = rows_at_once(dim)
    for batch in batches:
        for start in range(0, batch.num_rows, num_rows):
            yield batch.slice(start, num_rows)


def id_column(batches: Iterable[pa.RecordBatch]) -> IdArray:
    """Return the column `id` of record batches, int64 [n]."""
    # copies: a view would keep the whole batch in memory
    parts = [batch.column("id").to_numpy().copy() for batch in batches]
    return _joined(parts)


def _joined(parts: Sequence[IdArray]) -> IdArray:
    no_ids = np.empty(0, np.int64)
    return np.concatenate([no_ids, *parts])


class FrozenRows:
    """One mapped file of rows. Raises FormatError, which names the file, for a torn one."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.native = _core.FrozenRows(str(path))
        except (RuntimeError, OSError) as error:
            raise FormatError(
                f"{path}: expected a whole file of rows, got {error}. Restore it from a copy, or "
                "export again."
            ) from error

    def __len__(self) -> int:
        return int(self.native.num_rows)

    @property
    def dim(self) -> int:
        """Lanes of a row; 0 where the file holds ids alone."""
        return int(self.native.dim)

    def entries(self) -> tuple[IdArray, IdArray]:
        """Return the ids with a row, and the ids whose rows in older files do not count any more.

        The order of either is unspecified.
        """
        ids, removed = self.native.entries()
        return ids, removed

    def slots(self, ids: IdArray) -> IdArray:
        """Return the place of each id's row in the file, int64 [n]; -1 for an id without a row."""
        slots = self.native.slots(np.ascontiguousarray(ids))
        return np.asarray(slots)

    def rows(self, slots: IdArray) -> RowArray:
        """Return the rows of slots, float32 [n, dim]; NaN for negative slots."""
        lanes = self.native.rows(np.ascontiguousarray(slots))
        return np.asarray(lanes).reshape(len(slots), self.dim)
