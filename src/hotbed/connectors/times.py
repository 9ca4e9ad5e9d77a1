# SPDX-License-Identifier: Apache-2.0
"""Times as int64 microseconds UTC; and Replay, which reads recorded events in their order."""

from __future__ import annotations

import time as clocks
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.base import (
    PLACE,
    READ_ALL,
    READ_ROWS,
    TICK,
    Position,
    ReadPlan,
    Source,
    not_endless,
)
from hotbed.connectors.derive import LabelJoin, LateLabels, Run
from hotbed.connectors.journal import Live
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError

_EARLIEST = -(2**63)
_NEVER = 2**63 - 1
_FLOAT_BELOW_MAX = 2.0**63 - 1024
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FORMATS = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


def to_microseconds(values: pa.Array, unit: str, zones: set[str] | None = None) -> pa.Array:
    """Return a column of times as int64 microseconds UTC.

    Nulls stay null. Text that is not a time becomes null, and so does a time that int64
    microseconds cannot hold. Arrow timestamps and dates need no unit. Text without a zone is UTC.

    Args:
        values: The times.
        unit: "s", "ms", "us", "ns" for numbers, "iso" for ISO 8601 text, or a strptime format such
            as "%y%m%d%H".
        zones: The zones of earlier batches of the column; those of this batch are added.

    Raises:
        DataError: ISO text mixes zones, also with those of earlier batches.
        SchemaError: The unit does not fit the type of the column.
    """
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        return _scale(values.cast(pa.int64()), kind.unit)
    if pa.types.is_date(kind):
        return _scale(values.cast(pa.date64()).cast(pa.int64()), "ms")
    if _is_text(kind):
        if unit in (*UNITS, "ns"):
            whole = pl.Series(values.cast(pa.string())).cast(pl.Int64, strict=False).to_arrow()
            return to_microseconds(whole, unit)
        if unit == "iso":
            return _from_iso(values, set() if zones is None else zones)
        return _from_format(values, unit)
    if "%" in unit and pa.types.is_integer(kind):  # 14102100 read as a number
        return _from_format(values, unit)
    if unit == "iso" or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise SchemaError(
            f"times: unit {unit!r} does not fit a column of {kind}. Declare the column's real unit."
        )
    if pa.types.is_floating(kind):
        factor = float(UNITS.get(unit, 1e-3))
        micros = pc.round(pc.multiply(values.cast(pa.float64()), factor))
        return _within(micros, -(2.0**63), _FLOAT_BELOW_MAX).cast(pa.int64())
    if pa.types.is_uint64(kind):
        values = _within(values, 0, _NEVER)
    return _scale(values.cast(pa.int64()), unit)


def _scale(whole: pa.Array, unit: str) -> pa.Array:
    """Return int64 counts of `unit` as microseconds, null where they do not fit int64."""
    if unit != "ns":
        limit = _NEVER // UNITS[unit]
        return pc.multiply(_within(whole, -limit, limit), UNITS[unit])
    # Arrow divides towards zero; shifting keeps times before 1970 in order.
    limited = _within(whole, _EARLIEST + 999, _NEVER)
    return pc.divide(pc.subtract(limited, pc.if_else(pc.less(limited, 0), 999, 0)), 1_000)


def _within(values: pa.Array, least: float, most: float) -> pa.Array:
    """Return `values`, null where they are NaN or lie outside `least` to `most`."""
    kind = values.type
    above = pc.greater_equal(values, pa.scalar(least, kind))
    inside = pc.and_(above, pc.less_equal(values, pa.scalar(most, kind)))
    return pc.if_else(inside, values, pa.scalar(None, kind))


def _is_text(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _from_format(values: pa.Array, form: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    if ("%H" in form or "%I" in form) and "%M" not in form:  # Polars needs minutes with hours
        text = text + " 00"
        form = f"{form} %M"
    zone = "UTC" if "%z" in form else None
    parsed = text.str.to_datetime(form, time_unit="us", strict=False, time_zone=zone)
    return parsed.to_physical().to_arrow().cast(pa.int64())


def _from_iso(values: pa.Array, zones: set[str]) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    # A date alone ends like an offset ("2014-10-21"), so a zone needs a time of day before it.
    suffixes = text.str.extract(r"\d:\d.*?(Z|UTC|GMT|[+-]\d{2}:?\d{2})$").fill_null("")
    suffixes = suffixes.filter(text.is_not_null()).unique()
    zones.update(map(_canonical_zone, suffixes.to_list()))
    if len(zones) > 1:
        raise DataError(
            f"times: a column mixes zones, got {sorted(zones)} ('' = none). Write all its times "
            "with one zone."
        )
    zone = next(iter(zones), "")
    if zone:
        text = text.str.replace(r"\s*(Z|UTC|GMT|[+-]\d{2}:?\d{2})$", "")
    text = text.str.replace(" ", "T", literal=True)
    parsed = text.str.to_datetime(_FORMATS[0], time_unit="us", strict=False)
    for form in _FORMATS[1:]:
        if parsed.null_count() > text.null_count():
            parsed = parsed.fill_null(text.str.to_datetime(form, time_unit="us", strict=False))
    micros = parsed.to_physical().to_arrow().cast(pa.int64())
    shift = _offset_microseconds(zone)
    return pc.subtract(micros, shift) if shift else micros


def _canonical_zone(zone: str) -> str:
    """Return one spelling of a zone: "Z" for UTC, "+02:00" for an offset, "" for no zone."""
    if zone in ("Z", "UTC", "GMT") or (zone and set(zone[1:]) <= {"0", ":"}):
        return "Z"
    if not zone or ":" in zone:
        return zone
    return f"{zone[:3]}:{zone[3:]}"


def _offset_microseconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    seconds = int(zone[1:3]) * 3600 + int(zone[4:]) * 60
    if zone[0] == "-":
        seconds = -seconds
    return seconds * 1_000_000


@dataclass(frozen=True)
class Replay(Source):
    """Recorded events of several sources in the order of their times.

    Ties are in the order of the sources. A source whose rows are not in order of time keeps its own
    order; its events count as late. Columns that a source lacks are null.

    Args:
        sources: The sources.
        time: Their column of times.
        unit: Its unit, as in a schema ("s", "ms", "us", "ns", "iso" or a format).
        speed: None = as fast as possible; 60 = a minute of data per second, as a stream that ends.
        late: Labels from later events.

    Raises:
        SchemaError: A column is absent or has two types.
        DataError: A time cannot be read.

    Example: `hb.sources.Replay([views, purchases], time="event_time", unit="iso", speed=600)`
    """

    sources: Sequence[Source]
    time: str
    unit: str = "us"
    speed: float | None = None
    late: LateLabels | None = None

    def __post_init__(self) -> None:
        if not self.sources or (self.speed is not None and not self.speed > 0):
            raise ConfigError(
                f"replay: needs at least one source and a speed > 0, got {len(self.sources)} "
                f"sources and speed {self.speed!r}. Correct them."
            )
        for source in self.sources:
            not_endless(source, "a replay")

    @property
    def endless(self) -> bool:
        return self.speed is not None

    def schema(self) -> pa.Schema:
        try:
            whole = pa.unify_schemas([source.schema().remove_metadata() for source in self.sources])
        except pa.ArrowException as error:
            raise SchemaError(
                f"replay: a column has two types, got {error}. Declare one type in both sources."
            ) from error
        if missing := [name for name in self._own_columns() if name not in whole.names]:
            raise SchemaError(
                f"replay: columns {missing} are absent; the sources have {whole.names}. Correct "
                "them."
            )
        if self.late is None:
            return whole
        label = self.late.label
        others = [column for column in whole if column.name != label]
        return pa.schema([*others, (label, pa.float64())])

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
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        schema = self.schema()
        columns = [name for name in schema.names if plan.columns is None or name in plan.columns]
        state: Mapping[str, Any] = {"at": [{}] * len(self.sources), "emitted": 0}
        if position:
            state = position.state
        runs = _merged(self, state["at"], plan, columns)
        labelled = _plain(runs) if self.late is None else map(LabelJoin(self.late), runs)
        pace = None if self.speed is None else _Pace(self.speed, plan.live or Live())
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
                    yield part.select(columns).to_batches()[0], Position(run.place(row))
                else:
                    part = part.select([*columns, PLACE])
                    yield part.to_batches()[0], pace.position(run, row)


class _Reading:
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
        self._high = state.get("time", _EARLIEST)
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
        source = None if self._position is None else dict(self._position.state)
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
            self.rows = batch.take(pa.array(self.indices))
            self.times = times.fill_null(0).to_numpy(zero_copy_only=False)[self.indices]
            self.keys = np.maximum.accumulate(np.concatenate([[self._high], self.times]))[1:]

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
        place = self.source.locate(self._after, self._size - int(np.flatnonzero(bad)[0]))
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
) -> Iterator[Run]:
    """Yield the events of all sources by time, ties by source."""
    schema = pa.unify_schemas([source.schema().remove_metadata() for source in replay.sources])
    own = replay._own_columns()
    names = [name for name in columns if replay.late is None or name != replay.late.label]
    needed = list(dict.fromkeys([*names, *own]))
    types = {
        name: kind
        for name, kind in plan.types.items()
        if name not in own and name in needed and _is_number(schema, name)
    }
    target = pa.schema([(name, types.get(name, schema.field(name).type)) for name in needed])
    readings: list[_Reading] = []
    for number, (source, state) in enumerate(zip(replay.sources, states, strict=True)):
        present = source.schema().names
        own_plan = replace(plan, columns=tuple(n for n in needed if n in present), types=types)
        readings.append(_Reading(replay, number, state, own_plan))
    while True:
        for reading in readings:
            reading.fill()
        if not any(len(reading.keys) for reading in readings):
            return
        yield _next_run(readings, target)


def _next_run(readings: Sequence[_Reading], target: pa.Schema) -> Run:
    """Return the events that no later row of any source can precede."""
    before = [reading.state() for reading in readings]
    filled = [reading for reading in readings if len(reading.keys)]
    # Rows that were not read yet may not be overtaken: the limit is the source whose rows at hand
    # end earliest, the first one of several.
    limits = [(int(reading.keys[-1]), reading.number) for reading in filled if not reading.ended]
    latest, last = min(limits, default=(_NEVER, len(readings)))
    batches = []
    all_keys = []
    all_times = []
    for reading in filled:
        # ties are in the order of the sources
        side: Literal["left", "right"] = "right" if reading.number <= last else "left"
        count = int(np.searchsorted(reading.keys, latest, side))
        if count:
            rows, keys, times, numbers = reading.take(count)
            batches.append(_as_wanted(rows, target, reading.number, numbers))
            all_keys.append(keys)
            all_times.append(times)
    merged = np.concatenate(all_keys)
    order = np.argsort(merged, kind="stable")
    table = pa.Table.from_batches(batches).take(pa.array(order))
    after = [reading.state() for reading in readings]
    return Run(table, merged[order], np.concatenate(all_times)[order], before, after)


def _is_number(schema: pa.Schema, name: str) -> bool:
    kind = schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _as_wanted(
    rows: pa.RecordBatch, target: pa.Schema, source: int, numbers: np.ndarray
) -> pa.RecordBatch:
    """Return the rows with exactly the columns of `target`, and with the place of each row."""
    arrays: list[pa.Array] = []
    for column in target:
        if column.name in rows.schema.names:
            arrays.append(rows.column(column.name).cast(column.type))
        else:
            arrays.append(pa.nulls(rows.num_rows, column.type))
    origin = pa.array(np.full(rows.num_rows, source, np.int32))
    place = pa.StructArray.from_arrays([origin, pa.array(numbers)], ["source", "row"])
    return pa.RecordBatch.from_arrays([*arrays, place], names=[*target.names, PLACE])


def _plain(runs: Iterator[Run]) -> Iterator[Run]:
    """Yield runs unchanged but for their positions."""
    for run in runs:
        run.place = partial(_place_in, run)
        yield run


def _place_in(run: Run, row: int) -> dict[str, Any]:
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
        self._origin = self._origin or (int(times[0]), self.live.clock())
        begin, since = self._origin
        now = begin + (self.live.clock() - since) * self.speed * 1e6
        count = int(np.searchsorted(times, now, "right"))
        if count:
            self.now = int(times[count - 1])
        else:
            remaining = (int(times[0]) - now) / self.speed / 1e6
            clocks.sleep(min(self.live.tick_seconds, max(0.0, remaining)))
        return count

    def position(self, run: Run, row: int) -> Position:
        return Position({**run.place(row), "block": 0, "now": self.now})
