# SPDX-License-Identifier: Apache-2.0
"""Which rows of which input a turn takes, and which partitions are idle then."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hotbed.connectors.join.inputs import Input
from hotbed.connectors.join.lanes import IdleClock, Lane, Lanes
from hotbed.connectors.join.open_rows import OpenRows
from hotbed.connectors.join.settings import JoinSettings
from hotbed.connectors.live import Live, steady
from hotbed.connectors.read_plan import READ_ROWS, ReadPlan
from hotbed.connectors.status import SourceStatus
from hotbed.errors import DataError

logger = logging.getLogger("hotbed.connectors")

Turn = Mapping[str, Any]
"""A decision: `input`, None for a turn without rows; `rows` of it, and their `block`; `idle`
partitions; `now`; the `latest` time that an event may have.
"""


class JoinTurns:
    """Decides the turns of a reading.

    Args:
        join: the arguments of the join.
        plan: of the reader.
        inputs: of the join.
        lanes: of these.
        open_rows: what is open.
        state: of the position where reading begins; empty at the start.

    Attributes:
        idle: the partitions that were idle in the last turn.
        status: what the join knew before the last turn.
    """

    def __init__(
        self,
        join: JoinSettings,
        plan: ReadPlan,
        inputs: Sequence[Input],
        lanes: Lanes,
        open_rows: OpenRows,
        state: Mapping[str, Any],
    ) -> None:
        self._join = join
        self._plan = plan
        self._live = plan.live or Live()
        self._inputs = inputs
        self._lanes = lanes
        self._open = open_rows
        self.status = SourceStatus(open_rows=open_rows)
        self._turn: Turn | None = state.get("turn")
        self.idle: list[Lane] = [(number, name) for number, name in state.get("idle", ())]
        self._seconds = steady(self._live.clock)
        self._clock = IdleClock(join.idle_seconds, self._seconds)
        self._is_paused = False
        self._polled: dict[int, float] = {}  # when each input was read last

    def is_over(self) -> bool:
        """Return whether no turn follows: all inputs ended."""
        self.look_ahead()
        return all(source.ended and not source.num_rows for source in self._inputs)

    def look_ahead(self) -> None:
        """Read inputs that end so far that it is known whether more follows a turn."""
        for number, source in enumerate(self._inputs):
            if not source.source.endless:
                while not source.ended and source.num_rows <= READ_ROWS:
                    source.poll()
                if source.ended and not source.num_rows:
                    self._lanes.end(number)

    def touch(self, number: int, names: Iterable[str]) -> None:
        """Note that partitions of an input had rows in a turn."""
        self._clock.touch((number, name) for name in names)

    def take(self, turn: Turn) -> None:
        """Take over which partitions are idle in a turn; the next one is another."""
        self.idle = [(lane[0], lane[1]) for lane in turn["idle"]]
        self._turn = None

    def decided(self, number: int) -> Turn | None:
        """Return the decision about a turn, once its rows are at hand; None = not yet."""
        if not self._join.endless:
            return self._next_turn()
        turn = self._turn
        if turn is None:
            turn = self._live.journal.decide("block", number, self._proposed, dense=True)
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
        rest = source.rest_of(turn["block"]) if "block" in turn else None
        if rest is None:
            return None
        # Its file was corrected or left out: the rest of its rows never comes.
        return {**turn, "rows": rest, "input": turn["input"] if rest else None}

    def _next_turn(self) -> Turn:
        """Return the next turn of a join that ends: of the input that is furthest behind."""
        self.look_ahead()
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
        self.status = self._status()
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
        if set(idle) == set(self.idle):
            return None
        return self._decision(None, 0, idle)

    def _poll(self, number: int) -> None:
        """Read an input once; what happened while it was not asked for long is not known."""
        now = self._seconds()
        if now - self._polled.get(number, now) > self._join.idle_seconds / 2:
            self._clock.touch((number, name) for name in self._lanes.names(number))
        self._inputs[number].poll()
        self._polled[number] = now

    def _decision(self, number: int | None, rows: int, idle: list[Lane]) -> dict[str, Any]:
        lanes = [list(lane) for lane in idle]
        now = self._live.now()
        latest = self._plan.latest(now)
        turn = {"input": number, "rows": rows, "idle": lanes, "now": now, "latest": latest}
        if number is not None:
            turn["block"] = self._inputs[number].block
        return turn

    def _must_pause(self) -> bool:
        """Whether memory and disk are full, so that reading waits."""
        is_full = self._open.is_full
        if is_full and not self._is_paused:
            logger.warning(
                "join: reading waits, because open impressions and held outcomes fill %d bytes of "
                "the disk and %d of memory; give spill more disk_bytes and start again",
                self._open.disk_bytes,
                self._open.memory_bytes,
            )
        self._is_paused = is_full
        return is_full

    def _status(self) -> SourceStatus:
        """Return the rows that wait at all inputs, as far as these know it, and what is open."""
        waiting = self._inputs[0].status.waiting
        endless = [source for source in self._inputs if source.source.endless]
        statuses = [source.status for source in endless if not source.ended]
        reached = [status.is_reached for status in statuses if status.is_reached is not None]
        is_reached = all(reached) if reached else None
        lags = [status.lag for status in statuses]
        if any(lag is None for lag in lags):
            return SourceStatus(None, waiting, self._open, is_reached)
        at_hand = sum(source.num_rows for source in self._inputs)
        return SourceStatus(
            sum(lag or 0 for lag in lags) + at_hand, waiting, self._open, is_reached
        )

    def _idle_lanes(self, polled: set[int]) -> list[Lane]:
        """Return the partitions that have had nothing to read for long enough, or have ended.

        `polled`: the inputs that were just read; partitions of the others stay as they are.
        """
        idle: list[Lane] = []
        quiet: list[Lane] = []
        for number, source in enumerate(self._inputs):
            for name in self._lanes.names(number):
                lane = (number, name)
                if source.ended and not source.num_rows:
                    idle.append(lane)
                elif not source.is_quiet(name):
                    self._clock.touch([lane])
                elif number in polled:
                    quiet.append(lane)
                elif lane in self.idle:
                    idle.append(lane)
        return [*idle, *self._clock.idle(quiet)]
