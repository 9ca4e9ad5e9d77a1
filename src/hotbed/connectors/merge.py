# SPDX-License-Identifier: Apache-2.0
"""Merge: the events of several sources in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed.connectors.plan import READ_ROWS, ReadPlan
from hotbed.connectors.position import PLACE, TICK, Position
from hotbed.connectors.source import Source
from hotbed.connectors.times import EARLIEST, LATEST, to_microseconds
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
        self, states: Sequence[Mapping[str, Any]], plan: ReadPlan, target: pa.Schema
    ) -> Iterator[Events]:
        """Yield runs of events.

        Args:
            states: where each source begins: `before` or `after` of a run.
            plan: how the sources are read.
            target: the columns of the events.
        """
        readings: list[_MergeReading] = []
        for number, (source, state) in enumerate(zip(self.sources, states, strict=True)):
            present = source.schema().names
            own_columns = tuple(name for name in target.names if name in present)
            reading = _MergeReading(self, number, state, replace(plan, columns=own_columns))
            readings.append(reading)
        while True:
            for reading in readings:
                reading.fill()
            if not any(len(reading.keys) for reading in readings):
                return
            yield _next_run(self.where, readings, target)


class _MergeReading:
    """One source of a merge, and its next rows.

    `keys` are the times of these rows, each raised to the latest time before it.
    """

    def __init__(self, merge: Merge, number: int, state: Mapping[str, Any], plan: ReadPlan) -> None:
        self.source = merge.sources[number]
        self.number = number
        self.time = merge.time
        self.unit = merge.unit
        self.plan = plan
        self.zones = set[str]()
        self._position: Position | None = None
        if state.get("source") is not None:
            self._position = Position.from_json(state["source"])
        self._skip = state.get("skip", 0)
        self._row = state.get("row", 0)
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
            self._used = min(self._skip, batch.num_rows)
            self._skip -= self._used
            times = to_microseconds(batch.column(self.time), self.unit, self.zones)
            if times.null_count:
                self._report_bad(times.is_null().to_numpy(zero_copy_only=False))
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

    def _report_bad(self, bad: np.ndarray) -> None:
        """Count rows whose time cannot be read, or raise DecodeError if the plan has no `skips`."""
        assert self._after is not None
        first = int(np.flatnonzero(bad)[0])
        place = self.source.locate(self._after, self._size - first)
        message = f"{place}: column {self.time!r} does not hold a time of unit {self.unit!r}"
        if self.plan.skips is None:
            raise DecodeError(
                f"{message}. Correct it or use on_error='skip'.",
                place.file,
                place.number,
                self.time,
            )
        self.plan.skips.add("value", message, int(bad.sum()))


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
