# SPDX-License-Identifier: Apache-2.0
"""Keys of events as pairs of 64-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from hotbed.connectors.types import is_text_or_bytes, plain, recast
from hotbed.errors import SchemaError

_SEEDS = (0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D)
_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


class EventKeys(NamedTuple):
    """Keys of events; two of them are equal where both numbers are.

    A key of one column of whole numbers is its value and 0. Other keys are two hashes of 64 bits,
    which are the same within a process only.
    """

    first: np.ndarray
    second: np.ndarray

    def take(self, rows: np.ndarray) -> EventKeys:
        """Return the keys of some events."""
        return EventKeys(self.first[rows], self.second[rows])


def keys_of(columns: Sequence[pa.Array]) -> EventKeys:
    """Return the keys of events; what they are where a column is null does not matter."""
    if len(columns) == 1 and _is_number(plain(columns[0].type)):
        first = _plain(columns[0]).to_numpy()
        return EventKeys(first, np.zeros(len(first), np.uint64))
    first, second = (_hashed(columns, seed) for seed in _SEEDS)
    return EventKeys(first, second)


def _hashed(columns: Sequence[pa.Array], seed: int) -> np.ndarray:
    """Return a hash of each row: Murmur3's 64-bit finalizer over the columns, one after another."""
    hashes = np.full(len(columns[0]), seed, np.uint64)
    for column in columns:
        values = _plain(column)
        if values.dtype == pl.Binary:
            values = values.hash(seed)
        hashes ^= values.to_numpy()
        for factor in _FACTORS:
            hashes ^= hashes >> _SHIFT
            hashes *= np.uint64(factor)
        hashes ^= hashes >> _SHIFT
    return hashes


def require_key(name: str, kind: pa.DataType) -> None:
    """Raise SchemaError if values of a type, without encodings, cannot be keys of a join."""
    if not (pa.types.is_null(kind) or _is_number(kind) or is_text_or_bytes(kind) or _is_time(kind)):
        raise SchemaError(
            f"join: the key {name!r} must hold whole numbers, text or times, got {kind}. Name "
            "another column."
        )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _numbers(column: pa.Array) -> np.ndarray:
    filled = column.fill_null(0)
    if pa.types.is_uint64(column.type):
        return np.asarray(filled.to_numpy())
    return np.asarray(filled.cast(pa.int64()).to_numpy()).view(np.uint64)


def _plain(column: pa.Array) -> pl.Series:
    """Return a column as bytes or as unsigned numbers."""
    column = recast(column, plain(column.type))
    if is_text_or_bytes(column.type):
        return pl.Series(column.cast(pa.large_binary()))
    if pa.types.is_null(column.type):
        return pl.Series(np.zeros(len(column), np.uint64))
    if pa.types.is_timestamp(column.type):
        return pl.Series(_moments(column))
    if not pa.types.is_integer(column.type):
        if pa.types.is_date(column.type):
            column = column.cast(pa.date64())
        column = column.cast(pa.int64())
    return pl.Series(_numbers(column))


def _moments(column: pa.Array) -> np.ndarray:
    """Return a number of each time, which is the same in every unit."""
    if column.type.unit != "ns":
        return _numbers(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()))
    micros, rest = np.divmod(column.cast(pa.int64()).fill_null(0).to_numpy(), 1000)
    return np.asarray(micros.view(np.uint64) + rest.view(np.uint64) * np.uint64(_SEEDS[0]))
