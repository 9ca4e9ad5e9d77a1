# SPDX-License-Identifier: Apache-2.0
"""Space the attempts at something that fails."""

from __future__ import annotations

import math


class Backoff:
    """Pauses between attempts that fail: they double from `first` up to `longest`.

    Times are numbers of any one unit, such as seconds or polls. Not safe for several threads: the
    caller holds a lock where it needs one.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._pause = 0.0
        self._next = -math.inf  # time of the next attempt

    @property
    def is_pausing(self) -> bool:
        """Whether the last attempt failed."""
        return self._pause > 0

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next attempt."""
        return now >= self._next

    def failed(self, now: float) -> None:
        """Record that an attempt failed."""
        self._pause = min(max(2 * self._pause, self._first), self._longest)
        self._next = now + self._pause

    def reset(self) -> None:
        """Record that an attempt succeeded, or that the next one is another matter."""
        self._pause = 0.0
        self._next = -math.inf
