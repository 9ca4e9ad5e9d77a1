# SPDX-License-Identifier: Apache-2.0
"""One reading of a join: turns, and the samples that they decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.columns import held, together
from hotbed.connectors.join.inputs import Input, live_of
from hotbed.connectors.join.intake import Intake
from hotbed.connectors.join.lanes import Lanes
from hotbed.connectors.join.open_rows import JoinWindows, OpenRows, TurnResult
from hotbed.connectors.join.settings import JoinSettings
from hotbed.connectors.join.stalls import Stalls
from hotbed.connectors.join.states import saved_matches, saved_tables
from hotbed.connectors.join.turns import JoinTurns, Turn
from hotbed.connectors.live import Live
from hotbed.connectors.position import (
    COUNTED,
    IMPRESSION,
    KNOWN,
    OPENED,
    PLACE,
    PREVIEW,
    TICK,
    Batches,
    Position,
)
from hotbed.connectors.read_plan import NO_WISHES, ReadPlan
from hotbed.connectors.status import SourceStatus
from hotbed.connectors.times import LATEST
from hotbed.errors import DataError, DecodeError, SchemaError


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
        join.spill.check_ready()
        self._intake = Intake(join, plan)
        self._inputs = self._opened_inputs(state.get("inputs"))
        self._lanes = Lanes(len(self._inputs), state.get("lanes", ()))
        windows = [int(outcome.within * 1e6) for outcome in join.kinds.values()]
        lateness = int(join.lateness_seconds * 1e6)
        self.open = OpenRows(JoinWindows(windows, lateness), join.rule, join.spill)
        self.open.keeps = join.endless and plan.wishes.keeps_open
        self.open.returns_unmatched = join.keeps_unmatched
        self.open.returns_accepted = join.endless and plan.wishes.previews
        self.open.returns_known = plan.wishes.known
        self._turns = JoinTurns(join, plan, self._inputs, self._lanes, self.open, state)
        self._stalls = Stalls(join, self.live, self._lanes)
        self.open.newest = self._lanes.to_json
        self._latest = LATEST  # of events, in turns that were decided without a bound
        if not join.endless:
            now = plan.latest_recorded(self.live.now())
            self._latest = self._goal.get("latest", LATEST if self._goal else now)
        if state:
            self._load(state)

    def _opened_inputs(self, states: Any) -> list[Input]:
        inputs: list[Input] = []
        for number, source in enumerate(self.join.inputs):
            plan = self._intake.plan_for(number) or replace(
                self.plan, columns=None, wishes=NO_WISHES
            )
            live = None
            if source.endless:
                live = live_of(self.live, number)
            state = states[number] if states else {}
            inputs.append(Input(source, state, replace(plan, live=live)))
        return inputs

    @property
    def status(self) -> SourceStatus:
        """What the join knows now."""
        return self._turns.status

    def close(self) -> None:
        """End reading."""
        for source in self._inputs:
            source.close()

    # --- samples

    def batches(self, batch_rows: int) -> Batches:
        """Yield the samples after the position."""
        while self.number < self._goal.get("block", 0):
            turn = self._turns.decided(self.number)
            assert turn is not None
            self._take(turn)
        if self.plan.opens and not (self.join.endless or self._goal):
            yield OPENED, self.position()
        while not self._turns.is_over():
            turn = self._turns.decided(self.number)
            if turn is None:
                yield TICK, self.position()
                continue
            before = {**self.position(turn["input"]).state, "turn": dict(turn)}
            if self.join.endless:
                yield OPENED, Position({**before, "row": self._skip})
            result = self._take(turn)
            if result.accepted and not self._skip:
                yield self._preview(result), Position({**before, "row": 0})
            samples = self._samples(result)
            self._stalls.note(turn["rows"], samples.num_rows)
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
        self._intake.end()
        if not self._goal:
            self._stalls.end(self.open.counts["impressions"], self.open.watermark)

    def position(self, number: int | None = None) -> Position:
        """Return the position before the next turn; `number`: the input of this turn, if known."""
        inputs: list[dict[str, Any]] = []
        for place, source in enumerate(self._inputs):
            inputs.append(source.state(decided=place == number))
        state: dict[str, Any] = {}
        if not self.join.endless:
            state["latest"] = self._latest
        state |= {
            "block": self.number,
            "inputs": inputs,
            "labels": list(self.join.kinds),
            "row": 0,
            "now": self.now,
            "watermark": self.open.watermark,
            "lanes": self._lanes.to_json(),
            "idle": [list(lane) for lane in self._turns.idle],
            "opened": self.open.opened,
            "counts": dict(self.open.counts),
        }
        return Position.of(self.join, state)

    def _take(self, turn: Turn) -> TurnResult:
        """Take a turn, whose rows are at hand."""
        number = turn["input"]
        if number is not None:
            try:
                self._take_rows(number, turn["rows"], turn.get("latest", self._latest))
            except (DecodeError, SchemaError):
                self._inputs[number].note_failure()
                raise
        self._turns.look_ahead()
        self.now = turn["now"]
        self._turns.take(turn)
        watermark = self._lanes.settle(self._turns.idle)
        result = self.open.end_turn(watermark)
        for outcomes in result.unmatched:
            self._intake.put_aside_outcomes(outcomes)
        self.number += 1
        return result

    def _take_rows(self, number: int, count: int, latest: int) -> None:
        source = self._inputs[number]
        first = source.row
        rows = source.take(count)
        rows = held(rows, first, placed=self.join.endless)
        timed = self._intake.timed(rows, number, source, latest)
        highs = timed.highs()
        self._lanes.rise(number, highs)
        self._lanes.set_names(number, source.lanes)
        self._turns.touch(number, highs)
        if number == 0:
            impressions = self._intake.impressions(timed, source)
            late, repeated = self.open.add_impressions(impressions)
            self._intake.warn_of_pages(impressions, repeated)
            if len(late):
                self._intake.put_aside(impressions.table.take(pa.array(late)), "late")
        outcomes = self._intake.outcomes(timed, source)
        if outcomes is not None:
            late = self.open.add_outcomes(outcomes)
            if self.join.keeps_unmatched and len(late):
                self._intake.put_aside_outcomes(outcomes.table.take(pa.array(late)))
        self.open.counts["future"] += timed.num_future

    def _samples(self, result: TurnResult) -> pa.Table:
        """Return samples with the columns that are wanted."""
        if not result.samples:
            return pa.table({})
        table = self._wanted(result.samples)
        for label, values in zip(self.join.kinds, result.labels, strict=True):
            if self.plan.columns is None or label in self.plan.columns:
                table = table.append_column(label, pa.array(values))
        if self.join.rule.repeats(len(self.join.kinds)):
            table = table.append_column(COUNTED, pa.array(result.is_first))
        if self.open.returns_accepted:
            table = table.append_column(IMPRESSION, pa.array(result.numbers))
        if self.open.returns_known:
            table = table.append_column(KNOWN, pa.array(result.known))
        return table

    def _preview(self, result: TurnResult) -> pa.RecordBatch:
        """Return the impressions that a turn accepted, which have no labels yet."""
        table = self._wanted(result.accepted)
        numbers = np.arange(result.first, result.first + table.num_rows)
        table = table.append_column(IMPRESSION, pa.array(numbers))
        (batch,) = table.replace_schema_metadata(PREVIEW).combine_chunks().to_batches()
        return batch

    def _wanted(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return impressions with the columns that are wanted, but for labels."""
        table = together(tables)
        names = self._intake.columns
        if names is None:
            names = [name for name in table.schema.names if name != PLACE]
        chosen = [name for name in names if name in table.schema.names]
        if PLACE in table.schema.names:
            chosen.append(PLACE)
        return table.select(chosen)

    # --- states

    def _load(self, state: Mapping[str, Any]) -> None:
        """Put back what was open at a position."""
        self._lanes.watermark = state["watermark"]
        saved = self.plan.wishes.saved
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
        for table in saved_tables(saved, "impressions"):
            self.open.impressions.put(self._intake.saved_impressions(table))
        for table in saved_tables(saved, "outcomes"):
            self.open.outcomes.put(self._intake.saved_outcomes(table))
        self.open.matches.put(*saved_matches(saved), state["opened"]["matches"])
        self.open.load(state)
