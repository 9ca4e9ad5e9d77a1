# SPDX-License-Identifier: Apache-2.0
"""Replay: recorded events of several sources in the order of their times."""

from __future__ import annotations

import time as clocks
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.late_labels import Events, LabelJoin, LateLabels
from hotbed.connectors.live import Live
from hotbed.connectors.plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.position import PLACE, TICK, Batches, Position
from hotbed.connectors.source import Source, not_endless
from hotbed.connectors.times import EARLIEST, LATEST, to_microseconds
from hotbed.connectors.types import (
    completed,
    conform,
    has_open,
    is_number,
    plain_types,
    usual_rows,
    widened,
    with_columns_of,
)
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError


@dataclass(frozen=True)
class Replay(Source):
    """Recorded events of several sources in the order of their times.

    Ties are in the order of the sources. A source whose rows are not in order of time keeps its own
    order; its events count as late. Columns that a source lacks are null.

    Args:
        sources: the sources.
        time: their column of times.
        unit: its unit, as in a schema ("s", "ms", "us", "ns", "iso" or a format).
        speed: None = as fast as possible; 60 = a minute of data per second, as a stream that ends.
        late: labels from later events.

    Raises:
        SchemaError: a column is absent, or the types of two sources do not go together.
        DataError: a time cannot be read.

    Example: `hb.sources.Replay([views, purchases], time="event_time", unit="iso", speed=600)`
    """

    sources: Sequence[Source]
    time: str
    unit: str = "us"
    speed: float | None = None
    late: LateLabels | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("replay.sources: must not be empty, got []. Give one or more.")
        checks.above("replay.speed", self.speed, 0)
        for source in self.sources:
            not_endless(source, "a replay")

    @property
    def endless(self) -> bool:
        return self.speed is not None

    def schema(self) -> pa.Schema:
        whole = self._whole()
        if missing := [name for name in self._own_columns() if name not in whole.names]:
            raise SchemaError(
                f"replay: columns {missing} are absent, got {whole.names}. Correct them."
            )
        if self.late is None:
            return whole
        self.late.check_types(whole)
        label = self.late.label
        others = [column for column in whole if column.name != label]
        return pa.schema([*others, (label, pa.float64())])

    def _whole(self) -> pa.Schema:
        """Return the columns of all sources, with types that hold the values of all."""
        whole = pa.schema([])
        for source in self.sources:
            schema = plain_types(source.inferred)
            whole = with_columns_of(widened(whole, schema, mixed_numbers=True), schema)
        for source in self.sources:
            if has_open(whole):
                whole = completed(whole, plain_types(source.schema()))
        return whole

    def _own_columns(self) -> list[str]:
        """Return the columns that order and label the events."""
        if self.late is None:
            return [self.time]
        return [self.time, *self.late.on, self.late.column]

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        schema = self.schema()
        columns = plan.wanted(schema.names)
        begin: list[Any] = [{} for _ in self.sources]
        state: Mapping[str, Any] = {"at": begin, "emitted": 0}
        if position:
            position.require("Replay", self)
            state = position.state
            if len(state["at"]) != len(self.sources):
                raise DataError(
                    f"position: it lies in a replay of {len(state['at'])} sources, got "
                    f"{len(self.sources)}. Give the sources that it was written for."
                )
        runs = _merged(self, state["at"], plan, columns)
        if self.late is None:
            labelled = _plain(runs)
        else:
            labelled = map(LabelJoin(self.late), runs)
        if self.speed is None:
            pace = None
        else:
            pace = _Pace(self.speed, plan.live or Live())
        skip = int(state["emitted"])
        for run in labelled:
            row = min(skip, len(run.keys))
            skip = max(0, skip - len(run.keys))
            while row < len(run.keys):
                count = min(batch_rows, len(run.keys) - row)
                if pace is not None:
                    count = pace.due(run.keys[row : row + count])
                    if not count:
                        yield TICK, pace.position(run, row)
                        continue
                part = run.table.slice(row, count).combine_chunks()
                row += count
                if pace is None:
                    (batch,) = part.select(columns).to_batches()
                    yield batch, Position(run.place(row))
                else:
                    (batch,) = part.select([*columns, PLACE]).to_batches()
                    yield batch, pace.position(run, row)


class _ReplayReading:
    """One source of a replay, and its next rows.

    `keys` are the times of these rows, each raised to the latest time before it.
    """

    def __init__(
        self, replay: Replay, number: int, state: Mapping[str, Any], plan: ReadPlan
    ) -> None:
        self.source = replay.sources[number]
        self.number = number
        self.time = replay.time
        self.unit = replay.unit
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


def _merged(
    replay: Replay, states: Sequence[Mapping[str, Any]], plan: ReadPlan, columns: list[str]
) -> Iterator[Events]:
    """Yield the events of all sources by time, ties by source."""
    target, types = _target(replay, plan, columns)
    readings: list[_ReplayReading] = []
    for number, (source, state) in enumerate(zip(replay.sources, states, strict=True)):
        present = source.schema().names
        own_columns = tuple(name for name in target.names if name in present)
        own_plan = replace(plan, columns=own_columns, types=types)
        reading = _ReplayReading(replay, number, state, own_plan)
        readings.append(reading)
    while True:
        for reading in readings:
            reading.fill()
        if not any(len(reading.keys) for reading in readings):
            return
        yield _next_run(readings, target)


def _target(
    replay: Replay, plan: ReadPlan, columns: list[str]
) -> tuple[pa.Schema, dict[str, pa.DataType]]:
    """Return the columns to read of all sources, and the types that the plan gives some of them."""
    schema = replay._whole()
    replay_columns = replay._own_columns()
    needed = dict.fromkeys([*columns, *replay_columns])
    if replay.late is not None and replay.late.label not in replay_columns:
        needed.pop(replay.late.label, None)
    types: dict[str, pa.DataType] = {}
    kinds: dict[str, pa.DataType] = {}
    for name in needed:
        kind = schema.field(name).type
        if name in plan.types and name not in replay_columns and is_number(kind):
            kind = plan.types[name]
            types[name] = kind
        kinds[name] = kind
    return pa.schema(list(kinds.items())), types


def _next_run(readings: Sequence[_ReplayReading], target: pa.Schema) -> Events:
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
            batch = _as_wanted(rows, target, reading.number, numbers)
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
    rows: pa.RecordBatch, target: pa.Schema, source: int, numbers: np.ndarray
) -> pa.RecordBatch:
    """Return the rows with exactly the columns of `target`, and with the place of each row."""
    arrays: list[pa.Array] = []
    for column in target:
        if column.name in rows.schema.names:
            values = rows.column(column.name)
            arrays.append(conform(values, column.type, f"replay.sources[{source}]", column.name))
        else:
            arrays.append(pa.nulls(rows.num_rows, column.type))
    sources = np.full(rows.num_rows, source, np.int32)
    columns = [pa.array(sources), pa.array(numbers)]
    places = pa.StructArray.from_arrays(columns, ["source", "row"])
    return pa.RecordBatch.from_arrays([*arrays, places], names=[*target.names, PLACE])


def _plain(runs: Iterator[Events]) -> Iterator[Events]:
    """Yield runs unchanged but for their positions."""
    for run in runs:
        run.place = partial(_place_in, run)
        yield run


def _place_in(run: Events, row: int) -> dict[str, Any]:
    """Return the position after `row` rows of a run."""
    if row == len(run.keys):
        return {"at": run.after, "emitted": 0}
    return {"at": run.before, "emitted": row}


class _Pace:
    """Releases events at `speed` times their own time."""

    def __init__(self, speed: float, live: Live) -> None:
        self.speed = speed
        self.live = live
        self._origin: tuple[int, float] | None = None
        self.now = 0

    def due(self, times: np.ndarray) -> int:
        """Return how many of the next events are due now; if none, wait for at most a tick."""
        if self._origin is None:
            self._origin = (int(times[0]), self.live.clock())
        begin, since = self._origin
        seconds = (self.live.clock() - since) * self.speed
        now = begin + seconds * 1e6
        count = int(np.searchsorted(times, now, "right"))
        if count:
            self.now = int(times[count - 1])
        else:
            remaining = (int(times[0]) - now) / self.speed / 1e6
            clocks.sleep(min(self.live.tick_seconds, max(0.0, remaining)))
        return count

    def position(self, run: Events, row: int) -> Position:
        return Position({**run.place(row), "block": 0, "now": self.now})
