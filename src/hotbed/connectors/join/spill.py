# SPDX-License-Identifier: Apache-2.0
"""How much of the open impressions lies in memory, and where the rest."""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hotbed import checks
from hotbed.errors import PersistError

WRITTEN_ROWS = 8192


@dataclass(frozen=True)
class Spill:
    """Where open impressions lie that exceed their memory.

    The files have no name, so that a process that is killed leaves none. They are scratch: what
    a killed run resumes from is its checkpoint.

    Args:
        directory: on a local disk; None = the directory of temporary files.
        memory_bytes: open impressions and held outcomes above this lie on the disk.
        disk_bytes: so much of the disk at most; then reading waits. None = no limit.

    Example: `hb.sources.Spill("/fast/disk", memory_bytes=4 << 30, disk_bytes=100 << 30)`
    """

    directory: str | Path | None = None
    memory_bytes: int = 512 << 20
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        checks.whole_number("spill.memory_bytes", self.memory_bytes, 0)
        if self.disk_bytes is not None:
            checks.whole_number("spill.disk_bytes", self.disk_bytes, 0)


class SpilledTable:
    """A table in a file without a name, which lives as long as this object."""

    def __init__(self, table: pa.Table, spill: Spill) -> None:
        place = spill.directory or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115 - it stays open
            weakref.finalize(self, self._file.close)
            with pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), table.schema) as sink:
                sink.write_table(table, WRITTEN_ROWS)
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise PersistError(
                f"join.spill: open impressions cannot be written to {os.fspath(place)!r}, got "
                f"{error.strerror}. Name another directory, or more memory_bytes."
            ) from error

    def read(self) -> pa.Table:
        """Return the table."""
        data = os.pread(self._file.fileno(), self.num_bytes, 0)
        return pa.ipc.open_file(pa.py_buffer(data)).read_all()
