# SPDX-License-Identifier: Apache-2.0
"""Warnings where a join reads events and none becomes a sample: for a minute, or to the end."""

from __future__ import annotations

import logging

from hotbed.connectors.join.lanes import Lanes
from hotbed.connectors.join.settings import JoinSettings
from hotbed.connectors.live import Live
from hotbed.connectors.times import text_of_time

logger = logging.getLogger("hotbed.connectors")

STALL_SECONDS = 60.0


class Stalls:
    """Says which partition holds the windows of a join open, once in `STALL_SECONDS`."""

    def __init__(self, join: JoinSettings, live: Live, lanes: Lanes) -> None:
        self._join = join
        self._clock = live.clock
        self._lanes = lanes
        self._since = live.clock()
        self._num_rows = 0
        self._num_samples = 0

    def note(self, num_rows: int, num_samples: int) -> None:
        """Note how many rows a turn took and how many samples it decided."""
        now = self._clock()
        self._num_samples += num_samples
        if num_samples or now < self._since:
            self._since = now
            self._num_rows = 0
            return
        self._num_rows += num_rows
        if self._num_rows and now - self._since >= STALL_SECONDS:
            number, lane, newest = self._lanes.last()
            partition = f", partition {lane}" if lane else ""
            logger.warning(
                "join: %d rows were read in %.0f s and no sample is decided: input %d%s holds the "
                "windows open, its newest event is of %s (unit %r). Check the unit and the clock "
                "of its events, lateness_seconds and the windows",
                self._num_rows,
                now - self._since,
                number,
                partition,
                text_of_time(newest),
                self._unit(number),
            )
            self._since = now
            self._num_rows = 0

    def end(self, num_impressions: int, newest: int) -> None:
        """Note that all inputs ended, after `num_impressions` and at the `newest` event time."""
        if num_impressions and not self._num_samples:
            logger.warning(
                "join: no sample comes of %d impressions, the windows of all reach beyond the "
                "newest event, %s (unit %r). Check the unit of the times and the windows",
                num_impressions,
                text_of_time(newest),
                self._join.unit,
            )

    def _unit(self, number: int) -> str:
        """Return the unit of an input's times."""
        source = self._join.inputs[number]
        if number:
            for outcome in self._join.kinds.values():
                if outcome.source == source and outcome.unit is not None:
                    return outcome.unit
        return self._join.unit
