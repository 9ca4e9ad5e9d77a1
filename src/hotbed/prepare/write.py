# SPDX-License-Identifier: Apache-2.0
"""Writing: encoded rows as Parquet files, one for each partition and part."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.data.arrays import is_list
from hotbed.data.batch import Batch, Ids
from hotbed.data.columns import Columns, transformed
from hotbed.data.encode import Encoder
from hotbed.data.schema import (
    Column,
    Dense,
    Id,
    Label,
    Schema,
    Shape,
    Time,
    Type,
    Weight,
    joined,
    joined_shape,
    shape_of,
    type_of,
)
from hotbed.errors import DecodeError
from hotbed.prepare.keyed.encodings import training_schema
from hotbed.prepare.partitions import PARTS, TRAIN, VALID, Chunk, Partition
from hotbed.prepare.report import Profile
from hotbed.prepare.view import View

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Layout:
    """The columns of prepared files.

    Args:
        raw: the fitted schema over raw rows.
        bags: the id features that hold lists, with a number of ids that differs by row.
    """

    raw: Schema
    bags: frozenset[str]

    @staticmethod
    def of(raw: Schema, rows: pa.RecordBatch) -> Layout:
        """Return the layout for raw rows of these types; `rows` may be empty."""
        context = Columns(rows)
        bags: set[str] = set()
        for column in raw.ids:
            values = transformed(column.source, column.transforms, context)
            if is_list(values.type):
                bags.add(column.name)
        return Layout(raw, frozenset(bags))

    def schema(self) -> Schema:
        """Return the schema of the prepared files."""
        return Schema([_prepared(column) for column in self.raw.columns])

    def arrow(self) -> pa.Schema:
        """Return names and types of the columns of the prepared files."""
        fields: list[pa.Field] = []
        for column in self.raw.columns:
            if isinstance(column, Id):
                is_bag = column.name in self.bags
                fields.append(pa.field(column.name, _of(pa.int64(), is_bag)))
                if column.weights is not None:
                    name = weights_name(column)
                    fields.append(pa.field(name, _of(pa.float32(), is_bag)))
            elif isinstance(column, Time):
                fields.append(pa.field(column.name, _TIME))
            elif isinstance(column, Dense) and column.width > 1:
                fields.append(pa.field(column.name, pa.list_(pa.float32(), column.width)))
            else:
                fields.append(pa.field(column.name, pa.float32()))
        return pa.schema(fields)

    def table(self, batch: Batch) -> pa.Table:
        """Return encoded rows as columns of the prepared files."""
        columns: dict[str, pa.Array] = {}
        for column in self.raw.columns:
            name = column.name
            if isinstance(column, Id):
                ids = batch.ids[name]
                is_bag = name in self.bags
                columns[name] = _array(ids, ids.values, is_bag)
                if column.weights is not None:
                    columns[weights_name(column)] = _array(ids, ids.weights, is_bag)
            elif isinstance(column, Dense):
                columns[name] = _dense_array(batch.dense[name])
            elif isinstance(column, Label):
                columns[name] = pa.array(batch.labels[name])
            elif isinstance(column, Weight):
                columns[name] = pa.array(batch.weight)
            elif isinstance(column, Time):
                columns[name] = pa.array(batch.time).cast(_TIME)
        return pa.table(columns, schema=self.arrow())


def weights_name(column: Id) -> str:
    """Return the column of prepared files that holds the weights of an id feature."""
    return f"{column.name}_weights"


def _of(kind: pa.DataType, is_bag: bool) -> pa.DataType:
    if is_bag:
        return pa.list_(kind)
    return kind


def _prepared(column: Column) -> Column:
    """Return the role that reads the prepared column."""
    if isinstance(column, Label):
        return Label(column.name)
    if isinstance(column, Time):
        return Time(column.name)
    if isinstance(column, Weight):
        return Weight(column.name)
    if isinstance(column, Dense):
        return Dense(column.name, width=column.width)
    assert isinstance(column, Id)
    weights = column.weights
    if weights is not None:
        weights = weights_name(column)
    return Id(
        column.name,
        column.table,
        pooling=column.pooling,
        max_length=column.max_length,
        weights=weights,
    )


def _array(ids: Ids, values: Any, is_bag: bool) -> pa.Array:
    """Return ids, or their weights, as a column of lists or of single values; null for none."""
    if is_bag:
        offsets = ids.with_offsets().offsets
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    if ids.offsets is None:
        return pa.array(values)
    is_missing = ids.lengths() == 0
    single = np.zeros(len(ids), values.dtype)
    single[~is_missing] = values
    return pa.array(single, mask=is_missing)


def _dense_array(values: Any) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenFile:
    """A file of the output: its name there, its rows, bytes and SHA-256 (hex)."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass
class Written:
    """What the task of a partition wrote.

    `files`: by part. `types`, `shapes`: of the raw columns.
    """

    files: dict[str, WrittenFile] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def note_types(self, schema: Schema, rows: pa.Schema) -> None:
        """Add the types and shapes of the raw columns that a schema reads."""
        for name in schema.raw_columns(labels=False):
            kind = type_of(rows.field(name).type)
            if kind is not None:
                self.types[name] = joined(self.types.get(name), kind)
            shape = shape_of(rows.field(name).type)
            if shape is not None:
                self.shapes[name] = joined_shape(self.shapes.get(name), shape)


@dataclass(frozen=True)
class Writing:
    """The task that encodes and writes the rows of a partition.

    Args:
        folder: of the output.
        view: the rows.
        layout: the columns to write.
    """

    folder: Path
    view: View
    layout: Layout

    def __call__(self, partition: Partition) -> tuple[Written, Profile]:
        """Return what was written, and the profile of the rows."""
        of_training = training_schema(self.layout.raw, self.view.encoded)
        encoders = {TRAIN: Encoder(of_training), VALID: Encoder(self.layout.raw)}
        writers: dict[int, PartWriter] = {}
        written = Written()
        profile = Profile(self.layout.raw)
        for chunk in self.view.chunks(partition):
            written.note_types(self.layout.raw, chunk.rows.schema)
            for part in np.unique(chunk.part).tolist():
                chosen = chunk.of_part(part)
                if part not in writers:
                    name = f"{PARTS[part]}/part-{partition.number:05d}.parquet"
                    writers[part] = PartWriter(self.folder, name, self.layout.arrow())
                batch = _encoded(encoders[part], chosen)
                writers[part].write(self.layout.table(batch))
                profile.add(PARTS[part], chosen.rows, batch)
        for part, writer in writers.items():
            written.files[PARTS[part]] = writer.close()
        return written, profile


def _encoded(encoder: Encoder, chunk: Chunk) -> Batch:
    try:
        return encoder(chunk.rows)
    except DecodeError as error:
        raise chunk.located((error.row or 1) - 1, str(error), error.column) from error


class PartWriter:
    """Writes one Parquet file of the output, and takes its digest while it writes."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._name = name
        self._file = _HashedFile(folder / name)
        self._parquet = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._num_rows = 0

    def write(self, rows: pa.Table) -> None:
        """Append rows, as one row group."""
        self._num_rows += rows.num_rows
        self._parquet.write_table(rows)

    def close(self) -> WrittenFile:
        """Return the facts of the file, which is on disk."""
        self._parquet.close()
        num_bytes, digest = self._file.finish()
        return WrittenFile(
            self._name,
            self._num_rows,
            num_bytes,
            digest,
        )


class _HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A task that a cluster runs again finds the file of the first run.
        self._file = open(path, "wb")  # noqa: SIM115 - closed by `finish`
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        self._file.write(piece)
        self._hash.update(piece)
        self._num_bytes += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: the file is on disk when `finish` returns."""

    def close(self) -> None:
        self.closed = True

    def finish(self) -> tuple[int, str]:
        """Return bytes and SHA-256 (hex) once the file is on disk."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return self._num_bytes, self._hash.hexdigest()
