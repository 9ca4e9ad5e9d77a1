# SPDX-License-Identifier: Apache-2.0
"""Writes: how often a run saved or published, how often that failed, and what the last one took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotbed.persist.container.format import Saved


@dataclass
class Writes:
    """Counts of saves or of published versions since the process began.

    Attributes:
        count: those that succeeded.
        failures: those that failed.
        last_seconds: the time of the last one that succeeded, in seconds since 1970; None = none.
        last_bytes: of its files.
        last_duration: how long it took, in seconds.
    """

    count: int = 0
    failures: int = 0
    last_seconds: float | None = None
    last_bytes: int = 0
    last_duration: float = 0.0

    def add(self, saved: Saved, duration: float) -> None:
        """Count a write that succeeded."""
        self.count += 1
        self.last_seconds = time.time()
        self.last_bytes = saved.bytes
        self.last_duration = duration

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count an error within as a failure."""
        try:
            yield
        except Exception:
            self.failures += 1
            raise
