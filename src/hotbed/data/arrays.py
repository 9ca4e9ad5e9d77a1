# SPDX-License-Identifier: Apache-2.0
"""Arrow arrays as NumPy arrays, and the lengths and offsets of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.connectors.times import with_readable_times
from hotbed.data.arrow_types import is_number
from hotbed.errors import SchemaError


def as_numpy(values: pa.Array) -> np.ndarray:
    """Return the values as a NumPy array, without a copy where that is possible."""
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array


def list_lengths(values: pa.Array) -> np.ndarray:
    """Return the number of items of each list, [n]; 0 for null."""
    return as_numpy(pc.list_value_length(values).fill_null(0))


def offsets_of(lengths: Any) -> NDArray[np.int64]:
    """Return the offsets [n + 1] of bags that have these lengths, [n]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def series_of(name: str, values: pa.Array) -> pl.Series:
    """Return a column as one of Polars; SchemaError for a type that Polars does not have."""
    if pa.types.is_decimal256(values.type) or pa.types.is_interval(values.type):
        raise SchemaError(
            f"column {name!r}: expected numbers, text or times, got {values.type}. Cast the column "
            "to another type."
        )
    return pl.Series(name, values)


def nulls_of(values: pa.Array) -> np.ndarray:
    """Return bool [n], true where a value is null."""
    return as_numpy(values.is_null())


def list_array(items: pa.Array, lengths: Any, values: pa.Array) -> pa.Array:
    """Return a list array of `items`; a row is null where it is null in `values`."""
    missing = None
    if values.null_count:
        missing = values.is_null()
    offsets = pa.array(offsets_of(lengths))
    return pa.LargeListArray.from_arrays(offsets, items, mask=missing)


def integers_of(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return integers as int64, or uint64 where the column has that type, and where they are null.

    The value of a null is 0.
    """
    wide = pa.int64()
    if pa.types.is_uint64(values.type):
        wide = pa.uint64()
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return as_numpy(values.cast(wide).fill_null(0)), nulls_of(values)


def numbers_of(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 values, and where they are null (NaN counts as null)."""
    kind = values.type
    if not is_number(kind):
        raise SchemaError(
            f"a transform of numbers: expected numbers, got a column of {kind}. Cast it or "
            "Extract the number."
        )
    numbers = as_numpy(values.cast(pa.float64(), safe=False))
    return numbers, np.isnan(numbers)


def rows_of_items(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return bool [n]: the lists of these `lengths` that hold an item where `mask` is true."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner[mask], minlength=len(lengths)) > 0


def first_of(values: pa.Array, mask: np.ndarray) -> Any:
    """Return the first value where `mask`, bool [n], is true."""
    row = int(np.flatnonzero(mask)[0])
    return with_readable_times(values.slice(row, 1))[0].as_py()


def require_text_form(where: str, kind: pa.DataType) -> None:
    """Raise SchemaError for a type whose values have several forms as text: 1, 1.0 and 1e0."""
    is_inexact = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if is_inexact or (pa.types.is_temporal(kind) and not pa.types.is_date(kind)):
        raise SchemaError(
            f"{where}: expected text, integers, booleans or dates, got a column of {kind}, whose "
            "values have more than one form as text. Write the column as text."
        )
