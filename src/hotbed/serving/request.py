# SPDX-License-Identifier: Apache-2.0
"""A request's raw columns -> ids and dense columns, with the values of the Encoder and little of
its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.memory import Memory
from hotbed.data.batch import Ids
from hotbed.data.columns import plain_columns
from hotbed.data.encode import KEPT_SCHEMAS, Encoder
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError

Columns: TypeAlias = "Mapping[str, Any] | pa.RecordBatch | pa.Table"

_ARROW = {
    kind.id
    for kind in (
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
}


@dataclass(frozen=True)
class ScoreRequest:
    """What `num_samples` candidates hold, as a Batch does; but ids and numbers of one sample hold
    for all of them, and ids of which each sample has one may be an array.
    """

    ids: Mapping[str, Ids | NDArray[np.int64]]
    dense: Mapping[str, NDArray[np.float32]]
    num_samples: int


@dataclass(frozen=True)
class _Feature:
    """A feature, the raw columns that it reads, and the one that it only changes the type of, where
    that is all.
    """

    name: str
    column: Id | Dense
    raw: frozenset[str]
    plain: str | None


class RequestEncoder:
    """Encodes requests by a schema. Safe to call from several threads.

    The values are those of `Encoder`, bit for bit. What is fast: numbers in NumPy or Arrow arrays
    whose column has no transforms become no Arrow column, and a feature of context columns alone is
    encoded as one sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._ids = [_feature(schema, column) for column in schema.ids]
        self._dense = [_feature(schema, column) for column in schema.dense]
        self._raw = frozenset().union(*(feature.raw for feature in (*self._ids, *self._dense)))
        self._encoders: dict[tuple[str, ...], Encoder] = {}

    def __call__(self, columns: Columns, context: Mapping[str, Any] | None = None) -> ScoreRequest:
        """Raises DataError for columns that do not fit, as `Encoder` does."""
        given, num_samples = _given(columns)
        check_context(context)
        once = {name: _single(name, value) for name, value in context.items()} if context else {}
        twice = given.keys() & once.keys()
        if twice:
            raise DataError(
                f"column {min(twice)!r}: given twice — received it for the candidates and as "
                "context — give one"
            )
        given.update(once)
        if not self._raw <= given.keys():
            # raises, naming them
            Encoder(self._schema)(pa.table({name: pa.nulls(0) for name in given}), labels=False)
        ids, dense, rest = self._plain(given)
        held = [feature for feature in rest if feature.raw <= once.keys()]
        rest = [feature for feature in rest if not feature.raw <= once.keys()] if held else rest
        for features, repeated in ((held, frozenset[str]()), (rest, frozenset(once))):
            if features:
                names = sorted(frozenset().union(*(feature.raw for feature in features)))
                table = {
                    name: _repeated(name, once[name], num_samples)
                    if name in repeated
                    else given[name]
                    for name in names
                }
                batch = self._encoder(features)(Memory(table).table, labels=False)
                ids.update(batch.ids)
                dense.update(batch.dense)
        return ScoreRequest(ids, dense, num_samples)

    def _plain(
        self, given: dict[str, Any]
    ) -> tuple[dict[str, Ids | NDArray[np.int64]], dict[str, NDArray[np.float32]], list[_Feature]]:
        """What takes no more than a change of type, and the features that take more."""
        for name in self._raw:
            values = given[name]
            if type(values) is not np.ndarray or not values.flags.c_contiguous:
                given[name] = _numbers(values)
        ids = dict[str, Any]()
        dense = dict[str, Any]()
        rest = list[_Feature]()
        for features, kind, found in ((self._ids, int, ids), (self._dense, float, dense)):
            flat, counts = plain_columns(given, [feature.plain for feature in features], kind)
            end = 0
            for feature, count in zip(features, counts, strict=True):
                if count < 0:
                    rest.append(feature)
                else:
                    found[feature.name] = flat[end : (end := end + count)]
        return ids, dense, rest

    def _encoder(self, features: Iterable[_Feature]) -> Encoder:
        """Of these features alone."""
        columns = [feature.column for feature in features]
        key = tuple(column.name for column in columns)
        found = self._encoders.get(key)
        if found is None:
            found = Encoder(Schema(columns, self._schema.types, self._schema.shapes))
            self._encoders = {**dict(list(self._encoders.items())[-KEPT_SCHEMAS:]), key: found}
        return found


def _feature(schema: Schema, column: Any) -> _Feature:
    plain = not column.transforms and (
        column.width == 1
        if isinstance(column, Dense)
        else column.padding is None and column.weights is None
    )
    plain = plain and schema.types.get(column.source) != "text"
    raw = frozenset(Schema([column]).raw_columns(labels=False))
    return _Feature(column.name, column, raw, column.source if plain else None)


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


def _given(columns: Columns) -> tuple[dict[str, Any], int]:
    """Columns by name, all of one length, and that length."""
    if isinstance(columns, pa.Table):
        columns = columns.combine_chunks()
        columns = (
            columns.to_batches()[0]
            if columns.num_rows
            else pa.RecordBatch.from_pylist([], columns.schema)
        )
    if isinstance(columns, pa.RecordBatch):
        return dict(zip(columns.schema.names, columns.columns, strict=True)), columns.num_rows
    check_columns(columns)
    lengths = set()
    for name, values in columns.items():
        try:
            lengths.add(len(values))
        except TypeError:
            raise DataError(
                f"column {name!r}: one value, no column — received {values!r} — give a list, or "
                "give it as context"
            ) from None
    if len(lengths) > 1:
        Memory(columns)  # raises, naming them
    num_samples = lengths.pop() if lengths else 0
    if num_samples == 0:  # no values, so of any type: NumPy's empty arrays are floats
        return dict.fromkeys(columns, pa.nulls(0)), 0
    return dict(columns), num_samples


def _single(name: str, value: Any) -> Any:
    """One value as an array of one."""
    if isinstance(value, np.ndarray) and value.shape == (1,):  # as a server has it
        return value
    if isinstance(value, pa.Array):
        if len(value) != 1:
            raise DataError(
                f"column {name!r}: context is one value — received {len(value)} — give one, or a "
                "column"
            )
        return value
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        found = np.array([value])
        return found if found.dtype.kind in "biuf" else [value]
    return [value]


def _numbers(values: Any) -> Any:
    """Numbers as a NumPy array without gaps, from Arrow without a copy; anything else as it is,
    lists as Arrow.
    """
    if isinstance(values, list):
        with suppress(pa.ArrowException, OverflowError):  # the encoder says what is wrong
            values = pa.array(values)
    if isinstance(values, pa.Array) and values.type.id in _ARROW and not values.null_count:
        return values.to_numpy()
    return np.ascontiguousarray(values) if type(values) is np.ndarray else values


def _repeated(name: str, values: Any, times: int) -> pa.Array:
    one = Memory({name: values}).table.column(name).combine_chunks()
    return one.take(pa.array(np.zeros(times, np.int64)))
