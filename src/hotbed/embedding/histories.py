# SPDX-License-Identifier: Apache-2.0
"""Histories: the rows of the columns that a model keeps, in tables of whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotbed import _core
from hotbed.data.batch import Batch, changed
from hotbed.data.histories import (
    LEARNED_UNTIL,
    EntryKind,
    KeptByKey,
    LeftEntries,
    TableReader,
    keys_of,
    newest_times,
    read_stored,
    row_of_time,
    see,
)
from hotbed.errors import ConfigError, DataError, TableError

from . import hashing
from .init import Zeros
from .policy import Ttl
from .rule import Sgd
from .table import Table
from .tier import Tier

if TYPE_CHECKING:
    from hotbed.data.schema import Schema

Int64Array: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = dict[str, NDArray[np.float32]]
_FOR_GOOD = 2**62  # the last time of rows that must not expire
_MOST_SERIALS = 2**32


def history_tables(schema: Schema, tier: Tier | None = None) -> dict[str, Table]:
    """Return new tables for the columns of a schema that a model keeps, by name."""
    tables: dict[str, Table] = {}
    for column in schema.kept:
        assert isinstance(column, KeptByKey)
        kind = column.kind_in(schema)
        widths = {
            column.newest_table: _core.HEAD_LANES + _core.ROW_ENTRIES * kind.lanes,
            column.older_table: _core.ROW_ENTRIES * kind.lanes,
        }
        for name, width in widths.items():
            tables[name] = Table(
                name,
                width,
                rule=Sgd(),
                evict=None if kind.seconds is None else Ttl(seconds=kind.seconds),
                tier=tier,
                init=Zeros(),
                dtype="int32",
                always_default=True,
            )
    return tables


def rows_here(
    tables: Mapping[str, Table], wanted: Mapping[str, Int64Array], *, learns: bool = False
) -> Rows:
    """Return the rows [n, dim] of ids [n] by table; zeros for those that other ranks have.

    `learns`: whether they are read for rows that are then learned.
    """
    rows: Rows = {}
    for name, ids in wanted.items():
        table = tables[name]
        is_here = _are_here(table, ids)
        rows[name] = np.zeros((len(ids), table.dim), np.float32)
        rows[name][is_here] = table.lookup(ids[is_here])
    return rows


class RowsOfTables(Protocol):
    """Returns the rows [n, dim] of ids [n] by table, as `rows_here` does."""

    def __call__(
        self, tables: Mapping[str, Table], wanted: Mapping[str, Int64Array], *, learns: bool = False
    ) -> Rows: ...


class HistoryStore:
    """The columns of a schema that a model keeps, with their tables.

    Args:
        schema: of the batches.
        tables: by name, with those that `make_tables` makes for these columns.

    Attributes:
        columns: that are kept.
        features: the names of what they give a network.
        read_tables: returns the rows of ids by table, as `rows_here` does. On several ranks all
            call it with the same ids, and get the rows of all of them.

    Raises:
        ConfigError: a table is missing, or has another shape.
    """

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        self.schema = schema
        self.columns = [column for column in schema.kept if isinstance(column, KeptByKey)]
        self.features = [feature.name for feature in schema.kept_features]
        self.read_tables: RowsOfTables = rows_here
        self.tables: dict[str, Table] = {}
        for name, wanted in history_tables(schema).items():
            table = tables.get(name)
            if table is None or (table.dim, table.dtype) != (wanted.dim, wanted.dtype):
                raise ConfigError(
                    f"tables: the schema keeps histories in a table {name!r} of whole numbers of "
                    f"dim {wanted.dim}, got {table}. Make it with hb.make_tables(schema, dim)."
                )
            self.tables[name] = table

    @staticmethod
    def of(schema: Schema, tables: Mapping[str, Table]) -> HistoryStore | None:
        """Return the store of a schema with kept columns; None if it has none."""
        return HistoryStore(schema, tables) if schema.kept else None

    def fill(self, batch: Batch, *, leaves: bool) -> Batch:
        """Return a batch, and its previews, with the values that are kept.

        A column that the batch has already stays as it is. Previews leave nothing. On several ranks
        all call it, each with all rows of the batch: each applies the rule to all of them, and
        keeps the entries of the keys that it owns.

        Args:
            batch: rows in their order, with times.
            leaves: whether the rows then leave what later rows see, as rows that are learned do.

        Raises:
            DataError: the batch has no times, keys, or labels of `where`.
            ConfigError: on every rank: they have different rows.
        """
        return self._filled(batch, partial(self._read, learns=leaves), leaves=leaves)

    def foreseen(self, batch: Batch) -> Batch:
        """Return a batch with those values that are kept in this process; it leaves nothing.

        Where several ranks keep them, no other one is asked, so values of their keys are missing.
        """
        return self._filled(batch, lambda wanted: rows_here(self.tables, wanted), leaves=False)

    def _filled(self, batch: Batch, read: TableReader, *, leaves: bool) -> Batch:
        if batch.previews is not None:
            previews = self._filled(batch.previews, read, leaves=False)
            batch = changed(batch, {"previews": previews})
        self._check(batch, leaves=leaves)
        ids = dict(batch.ids)
        dense = dict(batch.dense)
        keys = [keys_of(column, batch) for column in self.columns]
        stored = read_stored(self.columns, self.schema, keys, read)
        for column, row_keys, entries in zip(self.columns, keys, stored, strict=True):
            newest = newest_times(np.asarray(batch.time), entries.learned_until, leaves=leaves)
            seen, left = see(column, self.schema, batch, row_keys, entries, newest, leaves=leaves)
            more_ids, more_dense = column.features_of(seen, self.schema)
            ids = {**more_ids, **ids}
            dense = {**more_dense, **dense}
            if left is not None and len(left.keys):
                self._add(column, seen.kind, left)
            if leaves and seen.kind.seconds is not None:
                self._set_learned_until(column, entries.learned_until, newest)
        return changed(batch, {"ids": ids, "dense": dense})

    def _check(self, batch: Batch, *, leaves: bool) -> None:
        """Raise DataError if a batch lacks what the columns are kept by."""
        missing = {column.by for column in self.columns} - batch.ids.keys()
        if leaves:
            missing |= {label for column in self.columns for label in column.where}
            missing -= batch.labels.keys()
        if batch.time is None and self.schema.time is not None:
            missing.add(self.schema.time.name)
        if missing:
            raise DataError(
                "histories: a batch has the time, keys and labels of its rows, got none of "
                f"{min(missing)!r}. Encode it with hb.Encoder(schema)."
            )

    def older_ids(
        self, column: KeptByKey, keys: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many older rows each key has, [k], and the ids of these rows, key by key."""
        newest = self.tables[column.newest_table].lookup(keys).view(np.int32)
        counts, ids = _core.older_rows(keys, newest.reshape(-1), column.kind_in(self.schema).lanes)
        return counts, ids

    def _read(self, wanted: Mapping[str, Int64Array], *, learns: bool) -> Rows:
        return self.read_tables(self.tables, wanted, learns=learns)

    def _add(self, column: KeptByKey, kind: EntryKind, left: LeftEntries) -> None:
        """Add the entries that rows left to the rows of their keys."""
        newest_table = self.tables[column.newest_table]
        older_table = self.tables[column.older_table]
        newest = left.stored.newest.copy()
        moved, numbers, rows, gone, gone_numbers = _core.add_entries(
            newest.reshape(-1),
            kind.lanes,
            left.offsets,
            left.entries.reshape(-1),
            _dropped_places(left),
            sums=kind.sums,
        )
        partitions = hashing.partition(left.keys).astype(np.int64)
        new = np.unique(moved[newest[moved, 0] == 0])
        if len(new):
            newest[new, 0] = self._serials(older_table, partitions[new])
        serials = newest[:, 0].view(np.uint32).astype(np.int64)
        if len(moved):
            ids = _core.older_ids(partitions[moved], serials[moved], numbers)
            rows = rows.reshape(-1, older_table.dim)
            last = column.times_of(rows.reshape(-1, kind.lanes), kind).reshape(len(rows), -1)
            _write(older_table, ids, rows, last.max(1) * kind.tick)
        is_changed = np.diff(left.offsets) > 0
        # The last time of all entries: a key's newest row never expires before an older one.
        last = np.maximum(left.last, -_FOR_GOOD // kind.tick) * kind.tick
        _write(newest_table, left.keys[is_changed], newest[is_changed], last[is_changed])
        if len(gone):
            older_ids = _core.older_ids(partitions[gone], serials[gone], gone_numbers)
            older_table.native.remove(older_ids[_are_here(older_table, older_ids)])

    def _set_learned_until(self, column: KeptByKey, before: int, newest: NDArray[np.int64]) -> None:
        """Keep the newest time of the rows that were learned, in microseconds."""
        if len(newest) and newest[-1] > before:
            table = self.tables[column.older_table]
            row = row_of_time(int(newest[-1]), table.dim)
            _write(table, np.array([LEARNED_UNTIL]), row[None], np.array([_FOR_GOOD]))

    def _serials(self, table: Table, partitions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return new serial numbers of keys in these partitions.

        The last one of a partition lies in a row of its own, under the serial number 0.
        """
        owners, places = np.unique(partitions, return_inverse=True)
        zeros = np.zeros(len(owners), np.int64)
        ids = _core.older_ids(owners, zeros, zeros)
        rows = self._read({table.name: ids}, learns=True)[table.name].view(np.int32)
        before = rows[:, 0].view(np.uint32).astype(np.int64)
        order = np.argsort(places, kind="stable")
        counts = np.bincount(places)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        serials = np.empty(len(partitions), np.int64)
        serials[order] = before[places[order]] + 1 + np.arange(len(order)) - firsts
        if serials.max() >= _MOST_SERIALS:
            raise TableError(
                f"table {table.name!r}: a partition has had {_MOST_SERIALS:,} long histories, got "
                "one more. Begin a new state."
            )
        rows[:, 0] = (before + counts).astype(np.uint32).view(np.int32)
        _write(table, ids, rows, np.full(len(ids), _FOR_GOOD))
        return serials.astype(np.uint32).view(np.int32)


def _dropped_places(left: LeftEntries) -> NDArray[np.int64]:
    """Return how many entries of each key go, with those before them whose rows have expired."""
    stored = left.stored
    heads = stored.newest[:, : _core.HEAD_LANES].view(np.uint32)
    num_held = (heads[:, 2] - heads[:, 1]).astype(np.int64)
    num_stored = np.diff(stored.offsets)
    places = np.append(stored.places, 0)
    first_to_stay = np.minimum(stored.offsets[:-1] + left.dropped, len(stored.places))
    dropped: NDArray[np.int64] = np.where(
        left.dropped < num_stored, places[first_to_stay], num_held + left.dropped - num_stored
    )
    return dropped


def _are_here(table: Table, ids: Int64Array) -> NDArray[np.bool_]:
    """Return which ids have their rows in this process, [n]."""
    if table.owned is None:
        return np.ones(len(ids), bool)
    are_here: NDArray[np.bool_] = table.owned[hashing.partition(ids)]
    return are_here


def _write(
    table: Table, ids: NDArray[np.int64], rows: NDArray[np.int32], last: NDArray[np.int64]
) -> None:
    """Write rows [n, dim] of whole numbers, last seen at these times in microseconds.

    On several ranks each writes those that it owns.
    """
    is_here = _are_here(table, ids)
    if not is_here.any():
        return
    values = rows[is_here].reshape(-1).view(np.float32)
    columns: dict[str, Any] = {"id": ids[is_here], "value": values}
    if table.keeps_times:
        columns["last_seen"] = last[is_here]
    table.native.load_rows(columns)
