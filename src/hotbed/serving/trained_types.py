# SPDX-License-Identifier: Apache-2.0
"""Columns of requests in the types that they had in training: times, decimals and text."""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.memory import Memory
from hotbed.connectors.times import to_microseconds, unreadable
from hotbed.connectors.types import is_text
from hotbed.data.arrays import as_numpy, first_of, list_array, list_lengths
from hotbed.data.arrow_types import is_bytes, is_list, is_time
from hotbed.errors import DataError

_NARROW = {pa.date32().id, pa.time32("s").id}  # Arrow makes them of int32 only


def check_text(name: str, values: Any) -> None:
    """Raise DataError for bytes that are not UTF-8 in a column that held text in training."""
    if isinstance(values, pa.Array):
        while is_list(values.type):
            values = values.flatten()
        if is_text(values.type) or not is_bytes(values.type):
            return
        values = values.to_pylist()
    elif isinstance(values, np.ndarray) and values.dtype.kind not in "OS":
        return
    for value in values:
        if isinstance(value, bytes):
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"column {name!r}: expected text in UTF-8, got {value[:20]!r}. Encode it as "
                    "UTF-8, or train on a column of bytes."
                ) from error


def as_trained(name: str, values: Any, kind: pa.DataType) -> pa.Array:
    """Return a column of a request whose values were times or decimals of type `kind` in training.

    Numbers become decimals, rounded to their digits. Whole numbers count the unit of times since
    1970, UTC; text of them is ISO 8601. Times and decimals of any type stay as they are.

    Raises:
        DataError: the values are something else.
    """
    column = Memory({name: values}).table.column(name).combine_chunks()
    return _converted(name, column, kind)


def _converted(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if is_list(values.type):
        return list_array(_converted(name, values.flatten(), kind), list_lengths(values), values)
    if pa.types.is_decimal(kind):
        return _decimals(name, values, kind)
    if pa.types.is_null(values.type) or is_time(values.type):
        return values
    if is_bytes(values.type) and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return _of_text(name, values, kind)
    if pa.types.is_floating(values.type):  # where NaN marks what is missing
        values = _whole(name, values)
    return times_of_counts(name, values, kind)


def times_of_counts(name: str, counts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return whole numbers as the times of type `kind` that they count.

    Raises:
        DataError: they are not whole numbers, or too large.
    """
    if not (pa.types.is_integer(counts.type) or pa.types.is_null(counts.type)):
        raise DataError(
            f"column {name!r}: it held times ({kind}) in training, got {counts.type}. Send whole "
            "numbers in its unit."
        )
    width = pa.int32() if kind.id in _NARROW else pa.int64()
    try:
        return counts.cast(width).cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r}: expected whole numbers that fit {kind}, got {str(error)!r:.100}. "
            "Send them in its unit."
        ) from error


def _decimals(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return numbers as decimals; other values as they are, which encoding rejects."""
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        return values
    last_digit = Decimal(1).scaleb(-kind.scale)
    context = Context(prec=kind.precision)
    decimals: list[Decimal | None] = []
    for number in as_numpy(values):
        if number is None or number != number:
            decimals.append(None)
            continue
        try:  # the text of a float has the digits that were meant
            decimals.append(Decimal(str(number)).quantize(last_digit, context=context))
        except InvalidOperation as error:
            raise DataError(
                f"column {name!r}: it held {kind} in training, got {number}. Send numbers that "
                "fit it."
            ) from error
    return pa.array(decimals, kind)


def _of_text(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        raise DataError(
            f"column {name!r}: expected ISO 8601, got other bytes. Send text."
        ) from None
    micros = to_microseconds(texts, "iso")
    is_bad = as_numpy(unreadable(texts, micros))
    if is_bad.any():
        raise DataError(
            f"column {name!r}: expected ISO 8601 for times ({kind}), got "
            f"{first_of(texts, is_bad)!r}. Correct the text, or send whole numbers in its unit."
        )
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    times = micros.cast(pa.timestamp("us", zone))
    return times.cast(kind, safe=False) if pa.types.is_date(kind) else times


def _whole(name: str, values: pa.Array) -> pa.Array:
    """Return floats as whole numbers, NaN as null."""
    present = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    numbers = as_numpy(present.fill_null(0)).astype(np.float64)
    is_bad = ~((np.abs(numbers) < 1 << 53) & (np.floor(numbers) == numbers))
    if is_bad.any():
        raise DataError(
            f"column {name!r}: it held times in training, got {numbers[is_bad][0]}. Send whole "
            "numbers in its unit."
        )
    return present.cast(pa.int64())
