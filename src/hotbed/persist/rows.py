# SPDX-License-Identifier: Apache-2.0
"""Row files: their columns, their checks, and the rows of a chain, merged."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import config
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import PARTITIONS, evictions, kept_columns
from hotbed.embedding.rule import Adagrad
from hotbed.embedding.snapshot import COLUMN_TYPES
from hotbed.embedding.table import Table
from hotbed.errors import FormatError
from hotbed.persist.manifest import built_config, format_error
from hotbed.persist.store import ADVICE

_MAGIC = b"ARROW1\0\0"
_HEADER = 2  # number of the field `header` in Arrow's flatbuffer table Message
_COMPRESSION = 3  # number of the field `compression` in its table RecordBatch
_NOT_ARROW = (pa.ArrowException, OSError, EOFError, StopIteration, UnicodeDecodeError, struct.error)
_ROWS_AT_ONCE = 1 << 16  # bounds the memory of a check, whatever the size of a batch
_PLACE_TYPES = {"partition": pa.uint8(), "id": pa.int64()}
_WAITING_TYPES = {**_PLACE_TYPES, "count": pa.uint32(), "last_seen": pa.int64()}


def arrow_batches(data: memoryview, place: str) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow IPC file, without copying.

    Raises FormatError, naming the file, for anything else, and for compressed buffers, which could
    be a thousand times larger in memory.
    """
    try:
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise pa.ArrowInvalid("it does not begin as one")
        with pa.ipc.open_file(pa.py_buffer(data)) as file:
            schema = file.schema
            names = schema.names  # decoded here, where a name that is not UTF-8 is caught
            num_batches = file.num_record_batches
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data[len(_MAGIC) :]))
        if messages.read_next_message().type != "schema" or not names:
            raise pa.ArrowInvalid("it does not begin with a schema of columns")
        for _ in range(num_batches):
            message = messages.read_next_message()
            if message.type != "record batch":
                raise pa.ArrowInvalid(f"a message is a {message.type}")
            if _is_compressed(memoryview(message.metadata)):
                raise pa.ArrowInvalid("its buffers are compressed")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate()
            yield batch
    except _NOT_ARROW as error:
        text = f"{place}: no Arrow IPC file of rows — received {error} — {ADVICE}"
        raise FormatError(text) from error


def _is_compressed(metadata: memoryview) -> bool:
    """Whether the header of a record batch names a compression; Arrow verified the flatbuffer."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    header = _field(metadata, message, _HEADER)
    if header is None:
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, _COMPRESSION) is not None


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Where a flatbuffer table has a field; None where it does not have it."""
    offsets = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, offsets)[0]:
        return None
    offset = struct.unpack_from("<H", data, offsets + slot)[0]
    return table + offset if offset else None


def row_types(entry: Mapping[str, Any], contents: str, place: str) -> dict[str, pa.DataType]:
    """Columns that the row files of a table must have, by the table's config in the manifest.

    `contents`: of the manifest; published values have neither state nor policies. Raises
    FormatError for a config that cannot be built.
    """
    built = built_config(entry, place)
    dim = int(built["dim"])
    types = {**_PLACE_TYPES, "value": pa.list_(pa.float32(), dim)}
    if contents == "values":
        return types
    rule = built.get("rule") or Adagrad()
    width = rule.state_width(dim)
    if width:
        types["state"] = pa.list_(pa.float32(), width)
    for name in kept_columns(built.get("admit"), evictions(built.get("evict"))):
        types[name] = COLUMN_TYPES[name]
    if rule.scope == "catch_up":
        types["updated"] = COLUMN_TYPES["updated"]
    return types


def checked_rows(
    batches: Iterator[pa.RecordBatch],
    part: Mapping[str, Any],
    types: Mapping[str, pa.DataType],
    place: str,
) -> Iterator[pa.RecordBatch]:
    """The batches of a part, each checked when it is taken: columns, partitions, order, number."""
    rows = 0
    last: tuple[int, int] | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, types, place)
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            last = _check_order(batch.slice(start, _ROWS_AT_ONCE), part, last, place)
        rows += batch.num_rows
        yield batch
    if rows != part["rows"]:
        raise format_error(place, f"it has {rows} rows, the manifest says otherwise", part["rows"])


def _check_order(
    rows: pa.RecordBatch, part: Mapping[str, Any], last: tuple[int, int] | None, place: str
) -> tuple[int, int]:
    """Check that rows follow `last`, the (partition, id) before them; return their own last."""
    partitions = rows.column("partition").to_numpy()
    ids = rows.column("id").to_numpy()
    if not np.array_equal(partitions, partition(ids)):
        raise format_error(place, "an id lies in a partition that is not its own", int(ids[0]))
    first = (int(partitions[0]), int(ids[0]))
    if not _rise(partitions, ids) or (last is not None and first <= last):
        raise format_error(place, "rows out of order, or two of one id", first)
    end = (int(partitions[-1]), int(ids[-1]))
    if first[0] < part["first"] or end[0] > part["last"]:
        raise format_error(place, "rows of other partitions than the manifest says", first[0])
    return end


def checked_candidates(
    batches: Iterator[pa.RecordBatch], entry: Mapping[str, Any], place: str
) -> Iterator[pa.RecordBatch]:
    """The batches of what waits for admission, each checked when it is taken."""
    admit = config.build(entry["config"].get("admit"), config.parameters(Table)["admit"].annotation)
    width = getattr(admit, "sketch_width", 0)
    rows = 0
    known = [np.empty(0, np.int64)]
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, _WAITING_TYPES, place)
        partitions = batch.column("partition").to_numpy()
        ids = batch.column("id").to_numpy()
        if width:
            if len(ids) != 4 * width or (partitions != partitions[0]).any():
                raise format_error(
                    place, f"a sketch has {4 * width} counters a partition", len(ids)
                )
        else:
            if not np.array_equal(partitions, partition(ids)):
                raise format_error(
                    place, "an id lies in a partition that is not its own", int(ids[0])
                )
            known.append(ids)
        rows += batch.num_rows
        yield batch
    waiting = np.concatenate(known)
    if len(np.unique(waiting)) != len(waiting):
        raise format_error(place, "an id waits twice", len(waiting))
    expected = entry["candidates"]["rows"]
    if rows != expected:
        raise format_error(place, f"it has {rows} rows, the manifest says otherwise", expected)


def _rise(partitions: NDArray[np.uint8], ids: NDArray[np.int64]) -> bool:
    same = partitions[1:] == partitions[:-1]
    rising = (partitions[1:] > partitions[:-1]) | (same & (ids[1:] > ids[:-1]))
    return bool(rising.all())


def _check_columns(batch: pa.RecordBatch, types: Mapping[str, pa.DataType], place: str) -> None:
    names = batch.schema.names
    missing = [name for name in types if name not in names]
    if missing:
        raise format_error(place, f"columns {missing} are missing", names)
    if len(set(names)) != len(names):
        raise format_error(place, "two columns have one name", names)
    for name in names:
        expected = types.get(name, COLUMN_TYPES.get(name))
        column = batch.column(name)
        if expected is not None and column.type != expected:
            raise format_error(place, f"column {name!r} must be {expected}", str(column.type))
        nulls = column.null_count
        if pa.types.is_fixed_size_list(column.type):
            nulls += column.flatten().null_count
        if nulls:
            raise format_error(place, f"column {name!r} has nulls", nulls)


# --- in order -----------------------------------------------------------------------------------


def partition_ranges(rows: int, rows_per_part: int = 1 << 20) -> list[range]:
    """Equal ranges of the 256 partitions for a table of `rows`, about `rows_per_part` rows each."""
    parts = 1
    while parts < PARTITIONS and rows > parts * rows_per_part:
        parts *= 2
    width = PARTITIONS // parts
    return [range(first, first + width) for first in range(0, PARTITIONS, width)]


class RowCuts:
    """Batches in the order of partitions, cut where the reader asks."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._head = next(batches, None)

    def until(self, stop: int) -> pa.RecordBatch | None:
        """All rows of partitions below `stop` that were not handed out yet."""
        found = []
        while self._head is not None:
            partitions = self._head.column("partition").to_numpy()
            n = int(np.searchsorted(partitions, stop))
            if n:
                found.append(self._head.slice(0, n))
            if n < self._head.num_rows:
                self._head = self._head.slice(n)
                break
            self._head = next(self._batches, None)
        return pa.concat_batches(found) if len(found) > 1 else found[0] if found else None


def sorted_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows by (partition, id)."""
    return batch.take(
        pa.array(np.lexsort([batch.column(name).to_numpy() for name in ("id", "partition")]))
    )


def merged_rows(
    rows: list[pa.RecordBatch | None], gone: list[pa.RecordBatch | None]
) -> pa.RecordBatch | None:
    """The rows of some partitions: of an id the newest, unless it went later."""
    decided: NDArray[np.int64] = np.empty(0, np.int64)
    kept = []
    for batch, removed in zip(reversed(rows), reversed(gone), strict=True):
        if batch is not None:
            ids = batch.column("id").to_numpy()
            kept.append(batch.filter(pa.array(~np.isin(ids, decided))) if len(decided) else batch)
            decided = np.union1d(decided, ids) if len(rows) > 1 else decided
        if removed is not None:
            decided = np.union1d(decided, removed.column("id").to_numpy())
    if len(kept) < 2:
        return kept[0] if kept else None
    names = [
        name for name in kept[0].schema.names if all(name in batch.schema.names for batch in kept)
    ]
    return sorted_rows(pa.concat_batches([batch.select(names) for batch in kept]))


def with_columns(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    """The columns of these names that are there."""
    return batch.select([name for name in columns if name in batch.schema.names])


def flat(column: pa.Array) -> NDArray[Any]:
    """A column's values as one flat array, without a copy where Arrow allows."""
    values: NDArray[Any] = (
        column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    ).to_numpy()
    return values
