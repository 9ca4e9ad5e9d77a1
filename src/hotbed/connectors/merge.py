# SPDX-License-Identifier: Apache-2.0
"""Merge: the events of several sources in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.first_times import FirstTimes
from hotbed.connectors.position import OPENED, PLACE, TICK, Position
from hotbed.connectors.read_plan import READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.times import EARLIEST, LATEST, YEAR, check_same_unit, to_microseconds
from hotbed.connectors.types import (
    completed,
    conform,
    has_open,
    plain_types,
    usual_rows,
    widened,
    with_columns_of,
)
from hotbed.errors import DecodeError

Faults = Callable[[pa.RecordBatch], Iterator[tuple[pa.Array, str]]]
"""Takes rows of a source; yields which of them are bad, and a message about them."""
PlaceAfter = Callable[[int], dict[str, Any]]
"""Takes a number of events; returns the position after them."""


@dataclass
class Events:
    """Some events in their order.

    Args:
        table: the events.
        keys: the time at which each event is due, rising, in microseconds.
        times: the time at which each event happened, in microseconds.
        before: state of the sources before the events.
        after: state of the sources after the events.
        place: returns the position after a number of these events.
    """

    table: pa.Table
    keys: np.ndarray
    times: np.ndarray
    before: Sequence[Any]
    after: Sequence[Any]
    place: PlaceAfter = field(default=lambda row: {})


@dataclass(frozen=True)
class Merge:
    """Several sources whose events are read in the order of their times, ties by source.

    Attributes:
        where: the source that merges them, for messages.
        sources: the sources.
        time: their column of times.
        unit: its unit.
    """

    where: str
    sources: Sequence[Source]
    time: str
    unit: str

    @property
    def inferred(self) -> pa.Schema:
        """The columns of all sources, with types that hold the values of all."""
        whole = pa.schema([])
        for source in self.sources:
            schema = plain_types(source.inferred)
            whole = with_columns_of(widened(whole, schema), schema)
        return whole

    def schema(self) -> pa.Schema:
        """Return the columns of all sources, with types that hold the values of all."""
        whole = self.inferred
        for source in self.sources:
            if has_open(whole):
                whole = completed(whole, plain_types(source.schema()))
        return whole

    def read(
        self,
        states: Sequence[Mapping[str, Any]],
        plan: ReadPlan,
        target: pa.Schema,
        latest: int,
        faults: Faults | None,
    ) -> Iterator[Events]:
        """Yield runs of events.

        Args:
            states: where each source begins: `before` or `after` of a run.
            plan: how the sources are read.
            target: the columns of the events.
            latest: events with a later time are bad rows: one of them would let all that follow it
                in its source come last.
            faults: finds bad rows; None = only their times are looked at.

        Raises:
            SchemaError: a unit is wrong.
            DataError: some times have a zone and some have none.
        """
        readings: list[_MergeReading] = []
        check = _RowCheck(self.where, latest, faults)
        for number, (source, state) in enumerate(zip(self.sources, states, strict=True)):
            present = source.schema().names
            own_columns = tuple(name for name in target.names if name in present)
            own_plan = replace(plan, columns=own_columns)
            readings.append(_MergeReading(self, number, state, own_plan, check))
        while True:
            for reading in readings:
                reading.fill()
            check.first.check_apart(latest, last=all(reading.ended for reading in readings))
            if not any(len(reading.keys) for reading in readings):
                return
            yield _next_run(self.where, readings, target)


class _RowCheck:
    """What the rows of all sources of a merge are checked against.

    Attributes:
        where: the source that merges them.
        latest: the latest time that an event may have.
        first: the first times of each source. Recorded ones may lie decades apart; a source that
            lies in 1970 beside another one after 1980 was read by a wrong unit.
        zones: of all times.
        faults: finds bad rows.
    """

    def __init__(self, where: str, latest: int, faults: Faults | None) -> None:
        self.where = where
        self.latest = latest
        self.faults = faults
        self.first = FirstTimes(where, most_apart=9 * YEAR, before=YEAR)
        self.zones: set[str] = set()


class _MergeReading:
    """One source of a merge, and its next rows.

    `keys` are the times of these rows, each raised to the latest time before it.
    """

    def __init__(
        self, merge: Merge, number: int, state: Mapping[str, Any], plan: ReadPlan, check: _RowCheck
    ) -> None:
        self.source = merge.sources[number]
        self.number = number
        self.time = merge.time
        self.unit = merge.unit
        self.plan = plan
        self._check = check
        self._position: Position | None = None
        if state.get("source") is not None:
            self._position = Position.from_json(state["source"])
        self._skip = state.get("skip", 0)
        self._row = state.get("row", 0)
        self._has_begun_here = not (self._row or self._skip)
        self._high = state.get("time", EARLIEST)
        self._used = self._skip
        self._size = 0
        self._after = self._position
        self._batches = self.source.read(self._position, READ_ROWS, plan)
        self._ahead = next(self._batches, None)
        self.rows = TICK
        self.indices = np.zeros(0, np.int64)
        self.times = np.zeros(0, np.int64)
        self.keys = np.zeros(0, np.int64)

    @property
    def ended(self) -> bool:
        """Whether no rows follow those at hand."""
        return self._ahead is None

    def state(self) -> dict[str, Any]:
        """Return the state before the rows at hand.

        "source": a position; "skip": the rows used after it; "row": the rows before it; "time": the
        newest time so far.
        """
        source = None
        if self._position is not None:
            source = dict(self._position.state)
        return {"source": source, "skip": self._used, "row": self._row, "time": self._high}

    def fill(self) -> None:
        """Read until rows are at hand or the source ends."""
        while not len(self.keys) and self._ahead is not None:
            self._position = self._after
            self._row = self._row + self._size
            batch, self._after = self._ahead
            self._ahead = next(self._batches, None)
            self._size = batch.num_rows
            if batch is OPENED:
                continue
            self._used = min(self._skip, batch.num_rows)
            self._skip -= self._used
            times = self._times(batch)
            is_valid = times.is_valid().to_numpy(zero_copy_only=False)
            self.indices = np.flatnonzero(is_valid[self._used :]) + self._used
            self.rows = usual_rows(batch).take(pa.array(self.indices))
            micros = times.fill_null(0).to_numpy(zero_copy_only=False)
            self.times = micros[self.indices]
            with_newest = np.concatenate([[self._high], self.times])
            self.keys = np.maximum.accumulate(with_newest)[1:]

    def take(self, count: int) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return the next rows with keys, times and numbers in the source (from 1)."""
        numbers = self._row + self.indices[:count] + 1
        rows = self.rows.slice(0, count)
        keys = self.keys[:count]
        times = self.times[:count]
        self._used = int(self.indices[count - 1]) + 1
        self._high = int(self.keys[count - 1])
        self.rows = self.rows.slice(count)
        self.keys = self.keys[count:]
        self.times = self.times[count:]
        self.indices = self.indices[count:]
        return rows, keys, times, numbers

    def _times(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the times of rows in microseconds; bad rows have null."""
        values = batch.column(self.time)
        check = self._check
        check_same_unit(check.where, self.time, values.type, self.unit, self.plan.time)
        times = to_microseconds(values, self.unit, check.zones)
        if self._has_begun_here:
            kind = f"{check.where}.sources[{self.number}]"
            check.first.add(kind, values, self.unit, times, last=self.ended)
        fault = f"column {self.time!r} does not hold a time of unit {self.unit!r}"
        faults = [(times.is_null(), fault)]
        is_future = pc.fill_null(pc.greater(times, check.latest), False)
        faults.append((is_future, f"column {self.time!r} holds a time ahead of the clock"))
        if check.faults is not None:
            faults += check.faults(batch)
        for is_bad, fault in faults:
            self._report_bad(is_bad, fault)
            times = pc.if_else(is_bad, pa.scalar(None, pa.int64()), times)
        return times

    def _report_bad(self, mask: pa.Array, fault: str) -> None:
        """Count bad rows, or raise DecodeError if the plan has no `skips`."""
        bad = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        if not len(bad):
            return
        assert self._after is not None
        place = self.source.locate(self._after, self._size - int(bad[0]))
        message = f"{place}: {fault}"
        if self.plan.skips is None:
            raise DecodeError(
                f"{message}. Correct it or use on_error='skip'.",
                place.file,
                place.number,
                self.time,
            )
        self.plan.skips.add("value", message, len(bad))


def _next_run(where: str, readings: Sequence[_MergeReading], target: pa.Schema) -> Events:
    """Return the events that no later row of any source can precede."""
    before = [reading.state() for reading in readings]
    filled = [reading for reading in readings if len(reading.keys)]
    # Rows that were not read yet may not be overtaken: the limit is the source whose rows at hand
    # end earliest, the first one of several.
    latest = LATEST
    last = len(readings)
    for reading in filled:
        end = int(reading.keys[-1])
        if not reading.ended and (end, reading.number) < (latest, last):
            latest = end
            last = reading.number
    batches = []
    all_keys = []
    all_times = []
    for reading in filled:
        side: Literal["left", "right"] = "left"
        if reading.number <= last:  # ties are in the order of the sources
            side = "right"
        count = int(np.searchsorted(reading.keys, latest, side))
        if count:
            rows, keys, times, numbers = reading.take(count)
            batch = _as_wanted(
                f"{where}.sources[{reading.number}]", rows, target, reading.number, numbers
            )
            batches.append(batch)
            all_keys.append(keys)
            all_times.append(times)
    keys = np.concatenate(all_keys)
    times = np.concatenate(all_times)
    order = np.argsort(keys, kind="stable")
    table = pa.Table.from_batches(batches)
    after = [reading.state() for reading in readings]
    return Events(table.take(pa.array(order)), keys[order], times[order], before, after)


def _as_wanted(
    where: str, rows: pa.RecordBatch, target: pa.Schema, source: int, numbers: np.ndarray
) -> pa.RecordBatch:
    """Return the rows with exactly the columns of `target`, and with the place of each row."""
    arrays: list[pa.Array] = []
    for column in target:
        if column.name in rows.schema.names:
            values = rows.column(column.name)
            arrays.append(conform(values, column.type, where, column.name))
        else:
            arrays.append(pa.nulls(rows.num_rows, column.type))
    sources = np.full(rows.num_rows, source, np.int32)
    columns = [pa.array(sources), pa.array(numbers)]
    places = pa.StructArray.from_arrays(columns, ["source", "row"])
    return pa.RecordBatch.from_arrays([*arrays, places], names=[*target.names, PLACE])
