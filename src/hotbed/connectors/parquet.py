# SPDX-License-Identifier: Apache-2.0
"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.connectors.files import (
    Endings,
    FileSource,
    Paths,
    Rows,
    Section,
    first_line,
    one_path,
    open_bytes,
)
from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.source import Source, not_endless
from hotbed.errors import DecodeError, SchemaError
from hotbed.files import new_file


@dataclass(frozen=True)
class Parquet(FileSource):
    """Parquet files.

    Only the columns that a schema needs are read.

    Args:
        path: A file, a glob or a list of both.

    Raises:
        DecodeError: A file is torn (file).
        SchemaError: A file lacks a column of the first one, or has other types.

    Example: `hb.sources.Parquet("events/day=*/part-*.parquet")`
    """

    endings: ClassVar[Endings] = {".parquet": {}, ".pq": {}}
    path: Paths

    def infer(self) -> pa.Schema:
        return _open(self.files()[0]).schema_arrow.remove_metadata()

    def num_rows(self) -> int:
        return sum(_open(file).metadata.num_rows for file in self.files())

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        file = section.file
        wanted = _with_dictionaries(self.schema(), plan)
        dictionaries = [field.name for field in wanted if pa.types.is_dictionary(field.type)]
        parquet = _open(file, dictionaries)
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
                    numbers = np.arange(done - rest.num_rows, done) + 1
                    yield _conform(rest, wanted, file), numbers
        except (pa.ArrowException, OSError) as error:
            raise DecodeError(
                f"{file}: torn or damaged parquet after row {done}, got {first_line(error)}. Write "
                "the file again or leave it out.",
                file,
                done + 1,
            ) from error

    def write(self, rows: Source) -> int:
        """Write the rows of another source as one file, and return their number.

        Raises:
            ConfigError: `path` is more than one file, or the source is endless.
        """
        path = one_path("parquet.path", self.path)
        not_endless(rows, "a file to write")
        num_rows = 0
        with new_file(Path(path)) as file, pq.ParquetWriter(file, rows.schema()) as writer:
            for batch, _ in rows.read():
                writer.write_batch(batch)
                num_rows += batch.num_rows
        return num_rows


def _with_dictionaries(schema: pa.Schema, plan: ReadPlan) -> pa.Schema:
    """Return the fields to read, with dictionaries for the text that `plan` takes so."""
    fields: list[pa.Field] = []
    for name in plan.wanted(schema.names):
        field = schema.field(name)
        if name in plan.words and pa.types.is_string(field.type):
            field = field.with_type(pa.dictionary(pa.int32(), field.type))
        fields.append(field)
    return pa.schema(fields)


def row_groups(file: str) -> list[pq.RowGroupMetaData]:
    """Return what a file says of its row groups.

    For a damaged file it is nothing: reading its rows reports the damage.
    """
    try:
        metadata = _open(file).metadata
    except DecodeError:
        return []
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def _open(file: str, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(open_bytes(file), read_dictionary=list(dictionaries))
    except (pa.ArrowException, OSError) as error:
        raise DecodeError(
            f"{file}: not a whole parquet file, got {first_line(error)}. Write the file again or "
            "leave it out.",
            file,
        ) from error


def _conform(batch: pa.RecordBatch, wanted: pa.Schema, file: str) -> pa.RecordBatch:
    """Return `batch` with exactly the columns and types of `wanted` (those of the first file)."""
    if batch.schema.equals(wanted):
        return batch
    missing = [name for name in wanted.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"{file}: columns {missing} are absent, got {batch.schema.names}. Give all files the "
            f"columns of the first: {wanted.names}."
        )
    try:
        return pa.RecordBatch.from_arrays(
            [batch.column(field.name).cast(field.type) for field in wanted], schema=wanted
        )
    except pa.ArrowException as error:
        raise SchemaError(
            f"{file}: its types differ from the first file's, got {first_line(error)}. Write all "
            "files with one schema."
        ) from error
