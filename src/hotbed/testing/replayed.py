# SPDX-License-Identifier: Apache-2.0
"""Histories and counts over a dict, which replay all rows: the rule of docs/histories.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any


class ReplayedHistory:
    """The entries of keys, oldest first; times are in any unit.

    `length` and `within` are those of `hb.History`.

    Example:
        >>> history = ReplayedHistory(length=2)
        >>> history.leave("ann", time=1, known=1, entry="Alien")
        >>> history.see("ann", time=2)
        [(1, 'Alien')]
    """

    def __init__(self, length: int, within: float = float("inf")) -> None:
        self._length = length
        self._within = within
        self._newest = float("-inf")
        self._kept: defaultdict[Hashable, list[tuple[int, Any]]] = defaultdict(list)

    def see(self, key: Hashable, time: int) -> list[tuple[int, Any]]:
        """Return the entries, as (known, entry), that a row of this time sees."""
        oldest = max(time - self._within, self._newest - 2 * self._within)
        seen = [each for each in self._kept[key] if oldest <= each[0] < time]
        return sorted(seen, key=lambda each: each[0])[-self._length :]

    def learn(self, time: int) -> None:
        """Learn a row of this time that leaves no entry."""
        self._newest = max(self._newest, time)

    def leave(self, key: Hashable, time: int, known: int, entry: Any) -> None:
        """Learn a row that leaves an entry."""
        self.learn(time)
        entries = self._kept[key]
        entries.append((known, entry))
        oldest = self._newest - 2 * self._within
        while entries and (
            entries[0][0] < oldest
            or sum(oldest <= other < time for other, _ in entries[1:]) >= self._length
        ):
            del entries[0]


class ReplayedCount:
    """How many rows of keys match, and how many there are; times are in seconds.

    `every` is that of `hb.Count`, and `longest` the longest of its windows.

    Example: `ReplayedCount(every=60).see("film", time=3600, window=3600)` is (0, 0).
    """

    def __init__(self, every: int, longest: float = float("inf")) -> None:
        self._every = every
        self._longest = longest
        self._newest_tile = float("-inf")
        self._rows: defaultdict[Hashable, list[tuple[int, int, int]]] = defaultdict(list)

    def see(self, key: Hashable, time: int, window: int) -> tuple[int, int]:
        """Return the matches and the rows of the whole tiles before that of `time`."""
        end = self._tile_of(time)
        oldest = max(end - window, self._newest_tile - 2 * self._longest)
        inside = [each for each in self._rows[key] if oldest <= each[0] < end]
        return sum(match for _, match, _ in inside), sum(row for _, _, row in inside)

    def learn(self, time: int) -> None:
        """Learn a row of this time that does not count."""
        self._newest_tile = max(self._newest_tile, self._tile_of(time))

    def leave(self, key: Hashable, time: int, known: int, match: int, row: int = 1) -> None:
        """Learn a row: whether it matches, and whether it counts as one."""
        self.learn(time)
        self._rows[key].append((known, match, row))

    def _tile_of(self, time: int) -> int:
        return time // self._every * self._every
