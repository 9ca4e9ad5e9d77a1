# SPDX-License-Identifier: Apache-2.0
"""Snapshot: a table as it was at one moment, read while training continues; rows as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import RowShapeError

from . import hashing
from .policy import PARTITIONS
from .waiting import candidate_batches, sketch_batches

BATCH_ROWS = 4096
COLUMN_TYPES = {
    "last_seen": pa.int64(),
    "count": pa.uint32(),
    "updated": pa.uint32(),
    "score": pa.float64(),
}
"""Columns that rows have only if the table keeps them."""

LOADED_COLUMNS = ("last_seen", "count", "score", "missed")
"""Columns that `Table.load` takes if they are there.

A row that was exported is up to date, so its step says nothing. `missed` is the number of steps
before that of the table which a row has still to catch up with.
"""

Owned = NDArray[np.bool_] | None
"""Whether a process has the rows of each partition, [256]; None: it has all of them."""


class Spread(Protocol):
    """The processes over which the rows of a table are spread.

    Attributes:
        owned: whether this one has the rows of each partition, [256].
    """

    owned: NDArray[np.bool_]

    def removed(self, ids: Any, remove: Callable[[Any], int]) -> int:
        """Let each process remove the rows of ids that it has; return how many all removed.

        `ids`: as `Table.remove` takes them.

        Raises:
            ConfigError: on each of them, before a row is removed: they got other ids.
        """

    def gathered(self, value: Any) -> list[Any]:
        """Return a value of each process, in their order."""

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError, in all processes, if a setting is not the same in all of them."""


class Snapshot:
    """All rows of a table at one moment, or with `changes` those changed since the last snapshot.

    `Table.snapshot` makes it. `num_rows`: the number of its rows (with `changes`, an upper bound).
    `scalars`: `Table.scalars()` of that moment. `read_bytes`: read from the disk for it so far,
    where rows lie on one. Another thread may read it. The first change to a row that was not read
    yet saves its old record, so memory grows by the rows that training
    touches in the meantime. A table has one snapshot at a time; `close` ends it.

    Example: `with table.snapshot() as rows: batches = list(rows.rows())`.
    """

    def __init__(
        self,
        native: Any,
        scalars: Callable[[], Mapping[str, Any]],
        state_width: int,
        *,
        dtype: str,
        changes: bool,
        takes: bool,
    ) -> None:
        self._native = native
        self._takes = takes
        self._state_width = state_width
        self._dtype = dtype
        self.changes = changes
        # ends a sweep under way, which changes counters: take the scalars after it
        self.num_rows = int(native.begin_snapshot(changes=changes))
        self.scalars = dict(scalars())
        self.read_bytes = 0

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(saved=kind is None)

    def rows(self, partitions: Iterable[int] = range(PARTITIONS)) -> Iterator[pa.RecordBatch]:
        """Yield rows as `Table.export` does, small partitions together in one batch.

        Each partition can be read once.
        """
        yield from joined_partitions(self._read, partitions, self._native, self._state_width)

    def _read(self, partitions: list[int]) -> dict[str, Any]:
        rows: dict[str, Any] = self._native.snapshot_rows(partitions)
        self.read_bytes += rows["read_bytes"]
        return with_dtype(rows, self._dtype)

    def removed(self, partitions: Iterable[int] = range(PARTITIONS)) -> Iterator[pa.RecordBatch]:
        """Yield tombstones: partition and id of rows removed since the last snapshot.

        `rows` may contain some of these ids again.
        """
        for partition in partitions:
            ids = self._native.snapshot_removed(partition)
            if len(ids):
                yield pa.record_batch(
                    {"partition": _number(partition, len(ids)), "id": pa.array(ids)}
                )

    def candidates(self) -> Iterator[pa.RecordBatch]:
        """Yield the candidates of that moment, as `Table.candidates` does."""
        # asked for through self: a closed snapshot must not be read
        return candidate_batches(
            lambda partition: self._native.snapshot_candidates(partition),
            lambda partition: self._native.snapshot_plain_sketch(partition),
        )

    def sketch(self) -> Iterator[pa.RecordBatch]:
        """Yield the sketches of waiting ids of that moment, as `Table.sketch` does."""
        return sketch_batches(lambda partition: self._native.snapshot_sketch(partition))

    def close(self, saved: bool) -> None:
        """End the snapshot. Closing it again does nothing.

        `saved=False`: the rows that it contains as changed stay marked as changed, as they do if
        the snapshot does not take the record.
        """
        native = self._native
        self._native = None
        if native is not None:
            native.end_snapshot(saved=saved and self._takes)


def by_partition(
    read: Callable[[list[int]], dict[str, Any]], partitions: Iterable[int], native: Any
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    """Yield the rows of each partition as flat arrays by column.

    `read`: returns those of several partitions of the table `native`, with their sizes. It is asked
    for as many at once as the table reads together.
    """
    numbers = list(partitions)
    width = native.num_read_together()
    for first in range(0, len(numbers), width):
        group = numbers[first : first + width]
        columns = read(group)
        del columns["read_bytes"]
        sizes = columns.pop("sizes")
        if len(group) == 1:
            yield group[0], columns
            continue
        lanes = {name: len(array) // max(sum(sizes), 1) for name, array in columns.items()}
        begin = 0
        for partition, size in zip(group, sizes, strict=True):
            end = begin + size
            # copies: no array of a group lives on while the next one is read
            rows = {
                name: array[begin * lanes[name] : end * lanes[name]].copy()
                for name, array in columns.items()
            }
            yield partition, rows
            begin = end
        del columns


def joined_partitions(
    read: Callable[[list[int]], dict[str, Any]],
    partitions: Iterable[int],
    native: Any,
    state_width: int,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of partitions, small ones together in one batch; see `by_partition`."""
    waiting: list[Mapping[str, NDArray[Any]]] = []
    numbers: list[NDArray[np.uint8]] = []
    num_rows = 0
    for partition, rows in by_partition(read, partitions, native):
        if n := len(rows["id"]):
            waiting.append(rows)
            numbers.append(np.full(n, partition, np.uint8))
            num_rows += n
        if num_rows >= BATCH_ROWS:
            yield _together(numbers, waiting, state_width)
            waiting = []
            numbers = []
            num_rows = 0
    if waiting:
        yield _together(numbers, waiting, state_width)


def with_dtype(rows: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return rows of the native core, which has no whole numbers, with values of the dtype."""
    if dtype == "int32":
        rows["value"] = rows["value"].view(np.int32)
    return rows


def value_type(dtype: str) -> pa.DataType:
    """Return the type of a lane in batches of rows, by the dtype of their table."""
    return pa.int32() if dtype == "int32" else pa.float32()


def _together(
    numbers: list[NDArray[np.uint8]], parts: list[Mapping[str, NDArray[Any]]], state_width: int
) -> pa.RecordBatch:
    if len(parts) == 1:
        return row_batch(numbers[0], parts[0], state_width)
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return row_batch(np.concatenate(numbers), rows, state_width)


def owned_rows(batches: Iterable[pa.RecordBatch], owned: Owned) -> Iterator[pa.RecordBatch]:
    """Yield the rows of partitions that are owned."""
    for batch in batches:
        if owned is not None:
            is_owned = owned[hashing.partition(batch.column("id").to_numpy())]
            batch = batch.filter(pa.array(is_owned))
        yield batch


def row_batch(
    partitions: NDArray[np.uint8], rows: Mapping[str, NDArray[Any]], state_width: int
) -> pa.RecordBatch:
    """Return n rows from flat arrays as one batch; `partitions`: [n]."""
    n = len(rows["id"])
    columns = {"partition": pa.array(partitions), "id": pa.array(rows["id"])}
    columns["value"] = pa.FixedSizeListArray.from_arrays(
        pa.array(rows["value"]), len(rows["value"]) // n
    )
    if state_width:
        columns["state"] = pa.FixedSizeListArray.from_arrays(pa.array(rows["state"]), state_width)
    columns |= {
        name: pa.array(rows[name], kind) for name, kind in COLUMN_TYPES.items() if name in rows
    }
    return pa.record_batch(columns)


def flat_rows(
    batch: pa.RecordBatch, dim: int, state_width: int, place: str, dtype: str = "float32"
) -> dict[str, NDArray[Any]]:
    """Return the rows of a batch as flat arrays by column, which the native core loads.

    `place`: begins the messages. `dtype`: of the table.

    Raises:
        RowShapeError: columns do not fit dim and rule, or a number is not finite.
    """
    rows: dict[str, NDArray[Any]] = {"id": batch.column("id").to_numpy()}
    for name, width, lane in (
        ("value", dim, value_type(dtype)),
        ("state", state_width, pa.float32()),
    ):
        if name not in batch.schema.names or not width:
            continue
        kind = batch.schema.field(name).type
        if kind != pa.list_(lane, width):
            raise RowShapeError(
                f"{place}: column {name!r} must hold {np.dtype(lane.to_pandas_dtype())} lists of "
                f"{width}, got {kind}. Give rows of a table with the same dim and rule."
            )
        rows[name] = batch.column(name).flatten().to_numpy()
        if pa.types.is_integer(lane):
            rows[name] = rows[name].view(np.float32)
            continue
        _check_finite(f"{place}: column {name!r}", rows["id"], rows[name].reshape(-1, width))
    if "value" not in rows:
        raise RowShapeError(
            f"{place}: rows need a column 'value', got {batch.schema.names}. Load batches from "
            "export."
        )
    rows |= {
        name: batch.column(name).to_numpy() for name in LOADED_COLUMNS if name in batch.schema.names
    }
    return rows


def _check_finite(place: str, ids: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    is_finite = np.isfinite(numbers)
    if is_finite.all():
        return
    row, lane = np.argwhere(~is_finite)[0]
    raise RowShapeError(
        f"{place} must hold finite numbers, got {numbers[row, lane]} for id {ids[row]}. Leave the "
        "row out."
    )


def empty_batch(dim: int, state_width: int, columns: Iterable[str], dtype: str) -> pa.RecordBatch:
    """Return a batch without rows; `columns`: the names of those that the table keeps."""
    types = {"partition": pa.uint8(), "id": pa.int64(), "value": pa.list_(value_type(dtype), dim)}
    if state_width:
        types["state"] = pa.list_(pa.float32(), state_width)
    types |= {name: kind for name, kind in COLUMN_TYPES.items() if name in columns}
    return pa.record_batch([pa.array([], kind) for kind in types.values()], schema=pa.schema(types))


def _number(partition: int, n: int) -> pa.Array:
    return pa.array(np.full(n, partition, np.uint8))
