# SPDX-License-Identifier: Apache-2.0
"""Parts of a log in a folder: an open one, which is whole up to its last flush, and closed ones.

An open part is a stream of Arrow, whose name begins with a dot. A closed one is a Parquet file that
never changes. So whoever reads `*.parquet` reads whole requests, each once. Its name is the time
of its last flush, whichever process closes it: parts sort by time, and one whose closing was cut
short is closed again under the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.files import new_file

log = logging.getLogger("hotbed.serving")
_OPEN_PREFIX = ".open-"
_OPEN_SUFFIX = ".arrows"
_MOST_OPEN = 8  # parts with other types of columns
_DIGITS = 20  # of microseconds in the name of a part


@dataclass(frozen=True)
class PartLimits:
    """When parts are closed, and how much a log may hold.

    Attributes:
        part_bytes: a part with so many bytes is closed.
        part_seconds: a part that is so old is closed.
        most_bytes: bytes of all parts of a model; the oldest closed ones are removed.
    """

    part_bytes: int
    part_seconds: float
    most_bytes: int


class _OpenPart:
    """A part that is being written."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        name = f"{_OPEN_PREFIX}{secrets.token_hex(8)}{_OPEN_SUFFIX}"
        self.path = folder / name
        self.begun = time.monotonic()
        self.has_rows = False
        self._lock = self.path.open("xb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = pa.OSFile(os.fspath(self.path), "wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    @property
    def num_bytes(self) -> int:
        num_bytes: int = self._file.tell()
        return num_bytes

    def append(self, rows: pa.RecordBatch) -> None:
        self._stream.write_batch(rows)
        now = time.time_ns()
        os.utime(self._lock.fileno(), ns=(now, now))  # of a write it is the last tick of the kernel
        self.has_rows = True

    def leave(self) -> None:
        """Close the file; what it holds is whole up to the last batch."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._lock.close()


class LogFolder:
    """The parts of a model's log. One thread of a process writes them; processes may share it.

    Args:
        root: the folder of all logs.
        model: name of the model.
        limits: when parts are closed.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, root: Path, model: str, limits: PartLimits) -> None:
        self.path = root / quote(model, safe="")
        self._limits = limits
        self._parts = dict[pa.Schema, _OpenPart]()
        self._left = list[Path]()  # parts whose disk was full
        self.path.mkdir(parents=True, exist_ok=True)
        self.recover()

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the open part with their columns; they are in the file afterwards.

        Raises OSError if they are not: the part then ends before them.
        """
        part = self._parts.get(rows.schema)
        try:
            if part is None:
                while len(self._parts) >= _MOST_OPEN:
                    self._close(next(iter(self._parts)))
                part = self._parts[rows.schema] = _OpenPart(self.path, rows.schema)
            part.append(rows)
        except OSError:
            self._leave(rows.schema)
            raise

    def rotate(self, most_bytes: int | None = None) -> None:
        """Close parts that are long or old enough, and remove the oldest beyond `most_bytes`.

        `most_bytes`: None = that of the limits.

        Raises OSError if a part cannot be closed yet; its rows stay in the open one.
        """
        limits = self._limits
        self._close_left()
        for schema, part in list(self._parts.items()):
            age = time.monotonic() - part.begun
            if part.num_bytes >= limits.part_bytes or age >= limits.part_seconds:
                self._close(schema)
        self._remove_oldest(limits.most_bytes if most_bytes is None else most_bytes)

    def close(self) -> None:
        """Close all parts."""
        for schema in list(self._parts):
            self._close(schema)
        self._close_left()

    def recover(self) -> None:
        """Close the parts that processes left open which are gone."""
        for path in self.path.glob(f"{_OPEN_PREFIX}*{_OPEN_SUFFIX}"):
            with contextlib.suppress(OSError), path.open("rb") as file:  # another one may close it
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                self._to_parquet(path)

    def _close(self, schema: pa.Schema) -> None:
        self._leave(schema)
        self._close_left()

    def _leave(self, schema: pa.Schema) -> None:
        """Write no more to the part with these columns, if there is one."""
        part = self._parts.pop(schema, None)
        if part is None:
            return
        part.leave()
        if part.has_rows:
            self._left.append(part.path)
        else:
            part.path.unlink()

    def _close_left(self) -> None:
        """Close the parts that are written no more."""
        while self._left:
            self._to_parquet(self._left[0])
            del self._left[0]

    def _to_parquet(self, path: Path) -> None:
        """Write the whole batches of an open part as a closed one, and remove it."""
        batches = _whole_batches(path)
        first = next(batches, None)
        if first is not None:
            flushed = path.stat().st_mtime_ns // 1000
            closed = self.path / f"{flushed:0{_DIGITS}}-{path.name[6:22]}.parquet"
            text = [column.name for column in first.schema if pa.types.is_string(column.type)]
            with new_file(closed) as file:
                writer = pq.ParquetWriter(
                    file, first.schema, compression="zstd", use_dictionary=text
                )
                with writer:
                    writer.write_batch(first)
                    for batch in batches:
                        writer.write_batch(batch)
        path.unlink(missing_ok=True)

    def _remove_oldest(self, most_bytes: int) -> None:
        parts = sorted(self.path.glob("*.parquet"))
        sizes = [_size(path) for path in parts]
        total = sum(sizes)
        for path, num_bytes in zip(parts, sizes, strict=True):
            if total <= most_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                log.info("%s: removed, the log has more than its bytes", path)
            total -= num_bytes


def _whole_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an open part up to the last whole one."""
    try:
        with pa.OSFile(os.fspath(path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream
    except (pa.ArrowException, OSError) as error:  # torn by a kill or a full disk
        log.info("%s: ends within a flush, which is not in the log: %s", path, error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
