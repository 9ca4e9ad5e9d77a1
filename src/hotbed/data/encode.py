# SPDX-License-Identifier: Apache-2.0
"""Encoder: raw Arrow columns -> Batch, by the same code in training and in serving."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.position import COUNTED, IMPRESSION, KNOWN, MARKS
from hotbed.connectors.read_plan import Skips
from hotbed.connectors.times import check_median, text_of_time, with_readable_times
from hotbed.connectors.types import usual_rows
from hotbed.data import numbers
from hotbed.data.arrays import list_lengths, offsets_of
from hotbed.data.arrow_types import (
    Shape,
    Type,
    holds_text,
    is_list,
    joined,
    joined_shape,
    shape_of,
    time_of,
    type_of,
)
from hotbed.data.batch import Batch, Ids
from hotbed.data.columns import (
    Columns,
    SegmentColumn,
    ids_of,
    missing_as_null,
    require_columns,
    transformed,
)
from hotbed.data.context import BadRows
from hotbed.data.numbers import LabelValues, numeric
from hotbed.data.places import Latest
from hotbed.data.schema import Column, Dense, DisplayPosition, Id, Label, Schema, Time, Weight
from hotbed.data.transforms import Hash
from hotbed.errors import DataError, DecodeError, SchemaError

Aside = Callable[[pa.RecordBatch, str, str], None]
"""Takes raw rows that are left out, a word for the reason, and a message."""

_INT64 = pa.int64().id
KEPT_SCHEMAS = 32
"""Checked raw schemas that an encoder remembers: clients of a server may send many."""


@dataclass
class EncodeStats:
    """Counters of an encoder.

    `rows`: encoded rows. `missing`: missing values (empty bags) by id feature. `skips`: rows that
    were left out.
    """

    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    skips: Skips = field(default_factory=Skips)


class Encoder:
    """Turns record batches into Batches by a schema.

    `on_error`: with "raise", a bad row raises DecodeError (its `row` counts from 1 within the
    record batch); with "skip", it is left out, counted in `stats.skips` and logged. A missing
    column or a column of the wrong type always raises SchemaError. `aside`: receives the raw rows
    that are left out.

    `rules`: those of the schema, or of the state that continues with these rows. `unit_labels`:
    labels that a trainer needs from 0 to 1; values outside are bad rows.
    `segments`: raw columns that rows with labels bring along, for figures by their values.
    `label_values`: for each label, what its rows held. If the median time of the
    first batch lies after the year 2200, SchemaError is raised: the unit is wrong.

    `types` and `shapes` record the types and shapes of the raw columns. Text where the schema has
    numbers, numbers where it has text, and lists where it has single values are rejected.

    For requests, `hotbed.serving.request.RequestEncoder` repeats the part of this class that only
    changes the type of plain numbers. The values are the same, bit for bit: whoever changes one
    changes the other (`tests/property/test_requests.py`).

    Example: `Encoder(schema)(pa.record_batch({"user": ["ann"], "label": [1]}))`
    """

    def __init__(self, schema: Schema, on_error: str = "raise", aside: Aside | None = None) -> None:
        self.schema = schema
        self.on_error = on_error
        self.aside = aside
        self.stats = EncodeStats()
        self._id_sources = {column.source for column in schema.ids}
        self.types: Mapping[str, Type] = {}
        self.shapes: Mapping[str, Shape] = {}
        self.rules = schema.rules
        self.unit_labels: frozenset[str] = frozenset()
        self.segments: tuple[SegmentColumn, ...] = ()
        self.forget_labels()
        self._times_checked = False
        self._seen: list[tuple[pa.Schema, bool]] = []
        self._zones: set[str] = set()
        self._kinds: dict[tuple[str, str], dict[str, set[str]]] = {}
        self._noted: set[tuple[str, int | str]] = set()
        self._mixed: set[str] = set()  # tables whose mixture was reported
        self._checked_kinds = 0

    def __call__(
        self,
        rows: pa.RecordBatch | pa.Table,
        *,
        labels: bool = True,
        features: bool = True,
        latest: Latest | None = None,
    ) -> Batch:
        """Return the Batch of `rows`.

        Args:
            rows: raw columns.
            labels: False in serving: label and weight columns are not read, and time only if it is
                there.
            features: False for rows whose features another rank encodes: ids and dense columns are
                not read.
            latest: rows with labels and a later event time (microseconds) are left out. Each row
                that is predicted has its score. Where the user has set the limit, this is so
                regardless of `on_error`. Else a wrong unit is an error, and outside of streams such
                rows are bad rows.
        """
        batch = _one_batch(rows)
        if features:
            self._check_once(batch.schema, labels)
        columns = [
            column
            for column in self.schema.columns
            if features or not isinstance(column, (Id, Dense))
        ]
        while True:
            try:
                context = Columns(batch, self.rules)
                encoded = self._encode(batch, columns, labels, context)
                if labels and batch.num_rows:
                    self._check_kinds()
                    checks_unit = latest is None or not latest.is_set
                    self._note(encoded, context, checks_unit=checks_unit)
                if labels and latest is not None and encoded.time is not None:
                    encoded = self._without_future(batch, encoded, latest)
                self.stats.rows += encoded.num_samples
                for name, count in context.missing.items():
                    before = self.stats.missing.get(name, 0)
                    self.stats.missing[name] = before + count
                return encoded
            except BadRows as bad:
                if self.on_error != "skip":
                    row = int(np.flatnonzero(bad.mask)[0]) + 1
                    raise DecodeError(bad.message, "", row, bad.column) from None
                batch = self._leave_out(batch, bad.mask, "value", bad.message)

    def raw_columns(self, labels: bool = True, features: bool = True) -> list[str]:
        """Return the raw columns that encoding reads, each once; as `Schema.raw_columns`."""
        names = self.schema.raw_columns(labels, features)
        if labels:
            names += [segment.column for segment in self.segments]
        return list(dict.fromkeys(names))

    def read_segments(self, segments: Sequence[SegmentColumn]) -> None:
        """Read these raw columns, too, with labels; `RecModel` calls this before it reads."""
        self.segments = tuple(dict.fromkeys((*self.segments, *segments)))

    def _without_future(self, batch: pa.RecordBatch, encoded: Batch, latest: Latest) -> Batch:
        """Leave out the rows whose time is after `latest`, or refuse the first one."""
        future = encoded.time > latest.time
        if not future.any():
            return encoded
        newest = int(encoded.time.max())
        message = f"event of the future: the clock allows {latest.time} us, got {newest} us"
        is_bad = not latest.is_set and self.aside is None
        if is_bad and self.on_error == "raise":
            time = self.schema.time
            assert time is not None, "it was read"
            raise BadRows(
                time.source,
                future,
                f"time {time.name!r}: an event ahead of the clock would end the time to live of "
                f"all rows, got {text_of_time(int(encoded.time[future][0]))}. Correct it, or give "
                "the Dataset max_ahead_seconds, beyond which events are left out.",
            )
        self._leave_out(batch, future, "future", message)
        return encoded.take(np.flatnonzero(~future))

    def forget_labels(self) -> None:
        """Look at the values of labels anew."""
        self.label_values = [LabelValues(label) for label in self.schema.labels]

    def _note(self, encoded: Batch, context: Columns, *, checks_unit: bool) -> None:
        """Check whole columns: the unit of times, and the values of labels."""
        time = self.schema.time
        if time is not None and encoded.time is not None and not self._times_checked:
            if checks_unit:  # else rows of the future are left out
                first = with_readable_times(context.column(time.source))[0].as_py()
                check_median(f"time {time.name!r}", encoded.time, time.unit, first)
            self._times_checked = True
        for values in self.label_values:
            raw = context.column(values.label.source)
            values.add(encoded.labels[values.label.name], raw)

    def _leave_out(
        self, batch: pa.RecordBatch, mask: np.ndarray, reason: str, message: str
    ) -> pa.RecordBatch:
        """Return the rows outside `mask`; count those inside and hand them to `aside`."""
        self.stats.skips.add(reason, message, int(mask.sum()))
        batch = usual_rows(batch)
        if self.aside is not None:
            self.aside(batch.filter(pa.array(mask)), reason, message)
        return batch.filter(pa.array(~mask))

    def _check_once(self, schema: pa.Schema, labels: bool) -> None:
        """Check the raw columns, unless columns of these names and types were checked before."""
        for checked, with_labels in self._seen:
            if with_labels == labels and checked.equals(schema):
                return
        self._check(schema, labels)
        newest = self._seen[-KEPT_SCHEMAS:]
        self._seen = [*newest, (schema, labels)]

    def _check(self, schema: pa.Schema, labels: bool) -> None:
        names = [name for name in schema.names if name not in MARKS]
        require_columns(self.raw_columns(labels), names)
        for name in self.schema.raw_columns(labels=False):
            kind = type_of(schema.field(name).type)
            trained_kind = self.schema.types.get(name, "mixed")
            self._check_shape(name, schema.field(name).type)
            if kind is None:
                continue
            if _is_other_type(trained_kind, kind, is_id=name in self._id_sources):
                raise _other_type(name, trained_kind, kind, schema.field(name).type)
            joined_kind = joined(self.types.get(name), kind)
            self.types = {**self.types, name: joined_kind}

    def _check_shape(self, name: str, kind: pa.DataType) -> None:
        shape = shape_of(kind)
        if shape is None:
            return
        if shape == "list" and self.schema.shapes.get(name) == "value":
            raise _lists(name, kind)
        joined_with = joined_shape(self.shapes.get(name), shape)
        self.shapes = {**self.shapes, name: joined_with}

    def _encode(
        self, batch: pa.RecordBatch, columns: Sequence[Column], labels: bool, context: Columns
    ) -> Batch:
        ids: dict[str, Ids] = {}
        dense: dict[str, np.ndarray] = {}
        targets: dict[str, np.ndarray] = {}
        weight = time = None
        for column in columns:
            try:
                if isinstance(column, Id):
                    ids[column.name] = self._ids(column, context)
                elif isinstance(column, Dense):
                    values = transformed(column.source, column.transforms, context)
                    dense[column.name] = numbers.dense(column, values)
                elif isinstance(column, Label) and labels:
                    in_unit = column.name in self.unit_labels
                    raw = context.column(column.source)
                    targets[column.name] = numbers.label(column, raw, in_unit)
                elif isinstance(column, Weight) and labels:
                    weight = numbers.weight(column, context.column(column.source))
                elif isinstance(column, DisplayPosition) and labels:
                    raw = context.column(column.source)
                    dense[column.name] = numbers.display_position(column, raw)
                elif isinstance(column, Time) and (labels or column.source in batch.schema.names):
                    time = numbers.time(column, context.column(column.source), self._zones)
            except BadRows:
                raise
            except (pa.ArrowException, DataError) as error:
                raise _named(error, column) from error
        counted = None
        if labels and COUNTED in batch.schema.names:
            counted = batch.column(COUNTED).to_numpy(zero_copy_only=False)
        impressions = None
        if IMPRESSION in batch.schema.names:
            impressions = batch.column(IMPRESSION).to_numpy().copy()
        moments = None
        if labels and KNOWN in batch.schema.names:
            moments = batch.column(KNOWN).to_numpy().copy()
        segments = self.segments if labels else ()
        return Batch(
            ids,
            dense,
            targets,
            weight,
            time,
            num_samples=batch.num_rows,
            counted=counted,
            impressions=impressions,
            known=moments,
            segments={each: each.names(context.column(each.column)) for each in segments},
        )

    def _ids(self, column: Id, context: Columns) -> Ids:
        if not column.transforms and column.padding is None and column.weights is None:
            plain = context.column(column.source)
            # The common case is short, because requests wait for it.
            if plain.type.id == _INT64 and not plain.null_count:
                self._note_kind(column, plain.type)
                return Ids(plain.to_numpy().copy())
        values = transformed(column.source, column.transforms, context)
        if column.transforms or self.rules == 1:  # else the column has nulls already
            values = missing_as_null(values)
        if column.weights:
            raw_weights, values = _alike(context.column(column.weights), values)
        num_missing = values.null_count
        num_rows = len(values)
        lengths = None
        weights = None
        if is_list(values.type):
            lengths = list_lengths(values).astype(np.int64)
            if column.weights:
                weights = _id_weights(column, raw_weights, lengths)
            values = values.flatten()
        elif column.weights:
            weights = numeric(column.weights, raw_weights)
        if num_missing:
            context.missing[column.name] = num_missing
        ids = ids_of(values, column.name)
        if len(values):
            self._note_kind(column, values.type)
            if column.transforms:
                self._note_hashed(column, context)
        keep = _ids_to_keep(values, ids, column.padding)
        if keep is not None:
            ids = ids[keep]
            if weights is not None:
                weights = weights[keep]
            owner = np.arange(num_rows)
            if lengths is not None:
                owner = np.repeat(owner, lengths)
            lengths = np.bincount(owner[keep], minlength=num_rows)
        if lengths is None:
            return Ids(ids, None, weights)
        bags = Ids(ids, offsets_of(lengths), weights)
        if column.max_length is None:
            return bags
        return bags.newest(column.max_length)

    def _note_kind(self, column: Id, kind: pa.DataType) -> None:
        if (column.name, kind.id) in self._noted:
            return
        self._noted.add((column.name, kind.id))
        if column.transforms and column.transforms[-1].gives_ids:
            return  # noted by `_note_hashed`
        self._add_kind(column, kind, "")

    def _note_hashed(self, column: Id, context: Columns) -> None:
        """Note what a Hash turns into ids: it gives a text and its number two ids."""
        *before, last = column.transforms
        raw = context.column(column.source).type
        if not isinstance(last, Hash) or (column.name, str(raw)) in self._noted:
            return
        self._noted.add((column.name, str(raw)))
        kind = transformed(column.source, before, context).type
        self._add_kind(column, kind.value_type if is_list(kind) else kind, repr(last))

    def _add_kind(self, column: Id, kind: pa.DataType, space: str) -> None:
        """Add the kind of a feature's values to those of its table; `space`: of the ids there."""
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_null(kind):
            return
        is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        table = column.table or column.name
        features = self._kinds.setdefault((table, space), {})
        features.setdefault(column.name, set()).add("integers" if is_number else "text")
        if len(features[column.name]) == 2 and table not in self._mixed:
            self._mixed.add(table)
            warnings.warn(
                f"table {table!r} is fed both strings (hashed) and integers (unchanged), last from "
                f"{column.name!r}: the same value as text and as a number gets two rows. Declare "
                "one type for it in the source.",
                UserWarning,
                stacklevel=5,
            )

    def _check_kinds(self) -> None:
        """Raise SchemaError if features of one table can never have a value in common."""
        if self._checked_kinds == len(self._noted):
            return
        for (table, _), features in self._kinds.items():
            of_kind = {kind: name for name, kinds in features.items() for kind in kinds}
            apart = [name for name, kinds in features.items() if len(kinds) == 1]
            if len(of_kind) == 2 and len(apart) == len(features):
                text = of_kind["text"]
                number = of_kind["integers"]
                source = next(column.source for column in self.schema.ids if column.name == number)
                raise SchemaError(
                    f"table {table!r}: {text!r} holds text and {number!r} integers, which are "
                    "never the same id, got two types for one table. Read the integers as text "
                    f"(columns={{{source!r}: 'string'}} of the source), let "
                    f"{text!r} end with Extract('(.*)', number=True), or give each a table."
                )
        self._checked_kinds = len(self._noted)


def check_types(
    trained: Schema, given: Schema, types: Mapping[str, Type], shapes: Mapping[str, Shape]
) -> None:
    """Raise SchemaError if raw columns are of other types than training had.

    Columns of features that both schemas transform alike are compared. Rows of a preparation and
    raw rows are not: a preparation may have made numbers of text.

    Args:
        trained: the schema, with the types and shapes that were learned from.
        given: the schema of the data that are learned, evaluated or predicted now.
        types: of their raw columns.
        shapes: of their raw columns.
    """
    if given.raw is None and trained.raw is not None:
        trained = trained.raw
    if (given.raw is None) != (trained.raw is None):
        return
    features: dict[str, Dense | Id] = {}
    features.update({column.name: column for column in trained.dense})
    features.update({column.name: column for column in trained.ids})
    for column in (*given.dense, *given.ids):
        before = features.get(column.name)
        if before is None or type(before) is not type(column):
            continue
        if before.transforms != column.transforms:
            continue
        trained_kind = trained.types.get(before.source, "mixed")
        kind = types.get(column.source, trained_kind)
        if _is_other_type(trained_kind, kind, is_id=isinstance(column, Id)):
            raise _other_type(column.source, trained_kind, kind, kind)
        shape = shapes.get(column.source, "value")
        if trained.shapes.get(before.source) == "value" and shape != "value":
            raise _lists(column.source, shape)


def _is_other_type(trained: Type, kind: Type, *, is_id: bool) -> bool:
    """Return whether values of a type are other ids than those of the type in training."""
    if trained == "mixed" or time_of(trained) is not None or time_of(kind) is not None:
        return False  # the use of times looks at their type itself
    if kind == "boolean" and trained in ("integer", "uint64") and is_id:
        return True
    return kind == "mixed" or holds_text(kind) != holds_text(trained)


def _other_type(name: str, trained: Type, kind: Type, shown: object) -> SchemaError:
    if kind == "boolean" and trained in ("integer", "uint64"):
        return SchemaError(
            f"column {name!r}: it held integer ids in training, got {shown}. Give integers."
        )
    return SchemaError(
        f"column {name!r}: it held {trained} values in training, got {shown}. Give {trained} "
        "values: the same value as text and as a number is two ids."
    )


def _lists(name: str, kind: object) -> SchemaError:
    return SchemaError(
        f"column {name!r}: it held single values in training, got lists ({kind}). Give one value "
        "for each row."
    )


def _named(error: Exception, column: Column) -> SchemaError:
    """Return an error about the type of a column, with its name."""
    message = str(error).splitlines()[0]
    if repr(column.name) in message or repr(column.source) in message:
        return SchemaError(message)
    return SchemaError(f"column {column.name!r}: {message}")


def _ids_to_keep(values: pa.Array, ids: np.ndarray, padding: int | None) -> np.ndarray | None:
    """Return bool [n], false for nulls and padding; None if all ids are kept."""
    masks: list[np.ndarray] = []
    if values.null_count:
        masks.append(values.is_valid().to_numpy(zero_copy_only=False))
    if padding is not None:
        masks.append(ids != padding)
    if not masks:
        return None
    keep = masks[0]
    for mask in masks[1:]:
        keep = keep & mask
    if keep.all():
        return None
    return keep


def _alike(weights: pa.Array, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return weights and their ids as lists, where all values of one or of both are missing.

    A column of missing values has the null type, which does not say whether it holds lists.
    """
    lists = pa.list_(pa.null())
    no_weights = pa.types.is_null(weights.type)
    no_ids = pa.types.is_null(ids.type)
    if no_ids and (no_weights or is_list(weights.type)):
        ids = ids.cast(lists)
    if no_weights and is_list(ids.type):
        weights = weights.cast(lists)
    return weights, ids


def _id_weights(column: Id, weights: pa.Array, lengths: np.ndarray) -> np.ndarray:
    if not is_list(weights.type):
        raise SchemaError(
            f"id {column.name!r}: weights {column.weights!r} must be lists, as the ids are, got "
            f"{weights.type}. Give lists of numbers."
        )
    weight_lengths = pc.list_value_length(weights).fill_null(0).to_numpy(zero_copy_only=False)
    wrong = weight_lengths != lengths
    if wrong.any():
        raise BadRows(
            column.name,
            wrong,
            f"id {column.name!r}: expected {lengths[wrong][0]} weights in {column.weights!r}, one "
            f"for each id, got {weight_lengths[wrong][0]}. Correct the row.",
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
