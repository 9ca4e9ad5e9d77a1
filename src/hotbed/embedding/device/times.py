# SPDX-License-Identifier: Apache-2.0
"""LinkTimes: where the time of steps goes that compute on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class LinkTimes:
    """Seconds so far.

    Events of the device tell the times of copies and of computing, and are read once they are
    over: nothing waits for them.

    Attributes:
        rows: in which the host mapped ids, pooled rows, summed their gradients and updated them,
            while nothing else happened on the thread that trains.
        copies: that copies took, up and down.
        device: from the arrival of a lookup's results on the device until their gradients were
            computed there.
    """

    rows: float = 0.0
    copies: float = 0.0
    device: float = 0.0

    @contextmanager
    def in_rows(self) -> Iterator[None]:
        """Count this block as work on rows."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.rows += time.perf_counter() - begin
