# SPDX-License-Identifier: Apache-2.0
"""Rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.position import Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source, rows_of
from hotbed.connectors.types import recast, types_of, usual
from hotbed.errors import DataError


@dataclass(frozen=True, eq=False)
class Memory(Source):
    """Rows in memory.

    Args:
        columns: a pyarrow Table or RecordBatch, a DataFrame of Polars or pandas, or a mapping of
            column names to lists or NumPy arrays of one length.

    Raises:
        DataError: the columns differ in length or cannot become Arrow arrays.

    Example: `hb.sources.Memory({"user": [1, 2], "genres": [["a", "b"], []], "label": [0, 1]})`
    """

    columns: Mapping[str, Any] | pa.Table | pa.RecordBatch

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _usual(_as_table(self.columns)))

    @property
    def table(self) -> pa.Table:
        """The rows as one Arrow table."""
        assert isinstance(self.columns, pa.Table)
        return self.columns

    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def inferred(self) -> pa.Schema:
        return types_of(self.table)

    @property
    def divisible(self) -> bool:
        return True

    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def locate(self, position: Position, back: int) -> RowPlace:
        return RowPlace("memory", int(position["row"]) - back + 1)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return rows_of(self, self.table, position, batch_rows, plan)


def _as_table(columns: Any) -> pa.Table:
    if isinstance(columns, pa.Table):
        return columns
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    if hasattr(columns, "__arrow_c_stream__"):
        return _of_frame(columns)
    if not isinstance(columns, Mapping):
        raise DataError(
            "memory source: neither a table nor a mapping of columns, got "
            f"{type(columns).__name__}. Give an Arrow table, a DataFrame or a dict of columns."
        )
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        try:
            arrays[name] = _as_array(values)
        except OverflowError as error:
            raise DataError(
                f"memory source: column {name!r} holds whole numbers beyond 64 bits. Hash them, "
                "or give them as text."
            ) from error
        except UnicodeEncodeError as error:
            raise DataError(
                f"memory source: column {name!r} holds a text that UTF-8 cannot hold, got "
                f"{error.object!r:.60}. Give such values as bytes."
            ) from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"memory source: column {name!r} is not one Arrow type, got {error}. Give each "
                "column values of one type."
            ) from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"memory source: columns differ in length, got {lengths}. Give every column the same "
            "number of rows."
        )
    return pa.table(arrays)


def _usual(table: pa.Table) -> pa.Table:
    """Return the table with each column in an encoding that all functions of Arrow take."""
    for place, raw in enumerate(table.schema.types):
        kind = usual(raw)
        if kind is not raw and not kind.equals(raw):
            column = table.column(place)
            chunks = [recast(chunk, kind) for chunk in column.chunks]
            table = table.set_column(
                place, table.schema.names[place], pa.chunked_array(chunks, kind)
            )
    return table


def _of_frame(frame: Any) -> pa.Table:
    """Return the columns of a data frame.

    Raises:
        DataError: a column has a type that Arrow does not have, such as Int128 of Polars.
    """
    try:
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        for name in getattr(frame, "columns", ()):
            try:
                pa.table(frame[[name]])
            except (pa.ArrowException, TypeError, ValueError) as cause:
                raise DataError(
                    f"memory source: column {name!r} cannot become an Arrow array, got "
                    f"{frame[name].dtype} ({str(cause).splitlines()[0]}). Cast it to a type of at "
                    "most 64 bits, or to text."
                ) from cause
        raise DataError(
            f"memory source: not a table for Arrow, got {str(error).splitlines()[0]}. Give an "
            "Arrow table or a dict of columns."
        ) from error


def _as_array(values: Any) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise pa.ArrowTypeError(f"{values!r:.60}, not a list or an array")
    if isinstance(values, np.ndarray) and values.ndim == 2:
        _, width = values.shape
        if not width:
            empty = pa.nulls(len(values)).cast(pa.list_(pa.null()))
            return empty.fill_null([])
        flat = np.ascontiguousarray(values).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)
    if isinstance(values, np.ndarray) and values.dtype.kind == "S":
        values = values.astype(object)  # Arrow would end each value at its first zero byte
    try:
        return pa.array(values)
    except OverflowError:  # Python integers above int64: ids that use the upper half of 64 bits
        kind = pa.uint64()
        if any(isinstance(value, (list, tuple)) for value in values):
            kind = pa.list_(kind)
        return pa.array(values, type=kind)
