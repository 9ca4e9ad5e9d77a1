# SPDX-License-Identifier: Apache-2.0
"""Histories and counts of requests: read from the rows of a version, by the keys of a request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.batch import Batch, Ids
from hotbed.data.histories import KeptByKey, keys_of, newest_times, read_stored, see
from hotbed.data.histories.columns import MICROS
from hotbed.data.schema import Schema
from hotbed.errors import DataError
from hotbed.frozen import IdArray, RowArray
from hotbed.serving.request import ScoreRequest
from hotbed.serving.rows import FeatureSpec, LookupCall

KeptValues: TypeAlias = Mapping[str, Ids | RowArray]
"""By feature, what the model kept: of each candidate, or one value that holds for all."""


def kept_tables(schema: Schema) -> list[FeatureSpec]:
    """Return the tables of a schema's histories and counts as features of a lookup."""
    tables: list[FeatureSpec] = []
    for column in schema.kept:
        assert isinstance(column, KeptByKey)
        for table in (column.newest_table, column.older_table):
            tables.append((table, table, "none"))
    return tables


class KeptColumns:
    """The columns of a model that no request has to bring. Safe to call from several threads.

    Args:
        schema: of the model.
        lookup: looks up the features of `kept_tables`.
    """

    def __init__(self, schema: Schema, lookup: LookupCall) -> None:
        self._schema = schema
        self._lookup = lookup
        self._tables = [table for table, _, _ in kept_tables(schema)]
        self._columns = [column for column in schema.kept if isinstance(column, KeptByKey)]
        self._features = dict[str, list[str]]()
        for column in self._columns:
            features = (*column.ids_in(schema), *column.dense_in(schema))
            self._features[column.name] = [feature.name for feature in features]

    def fill(self, request: ScoreRequest, asked: float) -> tuple[ScoreRequest, KeptValues, int]:
        """Return a request with the columns that it lacks, as they are at its time, or now.

        The rows of all columns are read together, each row once.

        Args:
            request: may bring some of the columns; these stay as they are.
            asked: when it was made, for the deadline of a cache; a `time.monotonic()`.

        Returns:
            The request, the columns that it lacked, and how many rows did not arrive in time.

        Raises:
            DataError: the request brings a part of the features of a column.
            RowShapeError: a candidate has several keys.
        """
        columns = [column for column in self._columns if self._is_missing(column, request)]
        batches = [_rows_of(column, request) for column in columns]
        keys = [keys_of(column, rows) for column, rows in zip(columns, batches, strict=True)]
        num_late = 0

        def read(wanted: Mapping[str, IdArray]) -> Mapping[str, RowArray]:
            nonlocal num_late
            no_ids = np.empty(0, np.int64)
            ids = {}
            for table in self._tables:
                values = wanted.get(table, no_ids)
                ids[table] = Ids(values, np.array([0, len(values)]))
            answer = self._lookup(ids, 1, asked)
            num_late += answer.late
            return dict(zip(self._tables, answer.sequences, strict=True))

        stored = read_stored(columns, self._schema, keys, read)
        new_ids = dict[str, Ids]()
        new_dense = dict[str, RowArray]()
        for column, rows, row_keys, entries in zip(columns, batches, keys, stored, strict=True):
            newest = newest_times(np.asarray(rows.time), entries.learned_until, leaves=False)
            seen, _ = see(column, self._schema, rows, row_keys, entries, newest, leaves=False)
            ids, dense = column.features_of(seen, self._schema)
            new_ids.update(ids)
            new_dense.update(dense)
        filled = replace(
            request, ids={**request.ids, **new_ids}, dense={**request.dense, **new_dense}
        )
        return filled, {**new_ids, **new_dense}, num_late

    def _is_missing(self, column: KeptByKey, request: ScoreRequest) -> bool:
        """Return whether a request lacks a column; DataError if it has a part of its features."""
        features = self._features[column.name]
        brought = [name for name in features if name in request.ids or name in request.dense]
        if brought and len(brought) < len(features):
            raise DataError(
                f"{column.name!r}: a request brings all of {features} or none, got {brought}. Send "
                "the others, too, or leave all to the model."
            )
        return not brought


def kept_part(kept: KeptValues, begin: int, end: int) -> KeptValues:
    """Return the values of the candidates from `begin` to `end`, as one if they are all alike."""
    return {name: _as_one(values[begin:end]) for name, values in kept.items()}


def kept_columns(kept: KeptValues) -> dict[str, NDArray[Any] | pa.Array]:
    """Return values as raw columns: those with which a request gets the same scores again."""
    columns: dict[str, NDArray[Any] | pa.Array] = {}
    for name, values in kept.items():
        if isinstance(values, Ids):
            offsets = pa.array(values.with_offsets().offsets)
            columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(values.values))
        else:
            columns[name] = values
    return columns


def _as_one(values: Ids | RowArray) -> Ids | RowArray:
    """Return the first value alone if all others are equal to it."""
    if len(values) < 2:
        return values
    if not isinstance(values, Ids):
        is_alike = bool((values == values[:1]).all())
        return values[:1] if is_alike else values
    lengths = values.lengths()
    if (lengths != lengths[0]).any():
        return values
    lists = np.asarray(values.values).reshape(len(values), lengths[0])
    return values[:1] if (lists == lists[:1]).all() else values


def _rows_of(column: KeptByKey, request: ScoreRequest) -> Batch:
    """Return the keys and times of the candidates: one row if they are the same for all."""
    keys = request.ids[column.by]
    if not isinstance(keys, Ids):
        keys = Ids(keys)
    times = request.time
    if times is None:
        times = np.array([int(time.time() * MICROS)])
    num_rows = max(len(keys), len(times))
    if len(keys) < num_rows:
        keys = keys.take(np.zeros(num_rows, np.int64))
    if len(times) < num_rows:
        times = np.repeat(times, num_rows)
    return Batch(ids={column.by: keys}, time=times, num_samples=num_rows)
