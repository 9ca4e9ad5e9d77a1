# SPDX-License-Identifier: Apache-2.0
"""Layout: encoded rows as the columns of prepared files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.data.arrow_types import is_list
from hotbed.data.batch import Batch, Ids
from hotbed.data.columns import Columns, transformed
from hotbed.data.schema import Column, Dense, DisplayPosition, Id, Label, Schema, Time, Weight
from hotbed.data.transforms import Bucketize, Cross, Hash, Map, TimeOfDay

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Layout:
    """The columns of prepared files.

    Args:
        raw: the fitted schema over raw rows.
        bags: the id features that hold lists, with a number of ids that differs by row.
    """

    raw: Schema
    bags: frozenset[str]

    @staticmethod
    def of(raw: Schema, rows: pa.RecordBatch) -> Layout:
        """Return the layout for raw rows of these types; `rows` may be empty."""
        context = Columns(rows, raw.rules)
        bags: set[str] = set()
        for column in raw.ids:
            values = transformed(column.source, column.transforms, context)
            if is_list(values.type):
                bags.add(column.name)
        return Layout(raw, frozenset(bags))

    def schema(self) -> Schema:
        """Return the schema of the prepared files."""
        return Schema([_prepared(column) for column in self.raw.columns])

    def arrow(self) -> pa.Schema:
        """Return names and types of the columns of the prepared files."""
        fields: list[pa.Field] = []
        for column in self.raw.columns:
            if isinstance(column, Id):
                is_bag = column.name in self.bags
                fields.append(pa.field(column.name, _of(pa.int64(), is_bag)))
                if column.weights is not None:
                    name = weights_name(column)
                    fields.append(pa.field(name, _of(pa.float32(), is_bag)))
            elif isinstance(column, Time):
                fields.append(pa.field(column.name, _TIME))
            elif isinstance(column, Dense) and column.width > 1:
                fields.append(pa.field(column.name, pa.list_(pa.float32(), column.width)))
            else:
                fields.append(pa.field(column.name, pa.float32()))
        return pa.schema(fields)

    def table(self, batch: Batch) -> pa.Table:
        """Return encoded rows as columns of the prepared files."""
        columns: dict[str, pa.Array] = {}
        for column in self.raw.columns:
            name = column.name
            if isinstance(column, Id):
                ids = batch.ids[name]
                is_bag = name in self.bags
                columns[name] = _array(ids, ids.values, is_bag)
                if column.weights is not None:
                    columns[weights_name(column)] = _array(ids, ids.weights, is_bag)
            elif isinstance(column, DisplayPosition):
                columns[name] = pa.array(batch.dense[name], mask=batch.dense[name] < 0)
            elif isinstance(column, Dense):
                columns[name] = _dense_array(batch.dense[name])
            elif isinstance(column, Label):
                columns[name] = pa.array(batch.labels[name])
            elif isinstance(column, Weight):
                columns[name] = pa.array(batch.weight)
            elif isinstance(column, Time):
                columns[name] = pa.array(batch.time).cast(_TIME)
        return pa.table(columns, schema=self.arrow())


_PARTS_OF_TIME = {"hour": 24, "minute": 1440, "weekday": 7, "hour_of_week": 168}


def sizes_of(schema: Schema) -> Mapping[str, int]:
    """Return the size of each id feature whose ids are 0 .. size - 1, by its name."""
    sizes: dict[str, int] = {}
    for column in schema.ids:
        size = None
        if column.transforms:
            size = _size_of(column.transforms[-1])
        if size is not None:
            sizes[column.name] = size
    return sizes


def _size_of(transform: Any) -> int | None:
    """Return the number of ids that a fitted transform gives; None for unlimited ones."""
    if isinstance(transform, Map):
        if transform.fitted is not None:
            return 1 + len(transform.fitted)
        return 1 + len(transform.vocabulary or ())
    if isinstance(transform, (Hash, Cross)):
        return transform.bins
    if isinstance(transform, Bucketize):
        return 1 + len(transform.boundaries or ())
    if isinstance(transform, TimeOfDay):
        return _PARTS_OF_TIME[transform.part]
    return None


def weights_name(column: Id) -> str:
    """Return the column of prepared files that holds the weights of an id feature."""
    return f"{column.name}_weights"


def _of(kind: pa.DataType, is_bag: bool) -> pa.DataType:
    if is_bag:
        return pa.list_(kind)
    return kind


def _prepared(column: Column) -> Column:
    """Return the role that reads the prepared column."""
    if isinstance(column, Label):
        return Label(column.name)
    if isinstance(column, Time):
        return Time(column.name)
    if isinstance(column, Weight):
        return Weight(column.name)
    if isinstance(column, DisplayPosition):
        return replace(column, column=None, first=0)
    if isinstance(column, Dense):
        return Dense(column.name, width=column.width)
    assert isinstance(column, Id)
    weights = column.weights
    if weights is not None:
        weights = weights_name(column)
    return Id(
        column.name,
        column.table,
        pooling=column.pooling,
        max_length=column.max_length,
        weights=weights,
    )


def _array(ids: Ids, values: Any, is_bag: bool) -> pa.Array:
    """Return ids, or their weights, as a column of lists or of single values; null for none."""
    if is_bag:
        offsets = ids.with_offsets().offsets
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    if ids.offsets is None:
        return pa.array(values)
    is_missing = ids.lengths() == 0
    single = np.zeros(len(ids), values.dtype)
    single[~is_missing] = values
    return pa.array(single, mask=is_missing)


def _dense_array(values: Any) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])
