# SPDX-License-Identifier: Apache-2.0
"""Raw Arrow columns: their ids, hashes, segments, and transforms of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import config
from hotbed.connectors.types import recast, usual
from hotbed.data.arrays import as_numpy, list_array, list_lengths, nulls_of, rows_of_items
from hotbed.data.arrow_types import is_bytes, is_list, is_whole
from hotbed.data.context import BadRows
from hotbed.data.transforms import Transform
from hotbed.errors import SchemaError

_WIDE = {pa.large_string().id, pa.large_binary().id}
MISSING = "(missing)"
"""The segment of rows without a value."""

RULES = 2
"""The rules by which columns are read: those of `Schema.rules` in a new schema.

Schemas that were saved before there were rules have 1. There, transforms take empty text for a
text like any other, and NaN for a number; `Normalize` subtracts the mean of a constant column; and
`TimeOfDay` does not look at the unit that the schema's `Time` has.
"""


class Columns:
    """The raw columns of one record batch: the context of transforms.

    `missing`: the number of missing ids by feature. `rules`: as `Schema.rules`.
    """

    def __init__(self, batch: pa.RecordBatch, rules: int = RULES) -> None:
        self._batch = batch
        self.rules = rules
        self.missing: dict[str, int] = {}
        self._places = {name: place for place, name in enumerate(batch.schema.names)}
        self._read: dict[str, pa.Array] = {}

    def column(self, name: str) -> pa.Array:
        values = self._read.get(name)
        if values is None:
            values = self._batch.column(self._places[name])
            values = self.with_nulls(recast(values, usual(values.type)))
            self._read[name] = values
        return values

    def with_nulls(self, values: pa.Array) -> pa.Array:
        """Return values with null for all that is missing by the rules."""
        if self.rules == 1:
            return values
        return missing_as_null(values)

    def ids(self, values: pa.Array) -> np.ndarray:
        return ids_of(values, "key")

    def hash(self, values: pa.Array, seed: int) -> pa.Array:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        kind = values.type
        if pa.types.is_null(kind):
            return pa.nulls(len(values), pa.int64())
        if is_whole(kind):
            integers = ids_of(values, "hash")
            hashes = _hash_integers(integers, seed)
        elif is_bytes(kind):
            hashes = hash_strings(values, seed)
        else:
            raise SchemaError(
                f"hash: expected strings or integers, got a column of {kind}. Bucketize it first."
            )
        return pa.array(hashes, mask=nulls_of(values))


def missing_as_null(values: pa.Array) -> pa.Array:
    """Return `values` with null for empty text and for NaN.

    It looks into lists of any depth and into dictionaries.
    """
    kind = values.type
    if is_list(kind):
        items = values.flatten()
        with_nulls = missing_as_null(items)
        if with_nulls is items:
            return values
        return list_array(with_nulls, list_lengths(values), values)
    if pa.types.is_dictionary(kind):
        return _without_missing_words(values)
    if is_bytes(kind):
        offsets, _ = text_buffers(values)
        is_missing = offsets[1:] == offsets[:-1]
    elif pa.types.is_floating(kind):
        is_missing = np.isnan(as_numpy(values))
    else:
        return values
    num_missing = np.count_nonzero(is_missing)
    if num_missing == 0 or (num_missing == values.null_count and not is_bytes(kind)):
        return values
    if values.null_count:
        is_missing &= ~nulls_of(values)
        if not is_missing.any():
            return values
    return pc.if_else(pa.array(is_missing), pa.scalar(None, kind), values)


def _without_missing_words(values: pa.DictionaryArray) -> pa.Array:
    """Return a dictionary column with null where its word is missing."""
    is_missing = nulls_of(missing_as_null(values.dictionary))
    if not is_missing.any():
        return values
    indices = values.indices
    is_missing = is_missing[as_numpy(indices.fill_null(0))]
    indices = pc.if_else(pa.array(is_missing), pa.scalar(None, indices.type), indices)
    return pa.DictionaryArray.from_arrays(indices, values.dictionary)


def ids_of(values: pa.Array, name: str) -> np.ndarray:
    """Return ids, int64 [n], as a fresh array.

    Integers are not hashed (uint64 is reinterpreted). Strings become the XXH64 of their UTF-8
    bytes. Nulls become 0. Raises SchemaError for floats and other types that cannot be ids.
    """
    kind = values.type
    if values.null_count == len(values):  # of any type: NumPy's empty arrays are floats
        return np.zeros(len(values), np.int64)
    if pa.types.is_dictionary(kind):
        words = ids_of(values.dictionary, name)
        table = np.append(words, np.int64(0))  # the last one is the id of null
        indices = values.indices.cast(pa.int64())
        places = indices.fill_null(len(words))
        return np.asarray(table[as_numpy(places)])
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64)
    if is_whole(kind):
        if values.null_count:
            values = values.fill_null(pa.scalar(0).cast(kind))
        integers = as_numpy(values)
        if kind.bit_width == 64:
            return integers.view(np.int64).copy()
        return integers.astype(np.int64)
    if is_bytes(kind):
        return hash_strings(values, 0)
    raise SchemaError(
        f"id {name!r}: expected integers or strings, got a column of {kind}. Write ids without a "
        "point (7, not 7.0), or Bucketize it."
    )


def distinct_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different ids in the order in which they first occur, and the number of each.

    Args:
        ids: int64 [n].

    Returns:
        int64 [k], and for each of `ids` its place there, int64 [n].
    """
    from hotbed import _core

    distinct: tuple[np.ndarray, np.ndarray] = _core.distinct_ids(np.ascontiguousarray(ids))
    return distinct


def plain_columns(
    columns: dict[str, Any], names: list[str | None], kind: type
) -> tuple[np.ndarray, list[int]]:
    """Return the values of plain columns one after the other, and the number of values by name.

    A plain column is a NumPy array [n] of common numbers. The values are int64 (`kind` int) or
    finite float32 (`kind` float). The number is -1 where a column is something else.
    """
    from hotbed import _core

    read = _core.plain_numbers
    if kind is int:
        read = _core.plain_ids
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
        no_offsets = np.zeros(1, np.int64)
        return no_offsets, np.zeros(0, np.uint8)
    _, offsets, data = values.buffers()
    width: np.dtype[Any] = np.dtype(np.int32)
    if values.type.id in _WIDE:
        width = np.dtype(np.int64)
    bounds = np.frombuffer(
        offsets, dtype=width, count=len(values) + 1, offset=values.offset * width.itemsize
    )
    if data is None or not data.size:
        return bounds, np.zeros(0, np.uint8)
    return bounds, np.frombuffer(data, np.uint8)


def _hash_integers(values: np.ndarray, seed: int) -> np.ndarray:
    from hotbed import _core

    numbers = np.arange(len(values) + 1, dtype=np.int64)
    offsets = numbers * 8
    data = values.view(np.uint8)
    hashed: np.ndarray = _core.hash_strings(offsets, data, seed)
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
    items = values.flatten()
    if pa.types.is_dictionary(items.type):
        items = items.dictionary_decode()
    lengths = list_lengths(values)
    try:
        items = transform.apply(items, context)
    except BadRows as bad:
        raise BadRows(bad.column, rows_of_items(bad.mask, lengths), bad.message) from None
    return list_array(items, lengths, values)


def transformed(name: str, transforms: Sequence[Transform], context: Columns) -> pa.Array:
    """Return the raw column `name` after `transforms`."""
    values = context.column(name)
    for transform in transforms:
        if pa.types.is_dictionary(values.type):
            if transform.by_value and 2 * len(values.dictionary) <= len(values):
                values = _by_word(name, transform, values, context)
                continue
            values = values.dictionary_decode()
        values = _named(name, transform, values, context)
    return values


def _named(name: str, transform: Transform, values: pa.Array, context: Columns) -> pa.Array:
    """Return `transform` applied to the column `name`, which its errors name."""
    try:
        return apply(transform, values, context)
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from error
    except BadRows as bad:
        raise BadRows(name, bad.mask, f"column {name!r}: {bad.message}") from None


def _by_word(
    name: str, transform: Transform, values: pa.DictionaryArray, context: Columns
) -> pa.Array:
    """Return `transform` applied to a dictionary column: once to each word, and to null."""
    null = pa.nulls(1, values.dictionary.type)
    words = pa.concat_arrays([values.dictionary, null])
    places = values.indices.fill_null(len(values.dictionary))
    try:
        return _named(name, transform, words, context).take(places)
    except BadRows as bad:
        raise BadRows(name, bad.mask[as_numpy(places)], bad.message) from None


@dataclass(frozen=True)
class SegmentColumn:
    """A raw column by whose values figures are divided; the model need not read it.

    Attributes:
        column: its name in the data.
        bounds: None: each value is a segment. Else the values are numbers, and a segment is what
            lies between two bounds, the lower one included.
    """

    column: str
    bounds: tuple[float, ...] | None = None

    def names(self, values: pa.Array) -> np.ndarray:
        """Return the segment of each row: texts as objects, [n].

        Raises:
            SchemaError: the values are lists, or there are bounds and the values are not numbers.
        """
        if pa.types.is_dictionary(values.type) and self.bounds is not None:
            values = values.dictionary_decode()
        try:
            if self.bounds is not None:
                return self._ranges(values.cast(pa.float64(), safe=False))
            if not pa.types.is_dictionary(values.type):
                values = values.dictionary_encode()
            words = values.dictionary.cast(pa.string()).to_pylist()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            wanted = "one value a row is needed" if self.bounds is None else "bounds need numbers"
            raise SchemaError(
                f"segments: {wanted}, got column {self.column!r} of {values.type}. Name another "
                "column."
            ) from error
        table = np.array([*words, MISSING], object)
        places = values.indices.cast(pa.int64()).fill_null(len(words))
        return table.take(as_numpy(places))

    def _ranges(self, numbers: pa.Array) -> np.ndarray:
        """Return the range of each number."""
        assert self.bounds is not None
        texts = [str(int(bound) if bound == int(bound) else bound) for bound in self.bounds]
        between = [f"{low} to {high}" for low, high in itertools.pairwise(texts)]
        table = np.array([f"below {texts[0]}", *between, f"from {texts[-1]}", MISSING], object)
        places = np.searchsorted(self.bounds, as_numpy(numbers.fill_null(0.0)), side="right")
        return table.take(np.where(nulls_of(numbers), len(table) - 1, places))


def require_columns(names: list[str], present: list[str]) -> None:
    """Raise SchemaError if some of the raw columns `names` are not among those `present`."""
    missing = [name for name in names if name not in present]
    if not missing:
        return
    for delimiter in (";", "\t", "|", ","):
        if len(present) > 1:
            break
        fields = set("".join(present).split(delimiter))
        if fields & set(missing):
            raise SchemaError(
                f"columns {missing} are missing, got one column, {present[0]!r}. Read the file "
                f"with delimiter={delimiter!r}."
            )
    hints: list[str] = []
    for name in missing[:3]:
        near = config.nearest(name, present)
        if near is not None:
            hints.append(f"{name!r}: Did you mean {near!r}?")
    advice = " ".join(hints) or "Add them to the data, or correct their names."
    raise SchemaError(f"columns {missing} are missing, got {present}. {advice}")
