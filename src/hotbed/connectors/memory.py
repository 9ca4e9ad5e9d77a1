# SPDX-License-Identifier: Apache-2.0
"""Rows that are already in memory: the public fake of every other source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.base import READ_ALL, READ_ROWS, Place, Position, ReadPlan, Source
from hotbed.errors import DataError


@dataclass(frozen=True, eq=False)
class Memory(Source):
    """A pyarrow Table, a RecordBatch, or a mapping of column names to lists or NumPy arrays of one length.

    Raises DataError when the columns differ in length or cannot become Arrow arrays.

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
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        row = int(position["row"]) if position else 0
        table = self.table
        if plan.columns is not None:
            table = table.select([name for name in table.schema.names if name in plan.columns])
        for batch in table.slice(row).to_batches(max_chunksize=batch_rows):
            if batch.num_rows:
                row += batch.num_rows
                yield batch, Position({"row": row})


def _as_table(columns: Mapping[str, Any] | pa.Table | pa.RecordBatch) -> pa.Table:
    if isinstance(columns, pa.Table):
        return columns
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        try:
            arrays[name] = _as_array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"memory source: column {name!r} is not one Arrow type — {error} — give each column values of one type"
            ) from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"memory source: columns differ in length — {lengths} — give every column the same number of rows"
        )
    return pa.table(arrays)


def _as_array(values: Any) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, np.ndarray) and values.ndim == 2:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    try:
        return pa.array(values)
    except OverflowError:  # Python integers above int64: ids that use the upper half of 64 bits
        return pa.array(values, type=pa.uint64())
