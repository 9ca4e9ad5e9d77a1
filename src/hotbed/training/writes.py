# SPDX-License-Identifier: Apache-2.0
"""Writes: how often a run saved or published, how often that failed, and what the last one took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hotbed.persist.container.format import Saved
from hotbed.persist.container.store import MANIFEST_FILE


@dataclass
class Writes:
    """Counts of saves or of published versions since the process began.

    Attributes:
        count: those that succeeded.
        failures: those that failed.
        last_seconds: the time of the last one that succeeded, in seconds since 1970; None = none.
        last_step: step of the run whose state it holds.
        last_bytes: of its files.
        last_duration: how long it took, in seconds; None = an earlier process wrote it.
    """

    count: int = 0
    failures: int = 0
    last_seconds: float | None = None
    last_step: int = 0
    last_bytes: int = 0
    last_duration: float | None = None

    def add(self, saved: Saved, step: int, duration: float) -> None:
        """Count a write that succeeded."""
        self.count += 1
        self.last_seconds = time.time()
        self.last_step = step
        self.last_bytes = saved.bytes
        self.last_duration = duration

    def resume(self, saved: Saved, step: int) -> None:
        """Note what an earlier process wrote last, at the time of its file on a local disk."""
        self.last_step = step
        self.last_bytes = saved.bytes
        if isinstance(saved.folder, Path):
            self.last_seconds = (saved.folder / MANIFEST_FILE).stat().st_mtime

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count an error within as a failure."""
        try:
            yield
        except Exception:
            self.failures += 1
            raise
