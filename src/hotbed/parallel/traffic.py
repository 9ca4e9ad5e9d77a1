# SPDX-License-Identifier: Apache-2.0
"""Traffic and RankWork: what a rank sent, how long it waited, and what it trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Traffic:
    """What a rank sent to the others, counted where it is sent.

    Attributes:
        sent_bytes: to other ranks.
        messages: to other ranks.
        wait_seconds: in calls to them: until all had called, and until their values were here.
    """

    sent_bytes: int = 0
    messages: int = 0
    wait_seconds: float = 0.0

    def add_sent(self, num_bytes: int, messages: int) -> None:
        """Count messages that were sent."""
        self.sent_bytes += num_bytes
        self.messages += messages

    def add(self, other: Traffic) -> None:
        """Count all that another one has counted."""
        self.add_sent(other.sent_bytes, other.messages)
        self.wait_seconds += other.wait_seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the seconds that the `with` block lasts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - began


@dataclass(frozen=True)
class RankWork:
    """What one rank did in the steps of a fit, and its rows at the end.

    Attributes:
        rank: its number.
        steps: of the fit.
        samples: of the grains that it computed.
        rows: of all tables, that it owns.
        sent_bytes: to other ranks, in steps.
        messages: to other ranks, in steps.
        wait_seconds: in calls to other ranks, in steps.
    """

    rank: int
    steps: int
    samples: int
    rows: int
    sent_bytes: int
    messages: int
    wait_seconds: float
