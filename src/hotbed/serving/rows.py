# SPDX-License-Identifier: Apache-2.0
"""Rows that a server reads: files that are written once, mapped into memory and shared by every
process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import _core
from hotbed.config import build
from hotbed.data.batch import Ids, as_ids
from hotbed.embedding.table import POOLINGS, Table
from hotbed.errors import FormatError, PersistError, RowShapeError

RowDtype = Literal["float32", "float16", "int8"]
ROW_DTYPES: tuple[RowDtype, ...] = ("float32", "float16", "int8")
_PIECE_BYTES = 2 << 20


def write_rows(
    path: Path,
    dim: int,
    batches: Iterable[pa.RecordBatch],
    removed: Iterable[pa.RecordBatch] = (),
    dtype: RowDtype = "float32",
) -> int:
    """Write one file from record batches with columns `id` and `value` (each id once); returns its
    rows.

    `removed`: batches with a column `id`, of ids that older files hold and this one takes away.
    int8 rows have one scale each. The file appears whole or not at all. Raises PersistError when
    the disk refuses.
    """
    kind = ROW_DTYPES.index(dtype)
    ids = [np.empty(0, np.int64)]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            pieces = _Pieces(file)
            for batch in batches:
                ids.append(batch.column("id").to_numpy())
                values = np.ascontiguousarray(batch.column("value").flatten().to_numpy())
                pieces.write(np.asarray(_core.frozen_rows(values, dim, kind)))
            _write_index(pieces, np.concatenate(ids), _ids(removed), dim, kind)
            pieces.flush()
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise PersistError(
            f"{path}: cannot be written — {error} — free space or choose another folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return sum(map(len, ids))


class _Pieces:
    """A new file, written in pieces as large as a huge page: file systems with large folios then
    map it by huge pages, which saves a lookup of rows a third of its time.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._held = bytearray()
        self.size = 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.size += len(view)
        while len(view):
            taken = view[: _PIECE_BYTES - len(self._held)]
            self._held += taken
            view = view[len(taken) :]
            if len(self._held) == _PIECE_BYTES:
                self.flush()

    def flush(self) -> None:
        self._file.write(self._held)
        self._held.clear()


def _write_index(
    pieces: _Pieces, ids: NDArray[np.int64], gone: NDArray[np.int64], dim: int, kind: int
) -> None:
    if len(gone):
        gone = np.setdiff1d(gone, ids)  # a row that came back has a row
    pieces.write(bytes(-pieces.size % 64))
    pieces.write(np.asarray(_core.frozen_index(ids, gone)))
    pieces.write(_core.frozen_footer(len(ids), len(gone), dim, kind))


def _ids(batches: Iterable[pa.RecordBatch]) -> NDArray[np.int64]:
    return np.concatenate(
        [np.empty(0, np.int64), *(batch.column("id").to_numpy() for batch in batches)]
    )


class FrozenRows:
    """One mapped file of rows."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.native = _core.FrozenRows(str(path))
        except (RuntimeError, OSError) as error:
            raise FormatError(
                f"{error} — not a whole file of rows — restore it from a copy, or export again"
            ) from error

    def __len__(self) -> int:
        return int(self.native.num_rows)

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids with a row, and ids that this file takes away from older ones; in no useful order."""
        held, removed = self.native.entries()
        return held, removed


class ServedTable:
    """A table as servers read it: files of rows, newest first, and what an id without a row reads
    as.

    `config`: the table's constructor keywords, as a checkpoint holds them; with admission an
    unknown id reads as `default`, without it as its initial row, exactly as in training.
    """

    def __init__(self, config: Mapping[str, Any], layers: Sequence[FrozenRows]) -> None:
        self.name, self.dim, native = _native_table(json.dumps(config, sort_keys=True))
        self.layers = tuple(layers)
        try:
            self.native = _core.FrozenTable([layer.native for layer in layers], native)
        except ValueError as error:
            raise FormatError(
                f"table {self.name!r}: {error} — received files of another dim — export again"
            ) from error

    def find(self, ids: Any) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows of ids, int64 [n] -> float32 [n, dim], and whether each has one.

        Raises RowShapeError for anything but whole numbers, as `Table.find` does.
        """
        rows, found = self.native.find(as_ids(ids))
        return rows.reshape(-1, self.dim), found.astype(bool)

    def batches(self, ids: NDArray[np.int64], batch_rows: int = 65_536) -> Iterator[pa.RecordBatch]:
        """Rows of ids, as record batches of `id` and `value`."""
        for start in range(0, len(ids), batch_rows):
            part = ids[start : start + batch_rows]
            values = pa.FixedSizeListArray.from_arrays(
                pa.array(self.find(part)[0].reshape(-1)), self.dim
            )
            yield pa.record_batch({"id": pa.array(part), "value": values})


@lru_cache(1024)  # each version of a model has the same tables
def _native_table(config: str) -> tuple[str, int, _core.TableConfig]:
    table: Table = build(json.loads(config), Table, "table")
    return table.name, table.dim, table._native_config()


class LookupResult(NamedTuple):
    """Pooled features side by side, float32 [n, width]; the rows [m, dim] of each sequence feature,
    in order; and how many rows read as the table's default because they came too late.
    """

    flat: NDArray[np.float32]
    sequences: list[NDArray[np.float32]]
    late: int = 0


class Lookup:
    """The embedding half of a model: pooled rows of every feature, side by side, in one native
    call.

    `features`: (name, table, pooling) as the collection in the network had them. A feature with one
    sample where others have more holds for all of them. Raises RowShapeError, naming the feature,
    for ids that do not fit.
    """

    def __init__(
        self, features: Sequence[tuple[str, str, str]], tables: Mapping[str, ServedTable]
    ) -> None:
        names = sorted({table for _, table, _ in features})
        layout = [
            (name, names.index(table), POOLINGS.index(pooling)) for name, table, pooling in features
        ]
        self._native = _core.FrozenLookup([tables[name].native for name in names], layout)

    def __call__(
        self, ids: Mapping[str, Ids | NDArray[np.int64]], num_samples: int
    ) -> LookupResult:
        """Ids by feature; an array where each sample has one."""
        try:
            flat, sequences = self._native(ids, num_samples)
        except ValueError as error:
            raise RowShapeError(f"{error} — encode the batch with the same schema") from error
        return LookupResult(flat, sequences)


def return_free_memory() -> None:
    """Give memory that malloc holds but nobody uses back to the system, where it can (glibc).

    A version is written through memory of many times the size of what stays.
    """
    _core.return_free_memory()
