# SPDX-License-Identifier: Apache-2.0
"""Times: any column of times to int64 microseconds UTC; and Replay, events in their order, with
labels that come late.
"""

from __future__ import annotations

import time as clocks
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
    """Int64 microseconds UTC; nulls stay.

    Text that is not a time becomes null, and so does a time that int64 microseconds cannot hold.

    `unit`: "s", "ms", "us", "ns" for numbers, "iso" for ISO 8601 text, or a strptime format such as
    "%y%m%d%H". Arrow timestamps and dates need no unit. Text without a zone is UTC; text that mixes
    zones raises DataError. `zones`: the zones of earlier batches, which this one may not mix with;
    its own is added.
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
            f"times: unit {unit!r} does not fit a column of {kind} — received {kind} — declare "
            "the column's real unit"
        )
    if pa.types.is_floating(kind):
        factor = float(UNITS.get(unit, 1e-3))
        micros = pc.round(pc.multiply(values.cast(pa.float64()), factor))
        return _within(micros, -(2.0**63), _FLOAT_BELOW_MAX).cast(pa.int64())
    if pa.types.is_uint64(kind):
        values = _within(values, 0, _NEVER)
    return _scale(values.cast(pa.int64()), unit)


def _scale(whole: pa.Array, unit: str) -> pa.Array:
    """Int64 counts of `unit` as microseconds; null where those do not fit int64."""
    if unit != "ns":
        limit = _NEVER // UNITS[unit]
        return pc.multiply(_within(whole, -limit, limit), UNITS[unit])
    # Arrow divides towards zero; shifting keeps times before 1970 in order.
    limited = _within(whole, _EARLIEST + 999, _NEVER)
    return pc.divide(pc.subtract(limited, pc.if_else(pc.less(limited, 0), 999, 0)), 1_000)


def _within(values: pa.Array, least: float, most: float) -> pa.Array:
    """`values`, null where they lie outside `least` to `most`, or are NaN."""
    kind = values.type
    above = pc.greater_equal(values, pa.scalar(least, kind))
    inside = pc.and_(above, pc.less_equal(values, pa.scalar(most, kind)))
    return pc.if_else(inside, values, pa.scalar(None, kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _from_format(values: pa.Array, form: str) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    if ("%H" in form or "%I" in form) and "%M" not in form:  # Polars wants minutes with hours
        text = text + " 00"
        form = f"{form} %M"
    parsed = text.str.to_datetime(
        form, time_unit="us", strict=False, time_zone="UTC" if "%z" in form else None
    )
    return parsed.to_physical().to_arrow().cast(pa.int64())


def _from_iso(values: pa.Array, zones: set[str]) -> pa.Array:
    text = pl.Series(values.cast(pa.string())).str.strip_chars()
    # A date alone ends like an offset ("2014-10-21"), so a zone needs a time of day before it.
    found = (
        text.str.extract(r"\d:\d.*?(Z|UTC|GMT|[+-]\d{2}:?\d{2})$")
        .fill_null("")
        .filter(text.is_not_null())
    )
    zones.update(map(_one_name, found.unique().to_list()))
    if len(zones) > 1:
        raise DataError(
            f"times: a column mixes zones — received {sorted(zones)} ('' = none) — write all its "
            "times with one zone"
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


def _one_name(zone: str) -> str:
    """UTC has many spellings."""
    if zone in ("Z", "UTC", "GMT") or (zone and set(zone[1:]) <= {"0", ":"}):
        return "Z"
    return zone if not zone or ":" in zone else f"{zone[:3]}:{zone[3:]}"


def _offset_microseconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    return (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[4:]) * 60) * 1_000_000


@dataclass(frozen=True)
class Replay(Source):
    """Recorded events of several sources in the order of their times, ties in the order of the
    sources.

    `time`: their column of times, `unit` as in a schema ("s", "ms", "us", "ns", "iso" or a format).
    A source that is not in order keeps its own order; its events count as late. Columns that a
    source lacks are null. `late`: labels from later events. `speed`: None = as fast as possible; 60
    = a minute of data a second, as a stream that ends.

    Raises SchemaError when a column is absent or has two types, DataError for a time that cannot be
    read.

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
                f"replay: at least one source and a speed > 0 — received {self.speed!r} — correct "
                "them"
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
                f"replay: a column has two types — {error} — declare one type in both sources"
            ) from error
        needed = [self.time, *((*self.late.on, self.late.column) if self.late else ())]
        if missing := [name for name in needed if name not in whole.names]:
            raise SchemaError(
                f"replay: columns {missing} are absent — the sources have {whole.names} — correct "
                "them"
            )
        if self.late is None:
            return whole
        return pa.schema(
            [*(c for c in whole if c.name != self.late.label), (self.late.label, pa.float64())]
        )

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        schema = self.schema()
        columns = [name for name in schema.names if plan.columns is None or name in plan.columns]
        state: Mapping[str, Any] = {"at": [{}] * len(self.sources), "emitted": 0}
        state = position.state if position else state
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
                part = part.select(columns if pace is None else [*columns, PLACE])
                yield (
                    part.to_batches()[0],
                    Position(run.place(row)) if pace is None else pace.position(run, row),
                )


class _Reading:
    """One source: the rows of it that come next. `keys` are their times, made rising."""

    def __init__(
        self, replay: Replay, number: int, state: Mapping[str, Any], plan: ReadPlan
    ) -> None:
        self.source = replay.sources[number]
        self.number = number
        self.time = replay.time
        self.unit = replay.unit
        self.plan = plan
        self.zones = set[str]()
        self._at = None if state.get("source") is None else Position.from_json(state["source"])
        self._skip = state.get("skip", 0)
        self._row = state.get("row", 0)
        self._high = state.get("time", _EARLIEST)
        self._used = self._skip
        self._size = 0
        self._after = self._at
        self._batches = self.source.read(self._at, READ_ROWS, plan)
        self._ahead = next(self._batches, None)
        self.rows = TICK
        self.indices = np.zeros(0, np.int64)
        self.times = self.keys = np.zeros(0, np.int64)

    @property
    def ended(self) -> bool:
        """Whether nothing comes after the rows at hand."""
        return self._ahead is None

    def state(self) -> dict[str, Any]:
        """Before the rows at hand: a position, rows used after it, rows before it, and the newest
        time.
        """
        at = None if self._at is None else dict(self._at.state)
        return {"source": at, "skip": self._used, "row": self._row, "time": self._high}

    def fill(self) -> None:
        """Sees to it that rows are at hand, as long as there are any."""
        while not len(self.keys) and self._ahead is not None:
            self._at = self._after
            self._row = self._row + self._size
            batch, self._after = self._ahead
            self._ahead = next(self._batches, None)
            self._size, self._used = batch.num_rows, min(self._skip, batch.num_rows)
            self._skip -= self._used
            times = to_microseconds(batch.column(self.time), self.unit, self.zones)
            if times.null_count:
                self._tell_bad(times.is_null().to_numpy(zero_copy_only=False))
            self.indices = (
                np.flatnonzero(times.is_valid().to_numpy(zero_copy_only=False)[self._used :])
                + self._used
            )
            self.rows = batch.take(pa.array(self.indices))
            self.times = times.fill_null(0).to_numpy(zero_copy_only=False)[self.indices]
            self.keys = np.maximum.accumulate(np.concatenate([[self._high], self.times]))[1:]

    def take(self, count: int) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """The next rows, their keys, their times, and their numbers in the source (from 1)."""
        numbers = self._row + self.indices[:count] + 1
        taken = self.rows.slice(0, count), self.keys[:count], self.times[:count], numbers
        self._used, self._high = int(self.indices[count - 1]) + 1, int(self.keys[count - 1])
        self.rows = self.rows.slice(count)
        self.keys = self.keys[count:]
        self.times = self.times[count:]
        self.indices = self.indices[count:]
        return taken

    def _tell_bad(self, bad: np.ndarray) -> None:
        assert self._after is not None
        place = self.source.locate(self._after, self._size - int(np.flatnonzero(bad)[0]))
        message = f"{place}: column {self.time!r}: no time of unit {self.unit!r}"
        if self.plan.skips is None:
            raise DecodeError(
                f"{message} — correct it or use on_error='skip'",
                place.file,
                place.number,
                self.time,
            )
        self.plan.skips.add("value", message, int(bad.sum()))


def _merged(
    replay: Replay, states: Sequence[Mapping[str, Any]], plan: ReadPlan, columns: list[str]
) -> Iterator[Run]:
    """The events of all sources by time, ties by source."""
    late = replay.late
    schema = pa.unify_schemas([source.schema().remove_metadata() for source in replay.sources])
    own = [replay.time, *((*late.on, late.column) if late else ())]
    needed = list(
        dict.fromkeys([*(name for name in columns if late is None or name != late.label), *own])
    )
    types = {
        n: kind
        for n, kind in plan.types.items()
        if n not in own and n in needed and _is_number(schema, n)
    }
    target = pa.schema([(name, types.get(name, schema.field(name).type)) for name in needed])
    readings = [
        _Reading(
            replay,
            number,
            state,
            replace(
                plan, columns=tuple(n for n in needed if n in source.schema().names), types=types
            ),
        )
        for number, (source, state) in enumerate(zip(replay.sources, states, strict=True))
    ]
    while True:
        for reading in readings:
            reading.fill()
        held = [reading for reading in readings if len(reading.keys)]
        if not held:
            return
        before = [reading.state() for reading in readings]
        # No row may pass one that a source has yet to show: the first source whose rows at hand end
        # earliest is the limit.
        limits = [(int(reading.keys[-1]), reading.number) for reading in held if not reading.ended]
        latest, last = min(limits, default=(_NEVER, len(readings)))
        taken = []
        for reading in held:
            count = int(
                np.searchsorted(reading.keys, latest, "right" if reading.number <= last else "left")
            )
            if count:
                rows, keys, times, numbers = reading.take(count)
                taken.append((_as_wanted(rows, target, reading.number, numbers), keys, times))
        parts, rising, event_times = zip(*taken, strict=True)
        keys = np.concatenate(rising)
        order = np.argsort(keys, kind="stable")
        table = pa.Table.from_batches(parts).take(pa.array(order))
        after = [reading.state() for reading in readings]
        yield Run(table, keys[order], np.concatenate(event_times)[order], before, after)


def _is_number(schema: pa.Schema, name: str) -> bool:
    kind = schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _as_wanted(
    rows: pa.RecordBatch, target: pa.Schema, source: int, numbers: np.ndarray
) -> pa.RecordBatch:
    """Exactly the columns of `target`, and where each row came from."""
    there = set(rows.schema.names)
    arrays = [
        rows.column(c.name).cast(c.type) if c.name in there else pa.nulls(rows.num_rows, c.type)
        for c in target
    ]
    origin = pa.array(np.full(rows.num_rows, source, np.int32))
    place = pa.StructArray.from_arrays([origin, pa.array(numbers)], ["source", "row"])
    return pa.RecordBatch.from_arrays([*arrays, place], names=[*target.names, PLACE])


def _plain(runs: Iterator[Run]) -> Iterator[Run]:
    """Runs as they are, each with its positions."""
    for run in runs:
        run.place = partial(_place_in, run)
        yield run


def _place_in(run: Run, row: int) -> dict[str, Any]:
    whole = row == len(run.keys)
    return {"at": run.after if whole else run.before, "emitted": 0 if whole else row}


class _Pace:
    """Lets events pass as fast as `speed` times their own time."""

    def __init__(self, speed: float, live: Live) -> None:
        self.speed = speed
        self.live = live
        self._origin: tuple[int, float] | None = None
        self.now = 0

    def due(self, times: np.ndarray) -> int:
        """How many of the next events may pass now; where it is none, waits, but no longer than a
        tick.
        """
        self._origin = self._origin or (int(times[0]), self.live.clock())
        begin, since = self._origin
        now = begin + (self.live.clock() - since) * self.speed * 1e6
        count = int(np.searchsorted(times, now, "right"))
        if count:
            self.now = int(times[count - 1])
        else:
            clocks.sleep(
                min(self.live.tick_seconds, max(0.0, (int(times[0]) - now) / self.speed / 1e6))
            )
        return count

    def position(self, run: Run, row: int) -> Position:
        return Position({**run.place(row), "block": 0, "now": self.now})
