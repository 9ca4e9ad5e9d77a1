# SPDX-License-Identifier: Apache-2.0
"""Parquet data of HugeCTR: file lists, and `_metadata.json` beside the files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotbed.config import build, parse_json
from hotbed.connectors import Parquet, ReadPlan, read_file_list
from hotbed.connectors.paths import open_bytes
from hotbed.errors import ConfigError, DataError
from hotbed.files import new_file

METADATA_FILE = "_metadata.json"
_LIST_ENDING = ".txt"


@dataclass(frozen=True)
class ColumnPlace:
    """An entry of the metadata: a column by its name and its number in the files."""

    col_name: str
    index: int


@dataclass(frozen=True)
class FileStats:
    """An entry of the metadata: a file and its rows."""

    file_name: str
    num_rows: int


@dataclass(frozen=True)
class Metadata:
    """The content of `_metadata.json`: files, and the roles of their columns in HugeCTR's order."""

    file_stats: tuple[FileStats, ...]
    cats: tuple[ColumnPlace, ...]
    conts: tuple[ColumnPlace, ...]
    labels: tuple[ColumnPlace, ...]

    @classmethod
    def read(cls, file: str) -> Metadata:
        """Return the content of a metadata file, at a path or a URL.

        Raises:
            DataError: the file cannot be read, or an entry is wrong.
        """
        try:
            with open_bytes(file) as stream:
                content = parse_json(stream.readall())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file}: the metadata of Parquet files cannot be read, got {error}. NVTabular "
                "and hugectr.tools.DataGenerator write this file beside the Parquet files."
            ) from error
        entries = {}
        for key in ("file_stats", "cats", "conts", "labels"):
            if isinstance(content, Mapping) and key in content:
                entries[key] = content[key]
        try:
            metadata: Metadata = build(entries, cls, METADATA_FILE)
        except ConfigError as error:
            raise DataError(f"{file}: {error}") from error
        return metadata

    def write(self, file: Path) -> None:
        """Write the file."""
        content: dict[str, Any] = {}
        stats = [vars(entry) for entry in self.file_stats]
        content["file_stats"] = stats
        for key in ("labels", "conts", "cats"):
            content[key] = [vars(entry) for entry in getattr(self, key)]
        with new_file(file) as stream:
            stream.write(json.dumps(content, indent=1).encode())


@dataclass(frozen=True)
class ParquetData:
    """The Parquet files of one or more sources of a reader.

    Args:
        source: file lists, read in turn. A path that does not end in `.txt` is a Parquet file or a
            glob itself.
    """

    source: Sequence[str]

    @cached_property
    def files(self) -> Parquet:
        """The rows, as a source of the engine."""
        files: list[str] = []
        for path in self.source:
            if path.endswith(_LIST_ENDING):
                files += read_file_list(path)
            else:
                files += Parquet(path).files()
        return Parquet(files)

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata beside the first file."""
        folder = os.path.dirname(self.files.files()[0])
        return Metadata.read(os.path.join(folder, METADATA_FILE))

    def names(self, role: str) -> tuple[str, ...]:
        """Return the columns of a role: "labels", "conts" or "cats".

        The number of a column decides, as in HugeCTR, whose own files have other names than their
        metadata. Where one name of the metadata is in the files, all of them have to be.

        Raises:
            DataError: the files have no such column, or its name is that of another one.
        """
        present = self._schema.names
        metadata = self.metadata
        entries = (*metadata.labels, *metadata.conts, *metadata.cats)
        is_named = any(entry.col_name in present for entry in entries)
        names: list[str] = []
        for entry in getattr(self.metadata, role):
            if not 0 <= entry.index < len(present):
                raise DataError(
                    f"{METADATA_FILE}: {role} has column {entry.col_name!r} with index "
                    f"{entry.index}, got {len(present)} columns in the files. Correct it."
                )
            name = present[entry.index]
            if name != entry.col_name and is_named:
                raise DataError(
                    f"{METADATA_FILE}: {role} has column {entry.col_name!r} with index "
                    f"{entry.index}, got {name!r} there in the files. Correct the name or "
                    "the index."
                )
            names.append(name)
        return tuple(names)

    def width(self, name: str) -> int:
        """Return the number of values in a row of a column of numbers."""
        kind = self._schema.field(name).type
        if not pa.types.is_nested(kind):
            return 1
        plan = ReadPlan(columns=(name,))
        for batch, _ in self.files.read(batch_rows=1, plan=plan):
            return len(batch.column(name)[0])
        return 0

    def check_rows(self) -> None:
        """Raise DataError if a file has not the number of rows that the metadata says."""
        stats = {Path(entry.file_name).name: entry for entry in self.metadata.file_stats}
        for file in self.files.files():
            entry = stats.get(Path(file).name)
            if entry is None:
                continue
            num_rows = Parquet(file).num_rows()
            if num_rows != entry.num_rows:
                raise DataError(
                    f"{file}: {METADATA_FILE} says {entry.num_rows} rows, got {num_rows}. Write "
                    "the files again, or correct the number."
                )

    def check_keys(self, names: Sequence[str], ends: Mapping[str, int]) -> None:
        """Raise DataError if columns of keys hold something else than whole numbers in a range.

        Args:
            names: of the columns.
            ends: number of keys from 0 on that a column may hold, by its name; none = any.
        """
        for name in names:
            kind = self._schema.field(name).type
            item = kind.value_type if _has_items(kind) else kind
            if not pa.types.is_integer(item):
                raise DataError(
                    f"{self.files.files()[0]}: column {name!r}: expected whole numbers or lists of "
                    f"them as keys, got {kind}. Number the values, as by NVTabular's Categorify or "
                    "hotbed prepare."
                )
        for file in self.files.files():
            _check_values(file, names, ends)

    @cached_property
    def _schema(self) -> pa.Schema:
        return self.files.schema()


def _has_items(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _check_values(file: str, names: Sequence[str], ends: Mapping[str, int]) -> None:
    """Raise DataError for a key that is null or out of range.

    Columns whose statistics exclude it are not read.
    """
    parquet = pq.ParquetFile(open_bytes(file))
    first_row = 0
    for number in range(parquet.metadata.num_row_groups):
        group = parquet.metadata.row_group(number)
        for name in names:
            if _may_have_nulls(group, name):
                column = parquet.read_row_group(number, [name]).column(0).combine_chunks()
                row = _null_row(column)
                if row is not None:
                    raise DataError(
                        f"{file}: row {first_row + row}: column {name!r}: expected a key, got "
                        "null. Fill missing values with a key of their own."
                    )
            if name in ends and _may_exceed(group, name, ends[name]):
                column = parquet.read_row_group(number, [name]).column(0).combine_chunks()
                row, key = _row_outside(column, ends[name])
                if row is not None:
                    raise DataError(
                        f"{file}: row {first_row + row}: column {name!r}: expected a key of 32 "
                        f"bits, from 0 to {ends[name] - 1}, got {key}. Set i64_input_key=True, or "
                        "input_key_type to I64 in JSON."
                    )
        first_row += group.num_rows


def _statistics(group: pq.RowGroupMetaData, name: str) -> pq.Statistics | None:
    """Return the statistics of a column in a row group; None without them."""
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == name or column.path_in_schema.startswith(f"{name}."):
            return column.statistics
    return None


def _may_have_nulls(group: pq.RowGroupMetaData, name: str) -> bool:
    """Return whether a row group may have nulls in a column; empty lists count as such."""
    statistics = _statistics(group, name)
    return statistics is None or not statistics.has_null_count or statistics.null_count > 0


def _may_exceed(group: pq.RowGroupMetaData, name: str, end: int) -> bool:
    """Return whether a row group may have keys below 0 or from `end` on in a column."""
    statistics = _statistics(group, name)
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min < 0 or statistics.max >= end)


def _row_outside(column: pa.Array, end: int) -> tuple[int | None, int]:
    """Return the first row with a key below 0 or from `end` on, and that key."""
    keys = column
    rows = np.arange(len(column))
    if _has_items(column.type):
        keys = pc.list_flatten(column)
        rows = pc.list_parent_indices(column).to_numpy()
    values = keys.to_numpy()
    outside = (values < 0) | (values >= end)
    if not outside.any():
        return None, 0
    first = np.argmax(outside)
    return int(rows[first]), int(values[first])


def _null_row(column: pa.Array) -> int | None:
    """Return the first row whose key, or a key in its list, is null; a list may be null itself."""
    is_null = column.is_null()
    rows = np.arange(len(column))
    if _has_items(column.type):
        is_null = pc.list_flatten(column).is_null()
        rows = pc.list_parent_indices(column).to_numpy()
    nulls = rows[is_null.to_numpy(zero_copy_only=False)]
    return int(nulls[0]) if len(nulls) else None
