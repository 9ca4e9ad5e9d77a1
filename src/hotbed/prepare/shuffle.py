# SPDX-License-Identifier: Apache-2.0
"""Shuffle: all rows of a key to one task, through files; and `Side`, the way back.

Buckets are ranges of the keys' hashes. Rows that are sorted by `mix64` in each bucket are
therefore sorted over all buckets, for any number of buckets.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.hashing import mix64

_COPIES = 6
"""Times that a bucket's rows are in memory while its task sorts and gathers them."""
_MAX_BUCKETS = 4096
_TAIL = struct.Struct("<qq")  # bytes of the Arrow schema, number of batches
_SHIFT = np.uint64(32)


def buckets_for(num_bytes: int, memory: int, workers: int) -> int:
    """Return the number of buckets for rows of `num_bytes` in all.

    The tasks of as many buckets as there are `workers` take at most half of `memory`, unless single
    keys have more rows than that. Results do not depend on the number of buckets.
    """
    room = max(1, memory // (2 * workers * _COPIES))
    buckets = -(-num_bytes // room)
    return min(max(1, buckets), _MAX_BUCKETS)


class Sliceable(Protocol):
    """Values of a column, made when they are asked for; an Arrow array is one."""

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Array:
        """Return `length` values from `offset` on."""


@dataclass(frozen=True)
class Bucket:
    """The rows of a bucket, in the order of (partition, chunk, row).

    `rows`: the table. `lengths`: for each partition that wrote rows, the number of this bucket's
    rows in each of its chunks.
    """

    rows: pa.Table
    lengths: Mapping[int, Sequence[int]]


class BucketShuffle:
    """Rows by the hash of their key, in `num_buckets` buckets.

    The task of a partition writes one file: for each chunk one record batch for each bucket. The
    task of a bucket reads its record batches of all files.

    Args:
        folder: a working folder, which is made.
        num_buckets: as `buckets_for` gives it.
    """

    def __init__(self, folder: Path, num_buckets: int) -> None:
        self.folder = folder
        self.num_buckets = num_buckets
        folder.mkdir(parents=True, exist_ok=True)

    def writer(self, partition: int) -> ShuffleWriter:
        """Return the writer of a partition; it replaces the file of an earlier attempt."""
        return ShuffleWriter(self._file(partition), self.num_buckets)

    def read(self, bucket: int) -> Bucket:
        """Return the rows of a bucket; a table without columns if no partition wrote any chunk."""
        lengths: dict[int, list[int]] = {}
        batches: list[pa.Table] = []
        for path in sorted(self.folder.glob("*.batches")):
            file = BatchReader(path)
            partition_lengths: list[int] = []
            for number in range(bucket, file.num_batches, self.num_buckets):
                batch = file.read(number)
                batches.append(pa.Table.from_batches([batch]))
                partition_lengths.append(batch.num_rows)
            lengths[int(path.stem)] = partition_lengths
        if not batches:
            return Bucket(pa.table({}), lengths)
        rows = pa.concat_tables(batches, promote_options="permissive")
        return Bucket(rows.combine_chunks(), lengths)

    def buckets(self) -> Sequence[int]:
        """Return the numbers of all buckets."""
        return range(self.num_buckets)

    def _file(self, partition: int) -> Path:
        return self.folder / f"{partition:08d}.batches"


class ShuffleWriter:
    """Writes the chunks of one partition; a context manager."""

    def __init__(self, path: Path, num_buckets: int) -> None:
        self._num_buckets = np.uint64(num_buckets)
        self._file = BatchWriter(path)

    def write(self, keys: NDArray[np.int64], rows: pa.RecordBatch) -> None:
        """Write the rows of the next chunk, which may be empty.

        Args:
            keys: the key of each row, int64 [n].
            rows: columns of the rows, of the same types in every chunk; no dictionaries.
        """
        buckets = (mix64(keys) >> _SHIFT) * self._num_buckets >> _SHIFT
        small = buckets.astype(np.int16)  # sorted by radix
        order = np.argsort(small, kind="stable")
        counts = np.bincount(small, minlength=int(self._num_buckets))
        in_order = rows.take(pa.array(order))
        begin = 0
        for count in counts.tolist():
            self._file.write(in_order.slice(begin, count))
            begin += count

    def __enter__(self) -> ShuffleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)


class Side:
    """Columns that the tasks of buckets computed, read back in the order of a partition's rows.

    Args:
        folder: a working folder, which is made.
        num_buckets: of the shuffle whose buckets write.
    """

    def __init__(self, folder: Path, num_buckets: int) -> None:
        self.folder = folder
        self.num_buckets = num_buckets
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, number: int, bucket: Bucket, columns: Mapping[str, Sliceable]) -> None:
        """Write the columns of bucket `number`, each aligned with `bucket.rows`.

        The column `row` of `bucket.rows` holds the number of each row in its chunk.
        """
        chunks = {str(number): len(lengths) for number, lengths in bucket.lengths.items()}
        note = {"chunks": json.dumps(chunks)}
        with BatchWriter(self._file(number), note) as file:
            begin = 0
            for length in itertools.chain.from_iterable(bucket.lengths.values()):
                positions = bucket.rows.column("row").slice(begin, length)
                arrays = {"row": positions.combine_chunks()}
                for name, values in columns.items():
                    arrays[name] = values.slice(begin, length)
                file.write(pa.RecordBatch.from_pydict(arrays))
                begin += length

    def reader(self, partition: int) -> SideReader:
        """Return the reader of a partition's rows."""
        files = [BatchReader(self._file(number)) for number in range(self.num_buckets)]
        return SideReader(partition, files)

    def _file(self, bucket: int) -> Path:
        return self.folder / f"{bucket:08d}.batches"


class SideReader:
    """Reads the columns of the rows of one partition."""

    def __init__(self, partition: int, files: Sequence[BatchReader]) -> None:
        self._files = files
        self._first = 0
        self._partition = partition
        if files:
            chunks = json.loads(files[0].note["chunks"])
            before = [count for number, count in chunks.items() if int(number) < partition]
            self._first = sum(before)

    def read(self, chunk: int, num_rows: int) -> pa.Table:
        """Return the columns of a chunk of `num_rows` rows; null where no bucket had the row."""
        batches = (file.read(self._first + chunk) for file in self._files)
        table = pa.Table.from_batches(batches).combine_chunks()
        positions = table.column("row").to_numpy()
        places = np.full(num_rows, -1, np.int64)
        places[positions] = np.arange(len(positions))
        indices = pa.array(places, mask=places < 0)
        return table.drop_columns("row").take(indices)


class BatchWriter:
    """Writes record batches of one schema that are read in any order; a context manager.

    `note`: text by name that the reader gives back.
    """

    def __init__(self, path: Path, note: Mapping[str, str] | None = None) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._note = dict(note or {})
        self._offsets = [0]
        self._schema: pa.Schema | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a record batch."""
        if self._schema is None:
            self._schema = batch.schema.with_metadata(self._note)
        columns = zip(batch.columns, self._schema.types, strict=True)
        arrays = [values.cast(kind) for values, kind in columns]
        same = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        size = self._file.write(same.serialize())
        self._offsets.append(self._offsets[-1] + size)

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            schema = self._schema or pa.schema([], self._note)
            schema_bytes = schema.serialize()
            self._file.write(schema_bytes)
            self._file.write(np.array(self._offsets, np.int64).tobytes())
            self._file.write(_TAIL.pack(len(schema_bytes), len(self._offsets)))


class BatchReader:
    """Reads a file of `BatchWriter`; no file stays open between two calls.

    `num_batches`: of the file. `note`: what the writer noted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            file.seek(-_TAIL.size, os.SEEK_END)
            schema_bytes, num_offsets = _TAIL.unpack(file.read())
            tail = _TAIL.size + 8 * num_offsets + schema_bytes
            file.seek(-tail, os.SEEK_END)
            self.schema = pa.ipc.read_schema(pa.py_buffer(file.read(schema_bytes)))
            offsets = file.read(8 * num_offsets)
        self._offsets = np.frombuffer(offsets, np.int64)
        metadata = self.schema.metadata or {}
        self.note = {name.decode(): value.decode() for name, value in metadata.items()}
        self.num_batches: int = num_offsets - 1

    def read(self, number: int) -> pa.RecordBatch:
        """Return a record batch."""
        begin, end = self._offsets[number : number + 2].tolist()
        with pa.OSFile(str(self._path)) as file:
            file.seek(begin)
            return pa.ipc.read_record_batch(file.read_buffer(end - begin), self.schema)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for number in range(self.num_batches):
            yield self.read(number)
