# SPDX-License-Identifier: Apache-2.0
"""The folder of an embedding collection: its tables with their keys and vectors.

`<path>/embedding_collection_<number>/meta_data` names the tables by number, `key<i>` and
`weight<i>` hold the rows of the i-th of them, behind a head of 128 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.compat.hugectr.weights.arrays import FLOAT, check_size, file_size
from hotbed.compat.hugectr.weights.gathered import Rows
from hotbed.compat.hugectr.weights.rows import (
    batches,
    check_finite,
    check_keys,
    check_read,
    rows_of,
)
from hotbed.embedding.table import Table
from hotbed.errors import FormatError
from hotbed.files import new_file

_HEAD = struct.Struct("<32i")
"""The head of a file of keys (1) or weights (2): its kind, and the number of the table."""
_KEY = 1
_WEIGHT = 2
_KEY_TYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<u4"), 1: np.dtype("<i8")}


@dataclass(frozen=True)
class _MetaData:
    """What `meta_data` says.

    Attributes:
        key_type: 0 = uint32, 1 = int64.
        numbers: of the tables.
        num_keys: of each of them.
        dims: of each of them.
    """

    key_type: int
    numbers: tuple[int, ...]
    num_keys: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def form(num_tables: int) -> struct.Struct:
        """Return the layout for so many tables."""
        return struct.Struct(f"<5i{num_tables}i{num_tables}q{num_tables}i")

    def to_bytes(self) -> bytes:
        head = (len(self.numbers), self.key_type, 0, 0, 0)
        form = self.form(len(self.numbers))
        return form.pack(*head, *self.numbers, *self.num_keys, *self.dims)

    @classmethod
    def read(cls, path: Path) -> _MetaData:
        file_size(path)
        data = path.read_bytes()
        if len(data) < 20:
            raise FormatError(
                f"{path}: expected a head of 20 bytes, got {len(data)}. Give the folder of an "
                "embedding collection."
            )
        num_tables, key_type, value_type, *_ = struct.unpack_from("<5i", data)
        if num_tables < 0 or len(data) != cls.form(num_tables).size:
            raise FormatError(
                f"{path}: expected {cls.form(max(num_tables, 0)).size} bytes for {num_tables} "
                f"tables, got {len(data)}. Give the folder of an embedding collection."
            )
        if key_type not in _KEY_TYPES or value_type != 0:
            raise FormatError(
                f"{path}: expected keys of type 0 (uint32) or 1 (int64) and values of type 0 "
                f"(float32), got {key_type} and {value_type}. Write the collection in these types."
            )
        numbers = cls.form(num_tables).unpack(data)[5:]
        ends = (num_tables, 2 * num_tables)
        return cls(key_type, numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] :])


def save_collection(
    path: str | Path, tables: Mapping[int, Rows], number: int = 0, *, i64: bool = True
) -> None:
    """Write tables of an embedding collection.

    Args:
        path: the folder.
        tables: by their numbers in the collection.
        number: of the collection in the model.
        i64: whether keys have 64 bits.

    Raises:
        FormatError: a key does not fit 32 bits.
    """
    folder = _folder(path, number)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = tuple(sorted(tables))
    ordered = [tables[table_number] for table_number in numbers]
    num_keys = tuple(len(table) for table in ordered)
    dims = tuple(table.dim for table in ordered)
    key_type = 1 if i64 else 0
    for place, (table_number, table) in enumerate(zip(numbers, ordered, strict=True)):
        with (
            new_file(folder / f"key{place}") as keys,
            new_file(folder / f"weight{place}") as weights,
        ):
            keys.write(_HEAD.pack(_KEY, table_number, *[0] * 30))
            weights.write(_HEAD.pack(_WEIGHT, table_number, *[0] * 30))
            for ids, vectors in rows_of(table):
                check_keys(folder, ids, i64=i64)
                keys.write(ids.astype(_KEY_TYPES[key_type]).tobytes())
                weights.write(vectors.astype(FLOAT).tobytes())
    with new_file(folder / "meta_data") as file:
        file.write(_MetaData(key_type, numbers, num_keys, dims).to_bytes())


def load_collection(path: str | Path, tables: Mapping[int, Table], number: int = 0) -> int:
    """Read tables of an embedding collection, and return the number of their rows.

    Args:
        path: the folder.
        tables: those to read, by their numbers in the collection.
        number: of the collection in the model.

    Raises:
        PersistError: a file is missing.
        FormatError: a file does not have the size of its rows, or a table is not in the folder.
            Nothing has changed.
    """
    folder = _folder(path, number)
    meta = _MetaData.read(folder / "meta_data")
    parts = {}
    for table_number, table in tables.items():
        if table_number not in meta.numbers:
            raise FormatError(
                f"{folder}: it does not hold table {table_number} ({table.name!r}), got tables "
                f"{list(meta.numbers)}. Save this table too, or leave it out here."
            )
        place = meta.numbers.index(table_number)
        if meta.dims[place] != table.dim:
            raise FormatError(
                f"{folder}: expected vectors of {table.dim} for table {table_number} "
                f"({table.name!r}), got {meta.dims[place]}. Give the collection of this very model."
            )
        num_keys = meta.num_keys[place]
        keys = _array(folder / f"key{place}", _KEY_TYPES[meta.key_type], (num_keys,))
        vectors = _array(folder / f"weight{place}", FLOAT, (num_keys, table.dim))
        check_read(folder / f"key{place}", keys)
        check_finite(folder / f"weight{place}", vectors)
        parts[table_number] = (keys, vectors)
    for table_number, (keys, vectors) in parts.items():
        tables[table_number].load(batches(keys, vectors))
    return sum(len(keys) for keys, _ in parts.values())


def _folder(path: str | Path, number: int) -> Path:
    return Path(path) / f"embedding_collection_{number}"


def _array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array behind the head of a file, mapped."""
    num_bytes = math.prod(shape) * dtype.itemsize
    what = f"a head and {shape[0]} rows"
    check_size(path, _HEAD.size + num_bytes, what)
    if not num_bytes:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", _HEAD.size, shape)
