# SPDX-License-Identifier: Apache-2.0
"""How much of the open impressions lies in memory, and where the rest."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.errors import PersistError
from hotbed.files import check_scratch, local_path

WRITTEN_ROWS = 8192


@dataclass(frozen=True)
class Spill:
    """Keep open impressions on a disk when they exceed their memory.

    The files have no name, so that a killed process leaves none. They are scratch: a killed run
    resumes from its checkpoint.

    Args:
        directory: on a local disk; None = the directory of temporary files.
        memory_bytes: open impressions and held outcomes above this lie on the disk.
        disk_bytes: the most bytes on the disk; then reading waits. None = no limit.

    Example: `hb.sources.Spill("/fast/disk", memory_bytes=4 << 30, disk_bytes=100 << 30)`
    """

    directory: str | Path | None = None
    memory_bytes: int = 512 << 20
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.directory is not None:
            object.__setattr__(
                self, "directory", str(local_path(self.directory, "spill.directory"))
            )
        checks.whole_number("spill.memory_bytes", self.memory_bytes, 0)
        if self.disk_bytes is not None:
            checks.whole_number("spill.disk_bytes", self.disk_bytes, 0)

    def check_ready(self) -> None:
        """Raise ConfigError unless files can be made in the directory; call it before reading."""
        if self.directory is not None:
            check_scratch(self.place, "spill.directory")

    @property
    def place(self) -> str:
        """The directory."""
        return os.fspath(self.directory or tempfile.gettempdir())


class SpilledTable:
    """A table in a file without a name, which lives as long as this object."""

    def __init__(self, table: pa.Table, spill: Spill) -> None:
        batches = table.to_batches(WRITTEN_ROWS)
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        with _writing(spill):
            self._file = _nameless(self, spill)
            with pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), table.schema) as sink:
                for batch in batches:
                    sink.write_batch(batch)
            self.num_bytes = os.fstat(self._file.fileno()).st_size

    def _opened(self) -> pa.ipc.RecordBatchFileReader:
        pages = mmap.mmap(self._file.fileno(), self.num_bytes, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(pages))

    def read(self) -> pa.Table:
        """Return the table, which is read by pages."""
        return self._opened().read_all()

    def take(self, rows: np.ndarray) -> pa.Table:
        """Return some rows, rising; only the pages of those near them are read."""
        reader = self._opened()
        parts: list[pa.Table] = []
        numbers = np.searchsorted(self._ends, rows, "right")
        for number in np.unique(numbers).tolist():
            batch = reader.get_batch(number)
            first = int(self._ends[number]) - batch.num_rows
            inside = rows[numbers == number] - first
            parts.append(rows_of(pa.Table.from_batches([batch]), inside))
        return pa.concat_tables(parts)


class SpilledArrays:
    """Arrays in a file without a name, which are read by pages."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        with _writing(spill):
            self._file = _nameless(self, spill)

    def put(self, values: np.ndarray) -> np.ndarray:
        """Write an array; return it as it lies in the file."""
        with _writing(self._spill):
            offset = os.fstat(self._file.fileno()).st_size
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(values).data)
            return np.memmap(self._file, values.dtype, "r", offset, values.shape)


def rows_of(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Return some rows of a table, rising; without copying where they follow one another."""
    if not len(rows):
        return table.slice(0, 0)
    first = int(rows[0])
    count = int(rows[-1]) - first + 1
    if count == len(rows):
        return table.slice(first, count)
    return table.take(pa.array(rows))


def _nameless(owner: object, spill: Spill) -> Any:
    """Return a file without a name, which is closed when its owner is gone."""
    file = tempfile.TemporaryFile(dir=spill.place, buffering=0)  # noqa: SIM115 - it stays open
    weakref.finalize(owner, file.close)
    return file


@contextmanager
def _writing(spill: Spill) -> Iterator[None]:
    """Name the place in errors of the disk."""
    try:
        yield
    except OSError as error:
        raise PersistError(
            f"join.spill: open impressions cannot be written to {spill.place!r}, got "
            f"{error.strerror}. Name another directory, or more memory_bytes."
        ) from error
