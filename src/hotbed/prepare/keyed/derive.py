# SPDX-License-Identifier: Apache-2.0
"""Derived columns: raw columns whose values depend on other rows of the same key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import checks
from hotbed.data.arrays import as_numpy, nulls_of, offsets_of
from hotbed.data.columns import Columns, ids_of
from hotbed.data.transforms.times import readable_times
from hotbed.embedding.hashing import GOLDEN, mix64
from hotbed.errors import SchemaError
from hotbed.prepare.shuffle import Sliceable

RAW = "raw "
"""Before the names of raw columns in a bucket, so that they differ from `key`, `time`, `row`."""


class Derivation(ABC):
    """Base of the derived columns.

    `name`: of the new raw column. `by`: the key column. `time`: the raw column that orders the rows
    of a key; text that is a number or a date is parsed as the schema's `Time` is.
    """

    name: str
    by: str
    time: str

    @property
    @abstractmethod
    def description(self) -> str:
        """What the column holds, for those who compute it for a server."""

    def inputs(self) -> Sequence[str]:
        """Return the raw columns that it reads, `by` and `time` included."""
        return (self.by, self.time, *self.columns())

    def columns(self) -> Sequence[str]:
        """Return the raw columns whose values go into the derived ones."""
        return ()

    @abstractmethod
    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        """Return the value of each row of a bucket.

        Args:
            rows: columns `key`, `time` (microseconds) and, after `RAW`, the raw `columns`.
            histories: the same rows in the order of time.
        """


@dataclass(frozen=True)
class TimeDifference(Derivation):
    """Seconds since the latest strictly earlier row of the same key; null for the first.

    Example: `TimeDifference("since_last", by="user", time="timestamp")`
    """

    name: str
    by: str
    time: str

    @property
    def description(self) -> str:
        return (
            f"seconds since the latest row before of the same {self.by!r}, ordered by "
            f"{self.time!r}; missing for the first"
        )

    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        begins = histories.moments
        before = np.maximum(begins - 1, 0)
        seconds = (histories.times - histories.times[before]) / 1e6
        return histories.in_rows(seconds, begins == histories.keys)


@dataclass(frozen=True)
class Session(Derivation):
    """The session of a row: rows of a key with at most `gap_seconds` between two of them.

    `gives`: "id" (one integer for each session), "position" (the number of strictly earlier rows of
    the session) or "seconds" (since its first row).

    Example: `Session("session", by="user", time="timestamp", gap_seconds=1800)`
    """

    name: str
    by: str
    time: str
    gap_seconds: float = 1800.0
    gives: Literal["id", "position", "seconds"] = "id"

    def __post_init__(self) -> None:
        checks.above("session.gap_seconds", self.gap_seconds, 0)
        checks.one_of("session.gives", self.gives, ("id", "position", "seconds"))

    @property
    def description(self) -> str:
        what = {
            "id": "an integer of the session",
            "position": "the number of rows before in the session",
            "seconds": "seconds since the first row of the session",
        }
        return (
            f"{what[self.gives]}: rows of the same {self.by!r}, ordered by {self.time!r}, with at "
            f"most {self.gap_seconds:g} seconds between two of them"
        )

    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        times = histories.times
        numbers = np.arange(len(times))
        is_first = numbers == histories.keys
        is_first[1:] |= np.diff(times) > self.gap_seconds * 1e6
        begins = np.maximum.accumulate(np.where(is_first, numbers, 0))
        if self.gives == "position":
            return histories.in_rows(histories.moments - begins)
        if self.gives == "seconds":
            return histories.in_rows((times - times[begins]) / 1e6)
        keys = as_numpy(rows.column("key").combine_chunks())[histories.order]
        steps = times[begins].view(np.uint64) * np.uint64(GOLDEN)
        ids = mix64(mix64(keys) + steps)
        return histories.in_rows(ids.view(np.int64))


@dataclass(frozen=True)
class Previous(Derivation):
    """The last `length` values of `column` in strictly earlier rows of the key, oldest first.

    Example: `Previous("history", by="user", time="timestamp", column="item", length=20)`
    """

    name: str
    by: str
    time: str
    column: str
    length: int = 20

    def __post_init__(self) -> None:
        checks.at_least("previous.length", self.length, 1)

    @property
    def description(self) -> str:
        return (
            f"the last {self.length} values of {self.column!r} in rows before of the same "
            f"{self.by!r}, ordered by {self.time!r}, oldest first"
        )

    def columns(self) -> Sequence[str]:
        return (self.column,)

    def values(self, rows: pa.Table, histories: Histories) -> Sliceable:
        name = RAW + self.column
        values = rows.column(name).combine_chunks()
        order = _order(rows.select(["key", "time", name]))
        is_present = ~nulls_of(values)[order]
        num_before = offsets_of(is_present)
        ends = num_before[histories.moments]
        begins = np.maximum(num_before[histories.keys], ends - self.length)
        return Lists(
            values.take(pa.array(order[is_present])),
            as_numpy(histories.in_rows(begins)),
            as_numpy(histories.in_rows(ends)),
        )


@dataclass(frozen=True)
class Lists:
    """Lists of neighbouring `items`, from `begins` to `ends`; made when they are asked for."""

    items: pa.Array
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Array:
        stop = len(self.begins)
        if length is not None:
            stop = min(stop, offset + length)
        begins = self.begins[offset:stop]
        offsets = offsets_of(self.ends[offset:stop] - begins)
        shifts = np.repeat(begins - offsets[:-1], np.diff(offsets))
        places = np.arange(offsets[-1]) + shifts
        items = self.items.take(pa.array(places))
        return pa.LargeListArray.from_arrays(pa.array(offsets), items)


@dataclass(frozen=True)
class Histories:
    """The rows of a bucket in the order of (key, time).

    `order`: the row that stands at each place, int64 [n]. `times`: by place. `keys`, `moments`: by
    place, the first place with the same key, and with the same key and time.
    """

    order: NDArray[np.int64]
    times: NDArray[np.int64]
    keys: NDArray[np.int64]
    moments: NDArray[np.int64]

    @classmethod
    def of(cls, rows: pa.Table) -> Histories:
        """Return the histories of the columns `key` and `time`."""
        order = _order(rows.select(["key", "time"]))
        keys = as_numpy(rows.column("key").combine_chunks())[order]
        times = as_numpy(rows.column("time").combine_chunks())[order]
        first_of_key = _begins(keys)
        return cls(order, times, _places(first_of_key), _places(first_of_key | _begins(times)))

    def in_rows(
        self, values: NDArray[np.generic], missing: NDArray[np.bool_] | None = None
    ) -> Sliceable:
        """Return values by place as a column of the bucket's rows; null where `missing`."""
        in_rows = np.empty_like(values)
        in_rows[self.order] = values
        mask = np.zeros(len(values), bool)
        if missing is not None:
            mask[self.order] = missing
        column: Sliceable = pa.array(in_rows, mask=mask)
        return column


def _order(columns: pa.Table) -> NDArray[np.int64]:
    """Return the numbers of the rows, sorted by all columns."""
    frame = pl.DataFrame(pl.from_arrow(columns)).with_row_index("\0number")
    in_order = frame.sort(columns.column_names, maintain_order=True)
    return in_order["\0number"].to_numpy().astype(np.int64)


def _begins(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return where a value differs from the one before it; true for the first."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def _places(begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each place the latest place at or before it where `begins` is true."""
    places = np.arange(len(begins))
    return np.maximum.accumulate(np.where(begins, places, 0))


def rows_with_key(
    rows: pa.RecordBatch, derivations: Sequence[Derivation], unit: str
) -> tuple[NDArray[np.int64], pa.RecordBatch]:
    """Return the keys of a chunk's rows that have key and time, and what derivations read of them.

    Args:
        rows: raw columns of a chunk.
        derivations: derived columns of one key and one time.
        unit: of the times, as in `Time`.

    Raises:
        SchemaError: a column cannot be a key or a time, or holds lists.
        BadRows: rows hold something else than a time.
    """
    first = derivations[0]
    context = Columns(rows)
    by = single_values(context.column(first.by), first.by)
    time = single_values(context.column(first.time), first.time)
    times = readable_times(time, unit)
    numbers = np.flatnonzero(~(nulls_of(by) | nulls_of(times)))
    places = pa.array(numbers)
    keys = ids_of(by.take(places), first.by)
    columns = {"key": keys, "time": times.take(places), "row": numbers.astype(np.uint32)}
    for derivation in derivations:
        for name in derivation.columns():
            values = single_values(context.column(name), name)
            columns[RAW + name] = values.take(places)
    return keys, pa.RecordBatch.from_pydict(columns)


def single_values(values: pa.Array, name: str) -> pa.Array:
    """Return single values without a dictionary, text with wide offsets."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_nested(values.type):
        raise SchemaError(
            f"derive: expected single values, got {values.type} for column {name!r}. Use another "
            "column."
        )
    if pa.types.is_string(values.type):
        return values.cast(pa.large_string())
    return values
