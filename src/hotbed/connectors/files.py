# SPDX-License-Identifier: Apache-2.0
"""Paths and globs, sections of files, positions inside a list of files, and parquet."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.base import READ_ALL, READ_ROWS, Place, Position, ReadPlan, Source, cut
from hotbed.errors import DataError, DecodeError, SchemaError

SAMPLE_BYTES = 1 << 20
"""Bytes of a file from which names and types of its columns are inferred."""

_BLANK_BYTES = 1 << 16
_CODECS = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(path: Paths) -> list[str]:
    """Files named by `path`: a file, a glob (sorted; `**` recurses) or a list of both. Raises
    DataError if one matches nothing.
    """
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    found: list[str] = []
    for item in path:
        text = os.fspath(item)
        matches = (
            [text]
            if os.path.isfile(text)
            else sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
        )
        if not matches:
            raise DataError(
                f"no file to read — {text!r} matches nothing — check the path (a folder needs a "
                "glob: 'folder/*')"
            )
        found += matches
    return found


Rows = tuple[pa.RecordBatch, np.ndarray]
"""Rows of a section, and the number of each among the rows of the file, good and bad, from 1."""


@dataclass(frozen=True)
class Section:
    """Bytes `begin` to `end` of a file; `end` None = all that follow. `rows`: rows before them."""

    file: str
    begin: int = 0
    end: int | None = None
    rows: int = 0

    @property
    def compression(self) -> str | None:
        """The codec that the ending of the name tells."""
        return _CODECS.get(os.path.splitext(self.file)[1])

    def open(self) -> pa.NativeFile:
        """A stream of the bytes, decompressed. Raises OSError where the file cannot be read."""
        stream = open_bytes(self.file)
        if self.begin or self.end is not None:
            end = stream.size() if self.end is None else self.end
            stream = stream.get_stream(self.begin, end - self.begin)
        codec = self.compression
        return stream if codec is None else pa.CompressedInputStream(stream, codec)

    def is_blank(self) -> bool:
        """Whether there is nothing but white space in it."""
        try:
            with self.open() as stream:
                while data := stream.read(_BLANK_BYTES):
                    if data.strip():
                        return False
        except (OSError, pa.ArrowException):  # reading it will name the damage
            return False
        return True


def open_bytes(file: str) -> pa.NativeFile:
    """The bytes of a file as they lie on the disk. Raises OSError where it cannot be read."""
    try:
        file.encode()
        return pa.OSFile(file)
    except UnicodeEncodeError:  # pyarrow takes only names that are UTF-8
        handle = os.open(file, os.O_RDONLY)
        try:
            return pa.OSFile(f"/dev/fd/{handle}")
        finally:
            os.close(handle)


class FileSource(Source):
    """A list of files of one format, read one after another; the position is the file and the rows
    of it already read.
    """

    path: Paths

    def files(self) -> list[str]:
        """The files in reading order."""
        return expand(self.path)

    def first_file(self) -> str:
        """The first file that holds something; it tells the columns and types."""
        files = self.files()
        return next((file for file in files if not Section(file).is_blank()), files[0])

    @abstractmethod
    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        """Batches of a section of a file after its first `skip_rows` rows, cast to `schema()`.

        Rows that cannot be read are left out where the plan says so, and do not count as skipped.
        Raises DecodeError.
        """

    def holds_lines(self, file: str) -> bool:
        """Whether it is plain lines, so that bytes after its end are more rows.

        Other files are whole or damaged as such.
        """
        return False

    def rows_end(self, section: Section) -> int:
        """The offset after the last whole row of a section of plain lines; its begin if it holds
        none.
        """
        raise NotImplementedError

    def locate(self, position: Position, back: int) -> Place:
        return self.place(self.files()[int(position["file"])], int(position["row"]) - back)

    def place(self, file: str, row: int) -> Place:
        """The row of a file that follows `row` others."""
        return Place(file, row + 1)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        files = self.files()
        first, row = self._start(files, position)
        for index in range(first, len(files)):
            name = os.path.basename(files[index])
            try:
                for whole, _ in self.read_file(Section(files[index]), row, batch_rows, plan):
                    for batch in cut(whole, batch_rows):
                        row += batch.num_rows
                        yield batch, Position({"file": index, "name": name, "row": row})
            except DecodeError as error:
                if plan.skips is None:
                    raise
                plan.skips.add("file", f"{error}; the rest of {files[index]} is left out")
            row = 0

    def _start(self, files: list[str], position: Position | None) -> tuple[int, int]:
        if position is None:
            return 0, 0
        index = int(position["file"])
        name = position["name"]
        if index >= len(files) or os.path.basename(files[index]) != name:
            raise DataError(
                f"cannot resume — file {index} was {name!r} and is now "
                f"{os.path.basename(files[index]) if index < len(files) else 'absent'!r} — put "
                "the files back in "
                "the same order"
            )
        return index, int(position["row"])


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files; `path` is a file, a glob or a list. Only the columns that a schema needs are
    read.

    Raises DecodeError (file) for a torn file, SchemaError when a file lacks a column of the first
    one.

    Example: `hb.sources.Parquet("events/day=*/part-*.parquet")`
    """

    path: Paths

    def schema(self) -> pa.Schema:
        cached: pa.Schema | None = self.__dict__.get("_schema")
        return _open(self.files()[0]).schema_arrow.remove_metadata() if cached is None else cached

    def num_rows(self) -> int:
        return sum(_open(file).metadata.num_rows for file in self.files())

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        file = section.file
        parquet = _open(file)
        wanted = self.schema()
        if plan.columns is not None:
            wanted = pa.schema([column for column in wanted if column.name in plan.columns])
        groups: list[int] = []
        skip = skip_rows
        for group in range(parquet.metadata.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if not groups and skip >= rows:
                skip -= rows
            else:
                groups.append(group)
        done = skip_rows - skip
        try:
            for batch in parquet.iter_batches(batch_rows, row_groups=groups, columns=wanted.names):
                done += batch.num_rows
                dropped = min(skip, batch.num_rows)
                skip = max(0, skip - batch.num_rows)
                if batch.num_rows > dropped:
                    rest = batch.slice(dropped)
                    yield _conform(rest, wanted, file), np.arange(done - rest.num_rows, done) + 1
        except (pa.ArrowException, OSError) as error:
            raise DecodeError(
                f"{file}: torn or damaged parquet after row {done} — {first_line(error)} — write "
                "the file again or "
                "leave it out",
                file,
                done + 1,
            ) from error


def _open(file: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(open_bytes(file))
    except (pa.ArrowException, OSError) as error:
        raise DecodeError(
            f"{file}: not a whole parquet file — {first_line(error)} — write the file again or "
            "leave it out",
            file,
        ) from error


def _conform(batch: pa.RecordBatch, wanted: pa.Schema, file: str) -> pa.RecordBatch:
    """`batch` with exactly the columns and types of `wanted` (those of the first file)."""
    if batch.schema.equals(wanted):
        return batch
    missing = [name for name in wanted.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"{file}: columns {missing} are absent — the first file has {wanted.names} — give all "
            "files one set of "
            "columns"
        )
    try:
        return pa.RecordBatch.from_arrays(
            [batch.column(field.name).cast(field.type) for field in wanted], schema=wanted
        )
    except pa.ArrowException as error:
        raise SchemaError(
            f"{file}: its types differ from the first file's — {first_line(error)} — write all "
            "files with one schema"
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
