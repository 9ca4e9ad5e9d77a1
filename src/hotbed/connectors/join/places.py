# SPDX-License-Identifier: Apache-2.0
"""Places of rows, in memory and as they are saved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from hotbed.connectors.position import PLACE


def placed(rows: pa.Table, first: int) -> pa.Table:
    """Return rows of an endless join with their places, whose dictionaries hold many words.

    Args:
        rows: the rows; those of a source that ends have no places.
        first: rows of the source before them.
    """
    if PLACE in rows.schema.names:
        return _changed(rows, _with_large_indices)
    numbers = pa.array(np.arange(first, first + rows.num_rows) + 1)
    return rows.append_column(PLACE, pa.StructArray.from_arrays([numbers], ["row"]))


def written(rows: pa.Table) -> pa.Table:
    """Return rows as they are saved: without dictionaries in their places."""
    return _changed(rows, _decoded)


def written_types(types: pa.Schema) -> pa.Schema:
    """Return the types of columns as they are saved."""
    return written(types.empty_table()).schema


def loaded(rows: pa.Table) -> pa.Table:
    """Return saved rows as they are in memory."""
    return _changed(rows, _encoded)


def _changed(rows: pa.Table, change: Callable[[pa.Array], pa.Array]) -> pa.Table:
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
