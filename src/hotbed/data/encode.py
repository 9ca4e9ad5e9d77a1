# SPDX-License-Identifier: Apache-2.0
"""Encoder: raw Arrow columns -> Batch. One plan, the very same in training and in serving."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import config
from hotbed.connectors.base import PLACE, Skips
from hotbed.data import numbers
from hotbed.data.batch import Batch, Ids
from hotbed.data.numbers import BadRows, is_bytes, is_list, numeric
from hotbed.data.schema import (
    Dense,
    Id,
    Label,
    Schema,
    Shape,
    Time,
    Type,
    Weight,
    joined,
    joined_shape,
    shape_of,
    type_of,
)
from hotbed.data.transforms import Cross, Hash, Split, Transform
from hotbed.errors import DataError, DecodeError, SchemaError

Aside = Callable[[pa.RecordBatch, str, str], None]
"""Takes raw rows that are left out, a word for the reason, and a message."""

# Few of Arrow's functions take views.
_VIEWS = {pa.string_view().id: pa.large_string(), pa.binary_view().id: pa.large_binary()}
_INT64 = pa.int64().id
KEPT_SCHEMAS = 32
"""Raw schemas that an encoder remembers as checked: clients of a server may send many."""
NAMED_VALUES = 10
"""Values of a label that a message names."""
_WIDE = {pa.large_string().id, pa.large_binary().id}


@dataclass
class EncodeStats:
    """What an encoder met: `missing` values (empty bags) by id feature, and rows left out
    (`skips`).
    """

    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    skips: Skips = field(default_factory=Skips)


class Encoder:
    """Turns record batches into Batches by a schema.

    `on_error`: "raise" = a bad row raises DecodeError (its `row` counts from 1 within the record
    batch); "skip" = it is left out, counted in `stats.skips` and logged. A missing column or a
    column of the wrong type always raises SchemaError. `aside`: gets the raw rows that are left
    out.

    `unit_labels`: labels that a trainer needs from 0 to 1; values outside are bad rows.
    `positives`: what labels with `positive` met. Times of the first batch whose median lies after
    the year 2200 raise SchemaError: their unit is wrong.

    What raw columns hold is kept in `types` and `shapes`. What is text where the schema knows
    numbers, or the other way round, and lists where it knows single values, are refused.

    Example: `Encoder(schema)(pa.record_batch({"user": ["ann"], "label": [1]}))`
    """

    def __init__(self, schema: Schema, on_error: str = "raise", aside: Aside | None = None) -> None:
        self.schema = schema
        self.on_error = on_error
        self.aside = aside
        self.stats = EncodeStats()
        self.types: Mapping[str, Type] = {}
        self.shapes: Mapping[str, Shape] = {}
        self.unit_labels: frozenset[str] = frozenset()
        self.forget_positives()
        self._times_checked = False
        self._seen: list[tuple[pa.Schema, bool]] = []
        self._zones: set[str] = set()
        self._kinds: dict[str, set[str]] = {}
        self._noted: set[tuple[str, int]] = set()

    def __call__(
        self, rows: pa.RecordBatch | pa.Table, *, labels: bool = True, latest: int | None = None
    ) -> Batch:
        """Batch of `rows`. `labels=False` (serving): label and weight columns are not read, time
        only if it is there. `latest`: rows with an event time after it (microseconds) are left out,
        whatever `on_error` says.
        """
        batch = _one_batch(rows)
        if not any(mode == labels and known.equals(batch.schema) for known, mode in self._seen):
            self._check(batch.schema, labels)
            self._seen = [*self._seen[-KEPT_SCHEMAS:], (batch.schema, labels)]
        while True:
            try:
                context = Columns(batch)
                encoded = self._encode(batch, labels, context)
                if labels and batch.num_rows:
                    self._note(encoded, context, latest)
                if (
                    latest is not None
                    and encoded.time is not None
                    and (future := encoded.time > latest).any()
                ):
                    early = f"an event of the future — received {int(encoded.time.max())} us, the clock allows {latest}"
                    batch = self._leave_out(batch, future, "future", early)
                    encoded = encoded.take(np.flatnonzero(~future))
                self.stats.rows += encoded.num_samples
                for name, count in context.missing.items():
                    self.stats.missing[name] = self.stats.missing.get(name, 0) + count
                return encoded
            except BadRows as bad:
                if self.on_error != "skip":
                    row = int(np.flatnonzero(bad.mask)[0]) + 1
                    raise DecodeError(bad.message, "", row, bad.column) from None
                batch = self._leave_out(batch, bad.mask, "value", bad.message)

    def forget_positives(self) -> None:
        """Begin anew to look for the texts of positive labels."""
        labels = self.schema.labels
        self.positives = [Positives(label) for label in labels if label.positive is not None]

    def _note(self, encoded: Batch, context: Columns, latest: int | None) -> None:
        """Look at what whole columns say: the unit of times, the text of positive labels."""
        time = self.schema.time
        if time is not None and encoded.time is not None and not self._times_checked:
            if latest is None:  # else times of the future are left out
                numbers.check_times(time, context.column(time.source), encoded.time)
            self._times_checked = True
        for positives in self.positives:
            label = positives.label
            positives.add(encoded.labels[label.name], context.column(label.source))

    def _leave_out(
        self, batch: pa.RecordBatch, mask: np.ndarray, reason: str, message: str
    ) -> pa.RecordBatch:
        """The rows outside `mask`; those inside are counted and put aside."""
        self.stats.skips.add(reason, message, int(mask.sum()))
        if self.aside is not None:
            self.aside(batch.filter(pa.array(mask)), reason, message)
        return batch.filter(pa.array(~mask))

    def _check(self, schema: pa.Schema, labels: bool) -> None:
        names = [name for name in schema.names if name != PLACE]
        require_columns(self.schema.raw_columns(labels), names)
        for name in self.schema.raw_columns(labels=False):
            kind = type_of(schema.field(name).type)
            held = self.schema.types.get(name, "mixed")
            self._check_shape(name, schema.field(name).type)
            if kind is None:
                continue
            if held != "mixed" and (kind == "text") != (held == "text"):
                raise SchemaError(
                    f"column {name!r}: it held {held} values in training — received "
                    f"{schema.field(name).type}, and the same "
                    f"value as text and as number is two ids — give {held} values"
                )
            self.types = {**self.types, name: joined(self.types.get(name), kind)}

    def _check_shape(self, name: str, kind: pa.DataType) -> None:
        shape = shape_of(kind)
        if shape is None:
            return
        if shape == "list" and self.schema.shapes.get(name) == "value":
            raise SchemaError(
                f"column {name!r}: it held single values in training, got lists ({kind}). Give "
                "one value for each row."
            )
        self.shapes = {**self.shapes, name: joined_shape(self.shapes.get(name), shape)}

    def _encode(self, batch: pa.RecordBatch, labels: bool, context: Columns) -> Batch:
        ids: dict[str, Ids] = {}
        dense: dict[str, np.ndarray] = {}
        targets: dict[str, np.ndarray] = {}
        weight = time = None
        for column in self.schema.columns:
            try:
                if isinstance(column, Id):
                    ids[column.name] = self._ids(column, context)
                elif isinstance(column, Dense):
                    dense[column.name] = numbers.dense(column, _transformed(column, context))
                elif isinstance(column, Label) and labels:
                    in_unit = column.name in self.unit_labels
                    targets[column.name] = numbers.label(
                        column, context.column(column.source), in_unit
                    )
                elif isinstance(column, Weight) and labels:
                    weight = numbers.weight(column, context.column(column.source))
                elif isinstance(column, Time) and (labels or column.source in batch.schema.names):
                    time = numbers.time(column, context.column(column.source), self._zones)
            except (SchemaError, BadRows):
                raise
            except (pa.ArrowException, DataError) as error:
                raise SchemaError(
                    f"column {column.name!r}: {str(error).splitlines()[0]}"
                ) from error
        return Batch(ids, dense, targets, weight, time, None, batch.num_rows)

    def _ids(self, column: Id, context: Columns) -> Ids:
        if not column.transforms and column.padding is None and column.weights is None:
            plain = context.column(column.source)
            # the common case, kept short for requests
            if plain.type.id == _INT64 and not plain.null_count:
                self._note_kind(column, plain.type)
                return Ids(plain.to_numpy().copy())
        values = _plain_dictionary(_transformed(column, context))
        if column.weights:
            raw_weights, values = _alike(context.column(column.weights), values)
        num_missing = values.null_count
        num_rows = len(values)
        lengths = weights = None
        if is_list(values.type):
            lengths = (
                pc.list_value_length(values)
                .fill_null(0)
                .to_numpy(zero_copy_only=False)
                .astype(np.int64)
            )
            if column.weights:
                weights = _id_weights(column, raw_weights, lengths)
            values = values.flatten()
        elif column.weights:
            weights = numeric(column.weights, raw_weights)
        if num_missing:
            context.missing[column.name] = num_missing
        found = ids_of(values, column.name)
        if len(values):
            self._note_kind(column, values.type)
        keep = _kept(values, found, column.padding)
        if keep is not None:
            found = found[keep]
            weights = None if weights is None else weights[keep]
            owner = (
                np.arange(num_rows) if lengths is None else np.repeat(np.arange(num_rows), lengths)
            )
            lengths = np.bincount(owner[keep], minlength=num_rows)
        if lengths is None:
            return Ids(found, None, weights)
        offsets = np.zeros(num_rows + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        result = Ids(found, offsets, weights)
        return result if column.max_length is None else _newest(result, column.max_length)

    def _note_kind(self, column: Id, kind: pa.DataType) -> None:
        if (column.name, kind.id) in self._noted:
            return
        self._noted.add((column.name, kind.id))
        if column.transforms and isinstance(column.transforms[-1], Hash | Cross):
            return  # hashes of their own: they meet no id as text or as number
        table = column.table or column.name
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_null(kind):
            return
        kinds = self._kinds.setdefault(table, set())
        before = len(kinds)
        kinds.add(
            "integers" if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else "strings"
        )
        if before == 1 and len(kinds) == 2:
            warnings.warn(
                f"table {table!r} is fed both strings (hashed) and integers (as they are), last "
                f"by {column.name!r}: "
                "the same value as text and as number gets two rows — declare one type for it in "
                "the source",
                UserWarning,
                stacklevel=4,
            )


@dataclass
class Positives:
    """What a label with `positive` met: `rows`, whether one `matched`, and some of the other texts."""

    label: Label
    rows: int = 0
    matched: bool = False
    warned: bool = False
    others: dict[str, None] = field(default_factory=dict)

    def add(self, encoded: np.ndarray, values: pa.Array) -> None:
        """Take the label of a chunk and the raw column that it came from."""
        self.rows += len(encoded)
        self.matched = self.matched or bool(encoded.any())
        if not self.matched and len(self.others) < NAMED_VALUES:
            texts = pc.unique(values.cast(pa.string())).to_pylist()
            self.others.update(dict.fromkeys(texts))

    def message(self) -> str:
        """Say that no row matched, and which texts there are."""
        names = ", ".join(repr(text) for text in list(self.others)[:NAMED_VALUES])
        return (
            f"label {self.label.name!r}: none of {self.rows:,} rows is "
            f"positive={self.label.positive!r}, "
            f"got {names}. Give one of them."
        )


def require_columns(names: list[str], present: list[str]) -> None:
    """Raise SchemaError where raw columns are missing among those that the data have."""
    missing = [name for name in names if name not in present]
    if not missing:
        return
    for delimiter in (";", "\t", "|", ","):
        if len(present) == 1 and set(present[0].split(delimiter)) & set(missing):
            raise SchemaError(
                f"columns {missing} are missing — the data has one column, {present[0]!r} — read "
                "the "
                f"file with delimiter={delimiter!r}"
            )
    near = "; ".join(f"{name!r}: {config.nearest(name, present)}" for name in missing[:3])
    raise SchemaError(f"columns {missing} are missing — the data has {present} — {near}")


class Columns:
    """The raw columns of one record batch; what transforms see as their context. Counts `missing`
    ids by feature.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self.missing: dict[str, int] = {}
        self._places = {name: place for place, name in enumerate(batch.schema.names)}

    def column(self, name: str) -> pa.Array:
        values = self._batch.column(self._places[name])
        kind = _VIEWS.get(values.type.id)
        return values if kind is None else values.cast(kind)

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
                f"a column of {values.type} cannot be hashed — received {values.type} — Bucketize "
                "it first"
            )
        return pa.array(hash_strings(values, seed), mask=null)


def ids_of(values: pa.Array, name: str) -> np.ndarray:
    """Int64 [n] (a fresh array): integers unhashed (uint64 reinterpreted), strings as XXH64 of
    their UTF-8 bytes; nulls read as 0.

    Raises SchemaError for floats and other types that are no ids.
    """
    kind = values.type
    if not len(values):  # of whatever type: NumPy's empty arrays are floats
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
        whole: np.ndarray = values.to_numpy(zero_copy_only=False)
        return whole.view(np.int64).copy() if kind.bit_width == 64 else whole.astype(np.int64)
    if is_bytes(kind):
        return hash_strings(values, 0)
    raise SchemaError(
        f"id {name!r}: a column of {kind} holds no ids — received {kind} — declare it an integer "
        "or string, or "
        "Bucketize it"
    )


def plain_columns(
    columns: dict[str, Any], names: list[str | None], kind: type
) -> tuple[np.ndarray, list[int]]:
    """Columns that are NumPy arrays [n] of common numbers, as int64 (`kind` int) or as finite
    float32 (`kind` float) one after the other, and the number of values of each name; -1 where a
    column is something else.
    """
    from hotbed import _core

    found: tuple[np.ndarray, list[int]] = (_core.plain_ids if kind is int else _core.plain_numbers)(
        columns, names, np.ndarray
    )
    return found


def hash_strings(values: pa.Array, seed: int) -> np.ndarray:
    """XXH64 (seed) of each string's bytes, as int64 [n]; what stands for a null means nothing."""
    from hotbed import _core

    offsets, data = _text(values)
    hashed: np.ndarray = _core.hash_strings(offsets, data, seed)
    return hashed


def _text(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [n + 1] and bytes of a string or binary column, no copy."""
    if not len(values):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = values.buffers()
    width = np.dtype(np.int64 if values.type.id in _WIDE else np.int32)
    found = np.frombuffer(offsets, width, len(values) + 1, values.offset * width.itemsize)
    return found, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(
        0, np.uint8
    )


def _hash_integers(values: np.ndarray, seed: int) -> np.ndarray:
    from hotbed import _core

    hashed: np.ndarray = _core.hash_strings(
        np.arange(len(values) + 1, dtype=np.int64) * 8, values.view(np.uint8), seed
    )
    return hashed


def _transformed(column: Dense | Id, context: Columns) -> pa.Array:
    values = context.column(column.source)
    if column.transforms and pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    for transform in column.transforms:
        values = apply(transform, values, context)
    return values


def apply(transform: Transform, values: pa.Array, context: Any) -> pa.Array:
    """`transform` on a column; on the items of a list column."""
    if not is_list(values.type):
        return transform.apply(values, context)
    if isinstance(transform, Split) or transform.inputs():
        raise SchemaError(
            f"{type(transform).__name__}: cannot take a column of lists — received {values.type} "
            "— apply it before "
            "Split"
        )
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    items = transform.apply(values.flatten(), context)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), items, mask=values.is_null() if values.null_count else None
    )


def _plain_dictionary(values: pa.Array) -> pa.Array:
    """A dictionary column as it is where each word is one id, else decoded (words that are null or
    empty).
    """
    if not pa.types.is_dictionary(values.type):
        return values
    words = values.dictionary
    if words.null_count or (is_bytes(words.type) and pc.min(pc.binary_length(words)).as_py() == 0):
        return values.dictionary_decode()
    return values


def _kept(values: pa.Array, found: np.ndarray, padding: int | None) -> np.ndarray | None:
    """Which ids stay: no nulls, no padding, no empty strings. None = all."""
    keep = None
    if is_bytes(values.type):
        keep = np.diff(_text(values)[0]) > 0
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        keep = valid if keep is None else keep & valid
    if padding is not None:
        real = found != padding
        keep = real if keep is None else keep & real
    return None if keep is None or keep.all() else keep


def _newest(ids: Ids, max_length: int) -> Ids:
    lengths = ids.lengths()
    if len(lengths) == 0 or lengths.max() <= max_length:
        return ids
    from_end = np.repeat(ids.offsets[1:], lengths) - np.arange(len(ids.values))
    keep = from_end <= max_length
    offsets = np.zeros_like(ids.offsets)
    np.cumsum(np.minimum(lengths, max_length), out=offsets[1:])
    return Ids(ids.values[keep], offsets, None if ids.weights is None else ids.weights[keep])


def _alike(weights: pa.Array, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Weights and their ids, where all of one or of both are missing, as lists: they name no type."""
    lists = pa.list_(pa.null())
    if pa.types.is_null(ids.type) and (is_list(weights.type) or pa.types.is_null(weights.type)):
        ids = ids.cast(lists)
    if pa.types.is_null(weights.type) and is_list(ids.type):
        weights = weights.cast(lists)
    return weights, ids


def _id_weights(column: Id, weights: pa.Array, lengths: np.ndarray) -> np.ndarray:
    if not is_list(weights.type):
        raise SchemaError(
            f"id {column.name!r}: weights {column.weights!r} are {weights.type} — ids are lists — "
            "give lists of numbers"
        )
    found = pc.list_value_length(weights).fill_null(0).to_numpy(zero_copy_only=False)
    if (found != lengths).any():
        raise BadRows(
            column.name,
            found != lengths,
            f"id {column.name!r}: {column.weights!r} has another number of items than its ids",
        )
    return numeric(column.weights or "", weights.flatten(), lengths)


def _one_batch(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    if isinstance(rows, pa.RecordBatch):
        return rows
    batches = rows.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays(
        [pa.array([], type=field.type) for field in rows.schema], schema=rows.schema
    )
