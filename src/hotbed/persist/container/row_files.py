# SPDX-License-Identifier: Apache-2.0
"""Files of rows: uncompressed Arrow IPC files, and how all or some rows are read and written."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import FormatError
from hotbed.persist.container.manifest import PartEntry
from hotbed.persist.container.sink import HashedFile
from hotbed.persist.container.store import ADVICE

_MAGIC = b"ARROW1\0\0"
_HEADER = 2  # number of the field `header` in Arrow's flatbuffer table Message
_COMPRESSION = 3  # number of the field `compression` in its table RecordBatch
_NOT_ARROW = (pa.ArrowException, OSError, EOFError, StopIteration, UnicodeDecodeError, struct.error)


OwnedPartitions = Callable[[str], NDArray[np.bool_]]
"""Returns whether the rows of each partition of a table are wanted, [256]."""


def every_partition(table: str) -> NDArray[np.bool_]:
    return np.ones(PARTITIONS, bool)


def holds(part: PartEntry, owned: NDArray[np.bool_]) -> bool:
    """Return whether a file has rows of partitions that are wanted."""
    return bool(owned[part.first : part.last + 1].any())


def owned_rows(
    batches: Iterable[pa.RecordBatch], owned: NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the partitions that are wanted."""
    for batch in batches:
        if owned.all():
            yield batch
            continue
        is_wanted = owned[batch.column("partition").to_numpy()]
        if is_wanted.any():
            yield batch.filter(pa.array(is_wanted))


def write_batches(file: HashedFile, batches: Iterable[pa.RecordBatch]) -> int:
    """Write batches of one schema, at least one, as an Arrow IPC file; return their rows."""
    iterator = iter(batches)
    first = next(iterator)
    num_rows = 0
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as sink:
        for batch in itertools.chain([first], iterator):
            sink.write_batch(batch)
            num_rows += batch.num_rows
    return num_rows


def arrow_batches(opener: Callable[[], RawIOBase], place: str) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow IPC file, each read when it is asked for.

    Args:
        opener: opens the file.
        place: where it lies, for messages.

    Raises:
        FormatError: it is not an Arrow file of uncompressed columns; compressed buffers could be a
            thousand times larger in memory.
    """
    try:
        with opener() as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise pa.ArrowInvalid("it does not begin as one")
            source = pa.PythonFile(file, mode="r")
            with pa.ipc.open_file(source) as footer:
                schema = footer.schema
                names = schema.names  # raises here where a name is not UTF-8
                num_batches = footer.num_record_batches
            source.seek(len(_MAGIC))
            messages = pa.ipc.MessageReader.open_stream(source)
            if messages.read_next_message().type != "schema" or not names:
                raise pa.ArrowInvalid("it does not begin with a schema of columns")
            for _ in range(num_batches):
                yield _checked_batch(messages.read_next_message(), schema)
    except _NOT_ARROW as error:
        message = f"{place}: not an Arrow IPC file of rows, got {error}. {ADVICE}"
        raise FormatError(message) from error


def _checked_batch(message: pa.ipc.Message, schema: pa.Schema) -> pa.RecordBatch:
    if message.type != "record batch":
        raise pa.ArrowInvalid(f"a message is a {message.type}")
    if _is_compressed(memoryview(message.metadata)):
        raise pa.ArrowInvalid("its buffers are compressed")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate()
    return batch


def _is_compressed(metadata: memoryview) -> bool:
    """Return whether a record batch's header names a compression; Arrow verified the flatbuffer."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    header = _field(metadata, message, _HEADER)
    if header is None:
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, _COMPRESSION) is not None


def _field(data: memoryview, table: int, number: int) -> int | None:
    """Return where a flatbuffer table has a field, None if it lacks it."""
    offsets = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, offsets)[0]:
        return None
    offset = struct.unpack_from("<H", data, offsets + slot)[0]
    return table + offset if offset else None
