# SPDX-License-Identifier: Apache-2.0
"""A request's raw columns -> ids and dense columns, with the values of the Encoder and little of its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.base import Memory
from hotbed.data.batch import Ids
from hotbed.data.encode import KEPT_SCHEMAS, Encoder
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError

Columns: TypeAlias = "Mapping[str, Any] | pa.RecordBatch | pa.Table"

_IDS = frozenset(map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")))
_NUMBERS = frozenset(map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "f4", "f8")))
_ARROW = {kind.id for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
                               pa.uint64(), pa.float32(), pa.float64())}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What `num_samples` candidates hold, as a Batch does; but ids and numbers of one sample hold for all of them."""

    ids: Mapping[str, Ids]
    dense: Mapping[str, NDArray[np.float32]]
    num_samples: int


@dataclass(frozen=True)
class _Feature:
    """A feature, the raw columns that it reads, and the one that it only changes the type of, where that is all, from
    `kinds`."""

    name: str
    column: Id | Dense
    raw: frozenset[str]
    plain: str | None
    kinds: frozenset[np.dtype[Any]]


class _Split(NamedTuple):
    once: Sequence[_Feature]
    rest: Sequence[_Feature]
    repeated: frozenset[str]


class RequestEncoder:
    """Encodes requests by a schema. Safe to call from several threads.

    The values are those of `Encoder`, bit for bit. What is fast: numbers in NumPy or Arrow arrays whose column has no
    transforms become no Arrow column, and a feature of context columns alone is encoded as one sample.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._features = [_feature(schema, column) for column in (*schema.ids, *schema.dense)]
        self._raw = frozenset().union(*(feature.raw for feature in self._features))
        self._encoders: dict[tuple[str, ...], Encoder] = {}
        self._splits: dict[frozenset[str], _Split] = {}

    def __call__(self, columns: Columns, context: Mapping[str, Any] | None = None) -> Request:
        """Raises DataError for columns that do not fit, as `Encoder` does."""
        given, num_samples = _given(columns)
        if not context:
            self._complete(given)
            return Request(*self._encode(self._features, given, num_samples), num_samples)
        once = {name: _single(name, value) for name, value in context.items()}
        twice = given.keys() & once.keys()
        if twice:
            raise DataError(
                f"column {min(twice)!r}: given twice — received it for the candidates and as context — give one"
            )
        self._complete({**given, **once})
        split = self._split(frozenset(once))
        for name in split.repeated:
            given[name] = _array(name, once[name]).take(pa.array(np.zeros(num_samples, np.int64)))
        ids, dense = self._encode(split.once, once, 1)
        more, numbers = self._encode(split.rest, given, num_samples)
        return Request({**ids, **more}, {**dense, **numbers}, num_samples)

    def _complete(self, columns: Mapping[str, Any]) -> None:
        if not self._raw <= columns.keys():
            Encoder(self._schema)(
                pa.table({name: pa.nulls(0) for name in columns}), labels=False
            )  # raises, naming them

    def _split(self, context: frozenset[str]) -> _Split:
        """Which features context columns alone make, the rest, and context columns that those need as well."""
        found = self._splits.get(context)
        if found is None:
            once = [feature for feature in self._features if feature.raw <= context]
            rest = [feature for feature in self._features if not feature.raw <= context]
            repeated = context & frozenset().union(*(feature.raw for feature in rest))
            found = _Split(once, rest, repeated)
            self._splits = {**dict(list(self._splits.items())[-KEPT_SCHEMAS:]), context: found}
        return found

    def _encode(
        self, features: Sequence[_Feature], given: Mapping[str, Any], num_samples: int
    ) -> tuple[dict[str, Ids], dict[str, NDArray[np.float32]]]:
        ids: dict[str, NDArray[Any]] = {}
        dense: dict[str, NDArray[Any]] = {}
        rest = []
        for feature in features:
            plain = None if feature.plain is None else _plain(given[feature.plain])
            if plain is not None and plain.ndim == 1 and plain.dtype in feature.kinds:
                (dense if feature.kinds is _NUMBERS else ids)[feature.name] = plain
            else:
                rest.append(feature)
        numbers = _side_by_side(dense, np.float32)
        if not np.isfinite(numbers).all():
            rest += [feature for feature in features if feature.name in dense]  # the encoder tells what is wrong
        found = dict(zip(ids, map(Ids, _side_by_side(ids, np.int64)), strict=True))
        columns = dict(zip(dense, numbers, strict=True))
        if rest:
            names = sorted(frozenset().union(*(feature.raw for feature in rest)))
            batch = self._encoder(rest)(Memory({name: given[name] for name in names}).table, labels=False)
            found.update(batch.ids)
            columns.update(batch.dense)
        return found, columns

    def _encoder(self, features: Iterable[_Feature]) -> Encoder:
        """Of these features alone."""
        columns = [feature.column for feature in features]
        key = tuple(column.name for column in columns)
        found = self._encoders.get(key)
        if found is None:
            found = Encoder(Schema(columns, self._schema.types))
            self._encoders = {**dict(list(self._encoders.items())[-KEPT_SCHEMAS:]), key: found}
        return found


def _feature(schema: Schema, column: Any) -> _Feature:
    plain = not column.transforms and (
        column.width == 1 if isinstance(column, Dense) else column.padding is None and column.weights is None
    )
    plain = plain and schema.types.get(column.source) != "text"
    raw = frozenset(Schema([column]).raw_columns(labels=False))
    kinds = _IDS if isinstance(column, Id) else _NUMBERS
    return _Feature(column.name, column, raw, column.source if plain else None, kinds)


def _given(columns: Columns) -> tuple[dict[str, Any], int]:
    """Columns by name, all of one length, and that length."""
    if isinstance(columns, pa.Table):
        columns = columns.combine_chunks()
        columns = columns.to_batches()[0] if columns.num_rows else pa.RecordBatch.from_pylist([], columns.schema)
    if isinstance(columns, pa.RecordBatch):
        return dict(zip(columns.schema.names, columns.columns, strict=True)), columns.num_rows
    lengths = set()
    for name, values in columns.items():
        try:
            lengths.add(len(values))
        except TypeError:
            raise DataError(
                f"column {name!r}: one value, no column — received {values!r} — give a list, or give it as context"
            ) from None
    if len(lengths) > 1:
        Memory(columns)  # raises, naming them
    return dict(columns), lengths.pop() if lengths else 0


def _single(name: str, value: Any) -> Any:
    """One value as an array of one."""
    if isinstance(value, np.ndarray) and value.shape == (1,):  # as a server has it
        return value
    if isinstance(value, pa.Array):
        if len(value) != 1:
            raise DataError(f"column {name!r}: context is one value — received {len(value)} — give one, or a column")
        return value
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        found = np.array([value])
        return found if found.dtype in _IDS or found.dtype in _NUMBERS else [value]
    return [value]


def _plain(values: Any) -> NDArray[Any] | None:
    """Numbers as NumPy, without a copy; None where they are something else."""
    if type(values) is np.ndarray:
        return values
    if isinstance(values, list):
        with suppress(pa.ArrowException, OverflowError):  # the encoder says what is wrong
            values = pa.array(values)
    if isinstance(values, pa.Array) and values.type.id in _ARROW and not values.null_count:
        found: NDArray[Any] = values.to_numpy()
        return found
    return None


def _side_by_side(columns: Mapping[str, NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """[columns, n]; integers of 64 bits without a sign keep their bits, as the encoder has it."""
    if not columns:
        return np.empty((0, 0), dtype)
    with np.errstate(over="ignore"):
        return np.concatenate(list(columns.values()), dtype=dtype, casting="unsafe").reshape(len(columns), -1)


def _array(name: str, values: Any) -> pa.Array:
    found: pa.Array = Memory({name: values}).table.column(name).combine_chunks()
    return found
