# SPDX-License-Identifier: Apache-2.0
"""Values that are written as text: which type they have, and what they are in it."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

# An integer has no sign "+", no leading zeros and no point: "007" and hex hashes that consist of
# digits stay strings.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"


def infer_type(column: pa.ChunkedArray) -> pa.DataType:
    """Return the narrowest of int64, uint64, float64 and string that loses nothing.

    It is null if all values are missing.
    """
    values = column
    if column.null_count:
        values = column.drop_null()
    if len(values) == 0:
        return pa.null()
    for kind in (pa.int64(), pa.uint64()):
        if _all_plain(values, kind) is not None:
            return kind
    if pc.all(pc.match_substring_regex(values, _INTEGER)).as_py():  # too large
        return pa.string()
    has_leading_zero = pc.match_substring_regex(values, r"^-?0[0-9]")
    if pc.any(has_leading_zero).as_py():
        return pa.string()
    try:
        values.cast(pa.float64())
        return pa.float64()
    except pa.ArrowInvalid:
        return pa.string()


def as_text(values: pa.Array) -> pa.Array:
    """Return bytes as text, null where they are not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [_decoded(value) for value in values.to_pylist()]
        return pa.array(decoded, pa.string())


def plain_integers(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return whole numbers, null where a text is not a plain integer of type `kind`."""
    numbers = _all_plain(text, kind)
    if numbers is not None:
        return numbers
    is_plain = pc.match_substring_regex(text, _INTEGER)
    return cast_text(pc.if_else(is_plain, text, pa.scalar(None, pa.string())), kind)


def _all_plain(text: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> Any:
    """Return texts as whole numbers of type `kind`; None if one of them is not a plain integer."""
    odd = pc.starts_with(text, "-0")
    has_zero = pc.starts_with(text, "0")
    if pc.any(has_zero).as_py():
        has_more = pc.greater(pc.binary_length(text), 1)
        odd = pc.or_(odd, pc.and_(has_zero, has_more))
    if pc.any(odd).as_py():
        return None
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None


def cast_text(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return bytes or text as type `kind`, null where a value does not parse."""
    if values.type.equals(kind):
        return values
    text = as_text(values)
    if pa.types.is_string(kind):
        return text
    if pa.types.is_boolean(kind):
        words = pc.utf8_lower(text)
        is_known = pc.is_in(words, pa.array(["true", "1", "false", "0"]))
        is_true = pc.is_in(words, pa.array(["true", "1"]))
        return pc.if_else(is_known, is_true, pa.scalar(None, pa.bool_()))
    wanted = pl.Series(pa.array([], kind)).dtype
    numbers = pl.Series(text).cast(wanted, strict=False)
    return numbers.to_arrow().cast(kind)


def _decoded(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
