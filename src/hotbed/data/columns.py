# SPDX-License-Identifier: Apache-2.0
"""Raw Arrow columns: their types, ids, hashes, and transforms of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import config
from hotbed.data.transforms import Transform
from hotbed.errors import SchemaError

_LISTS = {
    kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))
}


_BYTES = {kind.id for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())}


# Only a few functions of Arrow take views.
_VIEWS = {pa.string_view().id: pa.large_string(), pa.binary_view().id: pa.large_binary()}


_WIDE = {pa.large_string().id, pa.large_binary().id}


class Columns:
    """The raw columns of one record batch: the context of transforms.

    `missing`: the number of missing ids by feature.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self.missing: dict[str, int] = {}
        self._places = {name: place for place, name in enumerate(batch.schema.names)}

    def column(self, name: str) -> pa.Array:
        values = self._batch.column(self._places[name])
        kind = _VIEWS.get(values.type.id)
        if kind is None:
            return values
        return values.cast(kind)

    def hash(self, values: pa.Array, seed: int) -> pa.Array:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        null = values.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
            return pa.array(_hash_integers(ids_of(values, "hash"), seed), mask=null)
        if not is_bytes(values.type):
            raise SchemaError(
                f"hash: expected strings or integers, got a column of {values.type}. Bucketize it "
                "first."
            )
        return pa.array(hash_strings(values, seed), mask=null)


def ids_of(values: pa.Array, name: str) -> np.ndarray:
    """Return ids, int64 [n], as a fresh array.

    Integers are not hashed (uint64 is reinterpreted). Strings become the XXH64 of their UTF-8
    bytes. Nulls become 0. Raises SchemaError for floats and other types that cannot be ids.
    """
    kind = values.type
    if not len(values):  # of any type: NumPy's empty arrays are floats
        return np.zeros(0, np.int64)
    if pa.types.is_dictionary(kind):
        table = np.append(ids_of(values.dictionary, name), np.int64(0))
        place = values.indices.cast(pa.int64()).fill_null(len(table) - 1)
        return np.asarray(table[place.to_numpy(zero_copy_only=False)])
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if values.null_count:
            values = values.fill_null(False if pa.types.is_boolean(kind) else 0)
        integers: np.ndarray = values.to_numpy(zero_copy_only=False)
        if kind.bit_width == 64:
            return integers.view(np.int64).copy()
        return integers.astype(np.int64)
    if is_bytes(kind):
        return hash_strings(values, 0)
    raise SchemaError(
        f"id {name!r}: expected integers or strings, got a column of {kind}. Declare it an integer "
        "or string, or Bucketize it."
    )


def plain_columns(
    columns: dict[str, Any], names: list[str | None], kind: type
) -> tuple[np.ndarray, list[int]]:
    """Return the values of plain columns one after the other, and the number of values by name.

    A plain column is a NumPy array [n] of common numbers. The values are int64 (`kind` int) or
    finite float32 (`kind` float). The number is -1 where a column is something else.
    """
    from hotbed import _core

    read = _core.plain_ids if kind is int else _core.plain_numbers
    values: tuple[np.ndarray, list[int]] = read(columns, names, np.ndarray)
    return values


def hash_strings(values: pa.Array, seed: int) -> np.ndarray:
    """Return XXH64 (seed) of each string's bytes, int64 [n]; the value of a null is undefined."""
    from hotbed import _core

    offsets, data = text_buffers(values)
    hashed: np.ndarray = _core.hash_strings(offsets, data, seed)
    return hashed


def text_buffers(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets [n + 1] and bytes of a string or binary column, without a copy."""
    if not len(values):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = values.buffers()
    width = np.dtype(np.int64 if values.type.id in _WIDE else np.int32)
    bounds = np.frombuffer(
        offsets,
        width,
        len(values) + 1,
        values.offset * width.itemsize,
    )
    if data is None or not data.size:
        return bounds, np.zeros(0, np.uint8)
    return bounds, np.frombuffer(data, np.uint8)


def _hash_integers(values: np.ndarray, seed: int) -> np.ndarray:
    from hotbed import _core

    hashed: np.ndarray = _core.hash_strings(
        np.arange(len(values) + 1, dtype=np.int64) * 8, values.view(np.uint8), seed
    )
    return hashed


def apply(transform: Transform, values: pa.Array, context: Any) -> pa.Array:
    """Return `transform` applied to a column, or to the items of a list column."""
    if not is_list(values.type):
        return transform.apply(values, context)
    if not transform.by_item or transform.inputs():
        raise SchemaError(
            f"{type(transform).__name__}: expected single values, got a column of {values.type}. "
            "Apply it before Split."
        )
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    items = transform.apply(values.flatten(), context)
    missing = values.is_null() if values.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets), items, mask=missing)


def require_columns(names: list[str], present: list[str]) -> None:
    """Raise SchemaError if some of the raw columns `names` are not among those `present`."""
    missing = [name for name in names if name not in present]
    if not missing:
        return
    for delimiter in (";", "\t", "|", ","):
        if len(present) == 1 and set(present[0].split(delimiter)) & set(missing):
            raise SchemaError(
                f"columns {missing} are missing, got one column, {present[0]!r}. Read the file "
                f"with delimiter={delimiter!r}."
            )
    near = " ".join(f"{name!r}: {config.did_you_mean(name, present)}" for name in missing[:3])
    raise SchemaError(f"columns {missing} are missing, got {present}. {near}")


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list, of variable or fixed length."""
    return kind.id in _LISTS


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is text or binary, except the view types."""
    return kind.id in _BYTES
