# SPDX-License-Identifier: Apache-2.0
"""Which Arrow types a raw column may have, and what they are to Hotbed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

Type = Literal["text", "boolean", "integer", "number", "mixed"]
"""The type of the values of a raw column; `mixed`: text and numbers."""
_NUMBERS: Sequence[Type] = ("boolean", "integer", "number")  # each holds those before it
Shape = Literal["value", "list", "mixed"]
_TEXT = {
    pa.string().id,
    pa.large_string().id,
    pa.string_view().id,
    pa.binary().id,
    pa.large_binary().id,
    pa.binary_view().id,
}
_LISTS = {pa.list_(pa.null()).id, pa.large_list(pa.null()).id, pa.list_(pa.null(), 1).id}
_BYTES = {pa.string().id, pa.large_string().id, pa.binary().id, pa.large_binary().id}


def type_of(kind: pa.DataType) -> Type | None:
    """Return the type of the values, or of the items of lists, in a raw column.

    Returns None for an Arrow type that is neither text nor numbers.
    """
    while pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if kind.id in _TEXT:
        return "text"
    return None


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
    if before in _NUMBERS and kind in _NUMBERS:
        return max(before, kind, key=_NUMBERS.index)
    return "mixed"


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


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is text."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return bool(pa.types.is_string_view(kind))
