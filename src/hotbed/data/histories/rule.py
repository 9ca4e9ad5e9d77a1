# SPDX-License-Identifier: Apache-2.0
"""The rule of time: what rows see of a history, and what they leave in it.

docs/design/0023-histories.md has the rule. Training and servers apply it by this code, each to rows
of its own: a `TableReader` reads those of tables by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotbed import _core
from hotbed.data.arrays import offsets_of
from hotbed.data.batch import Batch
from hotbed.data.columns import distinct_ids
from hotbed.data.histories.columns import (
    NO_LIMIT,
    Int32Array,
    Int64Array,
    KeptByKey,
    SeenEntries,
    single_ids,
)
from hotbed.data.schema import Schema

TableReader: TypeAlias = Callable[[Mapping[str, Int64Array]], Mapping[str, NDArray[Any]]]
"""Ids [n] by table -> their rows of 4 bytes a lane, [n, dim]; zeros for an id without a row."""
NEVER = -(2**63)
"""The newest time where no row was learned."""
LEARNED_UNTIL = int(_core.older_ids(*np.array([[0], [0], [1]], np.int64))[0])
"""The id of the row of older entries that holds the newest time of a row that was learned."""


class RowKeys(NamedTuple):
    """The keys of the rows of a batch.

    Attributes:
        keys: distinct, in the order in which they first occur, [k].
        numbers: which of them each row has, -1 = none, [n].
    """

    keys: Int64Array
    numbers: Int64Array


class StoredEntries(NamedTuple):
    """The entries of distinct keys.

    Attributes:
        newest: the newest row of each key, [k, width].
        offsets: where the entries of each key begin, [k + 1].
        entries: of all keys, by arrival, [m, lanes].
        places: of each entry among those of its key that were not dropped, with those whose rows
            have expired, [m].
        learned_until: the newest time of a row that was learned, in microseconds. `NEVER` where
            entries of any age are seen, as it does not count there.
    """

    newest: Int32Array
    offsets: Int64Array
    entries: Int32Array
    places: Int64Array
    learned_until: int


class LeftEntries(NamedTuple):
    """What the rows of a batch leave.

    Attributes:
        keys: distinct, in the order in which they first occur, [k].
        stored: what was kept of each key before.
        offsets: where the new entries of each key begin, [k + 1].
        entries: of all keys, [m, lanes].
        dropped: how many entries of each key go, of those stored and then of the new ones, [k].
        last: the newest time of the entries of each key that stay, in units; `NEVER` = none, [k].
    """

    keys: Int64Array
    stored: StoredEntries
    offsets: Int64Array
    entries: Int32Array
    dropped: Int64Array
    last: Int64Array


def keys_of(column: KeptByKey, batch: Batch) -> RowKeys:
    """Return the keys of the rows of a batch."""
    ids, has_key = single_ids(batch.ids[column.by], column.by)
    keys, numbers = distinct_ids(ids)
    return RowKeys(keys, np.where(has_key, numbers, -1))


def read_stored(
    columns: Sequence[KeptByKey], schema: Schema, keys: Sequence[RowKeys], read: TableReader
) -> list[StoredEntries]:
    """Return the entries that are kept of the keys of each column. Rows are read twice at most."""
    kinds = [column.kind_in(schema) for column in columns]
    wanted = {column.newest_table: each.keys for column, each in zip(columns, keys, strict=True)}
    newest = {table: _lanes(rows) for table, rows in read(wanted).items()}
    counts: list[Int64Array] = []
    older_ids: dict[str, Int64Array] = {}
    for column, kind, each in zip(columns, kinds, keys, strict=True):
        rows = newest[column.newest_table].reshape(-1)
        num_older, ids = _core.older_rows(each.keys, rows, kind.lanes)
        counts.append(num_older)
        if kind.keeps != NO_LIMIT:
            ids = np.append(ids, LEARNED_UNTIL)
        if len(ids):
            older_ids[column.older_table] = ids
    older = read(older_ids) if older_ids else {}
    stored: list[StoredEntries] = []
    for column, kind, num_older in zip(columns, kinds, counts, strict=True):
        rows = newest[column.newest_table]
        older_rows = np.empty((0, _core.ROW_ENTRIES * kind.lanes), np.int32)
        learned_until = NEVER
        if column.older_table in older:
            older_rows = _lanes(older[column.older_table])
        if kind.keeps != NO_LIMIT:
            learned_until = time_in_row(older_rows[-1])
            older_rows = older_rows[:-1]
        offsets, entries, places = _core.stored_entries(
            rows.reshape(-1), num_older, older_rows.reshape(-1), kind.lanes
        )
        entries = entries.reshape(-1, kind.lanes)
        stored.append(StoredEntries(rows, offsets, entries, places, learned_until))
    return stored


def newest_times(times: Int64Array, learned_until: int, *, leaves: bool) -> Int64Array:
    """Return the newest time of each row and of those that were learned before it, [n].

    Args:
        times: of rows in their order, in microseconds.
        learned_until: the newest time of a row that was learned before these.
        leaves: whether these rows are learned.
    """
    newest = np.maximum(times, learned_until)
    return np.maximum.accumulate(newest) if leaves else newest


def row_of_time(time: int, width: int) -> Int32Array:
    """Return a row [width] of the older entries that holds a time, in microseconds."""
    row = np.zeros(width, np.int32)
    row[:2].view(np.int64)[0] = time ^ NEVER
    return row


def time_in_row(row: Int32Array) -> int:
    """Return the time that a row holds; `NEVER` of a row of zeros."""
    return int(row[:2].copy().view(np.int64)[0]) ^ NEVER


def see(
    column: KeptByKey,
    schema: Schema,
    batch: Batch,
    keys: RowKeys,
    stored: StoredEntries,
    newest: Int64Array,
    *,
    leaves: bool,
) -> tuple[SeenEntries, LeftEntries | None]:
    """Return what the rows of a batch see of a column, and what they leave.

    Args:
        column: the column.
        schema: that it is of.
        batch: rows in their order, with their times.
        keys: of the rows.
        stored: the entries of these keys that are kept.
        newest: the `newest_times` of the rows.
        leaves: whether rows leave entries. They then need the labels of `where`.
    """
    kind = column.kind_in(schema)
    times = np.asarray(batch.time) // kind.tick
    leaving_times = times
    num_rows = batch.num_samples
    leaving = np.zeros(num_rows, bool)
    entries = stored.entries
    if leaves:
        if batch.known is not None:
            leaving_times = np.asarray(batch.known) // kind.tick
        leaving = column.leaving(batch, column.matching(batch)) & (keys.numbers >= 0)
        entries = np.concatenate([entries, column.entries_of(batch, leaving_times, kind)])
    offsets, places, dropped, last = _core.see_entries(
        kind.length,
        kind.within,
        kind.keeps,
        keys.numbers,
        times,
        newest // kind.tick,
        leaving_times,
        leaving.astype(np.uint8),
        stored.offsets,
        column.times_of(stored.entries, kind),
    )
    seen = SeenEntries(kind, times, offsets, entries[places])
    if not leaves:
        return seen, None
    order = np.flatnonzero(leaving)
    order = order[np.argsort(keys.numbers[order], kind="stable")]
    counts = np.bincount(keys.numbers[order], minlength=len(keys.keys))
    added = entries[len(stored.entries) + order]
    return seen, LeftEntries(keys.keys, stored, offsets_of(counts), added, dropped, last)


def _lanes(rows: NDArray[Any]) -> Int32Array:
    return np.ascontiguousarray(rows).view(np.int32)
