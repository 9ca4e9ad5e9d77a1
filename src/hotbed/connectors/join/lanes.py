# SPDX-License-Identifier: Apache-2.0
"""The watermark of several inputs, and which of their partitions are idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hotbed.connectors.times import EARLIEST

Lane = tuple[int, str]
"""The number of an input, and the name of a partition of it; "" = the whole input."""


class Lanes:
    """The newest event time of each partition of each input.

    Attributes:
        watermark: the lowest of them, without those that are idle; it never falls.
    """

    def __init__(self, num_inputs: int, highs: Sequence[Mapping[str, int]] = ()) -> None:
        self._highs: list[dict[str, int]] = [{} for _ in range(num_inputs)]
        for number, by_name in enumerate(highs):
            self._highs[number] = dict(by_name)
        self._idle: set[Lane] = set()
        self._ended: set[int] = set()
        self.watermark = EARLIEST

    def to_json(self) -> list[dict[str, int]]:
        """Return the newest event times by input and partition."""
        return [dict(sorted(dict(highs).items())) for highs in list(self._highs)]

    def last(self) -> tuple[int, str, int]:
        """Return input, partition and newest time of the partition that is furthest behind.

        Idle partitions and inputs that ended are left out, unless all are.
        """
        every = [(n, name) for n in range(len(self._highs)) for name in self.names(n)]
        active = [lane for lane in every if lane not in self._idle and lane[0] not in self._ended]
        newest = [(self._highs[n].get(name, EARLIEST), n, name) for n, name in active or every]
        high, number, name = min(newest)
        return number, name, high

    def set_names(self, number: int, names: Sequence[str]) -> None:
        """Take over the partitions that an input has now; others of it have ended.

        `names`: [] = it has none that are known.
        """
        if names:
            highs = self._highs[number]
            self._highs[number] = {name: highs.get(name, EARLIEST) for name in names}

    def rise(self, number: int, highs: Mapping[str, int]) -> None:
        """Note the newest times of events of an input, by partition."""
        by_name = self._highs[number]
        for name, high in highs.items():
            by_name[name] = max(by_name.get(name, EARLIEST), high)

    def end(self, number: int) -> None:
        """Note that an input has no more events."""
        self._ended.add(number)

    def settle(self, idle: Iterable[Lane]) -> int:
        """Return the watermark of a turn in which these partitions are idle."""
        self._idle = set(idle)
        active: list[int | None] = []
        highest = EARLIEST
        for number, highs in enumerate(self._highs):
            highest = max([highest, *highs.values()])
            if number not in self._ended:
                active.append(self.high(number, default=None))
        values = [high for high in active if high is not None]
        mark = min(values, default=highest)
        self.watermark = max(self.watermark, mark)
        return self.watermark

    def high(self, number: int, default: int | None = EARLIEST) -> int | None:
        """Return the lowest of the newest times of an input's partitions that are not idle.

        `default`: the answer if all of them are idle.
        """
        highs = self._highs[number]
        values = [high for name, high in highs.items() if (number, name) not in self._idle]
        if highs and not values:
            return default
        if not highs and (number, "") in self._idle:
            return default
        return min(values, default=EARLIEST)

    def names(self, number: int) -> list[str]:
        """Return the partitions of an input; "" for one whose partitions are not known."""
        return list(self._highs[number]) or [""]


class IdleClock:
    """Which partitions had nothing to read for a while, by the clock of the reader."""

    def __init__(self, idle_seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = idle_seconds
        self._clock = clock
        self._begin = clock()
        self._last: dict[Lane, float] = {}

    def touch(self, lanes: Iterable[Lane]) -> None:
        """Note that partitions had events, or have some that were not read yet."""
        now = self._clock()
        for lane in lanes:
            self._last[lane] = now

    def idle(self, lanes: Iterable[Lane]) -> list[Lane]:
        """Return those of some partitions that had nothing to read for long enough."""
        now = self._clock()
        limit = self._seconds
        return [lane for lane in lanes if now - self._last.get(lane, self._begin) >= limit]
