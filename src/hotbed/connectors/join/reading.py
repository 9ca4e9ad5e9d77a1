# SPDX-License-Identifier: Apache-2.0
"""One reading of a join: turns, and the samples that they decide."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.inputs import Input, live_of
from hotbed.connectors.join.intake import Intake
from hotbed.connectors.join.lanes import IdleClock, Lane, Lanes
from hotbed.connectors.join.open_rows import NUMBER, TIME, JoinWindows, OpenRows
from hotbed.connectors.join.places import loaded, placed
from hotbed.connectors.join.segment import SEGMENT_ROWS
from hotbed.connectors.join.settings import JoinSettings
from hotbed.connectors.live import Live
from hotbed.connectors.plan import READ_ROWS, ReadPlan
from hotbed.connectors.position import OPENED, PLACE, TICK, Batches, Position
from hotbed.errors import DataError

logger = logging.getLogger("hotbed.connectors")

Turn = Mapping[str, Any]
"""A decision: `input`, None for a turn without rows; `rows` of it; `idle` partitions; `now`."""


class JoinReading:
    """One reading of a join: its inputs, and what is open.

    A position holds the place of each input before a turn, the decision about this turn if there is
    one, and how many samples of it were yielded.
    """

    def __init__(self, join: JoinSettings, plan: ReadPlan, position: Position | None) -> None:
        self.join = join
        self.live = plan.live or Live()
        if join.endless:
            plan = replace(plan, live=self.live)
        self.plan = plan
        state: Mapping[str, Any] = {}
        if position is not None:
            state = position.state
        self._goal = state  # of a join that ends: what to reach again by reading
        if not join.endless:
            state = {}
        self.number: int = state.get("block", 0)
        self.now: int = state.get("now", 0)
        self._skip: int = self._goal.get("row", 0)
        self._turn: Turn | None = state.get("turn")
        self._intake = Intake(join, plan)
        self._inputs = self._opened_inputs(state.get("inputs"))
        self._lanes = Lanes(len(self._inputs), state.get("lanes", ()))
        self._idle: list[Lane] = [(number, name) for number, name in state.get("idle", ())]
        self._clock = IdleClock(join.idle_seconds, self.live.clock)
        windows = [int(outcome.within * 1e6) for outcome in join.kinds.values()]
        lateness = int(join.lateness_seconds * 1e6)
        self.open = OpenRows(JoinWindows(windows, lateness), join.rule, join.spill)
        self.open.keeps = join.endless and self.live.saves_open_rows
        self._is_paused = False
        self._polled: dict[int, float] = {}  # when each input was read last
        if state:
            self._load(state)
        self.live.open_rows = self.open

    def _opened_inputs(self, states: Any) -> list[Input]:
        inputs: list[Input] = []
        for number, source in enumerate(self.join.inputs):
            plan = self._intake.plan_for(number) or replace(self.plan, columns=None)
            live = None
            if source.endless:
                live = live_of(self.live, number)
            state = states[number] if states else {}
            inputs.append(Input(source, state, replace(plan, live=live)))
        return inputs

    def close(self) -> None:
        """End reading."""
        for source in self._inputs:
            source.close()

    # --- samples

    def batches(self, batch_rows: int) -> Batches:
        """Yield the samples after the position."""
        while self.number < self._goal.get("block", 0):
            turn = self._decided()
            assert turn is not None
            self._take(turn)
        while not self._is_over():
            turn = self._decided()
            if turn is None:
                yield TICK, self.position()
                continue
            before = {**self.position(turn["input"]).state, "turn": dict(turn)}
            if self.join.endless:
                yield OPENED, Position({**before, "row": self._skip})
            samples = self._take(turn)
            for start in range(self._skip, samples.num_rows, batch_rows):
                end = min(start + batch_rows, samples.num_rows)
                after = self.position()
                if end < samples.num_rows:
                    after = Position({**before, "row": end})
                (batch,) = samples.slice(start, batch_rows).combine_chunks().to_batches()
                yield batch, after
            if self.join.endless and self._skip >= samples.num_rows:
                yield TICK, self.position()
            self._skip = 0

    def position(self, number: int | None = None) -> Position:
        """Return the position before the next turn; `number`: the input of this turn, if known."""
        inputs: list[dict[str, Any]] = []
        for place, source in enumerate(self._inputs):
            inputs.append(source.state(decided=place == number))
        return Position(
            {
                "block": self.number,
                "inputs": inputs,
                "row": 0,
                "now": self.now,
                "watermark": self.open.watermark,
                "lanes": self._lanes.to_json(),
                "idle": [list(lane) for lane in self._idle],
                "opened": self.open.opened,
                "counts": dict(self.open.counts),
            }
        )

    def _is_over(self) -> bool:
        """Whether no turn follows: all inputs ended."""
        self._look_ahead()
        return all(source.ended and not source.num_rows for source in self._inputs)

    def _look_ahead(self) -> None:
        """Read inputs that end so far that it is known whether more follows a turn."""
        for number, source in enumerate(self._inputs):
            if not source.source.endless:
                while not source.ended and source.num_rows <= READ_ROWS:
                    source.poll()
                if source.ended and not source.num_rows:
                    self._lanes.end(number)

    def _take(self, turn: Turn) -> pa.Table:
        """Take a turn, whose rows are at hand; return its samples."""
        number = turn["input"]
        if number is not None:
            self._take_rows(number, turn["rows"])
        self._look_ahead()
        self.now = turn["now"]
        self._idle = [(lane[0], lane[1]) for lane in turn["idle"]]
        watermark = self._lanes.settle(self._idle)
        tables, labels = self.open.end_turn(watermark)
        self.number += 1
        self._turn = None
        return self._samples(tables, labels)

    def _take_rows(self, number: int, count: int) -> None:
        source = self._inputs[number]
        first = source.row
        rows = source.take(count)
        self._intake.require_columns(rows, number)
        if self.join.endless:
            rows = placed(rows, first)
        self._lanes.add(number, source.lanes)
        highs = self._intake.highs(rows, number)
        self._lanes.rise(number, highs)
        self._clock.touch((number, name) for name in highs)
        if number == 0:
            impressions = self._intake.impressions(rows, source)
            late = self.open.add_impressions(impressions)
            if len(late):
                self._intake.put_aside(impressions.table.take(pa.array(late)), "late")
        outcomes = self._intake.outcomes(rows, number, source)
        if outcomes is not None:
            self.open.add_outcomes(outcomes)

    def _samples(self, tables: list[pa.Table], labels: np.ndarray) -> pa.Table:
        """Return samples with the columns that are wanted."""
        if not tables:
            return pa.table({})
        table = pa.concat_tables(tables, promote_options="default")
        names = self._intake.columns
        if names is None:
            names = [name for name in table.schema.names if name != PLACE]
        chosen = [name for name in names if name in table.schema.names]
        if PLACE in table.schema.names:
            chosen.append(PLACE)
        table = table.select(chosen)
        for label, values in zip(self.join.kinds, labels, strict=True):
            if self.plan.columns is None or label in self.plan.columns:
                table = table.append_column(label, pa.array(values))
        return table

    # --- turns

    def _decided(self) -> Turn | None:
        """Return the decision about the next turn, once its rows are at hand; None = not yet."""
        if not self.join.endless:
            return self._next_turn()
        turn = self._turn
        if turn is None:
            turn = self.live.journal.decide("block", self.number, self._proposed, dense=True)
        self._turn = turn
        if turn is None or turn["input"] is None:
            return turn
        source = self._inputs[turn["input"]]
        if source.num_rows < turn["rows"] and not source.ended:
            source.poll()
        if source.num_rows >= turn["rows"]:
            return turn
        if source.ended:
            raise DataError(
                f"join: the journal has a turn of {turn['rows']} rows of input {turn['input']}, "
                f"got {source.num_rows} before its end. Give the sources that it was written for."
            )
        return None

    def _next_turn(self) -> Turn:
        """Return the next turn of a join that ends: of the input that is furthest behind."""
        self._look_ahead()
        waiting = [number for number, source in enumerate(self._inputs) if source.num_rows]
        number = min(waiting, key=self._behind)
        count = min(self._inputs[number].num_rows, READ_ROWS)
        return {"input": number, "rows": count, "idle": [], "now": 0}

    def _behind(self, number: int) -> tuple[int, int]:
        """Return the order in which inputs are asked for rows."""
        high = self._lanes.high(number)
        assert high is not None
        return high, number

    def _proposed(self) -> dict[str, Any] | None:
        """Return the decision about a new turn; None if none is due."""
        self.live.lag = self._lag()
        if self._must_pause():
            return None
        polled: set[int] = set()
        for number in sorted(range(len(self._inputs)), key=self._behind):
            source = self._inputs[number]
            if not source.num_rows and not source.ended:
                self._poll(number)
                polled.add(number)
            if source.num_rows:
                return self._decision(number, source.next_rows, self._idle_lanes(polled))
        idle = self._idle_lanes(polled)
        if set(idle) == set(self._idle):
            return None
        return self._decision(None, 0, idle)

    def _poll(self, number: int) -> None:
        """Read an input once; what happened while it was not asked for long is not known."""
        now = self.live.clock()
        if now - self._polled.get(number, now) > self.join.idle_seconds / 2:
            self._clock.touch((number, name) for name in self._lanes.names(number))
        self._inputs[number].poll()
        self._polled[number] = now

    def _decision(self, number: int | None, rows: int, idle: list[Lane]) -> dict[str, Any]:
        lanes = [list(lane) for lane in idle]
        return {"input": number, "rows": rows, "idle": lanes, "now": self.live.now()}

    def _must_pause(self) -> bool:
        """Whether memory and disk are full, so that reading waits."""
        is_full = self.open.is_full
        if is_full and not self._is_paused:
            logger.warning(
                "join: reading waits, because open impressions fill %d bytes of the disk and %d of "
                "memory; give spill more disk_bytes and start again",
                self.open.disk_bytes,
                self.open.memory_bytes,
            )
        self._is_paused = is_full
        return is_full

    def _lag(self) -> int | None:
        """Return the rows that wait at all inputs; None if one does not know."""
        lags = [source.live.lag for source in self._inputs if source.source.endless]
        if any(lag is None for lag in lags):
            return None
        return sum(lag or 0 for lag in lags) + sum(source.num_rows for source in self._inputs)

    def _idle_lanes(self, polled: set[int]) -> list[Lane]:
        """Return the partitions that have had nothing to read for long enough.

        `polled`: the inputs that were just read; partitions of the others stay as they are.
        """
        idle: list[Lane] = []
        quiet: list[Lane] = []
        for number, source in enumerate(self._inputs):
            for name in self._lanes.names(number):
                lane = (number, name)
                if not source.is_quiet(name):
                    self._clock.touch([lane])
                elif number in polled:
                    quiet.append(lane)
                elif lane in self._idle:
                    idle.append(lane)
        return [*idle, *self._clock.idle(quiet)]

    # --- states

    def _load(self, state: Mapping[str, Any]) -> None:
        """Put back what was open at a position."""
        self._lanes.watermark = state["watermark"]
        saved = self.live.saved_open_rows
        if not any(state["opened"].values()):
            self.open.load(state)
            return
        if saved is None or dict(saved.opened) != state["opened"]:
            raise DataError(
                "join: a position needs the open impressions of its checkpoint, got a position "
                f"after {state['opened']['impressions']} impressions without them. Resume with "
                "hb.callbacks.Checkpoint and the folder that it wrote, or begin without the "
                "position."
            )
        for table in _whole_tables(saved.batches("impressions")):
            self.open.impressions.put(self._intake.saved_impressions(table))
        for table in _whole_tables(saved.batches("outcomes")):
            self.open.outcomes.put(self._intake.saved_outcomes(table))
        matches = pa.table({NUMBER: pa.array([], pa.int64()), TIME: pa.array([], pa.int64())})
        batches = [*matches.to_batches(), *saved.batches("matches")]
        matches = pa.Table.from_batches(batches, matches.schema)
        numbers, times = (matches[name].to_numpy() for name in (NUMBER, TIME))
        self.open.matches.put(numbers, times, state["opened"]["matches"])
        self.open.load(state)
        self.live.saved_open_rows = None


def _whole_tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of batches as tables of about a segment each."""
    waiting: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in batches:
        waiting.append(batch)
        num_rows += batch.num_rows
        if num_rows >= SEGMENT_ROWS // 2:
            yield _as_table(waiting)
            waiting = []
            num_rows = 0
    if waiting:
        yield _as_table(waiting)


def _as_table(batches: list[pa.RecordBatch]) -> pa.Table:
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return loaded(pa.concat_tables(tables, promote_options="default")).combine_chunks()
