# SPDX-License-Identifier: Apache-2.0
"""The state that an endless source shares with its reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.journal import Journal


@dataclass
class Live:
    """The state that an endless source shares with its reader.

    Args:
        journal: the decisions.
        dead_letters: the rows that could not be read.
        tick_seconds: the source yields at least this often, so that its reader can stop.
        lag: rows that wait at the source; None = unknown.
        clock: returns seconds since 1970; tests replace it.

    Example: `dataset.live.journal = Journal("run/journal")` before the first batch is read.
    """

    journal: Journal = field(default_factory=Journal)
    dead_letters: DeadLetters = field(default_factory=DeadLetters)
    tick_seconds: float = 0.2
    lag: int | None = None
    clock: Callable[[], float] = time.time

    def now(self) -> int:
        """Return the clock in microseconds since 1970."""
        return int(self.clock() * 1e6)
