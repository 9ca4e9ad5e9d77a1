# SPDX-License-Identifier: Apache-2.0
"""The rule of time: what rows see of a history, and what they leave in it.

docs/design/0023-histories.md has the rule. Training and servers apply it by this code, each to rows
of its own: a `RowReader` reads those of a table by their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotbed import _core
from hotbed.data.arrays import offsets_of
from hotbed.data.batch import Batch
from hotbed.data.columns import distinct_ids
from hotbed.data.histories.columns import (
    EntryKind,
    Int32Array,
    Int64Array,
    KeptByKey,
    SeenEntries,
    single_ids,
)
from hotbed.data.schema import Schema

RowReader: TypeAlias = Callable[[str, Int64Array], NDArray[Any]]
"""(table, ids [n]) -> rows of 4 bytes a lane, [n, dim]; zeros for an id without a row."""


class StoredEntries(NamedTuple):
    """The entries of distinct keys.

    Attributes:
        newest: the newest row of each key, [k, width].
        offsets: where the entries of each key begin, [k + 1].
        entries: of all keys, by arrival, [m, lanes].
    """

    newest: Int32Array
    offsets: Int64Array
    entries: Int32Array


class LeftEntries(NamedTuple):
    """What the rows of a batch leave.

    Attributes:
        keys: distinct, in the order in which they first occur, [k].
        newest: the newest row of each key before, [k, width].
        offsets: where the new entries of each key begin, [k + 1].
        entries: of all keys, [m, lanes].
        dropped: how many entries of each key go, of those stored and then of the new ones, [k].
    """

    keys: Int64Array
    newest: Int32Array
    offsets: Int64Array
    entries: Int32Array
    dropped: Int64Array


def read_stored(
    column: KeptByKey, kind: EntryKind, keys: Int64Array, read: RowReader
) -> StoredEntries:
    """Return the entries that are kept of distinct keys."""
    newest = _lanes(read(column.newest_table, keys))
    counts, ids = _core.older_rows(keys, newest.reshape(-1), kind.lanes)
    older = np.empty(0, np.int32)
    if len(ids):
        older = _lanes(read(column.older_table, ids)).reshape(-1)
    offsets, entries = _core.stored_entries(newest.reshape(-1), counts, older, kind.lanes)
    return StoredEntries(newest, offsets, entries.reshape(-1, kind.lanes))


def see(
    column: KeptByKey, schema: Schema, batch: Batch, read: RowReader, *, leaves: bool
) -> tuple[SeenEntries, LeftEntries | None]:
    """Return what the rows of a batch see of a column, and what they leave.

    Args:
        column: the column.
        schema: that it is of.
        batch: rows in their order, with their times.
        read: reads the rows that are kept.
        leaves: whether rows leave entries. They then need the labels of `where`.
    """
    kind = column.kind_in(schema)
    ids, has_key = single_ids(batch.ids[column.by], column.by)
    keys, numbers = distinct_ids(ids)
    stored = read_stored(column, kind, keys, read)
    times = np.asarray(batch.time) // kind.tick
    leaving_times = times
    num_rows = batch.num_samples
    leaving = np.zeros(num_rows, bool)
    entries = stored.entries
    if leaves:
        if batch.known is not None:
            leaving_times = np.asarray(batch.known) // kind.tick
        leaving = column.leaving(batch, column.matching(batch)) & has_key
        entries = np.concatenate([entries, column.entries_of(batch, leaving_times, kind)])
    rows = np.where(has_key, numbers, -1)
    offsets, places, dropped = _core.see_entries(
        kind.length,
        kind.within,
        kind.keeps,
        rows,
        times,
        leaving_times,
        leaving.astype(np.uint8),
        stored.offsets,
        column.times_of(stored.entries, kind),
    )
    seen = SeenEntries(kind, times, offsets, entries[places])
    if not leaves:
        return seen, None
    order = np.flatnonzero(leaving)
    order = order[np.argsort(numbers[order], kind="stable")]
    counts = np.bincount(numbers[order], minlength=len(keys))
    added = entries[len(stored.entries) + order]
    return seen, LeftEntries(keys, stored.newest, offsets_of(counts), added, dropped)


def _lanes(rows: NDArray[Any]) -> Int32Array:
    return np.ascontiguousarray(rows).view(np.int32)
