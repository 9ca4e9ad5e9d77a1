# SPDX-License-Identifier: Apache-2.0
"""Histories and counts of prepared rows: what a model that reads the rows in order would keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import config
from hotbed.data import numbers
from hotbed.data.arrays import as_numpy, offsets_of
from hotbed.data.batch import Batch, Ids
from hotbed.data.context import BadRows
from hotbed.data.histories import (
    NEVER,
    Count,
    History,
    KeptByKey,
    RowKeys,
    SeenEntries,
    StoredEntries,
    age_ids,
    see,
)
from hotbed.data.schema import Column, Id, Label, Schema, Time
from hotbed.data.transforms import Map
from hotbed.errors import ConfigError, DataError
from hotbed.prepare.keyed.derive import RAW, Derivation, Histories, Lists
from hotbed.prepare.shuffle import Sliceable

_PIECE = 1 << 13  # rows that the rule reads at a time, unless a key has more
_KEY = "\0key"
_PLACE = "\0place"


def with_kept_as_columns(schema: Schema) -> tuple[Schema, list[Derivation]]:
    """Return a schema whose histories and counts are plain columns, and what derives those.

    Raises:
        ConfigError: the ids of a history cannot be derived from raw values.
    """
    columns: list[Column] = []
    derived: list[Derivation] = []
    for column in schema.columns:
        if isinstance(column, History):
            features = _id_columns(column, schema)
            columns += features
            for name, feature in zip(column.of, features, strict=True):
                derived.append(_EarlierValues.of(column, schema, feature.name, name))
        elif isinstance(column, Count):
            columns += column.dense_in(schema)
            derived.append(_EarlierCounts.of(column, schema, column.name))
        else:
            columns.append(column)
    return replace(schema, columns=columns), derived


def _id_columns(column: History, schema: Schema) -> list[Id]:
    """Return the columns of the features of a history, which read lists of raw values."""
    features: list[Id] = []
    for name, feature in zip(column.of, column.ids_in(schema), strict=True):
        source = schema[name]
        if isinstance(source, Id):
            for transform in source.transforms:
                reads_others = bool(transform.inputs())
                if reads_others or (isinstance(transform, Map) and transform.joint is None):
                    raise ConfigError(
                        f"history {column.name!r}: prepared files hold lists of the raw values of "
                        f"{name!r}, got its transform {config.kind_of(type(transform))}. Give "
                        "`map` the key `joint`, and leave out transforms of several columns."
                    )
            feature = replace(feature, transforms=source.transforms, padding=source.padding)
        features.append(feature)
    return features


@dataclass(frozen=True)
class _Kept(Derivation):
    """Base of the columns that a model would keep.

    Args:
        name: of the column that is derived.
        by: the raw column of the key.
        time: the raw column of the time.
        column: the declaration.
        labels: that `column.where` names.
        time_column: of the schema.
    """

    name: str
    by: str
    time: str
    column: KeptByKey
    labels: Sequence[Label]
    time_column: Time

    @property
    def description(self) -> str:
        return (
            f"{config.kind_of(type(self.column))} {self.column.name!r} of rows before of the same "
            f"{self.by!r}, ordered by {self.time!r}; see docs/histories.md"
        )

    def columns(self) -> Sequence[str]:
        return [label.source for label in self.labels]

    def _seen(
        self, column: KeptByKey, rows: pa.Table, histories: Histories
    ) -> Iterator[tuple[SeenEntries, Schema]]:
        """Yield what pieces of the rows by (key, time) see; `_PLACE` is their place."""
        schema = Schema([*self._plain_labels(), self.time_column, Id(_KEY), Id(_PLACE), column])
        kind = column.kind_in(schema)
        labels = self._labels(rows, histories)
        for begin, end in _pieces(histories.keys):
            _, keys = np.unique(histories.keys[begin:end], return_inverse=True)
            num_keys = int(keys[-1]) + 1
            batch = Batch(
                ids={_KEY: Ids(keys), _PLACE: Ids(np.arange(begin, end))},
                labels={name: values[begin:end] for name, values in labels.items()},
                time=histories.times[begin:end],
            )
            nothing = StoredEntries(
                np.zeros((num_keys, 1), np.int32),
                np.zeros(num_keys + 1, np.int64),
                np.empty((0, kind.lanes), np.int32),
                np.empty(0, np.int64),
                NEVER,
            )
            row_keys = RowKeys(np.arange(num_keys), keys)
            newest = histories.times[begin:end]  # each row is the newest, since none is late
            seen, _ = see(column, schema, batch, row_keys, nothing, newest, leaves=True)
            yield seen, schema

    def _plain_labels(self) -> list[Label]:
        return [Label(label.name) for label in self.labels]

    def _labels(self, rows: pa.Table, histories: Histories) -> dict[str, NDArray[np.float32]]:
        """Return the labels of rows by place."""
        labels: dict[str, NDArray[np.float32]] = {}
        for label in self.labels:
            values = rows.column(RAW + label.source).combine_chunks()
            try:
                labels[label.name] = numbers.label(label, values)[histories.order]
            except BadRows as bad:
                raise DataError(f"derive: {bad.message}") from None
        return labels


def _basis(column: KeptByKey, schema: Schema) -> tuple[str, str, KeptByKey, Sequence[Label], Time]:
    """Return what `_Kept` has besides its name."""
    assert schema.time is not None
    labels = [label for label in schema.labels if label.name in column.where]
    return schema[column.by].source, schema.time.source, column, labels, schema.time


@dataclass(frozen=True)
class _EarlierValues(_Kept):
    """The values of a raw column in the entries of a history, or the ages of the entries.

    `value`: the raw column; None = ages.
    """

    value: str | None = None

    @classmethod
    def of(cls, column: History, schema: Schema, name: str, part: str) -> _EarlierValues:
        """Return what derives the feature `name`, which has `part` of each entry."""
        source = schema[part]
        value = None if isinstance(source, Time) else source.source
        return cls(name, *_basis(column, schema), value)

    def columns(self) -> Sequence[str]:
        more = [] if self.value is None else [self.value]
        return [*super().columns(), *more]

    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        assert isinstance(self.column, History)
        column = replace(self.column, of=[_PLACE], by=_KEY)
        num_rows = len(histories.order)
        firsts = np.zeros(num_rows, np.int64)
        lengths = np.zeros(num_rows, np.int64)
        begin = 0
        tick = 1
        for seen, schema in self._seen(column, rows, histories):
            ids, _ = column.features_of(seen, schema)
            places = np.asarray(ids[column.name].values)
            piece = slice(begin, begin + len(seen.times))
            lengths[piece] = np.diff(seen.offsets)
            has_entries = lengths[piece] > 0
            firsts[piece][has_entries] = places[seen.offsets[:-1][has_entries]]
            begin = piece.stop
            tick = seen.kind.tick
        leaves = self._leaves(rows, histories)
        # In the order of time, the entries that a row sees stand one behind another.
        begins = offsets_of(leaves)[firsts]
        begins_of_rows = as_numpy(histories.in_rows(begins))
        ends_of_rows = as_numpy(histories.in_rows(begins + lengths))
        if self.value is not None:
            values = rows.column(RAW + self.value).combine_chunks()
            items = values.take(pa.array(histories.order[leaves]))
            return Lists(items, begins_of_rows, ends_of_rows)
        times = as_numpy(histories.in_rows(histories.times))
        entries = pa.array(histories.times[leaves])
        return _Ages(Lists(entries, begins_of_rows, ends_of_rows), times, tick)

    def _leaves(self, rows: pa.Table, histories: Histories) -> NDArray[np.bool_]:
        """Return which rows leave an entry, by place."""
        leaves = np.ones(len(histories.order), bool)
        for name, values in self._labels(rows, histories).items():
            leaves &= values == np.float32(self.column.where[name])
        return leaves


@dataclass(frozen=True)
class _Ages:
    """The ids of the ages of entries; `entries`: their times, `times`: of the rows."""

    entries: Lists
    times: NDArray[np.int64]
    tick: int

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Array:
        lists = self.entries.slice(offset, length)
        lengths = np.diff(as_numpy(lists.offsets))
        shown = np.repeat(self.times[offset : offset + len(lists)], lengths)
        ages = age_ids(shown // self.tick - as_numpy(lists.values) // self.tick, self.tick)
        return pa.LargeListArray.from_arrays(lists.offsets, pa.array(ages))


@dataclass(frozen=True)
class _EarlierCounts(_Kept):
    """The numbers of a count."""

    @classmethod
    def of(cls, column: Count, schema: Schema, name: str) -> _EarlierCounts:
        """Return what derives a count."""
        return cls(name, *_basis(column, schema))

    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        assert isinstance(self.column, Count)
        column = replace(self.column, by=_KEY)
        width = len(column.windows) * len(column.values)
        in_order = np.empty((len(histories.order), width), np.float32)
        begin = 0
        for seen, schema in self._seen(column, rows, histories):
            _, dense = column.features_of(seen, schema)
            end = begin + len(seen.times)
            in_order[begin:end] = dense[column.name].reshape(-1, width)
            begin = end
        in_rows = np.empty_like(in_order)
        in_rows[histories.order] = in_order
        column_values: Sliceable = pa.array(in_rows[:, 0])
        if width > 1:
            offsets = pa.array(np.arange(len(in_rows) + 1) * width)
            numbers_of_all = pa.array(in_rows.reshape(-1))
            column_values = pa.LargeListArray.from_arrays(offsets, numbers_of_all)
        return column_values


def _pieces(keys: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield pieces of whole keys, as (begin, end); `keys`: the first place of each row's key."""
    begin = 0
    while begin < len(keys):
        end = len(keys)
        if begin + _PIECE < end:
            end = int(keys[begin + _PIECE])
            if end <= begin:  # a key with more rows than a piece
                end = int(np.searchsorted(keys, begin, side="right"))
        yield begin, end
        begin = end
