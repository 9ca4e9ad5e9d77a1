# SPDX-License-Identifier: Apache-2.0
"""Columns and places of rows, in memory and as they are saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from hotbed.connectors.position import PLACE
from hotbed.connectors.types import recast, usual


def held(rows: pa.Table, first: int, *, placed: bool) -> pa.Table:
    """Return rows in the encodings in which they are held.

    Dictionaries get wide indices, so that those of many turns can be put together.

    Args:
        rows: the rows; those of a source that ends have no places.
        first: rows of the source before them.
        placed: whether they get places where they have none.
    """
    for index, column in enumerate(rows.schema):
        kind = _held_type(column.type)
        if column.name != PLACE and not kind.equals(column.type):
            chunks = [recast(chunk, kind) for chunk in rows.column(index).chunks]
            rows = rows.set_column(index, column.name, pa.chunked_array(chunks, kind))
    if PLACE in rows.schema.names:
        return _with_places(rows, _with_large_indices)
    if not placed:
        return rows
    numbers = pa.array(np.arange(first, first + rows.num_rows) + 1)
    return rows.append_column(PLACE, pa.StructArray.from_arrays([numbers], ["row"]))


def _held_type(kind: pa.DataType) -> pa.DataType:
    kind = usual(kind)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type)
    return kind


def together(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables as one.

    Rows of a saved state have no dictionaries: where one table has a column without, all do.
    """
    kinds: dict[str, pa.DataType] = {}
    mixed: set[str] = set()
    for table in tables:
        for column in table.schema:
            if not kinds.setdefault(column.name, column.type).equals(column.type):
                mixed.add(column.name)
    decoded = [_without_dictionaries(table, mixed - {PLACE}) for table in tables]
    return pa.concat_tables(decoded, promote_options="default")


def written(rows: pa.Table) -> pa.Table:
    """Return rows as they are saved: without dictionaries, of which a file holds one a column."""
    return _with_places(_without_dictionaries(rows, rows.schema.names), _decoded)


def written_types(types: pa.Schema) -> pa.Schema:
    """Return the types of columns as they are saved."""
    return written(types.empty_table()).schema


def loaded(rows: pa.Table) -> pa.Table:
    """Return saved rows as they are in memory."""
    return _with_places(rows, _encoded)


def _without_dictionaries(rows: pa.Table, names: Sequence[str] | set[str]) -> pa.Table:
    for index, column in enumerate(rows.schema):
        if column.name in names and pa.types.is_dictionary(column.type):
            chunks = [_decoded(chunk) for chunk in rows.column(index).chunks]
            values = pa.chunked_array(chunks, column.type.value_type)
            rows = rows.set_column(index, column.name, values)
    return rows


def _with_places(rows: pa.Table, change: Callable[[pa.Array], pa.Array]) -> pa.Table:
    """Return rows with each field of their places changed."""
    index = rows.schema.get_field_index(PLACE)
    if index < 0:
        return rows
    column = rows[PLACE].combine_chunks()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    places: list[pa.Array] = []
    for chunk in chunks or [pa.array([], rows[PLACE].type)]:
        names = [field.name for field in chunk.type]
        fields = [change(chunk.field(name)) for name in names]
        places.append(pa.StructArray.from_arrays(fields, names))
    return rows.set_column(index, PLACE, pa.chunked_array(places))


def _with_large_indices(values: pa.Array) -> pa.Array:
    if not pa.types.is_dictionary(values.type):
        return values
    return pa.DictionaryArray.from_arrays(values.indices.cast(pa.int32()), values.dictionary)


def _decoded(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _encoded(values: pa.Array) -> pa.Array:
    return values.dictionary_encode() if pa.types.is_string(values.type) else values
