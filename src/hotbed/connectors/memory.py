# SPDX-License-Identifier: Apache-2.0
"""Rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.position import Batches, Place, Position
from hotbed.connectors.source import Source, rows_of
from hotbed.errors import DataError


@dataclass(frozen=True, eq=False)
class Memory(Source):
    """Rows in memory.

    Args:
        columns: A pyarrow Table or RecordBatch, a DataFrame of Polars or pandas, or a mapping of
            column names to lists or NumPy arrays of one length.

    Raises:
        DataError: The columns differ in length or cannot become Arrow arrays.

    Example: `hb.sources.Memory({"user": [1, 2], "genres": [["a", "b"], []], "label": [0, 1]})`
    """

    columns: Mapping[str, Any] | pa.Table | pa.RecordBatch

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _as_table(self.columns))

    @property
    def table(self) -> pa.Table:
        """The rows as one Arrow table."""
        assert isinstance(self.columns, pa.Table)
        return self.columns

    def schema(self) -> pa.Schema:
        return self.table.schema

    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def locate(self, position: Position, back: int) -> Place:
        return Place("memory", int(position["row"]) - back + 1)

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
        return pa.table(columns)
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
    try:
        return pa.array(values)
    except OverflowError:  # Python integers above int64: ids that use the upper half of 64 bits
        return pa.array(values, type=pa.uint64())
