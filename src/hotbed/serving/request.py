# SPDX-License-Identifier: Apache-2.0
"""Encode the raw columns of a request: the values of `Encoder`, in a fraction of its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from hotbed.connectors.memory import Memory
from hotbed.data.arrow_types import Type, decimal_of, holds_text, time_of
from hotbed.data.columns import plain_columns
from hotbed.data.encode import KEPT_SCHEMAS, Encoder
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.datatypes import input_datatypes
from hotbed.serving.rows import FeatureIds
from hotbed.serving.trained_types import as_trained, check_text, numbers_as_trained

Columns: TypeAlias = "Mapping[str, Any] | pa.RecordBatch | pa.Table"

_NUMBERS = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
)
_NUMBER_IDS = {kind.id for kind in _NUMBERS}
_COMPARED = ("integer", "uint64", "float32")  # whose values transforms take for others as float64


@dataclass(frozen=True)
class ScoreRequest:
    """The encoded columns of n candidates.

    Unlike in a Batch, ids and numbers of one sample hold for all candidates, and ids of which
    each sample has one may be an array. Columns that the model keeps are there only if the request
    brought them. `time`: when the candidates are shown, in microseconds, if the request says it.
    """

    ids: FeatureIds
    dense: Mapping[str, RowArray]
    num_samples: int
    time: IdArray | None = None


@dataclass(frozen=True)
class _Feature:
    """A feature and what it reads.

    Attributes:
        name: name of the feature.
        column: its column in the schema.
        raw: the raw columns that it reads.
        plain: the raw column whose values are its own, but for their type; None where encoding
            takes more than that.
    """

    name: str
    column: Id | Dense
    raw: frozenset[str]
    plain: str | None


class _Features:
    """The features of one kind: ids (`kind` int) or dense columns (float).

    Attributes:
        raw: the raw columns that they read.
    """

    def __init__(self, schema: Schema, columns: Sequence[Id | Dense], kind: type) -> None:
        self._features = [_feature(schema, column) for column in columns]
        self._plain = [feature.plain for feature in self._features]
        self._kind = kind
        self.raw = _raw_columns(self._features)

    def encode_plain(self, values: dict[str, Any], encoded: dict[str, Any]) -> list[_Feature]:
        """Encode what takes no more than a change of type; return the other features."""
        if not self._features:
            return []
        flat, counts = plain_columns(values, self._plain, self._kind)
        rest = list[_Feature]()
        start = 0
        for feature, count in zip(self._features, counts, strict=True):
            if count < 0:
                rest.append(feature)
                continue
            end = start + count
            encoded[feature.name] = flat[start:end]
            start = end
        return rest


def _feature(schema: Schema, column: Id | Dense) -> _Feature:
    raw = frozenset(Schema([column]).raw_columns(labels=False))
    is_text = holds_text(schema.types.get(column.source, ""))
    plain = None
    if not column.transforms and not is_text and _is_single(column):
        plain = column.source
    return _Feature(column.name, column, raw, plain)


def _is_single(column: Id | Dense) -> bool:
    """Return whether each sample has one number, without padding or weights."""
    if isinstance(column, Dense):
        return column.width == 1
    return column.padding is None and column.weights is None


def _transformed_columns(schema: Schema) -> dict[str, bool]:
    """Return the raw columns that transforms read, and whether one depends on their types."""
    features: list[Id | Dense] = [*schema.ids, *schema.dense]
    by_type = dict[str, bool]()
    for column in features:
        for transform in column.transforms:
            for name in transform.inputs() or (column.source,):
                by_type[name] = transform.by_type or by_type.get(name, False)
    return by_type


def _raw_columns(features: Iterable[_Feature]) -> frozenset[str]:
    """Return the raw columns that features read."""
    names = set[str]()
    for feature in features:
        names |= feature.raw
    return frozenset(names)


class RequestEncoder:
    """Encode requests by a schema. Safe to call from several threads.

    The values are those of `Encoder`, bit for bit. Two things make it fast: numbers in NumPy or
    Arrow arrays do not become Arrow columns where a column has no transforms, and a feature that
    reads only context is encoded as one sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        of_rows = [column for column in schema.columns if isinstance(column, (Id, Dense))]
        self._ids = _Features(schema, [each for each in of_rows if isinstance(each, Id)], int)
        self._dense = _Features(
            schema, [each for each in of_rows if isinstance(each, Dense)], float
        )
        self._kept = [_feature(schema, each) for each in schema.kept_features]
        self._time = schema.time
        encoded_ids = [each.name for each in schema.kept_features if isinstance(each, Id)]
        self._types = {**schema.types, **dict.fromkeys(encoded_ids, "integer")}
        self._raw = self._ids.raw | self._dense.raw
        self._texts = {name for name in self._raw if schema.types.get(name) == "text"}
        by_type = _transformed_columns(schema)
        self._trained = dict[str, Type]()
        self._compared = dict[str, Type]()
        for name in self._raw & schema.types.keys():
            kind = schema.types[name]
            if by_type.get(name) or time_of(kind) is not None or decimal_of(kind) is not None:
                self._trained[name] = kind
            elif name in by_type and kind in _COMPARED:
                self._compared[name] = kind
        datatypes = input_datatypes(schema)
        self._takes_floats = {
            name for name in self._compared if datatypes[name] in ("FP32", "FP64")
        }
        self._encoders: dict[tuple[str, ...], Encoder] = {}

    def __call__(self, columns: Columns, context: Mapping[str, Any] | None = None) -> ScoreRequest:
        """Return the encoded request. Raises DataError for columns that do not fit."""
        values, num_samples = _columns_by_name(columns)
        shared = _shared_values(context)
        twice = values.keys() & shared.keys()
        if twice:
            raise DataError(
                f"column {min(twice)!r}: given twice, got it for the candidates and as context. "
                "Give it once."
            )
        values.update(shared)
        for name in self._texts:
            if name in values:
                check_text(name, values[name])
        for name, kind in self._trained.items():
            if name in values:
                values[name] = as_trained(name, values[name], kind)
        if not self._raw <= values.keys():
            nothing = {name: pa.nulls(0) for name in values}
            Encoder(self._schema)(pa.table(nothing), labels=False)  # raises, naming the columns
        ids = dict[str, Any]()
        dense = dict[str, Any]()
        rest = self._encode_plain(values, ids, dense)
        time = None
        if self._kept:
            rest += [feature for feature in self._kept if feature.raw <= values.keys()]
            time = self._times(values)
        if not rest:
            return ScoreRequest(ids, dense, num_samples, time)
        once = [feature for feature in rest if feature.raw <= shared.keys()]
        each = [feature for feature in rest if not feature.raw <= shared.keys()]
        if once:
            self._encode_rest(once, values, ids, dense)
        if each:
            for name in shared.keys() & _raw_columns(each):
                values[name] = _repeat(name, values[name], num_samples)
            self._encode_rest(each, values, ids, dense)
        return ScoreRequest(ids, dense, num_samples, time)

    def _times(self, values: Mapping[str, Any]) -> IdArray | None:
        """Return the times of a request that has some, for a model that keeps histories."""
        column = self._time
        if column is None or column.source not in values:
            return None
        schema = self._schema
        encode = Encoder(Schema([column], schema.types, schema.shapes, rules=schema.rules))
        times: IdArray = encode(
            Memory({column.source: values[column.source]}).table, labels=False
        ).time
        return times

    def _encode_plain(
        self, values: dict[str, Any], ids: dict[str, Any], dense: dict[str, Any]
    ) -> list[_Feature]:
        """Encode the features that take no more than a change of type; return the other ones."""
        for name in self._raw:
            column = values[name]
            if type(column) is not np.ndarray or not column.flags.c_contiguous:
                values[name] = _numbers(column)
        for name, kind in self._compared.items():
            values[name] = numbers_as_trained(
                name, values[name], kind, takes_floats=name in self._takes_floats
            )
        rest = self._ids.encode_plain(values, ids)
        rest += self._dense.encode_plain(values, dense)
        return rest

    def _encode_rest(
        self,
        features: Sequence[_Feature],
        values: Mapping[str, Any],
        ids: dict[str, Any],
        dense: dict[str, Any],
    ) -> None:
        """Encode features with the Encoder."""
        names = sorted(_raw_columns(features))
        columns = Memory({name: values[name] for name in names})
        encode = self._encoder(features)
        batch = encode(columns.table, labels=False)
        ids.update(batch.ids)
        dense.update(batch.dense)

    def _encoder(self, features: Sequence[_Feature]) -> Encoder:
        """Return the encoder of these features alone."""
        key = tuple(feature.name for feature in features)
        encoder = self._encoders.get(key)
        if encoder is None:
            columns = [feature.column for feature in features]
            whole = self._schema
            schema = Schema(columns, self._types, whole.shapes, rules=whole.rules)
            encoder = Encoder(schema)
            newest = list(self._encoders.items())[-KEPT_SCHEMAS:]
            self._encoders = {**dict(newest), key: encoder}
        return encoder


def check_columns(columns: Any) -> None:
    """Raise DataError unless `columns` maps names to values."""
    if not isinstance(columns, Mapping):
        raise DataError(
            f"columns: expected a mapping of names to values, got {type(columns).__name__}. "
            "Give a dict of lists or arrays."
        )


def check_context(context: Any) -> None:
    """Raise DataError unless `context` is None or maps names to values."""
    if context is not None and not isinstance(context, Mapping):
        raise DataError(
            f"context: expected a mapping of names to single values, got {type(context).__name__}. "
            "Give a dict, or None."
        )


def single_value(name: str, value: Any) -> Any:
    """Return a value of a context as an array of one value; DataError if it has several."""
    if isinstance(value, np.ndarray) and value.shape == (1,):  # a server has it in this form
        return value
    if isinstance(value, pa.Array):
        if len(value) != 1:
            raise DataError(
                f"column {name!r}: context is one value, got {len(value)}. Give one value, or a "
                "column."
            )
        return value
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        array = np.array([value])
        if array.dtype.kind in "biuf":
            return array
    return [value]


def _columns_by_name(columns: Columns) -> tuple[dict[str, Any], int]:
    """Return columns by name, all of one length, and that length."""
    if isinstance(columns, pa.Table):
        columns = _batch(columns)
    if isinstance(columns, pa.RecordBatch):
        by_name = dict(zip(columns.schema.names, columns.columns, strict=True))
        return by_name, columns.num_rows
    check_columns(columns)
    lengths = set[int]()
    for name, values in columns.items():
        try:
            lengths.add(len(values))
        except TypeError:
            raise DataError(
                f"column {name!r}: expected one value a candidate, got {values!r}. Give a list, or "
                "give it as context."
            ) from None
    if len(lengths) > 1:
        Memory(columns)  # raises, naming the columns
    num_samples = max(lengths, default=0)
    if num_samples == 0:  # without values the type says nothing: NumPy's empty arrays are floats
        return dict.fromkeys(columns, pa.nulls(0)), 0
    return dict(columns), num_samples


def _batch(table: pa.Table) -> pa.RecordBatch:
    if not table.num_rows:
        return pa.RecordBatch.from_pylist([], table.schema)
    return table.combine_chunks().to_batches()[0]


def _shared_values(context: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a context as arrays of one value."""
    check_context(context)
    if not context:
        return {}
    return {name: single_value(name, value) for name, value in context.items()}


def _numbers(values: Any) -> Any:
    """Return numbers as a contiguous NumPy array, those of Arrow without a copy.

    Other lists become Arrow arrays, and anything else is returned as it is.
    """
    if isinstance(values, list):
        with suppress(pa.ArrowException, OverflowError):  # the encoder names the problem
            values = pa.array(values)
    if isinstance(values, pa.Array) and values.type.id in _NUMBER_IDS and not values.null_count:
        return values.to_numpy()
    if type(values) is np.ndarray:
        return np.ascontiguousarray(values)
    return values


def _repeat(name: str, values: Any, times: int) -> pa.Array:
    table = Memory({name: values}).table
    column = table.column(name).combine_chunks()
    first = np.zeros(times, np.int64)
    return column.take(pa.array(first))
