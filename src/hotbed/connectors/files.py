# SPDX-License-Identifier: Apache-2.0
"""Paths and globs, positions inside a list of files, and parquet."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.base import READ_ALL, READ_ROWS, Place, Position, ReadPlan, Source, cut
from hotbed.errors import DataError, DecodeError, SchemaError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(path: Paths) -> list[str]:
    """Files named by `path`: a file, a glob (sorted; `**` recurses) or a list of both. Raises DataError if one matches
    nothing."""
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    found: list[str] = []
    for item in path:
        text = os.fspath(item)
        matches = [text] if os.path.isfile(text) else sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
        if not matches:
            raise DataError(
                f"no file to read — {text!r} matches nothing — check the path (a folder needs a glob: 'folder/*')"
            )
        found += matches
    return found


class FileSource(Source):
    """A list of files of one format, read one after another; the position is the file and the rows of it already
    read."""

    path: Paths

    def files(self) -> list[str]:
        """The files in reading order."""
        return expand(self.path)

    @abstractmethod
    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        """Batches of one file after its first `skip_rows` rows, cast to `schema()`. Raises DecodeError."""

    def locate(self, position: Position, back: int) -> Place:
        return self.place(self.files()[int(position["file"])], int(position["row"]) - back)

    def place(self, file: str, row: int) -> Place:
        """The row of a file that follows `row` others."""
        return Place(file, row + 1)

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        files = self.files()
        first, row = self._start(files, position)
        for index in range(first, len(files)):
            name = os.path.basename(files[index])
            try:
                for whole in self.read_file(files[index], row, batch_rows, plan):
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
        index, name = int(position["file"]), position["name"]
        if index >= len(files) or os.path.basename(files[index]) != name:
            raise DataError(
                f"cannot resume — file {index} was {name!r} and is now "
                f"{os.path.basename(files[index]) if index < len(files) else 'absent'!r} — put the files back in "
                "the same order"
            )
        return index, int(position["row"])


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files; `path` is a file, a glob or a list. Only the columns that a schema needs are read.

    Raises DecodeError (file) for a torn file, SchemaError when a file lacks a column of the first one.

    Example: `hb.sources.Parquet("events/day=*/part-*.parquet")`
    """

    path: Paths

    def schema(self) -> pa.Schema:
        return _open(self.files()[0]).schema_arrow.remove_metadata()

    def num_rows(self) -> int:
        return sum(_open(file).metadata.num_rows for file in self.files())

    def read_file(self, file: str, skip_rows: int, batch_rows: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
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
                dropped, skip = min(skip, batch.num_rows), max(0, skip - batch.num_rows)
                if batch.num_rows > dropped:
                    yield _conform(batch.slice(dropped), wanted, file)
        except (pa.ArrowException, OSError) as error:
            raise DecodeError(
                f"{file}: torn or damaged parquet after row {done} — {_first_line(error)} — write the file again or "
                "leave it out",
                file,
                done + 1,
            ) from error


def _open(file: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DecodeError(
            f"{file}: not a whole parquet file — {_first_line(error)} — write the file again or leave it out", file
        ) from error


def _conform(batch: pa.RecordBatch, wanted: pa.Schema, file: str) -> pa.RecordBatch:
    """`batch` with exactly the columns and types of `wanted` (those of the first file)."""
    if batch.schema.equals(wanted):
        return batch
    missing = [name for name in wanted.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"{file}: columns {missing} are absent — the first file has {wanted.names} — give all files one set of "
            "columns"
        )
    try:
        return pa.RecordBatch.from_arrays(
            [batch.column(field.name).cast(field.type) for field in wanted], schema=wanted
        )
    except pa.ArrowException as error:
        raise SchemaError(
            f"{file}: its types differ from the first file's — {_first_line(error)} — write all files with one schema"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
