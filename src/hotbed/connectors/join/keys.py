# SPDX-License-Identifier: Apache-2.0
"""Keys of events as pairs of 64-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from hotbed.connectors.types import is_text
from hotbed.errors import SchemaError

Family = Literal["numbers", "text", "times"]
_SEEDS = (0x9E3779B97F4A7C15, 0xC4CEB9FE1A85EC53)


class Keys(NamedTuple):
    """Keys of events; two of them are equal where both numbers are.

    A key of one column of whole numbers is its value and 0. Other keys are two hashes of 64 bits,
    which are the same within a process only.
    """

    first: np.ndarray
    second: np.ndarray

    def take(self, rows: np.ndarray) -> Keys:
        """Return the keys of some events."""
        return Keys(self.first[rows], self.second[rows])


def keys_of(columns: Sequence[pa.Array]) -> Keys:
    """Return the keys of events; what they are where a column is null does not matter."""
    if len(columns) == 1 and pa.types.is_integer(columns[0].type):
        first = _numbers(columns[0])
        return Keys(first, np.zeros(len(first), np.uint64))
    frame = pl.DataFrame({str(number): _plain(column) for number, column in enumerate(columns)})
    first, second = (frame.hash_rows(seed, seed ^ 1, seed ^ 2, seed ^ 3) for seed in _SEEDS)
    return Keys(first.to_numpy(), second.to_numpy())


def family_of(name: str, kind: pa.DataType) -> Family | None:
    """Return what the values of a key are; None for a column without values.

    Raises:
        SchemaError: they cannot be keys.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "numbers"
    if is_text(kind):
        return "text"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "times"
    raise SchemaError(
        f"join: the key {name!r} must hold whole numbers, text or times, got {kind}. Name another "
        "column."
    )


def _numbers(column: pa.Array) -> np.ndarray:
    filled = column.fill_null(0)
    if pa.types.is_uint64(column.type):
        return np.asarray(filled.to_numpy())
    return np.asarray(filled.cast(pa.int64()).to_numpy()).view(np.uint64)


def _plain(column: pa.Array) -> pl.Series:
    """Return a column in the one type of its family."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_integer(column.type):
        return pl.Series(_numbers(column))
    elif not pa.types.is_null(column.type):
        column = column.cast(pa.large_string())
    return pl.Series(column)
