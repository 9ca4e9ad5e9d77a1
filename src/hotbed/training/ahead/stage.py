# SPDX-License-Identifier: Apache-2.0
"""MapStage: a thread that reads and maps, and the barriers that it does not pass."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum

from hotbed.training.example import Example

from .mapper import Mapper
from .worth import Worth

Barrier = Callable[[int, int | None], bool]
"""barrier(step, now): whether tables are read or changed between this step and the next one.

`now` is the newest event time up to this step, in microseconds; None without times.
"""

CLOSING_SECONDS = 10.0
"""How long the end of a pass waits for a source that yields nothing."""


class _State(Enum):
    READ = "read"
    ALLOWED = "allowed"
    MAPPING = "mapping"
    MAPPED = "mapped"
    DECLINED = "declined"  # it is mapped in its step, and nothing behind it before


@dataclass
class _Waiting:
    """An example that was read and is not learned yet; None = a tick."""

    example: Example | None
    step: int
    statistics: dict[str, dict[str, int]] | None = None  # of tables, once it was mapped
    state: _State = _State.READ


class MapStage:
    """Yields the examples of a pass in order, and maps some before their turn.

    A thread reads and maps. Which examples it may map is decided on the training thread, in
    `advance`: those up to the next barrier. An example that was not mapped is mapped when its turn
    comes. None among the examples is a tick, a barrier of its own.

    Args:
        examples: closed at the end, by the thread that reads them.
        planner: maps the ids.
        depth: how many examples are read and mapped ahead; 0 = no thread.
        barrier: see `Barrier`; asked once a step at most, with rising steps.
        step: number of steps that were learned before this pass.
        now: the newest event time before it.

    Attributes:
        ahead: number of examples after the current one that are mapped.
    """

    def __init__(
        self,
        examples: Generator[Example | None, None, None],
        planner: Mapper | None,
        depth: int,
        barrier: Barrier,
        step: int,
        now: int | None,
    ) -> None:
        self.ahead = 0
        self._examples = examples
        self._planner = planner
        self._depth = depth
        self._barrier = barrier
        self._blocked = -1  # the step of the barrier in front
        self._current = _Waiting(None, step)
        self._now = now  # the newest event time before the current example
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._failed = False  # ids could not be mapped: their turn ends the pass
        self._error: BaseException | None = None
        self._worth = Worth()
        self._read_step = step  # of the newest example that was read
        self._is_reading = False  # the thread is inside `examples`
        self._thread: threading.Thread | None = None
        if planner is not None:
            planner.begin(ahead=depth > 0)
        if depth:
            self._thread = threading.Thread(target=self._work, name="hotbed-map", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Example | None]:
        return self

    def __next__(self) -> Example | None:
        if self._thread is None:
            return next(self._examples)
        with self._changed:
            if not self._waiting:
                self._worth.wait()
            self._changed.wait_for(self._can_continue)
            is_direct = not self._waiting and not self._ended
        if is_direct:
            return self._read_here()
        with self._changed:
            if not self._waiting:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            first = self._waiting[0]
            is_late = first.state is _State.ALLOWED  # the thread reads: do not wait for the source
            if is_late:
                first.state = _State.MAPPING
        if is_late:
            self._map(first)
        with self._changed:
            self._changed.wait_for(lambda: first.state is not _State.MAPPING)
            self._waiting.popleft()
            self._changed.notify_all()
        if first.state is not _State.READ:
            self.ahead -= 1
        if self._planner is not None:
            self._now = _later(self._now, self._current, self._planner)
        self._current = first
        return first.example

    def _can_continue(self) -> bool:
        """Return whether an example waits, the data ended, or the next one is read here."""
        is_free = not self._worth.maps_ahead and not self._is_reading
        return bool(self._waiting) or self._ended or is_free

    def _read_here(self) -> Example | None:
        """Read the next example on the training thread; its step maps it."""
        example = next(self._examples)
        self._read_step += example is not None
        if self._planner is not None:
            self._now = _later(self._now, self._current, self._planner)
        self._current = _Waiting(example, self._read_step)
        return example

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """Statistics of the tables that are mapped ahead, as they are without later examples."""
        return self._current.statistics or {}

    def advance(self) -> None:
        """Allow the next examples to be mapped, up to the next barrier.

        Call it on the training thread, after the ids of the current example were mapped.
        """
        if self._thread is None or self._planner is None or not self._planner.foresees:
            return
        with self._changed:
            self._worth.count()
            self._changed.notify_all()
        if not self._worth.maps_ahead:
            return
        with self._changed:
            waiting = list(self._waiting)
        before = self._current
        if before.statistics is None:
            before.statistics = self._planner.statistics()
        now = _later(self._now, before, self._planner)
        for following in waiting:
            if following.example is None:
                break
            if following.state is _State.READ:
                if self._is_barrier(before.step, now):
                    break
                self.ahead += 1
                with self._changed:
                    following.state = _State.ALLOWED
                    self._changed.notify_all()
            before = following
            now = _later(now, before, self._planner)

    def close(self) -> None:
        """End the thread; it closes the examples."""
        if self._thread is None:
            self._examples.close()
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)

    def _is_barrier(self, step: int, now: int | None) -> bool:
        if self._blocked != step and self._barrier(step, now):
            self._blocked = step
        return self._blocked == step

    # --- on the thread

    def _work(self) -> None:
        try:
            with closing(self._examples):
                self._read_and_map()
        except BaseException as error:  # handed to the training thread, which raises it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read_and_map(self) -> None:
        while True:
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
                allowed = self._next_allowed()
                if allowed is not None:
                    allowed.state = _State.MAPPING
                self._is_reading = allowed is None
            if allowed is not None:
                self._map(allowed)
                continue
            try:
                example = next(self._examples)
            except StopIteration:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                continue
            self._read_step += example is not None
            with self._changed:
                self._waiting.append(_Waiting(example, self._read_step))
                self._changed.notify_all()

    def _has_work(self) -> bool:
        has_room = self._worth.maps_ahead and len(self._waiting) < self._depth
        return self._next_allowed() is not None or (has_room and not self._ended)

    def _next_allowed(self) -> _Waiting | None:
        """Return the next example to map; None while, or if, the one before it is not mapped."""
        if self._failed:
            return None
        for waiting in self._waiting:
            if waiting.state in (_State.MAPPING, _State.DECLINED):
                return None
            if waiting.state is _State.ALLOWED:
                return waiting
        return None

    def _map(self, waiting: _Waiting) -> None:
        example = waiting.example
        assert self._planner is not None
        assert example is not None
        planned = self._planner.plan(example)
        statistics = self._planner.statistics()
        with self._changed:
            waiting.example = planned
            waiting.statistics = statistics
            waiting.state = _State.DECLINED if planned is example else _State.MAPPED
            self._failed = planned.error is not None
            self._changed.notify_all()


def _later(now: int | None, place: _Waiting, planner: Mapper) -> int | None:
    """Return the newest event time up to an example."""
    latest = None if place.example is None else planner.latest(place.example)
    if latest is None or now is None:
        return now if latest is None else latest
    return max(now, latest)
