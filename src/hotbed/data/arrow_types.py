# SPDX-License-Identifier: Apache-2.0
"""Which Arrow types a raw column may have, and what they are to Hotbed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import pyarrow as pa

from hotbed.connectors.types import is_text

Type: TypeAlias = str
"""The type of the values of a raw column.

It is "text", "bytes" (text that need not be UTF-8), "boolean", "integer", "uint64", "float32" (also
for narrower floats), "number" for other numbers, "mixed" for text and numbers, or for times and
decimals the name of their Arrow type, such as "timestamp[us, tz=UTC]" or "decimal128(10, 2)".
"""
_NUMBERS: Sequence[Type] = ("boolean", "integer", "uint64", "number")  # each stands for the former
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_DECIMAL = re.compile(r"(decimal\d+)\((\d+), (-?\d+)\)")
_UNITS = ("s", "ms", "us", "ns")
Shape = Literal["value", "list", "mixed"]
_TEXTS = ("text", "bytes")
_BINARY = {pa.binary().id, pa.large_binary().id, pa.binary_view().id, pa.binary(1).id}
_LISTS = {pa.list_(pa.null()).id, pa.large_list(pa.null()).id, pa.list_(pa.null(), 1).id}
_BYTES = {pa.string().id, pa.large_string().id, pa.binary().id, pa.large_binary().id}


def type_of(kind: pa.DataType) -> Type | None:
    """Return the type of the values, or of the items of lists, in a raw column.

    Returns None for an Arrow type that is neither text nor numbers nor times.
    """
    while pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_uint64(kind):
        return "uint64"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "number" if pa.types.is_float64(kind) else "float32"
    if is_text(kind):
        return "text"
    if kind.id in _BINARY:
        return "bytes"
    if pa.types.is_decimal(kind) or is_time(kind):
        return str(kind)
    return None


def is_time(kind: pa.DataType) -> bool:
    """Return whether an Arrow type holds timestamps, dates, times of a day or durations."""
    return bool(is_moment(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind))


def is_moment(kind: pa.DataType) -> bool:
    """Return whether an Arrow type holds timestamps or dates."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def time_of(kind: Type) -> pa.DataType | None:
    """Return the Arrow type that a recorded type of times names; None for any other text."""
    timestamp = _TIMESTAMP.fullmatch(kind)
    if timestamp is not None:
        return pa.timestamp(*timestamp.groups())
    try:
        named = pa.type_for_alias(kind)
    except ValueError:
        return None
    return named if is_time(named) and str(named) == kind else None


def holds_text(kind: Type) -> bool:
    """Return whether a recorded type is text, in UTF-8 or not."""
    return kind in _TEXTS


def decimal_of(kind: Type) -> pa.DataType | None:
    """Return the Arrow type that a recorded type of decimals names; None for any other text."""
    decimal = _DECIMAL.fullmatch(kind)
    if decimal is None:
        return None
    name, precision, scale = decimal.groups()
    try:
        return getattr(pa, name)(int(precision), int(scale))
    except (AttributeError, ValueError):
        return None


def is_type(kind: Type) -> bool:
    """Return whether a text is a type of a raw column."""
    if kind in (*_NUMBERS, *_TEXTS, "float32", "mixed"):
        return True
    return time_of(kind) is not None or decimal_of(kind) is not None


def shape_of(kind: pa.DataType) -> Shape | None:
    """Return whether a row of an Arrow type is one value or a list; None for the null type."""
    if pa.types.is_null(kind):
        return None
    if pa.types.is_nested(kind):
        return "list"
    return "value"


def joined_shape(before: Shape | None, shape: Shape) -> Shape:
    """Return the shape of a column that had the shape `before` and now has `shape`."""
    if before is None or before == shape:
        return shape
    return "mixed"


def joined(before: Type | None, kind: Type) -> Type:
    """Return the type of a column that held values of type `before` and now of type `kind`."""
    if before is None or before == kind:
        return kind
    before = _widest(before)
    kind = _widest(kind)
    if before in _NUMBERS and kind in _NUMBERS:
        return max(before, kind, key=_NUMBERS.index)
    if before in _TEXTS and kind in _TEXTS:
        return "bytes"
    is_before = time_of(before) is not None
    is_now = time_of(kind) is not None
    if is_before and is_now:
        return _finer(before, kind)
    if is_before:
        return kind
    if is_now:  # times of their own type need no declaration beside others
        return before
    return "mixed"


def _widest(kind: Type) -> Type:
    """Return "number" for a type of floats or decimals, other types as they are."""
    return "number" if kind == "float32" or decimal_of(kind) is not None else kind


def _finer(before: Type, kind: Type) -> Type:
    """Return the type of two that holds the times of both; `before` where none does."""
    first = _TIMESTAMP.fullmatch(before)
    second = _TIMESTAMP.fullmatch(kind)
    if first is None or second is None or first[2] != second[2]:
        return before
    is_finer = _UNITS.index(second[1]) > _UNITS.index(first[1])
    return kind if is_finer else before


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list, of variable or fixed length."""
    return kind.id in _LISTS


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is text or binary, except the view types."""
    return kind.id in _BYTES


def is_whole(kind: pa.DataType) -> bool:
    """Return whether an Arrow type holds integers or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether an Arrow type holds numbers, booleans or nothing."""
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return True
    return is_whole(kind) or kind == pa.null()
