# SPDX-License-Identifier: Apache-2.0
"""Columns of requests in the types that they had in training."""

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
from hotbed.data.arrow_types import (
    Type,
    decimal_of,
    is_bytes,
    is_list,
    is_moment,
    is_number,
    is_time,
    is_whole,
    time_of,
)
from hotbed.errors import DataError

_NARROW = {pa.date32().id, pa.time32("s").id}  # Arrow makes them of int32 only
_NUMBERS: dict[Type, pa.DataType] = {
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "number": pa.float64(),
}
_UNITS = ("s", "ms", "us", "ns")
_NAMES = {"s": "second", "ms": "millisecond", "us": "microsecond"}  # of `floor_temporal`


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


def as_trained(name: str, values: Any, kind: Type) -> pa.Array:
    """Return a column of a request in the type `kind` that its values had in training.

    Numbers become numbers of that type, decimals rounded to their digits. Whole numbers count the
    unit of times since 1970, UTC; text of them is ISO 8601. Times become those of the unit and the
    zone of training. Text stays as it is: the encoder compares it with training.

    Raises:
        DataError: the values are something else.
    """
    column = Memory({name: values}).table.column(name).combine_chunks()
    return _converted(name, column, kind)


def numbers_as_trained(name: str, values: Any, kind: Type, *, takes_floats: bool) -> Any:
    """Return numbers in the type `kind` that they had in training, where it holds them.

    Transforms compare integers as such and other numbers as float64, and float32 numbers are not
    the decimals that they are written as. Other values stay as they are.

    Args:
        name: name of the column.
        values: the numbers.
        kind: integer, uint64 or float32.
        takes_floats: whether floats give the same results where the type is an integer.
    """
    if isinstance(values, np.ndarray):
        if kind == "float32" and values.dtype.kind in "iuf":
            with np.errstate(over="ignore"):
                return values.astype(np.float32, copy=False)
        is_whole_type = values.dtype.kind in "biu"
        is_float = values.dtype.kind == "f"
    else:
        is_whole_type = isinstance(values, pa.Array) and is_whole(values.type)
        is_float = isinstance(values, pa.Array) and pa.types.is_floating(values.type)
    if kind != "float32" and (is_whole_type or (is_float and takes_floats)):
        return values
    try:
        return as_trained(name, values, kind)
    except DataError:
        return values


def _converted(name: str, values: pa.Array, kind: Type) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if is_list(values.type):
        return list_array(_converted(name, values.flatten(), kind), list_lengths(values), values)
    if pa.types.is_null(values.type):
        return values
    decimal = decimal_of(kind)
    if decimal is not None:
        return _decimals(name, values, decimal)
    time = time_of(kind)
    if time is not None:
        return _times(name, values, time)
    if is_time(values.type) or (pa.types.is_boolean(values.type) and kind != "boolean"):
        raise DataError(
            f"column {name!r}: it held {kind} values in training, got {values.type}. Give values "
            "of that type."
        )
    if kind not in _NUMBERS or is_bytes(values.type):
        return values
    return _numbers(name, values, _NUMBERS[kind])


def _numbers(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return numbers as those of a type; NaN is null where the type does not have it."""
    if pa.types.is_floating(kind):
        if pa.types.is_decimal(values.type):  # Arrow does not round them to the nearest float32
            values = values.cast(pa.float64(), safe=False)
        return values.cast(kind, safe=False)
    if pa.types.is_integer(kind) and pa.types.is_integer(values.type):
        return values
    if pa.types.is_floating(values.type):
        values = _without_nan(values)
    try:
        if pa.types.is_integer(kind):
            return values.cast(kind)
        flags = values.cast(pa.uint8())
        if pc.any(pc.greater(flags, 1)).as_py():
            raise pa.ArrowInvalid(f"{pc.max(flags)} is neither 0 nor 1")
        return flags.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r}: expected {kind} values as in training, got {values.type}: "
            f"{str(error)!r:.100}. Give values of that type."
        ) from error


def _times(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    if is_time(values.type):
        return _retyped(name, values, kind)
    if is_bytes(values.type) and is_moment(kind):
        return _retyped(name, _of_text(name, values, kind), kind)
    if pa.types.is_floating(values.type):  # where NaN marks what is missing
        values = _whole(name, values)
    return times_of_counts(name, values, kind)


def _retyped(name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return times in the unit and the zone of a type, which their text depends on; rounded down.

    Raises:
        DataError: they do not fit it, or one of both types is a time of the day or a duration.
    """
    have = values.type
    if have == kind:
        return values
    try:
        if is_moment(have) and is_moment(kind):
            return _moments(values, kind)
        if have.id == kind.id or (pa.types.is_time(have) and pa.types.is_time(kind)):
            is_finer = _UNITS.index(kind.unit) > _UNITS.index(have.unit)
            return values.cast(kind, safe=is_finer)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r}: expected times that fit {kind}, got {str(error)!r:.100}. Correct "
            "them."
        ) from error
    raise DataError(
        f"column {name!r}: it held times ({kind}) in training, got {have}. Give times of that kind."
    )


def _moments(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return timestamps or dates as those of a type: the same moments, rounded down."""
    unit = "ms" if pa.types.is_date64(values.type) else "s"
    if pa.types.is_timestamp(values.type):
        unit = values.type.unit
    times = values.cast(pa.timestamp(unit))  # UTC
    if pa.types.is_date(kind):
        return pc.floor_temporal(times, unit="day").cast(kind)
    if _UNITS.index(kind.unit) < _UNITS.index(unit):
        times = pc.floor_temporal(times, unit=_NAMES[kind.unit])
    return times.cast(pa.timestamp(kind.unit)).cast(kind)


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
    if values.type == kind or pa.types.is_boolean(values.type) or not is_number(values.type):
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
    return micros.cast(pa.timestamp("us"))


def _whole(name: str, values: pa.Array) -> pa.Array:
    """Return floats as whole numbers, NaN as null."""
    present = _without_nan(values)
    numbers = as_numpy(present.fill_null(0)).astype(np.float64)
    is_bad = ~((np.abs(numbers) < 1 << 53) & (np.floor(numbers) == numbers))
    if is_bad.any():
        raise DataError(
            f"column {name!r}: it held times in training, got {numbers[is_bad][0]}. Send whole "
            "numbers in its unit."
        )
    return present.cast(pa.int64())


def _without_nan(values: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
