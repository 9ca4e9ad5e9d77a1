# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers: dense values, labels, weights and times as NumPy arrays, every bad row known."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.times import to_microseconds
from hotbed.data.schema import Dense, Label, Time, Weight
from hotbed.errors import SchemaError

_LISTS = {kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))}
_PLAIN = {kind.id for kind in (pa.float32(), pa.int8(), pa.int16(), pa.int32(), pa.int64())}
_BYTES = {kind.id for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())}


class BadRows(Exception):
    """Rows of a column that cannot be used; `mask` tells which."""

    def __init__(self, column: str, mask: np.ndarray, message: str) -> None:
        super().__init__(message)
        self.column, self.mask, self.message = column, mask, message


def dense(column: Dense, values: pa.Array) -> np.ndarray:
    """Float32 [n], or [n, width] of lists."""
    if pa.types.is_null(values.type) and column.width != 1:
        values = values.cast(pa.list_(pa.float32()))
    if not is_list(values.type):
        if column.width != 1:
            raise SchemaError(
                f"dense {column.name!r}: width {column.width} but the column is {values.type} — give lists or width=1"
            )
        return numeric(column.name, values)
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    if (lengths != column.width).any():
        wrong = lengths != column.width
        raise BadRows(
            column.name, wrong, f"dense {column.name!r}: a list of {lengths[wrong][0]} — width is {column.width}"
        )
    flat = numeric(column.name, values.flatten(), lengths)
    return flat.reshape(-1, column.width) if column.width != 1 else flat


def label(column: Label, values: pa.Array) -> np.ndarray:
    """Float32 [n]."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        mask = values.is_null().to_numpy(zero_copy_only=False)
        raise BadRows(column.source, mask, f"label {column.name!r}: a missing value — leave such rows out of the data")
    if column.positive is not None:
        equal = pc.equal(values.cast(pa.string()), column.positive)
        return np.asarray(equal.to_numpy(zero_copy_only=False), np.float32)
    try:
        numbers = numeric(column.name, values)
    except BadRows as bad:
        if not is_bytes(values.type):
            raise
        word = _first(values, bad.mask)
        message = f"label {column.name!r}: {word!r} is no number — text labels need positive={word!r} or the like"
        raise BadRows(column.source, bad.mask, message) from None
    return numbers if column.threshold is None else (numbers >= column.threshold).astype(np.float32)


def weight(column: Weight, values: pa.Array) -> np.ndarray:
    """Float32 [n], none below 0."""
    numbers = numeric(column.name, values)
    if (numbers < 0).any():
        raise BadRows(column.source, numbers < 0, f"weight {column.name!r}: {numbers.min():g} — weights are >= 0")
    return numbers


def time(column: Time, values: pa.Array, zones: set[str] | None = None) -> np.ndarray:
    """Int64 [n], microseconds UTC. `zones`: as in `to_microseconds`."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    micros = to_microseconds(values, column.unit, zones)
    if micros.null_count:
        mask = micros.is_null().to_numpy(zero_copy_only=False)
        raise BadRows(
            column.source, mask, f"time {column.name!r}: {_first(values, mask)!r} is no time of unit {column.unit!r}"
        )
    return np.array(micros.to_numpy(zero_copy_only=False), dtype=np.int64)


def numeric(name: str, values: pa.Array, lengths: np.ndarray | None = None) -> np.ndarray:
    """Float32 [n], all finite, of numbers or of text that holds numbers.

    `lengths`: the number of values of each row where they are items of lists.
    """
    kind = values.type
    if kind.id in _PLAIN and not values.null_count:  # the common case, and the only one that a request can wait for
        plain: np.ndarray = values.to_numpy().astype(np.float32)
        if np.isfinite(plain).all():
            return plain
    if pa.types.is_dictionary(kind):
        return numeric(name, values.dictionary_decode(), lengths)
    if is_list(kind) or pa.types.is_temporal(kind):
        raise SchemaError(f"column {name!r}: no number — received {kind} — transform it or give it another role")
    if is_bytes(kind):
        numbers = pl.Series(values.cast(pa.string())).cast(pl.Float64, strict=False).to_arrow()
    else:
        numbers = values.cast(pa.float64(), safe=False)
    with np.errstate(over="ignore"):
        result = np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float32)
    wrong = ~np.isfinite(result)
    if not wrong.any():
        return result
    first = _first(values, wrong)
    missing = first is None or first != first
    why = (
        "a missing value — add FillMissing"
        if missing
        else f"{first!r} is no finite float32 number — correct or Clip it"
    )
    if lengths is not None:
        wrong = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[wrong], minlength=len(lengths)) > 0
    raise BadRows(name, wrong, f"column {name!r}: {why}")


def _first(values: pa.Array, mask: np.ndarray) -> Any:
    row = int(np.flatnonzero(mask)[0])
    return with_readable_times(values.slice(row, 1))[0].as_py()


def with_readable_times(values: pa.Array) -> pa.Array:
    """`values`, timestamps as text: Python has no object for one after the year 9999."""
    return values.cast(pa.string()) if pa.types.is_timestamp(values.type) else values


def is_list(kind: pa.DataType) -> bool:
    """Lists of any width."""
    return kind.id in _LISTS


def is_bytes(kind: pa.DataType) -> bool:
    """Text or binary, views apart."""
    return kind.id in _BYTES
