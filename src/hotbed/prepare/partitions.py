# SPDX-License-Identifier: Apache-2.0
"""Partitions: the fixed pieces of a source that tasks read, and their chunks of rows.

Results of chunks are merged in the order of (partition, chunk), so that nothing depends on the
number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.concat import Concat
from hotbed.connectors.files import FileSource, Section
from hotbed.connectors.parquet import Parquet, row_groups
from hotbed.connectors.position import Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, ReadPlan
from hotbed.connectors.source import Source, TableJoin, not_endless
from hotbed.embedding.hashing import Uint64Array
from hotbed.errors import DecodeError
from hotbed.prepare.places import Purpose, hash_places

CHUNK_ROWS = 131_072
"""Rows of a chunk; the last one of a partition may have fewer."""

TRAIN = 0
VALID = 1
PARTS = ("train", "valid")
"""Names of the parts, by their numbers."""


@dataclass(frozen=True)
class Chunk:
    """Rows of a partition.

    `number`: of the chunk in its partition. `rows`: raw columns, and those that stages added.
    `places`: the number of each row in its file, among the good rows from 0, int64 [n]; the file is
    `partition.file`. A negative has the place of its positive. `part`: `TRAIN` or `VALID`, uint8
    [n]. `copies`: 0 for a row of the source, else the number of the negative from 1, int64 [n].
    """

    partition: Partition
    number: int
    rows: pa.RecordBatch
    places: NDArray[np.int64]
    part: NDArray[np.uint8]
    copies: NDArray[np.int64]

    @staticmethod
    def of(partition: Partition, number: int, first_row: int, rows: pa.RecordBatch) -> Chunk:
        """Return a chunk of neighbouring rows, all for training."""
        return Chunk(
            partition,
            number,
            rows,
            np.arange(first_row, first_row + rows.num_rows),
            np.full(rows.num_rows, TRAIN, np.uint8),
            np.zeros(rows.num_rows, np.int64),
        )

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def of_part(self, part: int) -> Chunk:
        """Return the rows of one part."""
        return self.take(np.flatnonzero(self.part == part))

    def take(self, rows: NDArray[np.int64]) -> Chunk:
        """Return some of the rows by their numbers, in ascending order."""
        if len(rows) == len(self):
            return self
        return replace(
            self,
            rows=self.rows.take(pa.array(rows)),
            places=self.places[rows],
            part=self.part[rows],
            copies=self.copies[rows],
        )

    def with_columns(self, columns: Mapping[str, pa.Array]) -> Chunk:
        """Return the same rows with columns added, or in the place of those of the same name."""
        if not columns:
            return self
        arrays = dict(zip(self.rows.schema.names, self.rows.columns, strict=True))
        arrays.update(columns)
        return replace(self, rows=pa.RecordBatch.from_pydict(arrays))

    def hashes(self, seed: int, purpose: Purpose) -> Uint64Array:
        """Return the hashes of the rows' places, uint64 [n]; a negative has that of its positive.

        A positive and its negatives are in one fold: in different ones, their target encodings
        would tell them apart.
        """
        return hash_places(self.partition.file, self.places, seed, purpose)

    def located(self, row: int, message: str, column: str | None) -> DecodeError:
        """Return the error of a row that cannot be used, with its place in the source."""
        place = self.partition.place(int(self.places[row]))
        return DecodeError(f"{place}: {message}", place.file, place.number, column)


@dataclass(frozen=True)
class Partition:
    """A file, a row group of a Parquet file, or a whole source of another kind.

    `number`: its place among the partitions. `source`: the source of this file alone. `file`: the
    number of the file in the whole source. `name`: the file, for messages. `first_row`: the rows of
    the file before it. `num_rows`: its rows; None = all that are left. `chunk_rows`: rows of each
    of its chunks, except for the last one.
    """

    number: int
    source: Source
    file: int = 0
    name: str = ""
    first_row: int = 0
    num_rows: int | None = None
    chunk_rows: int = CHUNK_ROWS

    def chunks(self, plan: ReadPlan = READ_ALL) -> Iterator[Chunk]:
        """Yield its rows in chunks of exactly `chunk_rows` rows; the last may have fewer."""
        row = self.first_row
        for number, rows in enumerate(_of_equal_size(self._batches(plan), self.chunk_rows)):
            yield Chunk.of(self, number, row, rows)
            row += rows.num_rows

    def place(self, row: int) -> RowPlace:
        """Return the place of a good row of the file, counted from 0, for messages."""
        inner = _innermost(self.source)
        if isinstance(inner, FileSource):
            return inner.place(Section(self.name), row)
        return RowPlace(self.name, row + 1)

    def _batches(self, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        position = None
        if self.first_row:
            state = {"file": 0, "name": os.path.basename(self.name), "row": self.first_row}
            position = _nested(self.source, Position(state))
        rest = self.num_rows
        if rest == 0:
            return
        batch_rows = self.chunk_rows
        if rest is not None:
            last_row = self.first_row + rest
            group = f"the row group of rows {self.first_row + 1:,} to {last_row:,}"
            plan = replace(plan, rest=group)
            batch_rows = min(rest, batch_rows)  # a larger batch would read the next row group too
        for batch, _ in self.source.read(position, batch_rows, plan):
            if rest is None:
                yield batch
                continue
            yield batch.slice(0, rest)
            rest -= batch.num_rows
            if rest <= 0:
                return


def _nested(source: Source, position: Position) -> Position:
    """Return the position of a file as that of the source around the file."""
    if isinstance(source, TableJoin):
        return _nested(source.source, position)
    if isinstance(source, Concat):
        inner = _nested(source.sources[0], position)
        return Position({"part": 0, "row": position["row"], "source": inner.to_json()})
    return position


def _innermost(source: Source) -> Source:
    """Return the files below joins and concatenations of one source."""
    if isinstance(source, TableJoin):
        return _innermost(source.source)
    if isinstance(source, Concat) and len(source.sources) == 1:
        return _innermost(source.sources[0])
    return source


def _of_equal_size(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in batches:
        rest = batch
        while num_rows + rest.num_rows >= size:
            head = rest.slice(0, size - num_rows)
            yield _one_batch([*waiting, head])
            rest = rest.slice(head.num_rows)
            waiting = []
            num_rows = 0
        if rest.num_rows:
            waiting.append(rest)
            num_rows += rest.num_rows
    if waiting:
        yield _one_batch(waiting)


def _one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def partitions_of(source: Source, chunk_rows: int = CHUNK_ROWS) -> Sequence[Partition]:
    """Return the partitions of a source, in the order of its rows.

    Raises:
        ConfigError: the source is endless.
        DataError: no file is at the path.
    """
    not_endless(source, "a preparation")
    partitions: list[Partition] = []
    for file, (name, alone) in enumerate(_files(source)):
        for first_row, num_rows in _groups(name, alone):
            partitions.append(
                Partition(
                    number=len(partitions),
                    source=alone,
                    file=file,
                    name=name,
                    first_row=first_row,
                    num_rows=num_rows,
                    chunk_rows=chunk_rows,
                )
            )
    return partitions


def _files(source: Source) -> Iterator[tuple[str, Source]]:
    """Yield each file of a source with the source of this file alone; else the whole source."""
    if isinstance(source, FileSource):
        types = source.schema()
        for file in source.files():
            yield file, source.like_first(file, types)
    elif isinstance(source, TableJoin):
        side = source._side
        for file, alone in _files(source.source):
            joined = replace(source, source=alone)
            joined.__dict__["_side"] = side  # read once, not once a file
            yield file, joined
    elif isinstance(source, Concat):
        types = source.schema()
        for part in source.sources:
            for file, alone in _files(part):
                concat = replace(source, sources=[alone])
                concat.__dict__["_schema"] = types
                yield file, concat
    else:
        yield type(source).__name__, source


def _groups(name: str, source: Source) -> Iterator[tuple[int, int | None]]:
    """Yield first row and number of rows of each row group of a Parquet file; else (0, None)."""
    if not isinstance(_innermost(source), Parquet):
        yield 0, None
        return
    groups = row_groups(name)
    if not groups:
        yield 0, None
        return
    first_row = 0
    for group in groups:
        yield first_row, group.num_rows
        first_row += group.num_rows
