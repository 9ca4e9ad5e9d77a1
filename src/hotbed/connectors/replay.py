# SPDX-License-Identifier: Apache-2.0
"""Replay: recorded events of several sources in the order of their times."""

from __future__ import annotations

import time as clocks
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.late_labels import LabelJoin, LateLabels
from hotbed.connectors.live import Live, steady
from hotbed.connectors.merge import Events, Merge
from hotbed.connectors.position import OPENED, PLACE, TICK, Batches, Position
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source, described
from hotbed.connectors.times import LATEST
from hotbed.connectors.types import is_number, opened
from hotbed.errors import ConfigError, DataError, SchemaError


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
    unit: str = "s"
    speed: float | None = None
    late: LateLabels | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("replay.sources: must not be empty, got []. Give one or more.")
        checks.above("replay.speed", self.speed, 0)
        for source in self.sources:
            if source.endless:
                raise ConfigError(
                    "replay.sources: a replay needs sources that end, got "
                    f"{type(source).__name__}. Read it alone, or join impressions and outcomes "
                    "that never end with hb.sources.Join (docs/join.md)."
                )

    @property
    def endless(self) -> bool:
        return self.speed is not None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return {
            "time": self.time,
            "unit": self.unit,
            "late": described(self.late),
            "sources": [source.settings for source in self.sources],
        }

    def schema(self) -> pa.Schema:
        whole = self._merge.schema()
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

    @property
    def inferred(self) -> pa.Schema:
        return opened(self.schema(), self._merge.inferred)

    @property
    def _merge(self) -> Merge:
        return Merge("replay", self.sources, self.time, self.unit)

    def _own_columns(self) -> list[str]:
        """Return the columns that order and label the events."""
        if self.late is None:
            return [self.time]
        return [self.time, *self.late.on, self.late.column]

    def _start(self, at: Sequence[Any], latest: int) -> dict[str, Any]:
        """Return the state before the first event; `at`: where the sources are."""
        state = {"at": at, "emitted": 0, "latest": latest}
        return {**state, "block": 0, "now": 0} if self.endless else state

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        schema = self.schema()
        columns = plan.wanted(schema.names)
        begin: list[Any] = [{} for _ in self.sources]
        live = plan.live or Live()
        state: Mapping[str, Any] = {"at": begin, "emitted": 0}
        latest = plan.latest_recorded(live.now())
        if position:
            position.require("Replay", self)
            state = position.state
            latest = state.get("latest", LATEST)
            if len(state["at"]) != len(self.sources):
                raise DataError(
                    f"position: it lies in a replay of {len(state['at'])} sources, got "
                    f"{len(self.sources)}. Give the sources that it was written for."
                )
        faults = None
        if self.late is not None and latest < LATEST:  # older positions count bad rows as samples
            faults = self.late.without_key
        target, types = _target(self, plan, columns)
        runs = self._merge.read(state["at"], replace(plan, types=types), target, latest, faults)
        if self.late is None:
            labelled = _plain(runs)
        else:
            labelled = LabelJoin(self.late, self.unit).over(runs)
        if self.speed is None:
            pace = None
        else:
            pace = _Pace(self.speed, live)
        skip = int(state["emitted"])
        opens = plan.opens and not position
        for run in labelled:
            if opens:
                opens = False
                yield OPENED, Position.of(self, self._start(run.before, latest))
            row = min(skip, len(run.keys))
            skip = max(0, skip - len(run.keys))
            while row < len(run.keys):
                count = min(batch_rows, len(run.keys) - row)
                if pace is not None:
                    count = pace.due(run.keys[row : row + count])
                    if not count:
                        yield TICK, Position.of(self, pace.place(run, row, latest))
                        continue
                part = run.table.slice(row, count).combine_chunks()
                row += count
                if pace is None:
                    (batch,) = part.select(columns).to_batches()
                    yield batch, Position.of(self, {**run.place(row), "latest": latest})
                else:
                    (batch,) = part.select([*columns, PLACE]).to_batches()
                    yield batch, Position.of(self, pace.place(run, row, latest))


def _target(
    replay: Replay, plan: ReadPlan, columns: list[str]
) -> tuple[pa.Schema, dict[str, pa.DataType]]:
    """Return the columns to read of all sources, and the types that the plan gives some of them."""
    schema = replay._merge.schema()
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
        self._seconds = steady(live.clock)
        self._origin: tuple[int, float] | None = None
        self.now = 0

    def due(self, times: np.ndarray) -> int:
        """Return how many of the next events are due now; if none, wait for at most a tick."""
        if self._origin is None:
            self._origin = (int(times[0]), self._seconds())
        begin, since = self._origin
        seconds = (self._seconds() - since) * self.speed
        now = begin + seconds * 1e6
        count = int(np.searchsorted(times, now, "right"))
        if count:
            self.now = int(times[count - 1])
        else:
            remaining = (int(times[0]) - now) / self.speed / 1e6
            clocks.sleep(min(self.live.tick_seconds, max(0.0, remaining)))
        return count

    def place(self, run: Events, row: int, latest: int) -> dict[str, Any]:
        """Return the state after `row` rows of a run."""
        return {**run.place(row), "latest": latest, "block": 0, "now": self.now}
