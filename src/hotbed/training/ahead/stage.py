# SPDX-License-Identifier: Apache-2.0
"""MapStage: a thread that reads and maps, and the barriers that it does not pass."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum

from hotbed.embedding.modules import Planner
from hotbed.training.learner import Example

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


@dataclass
class _Waiting:
    """An example that was read and is not learned yet; None = a tick."""

    example: Example | None
    step: int
    now: int | None
    state: _State = _State.READ


class MapStage:
    """Yields the examples of a pass in order, and maps some before their turn.

    A thread reads and maps. Which examples it may map is decided on the training thread, in
    `advance`: those up to the next barrier. An example that was not mapped is mapped when its turn
    comes, by `Planner.map`. None among the examples is a tick, a barrier of its own.

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
        planner: Planner | None,
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
        self._current = _Waiting(None, step, now)
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._failed = False  # ids could not be mapped: their turn ends the pass
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._work, name="hotbed-map", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Example | None]:
        return self

    def __next__(self) -> Example | None:
        if self._thread is None:
            return next(self._examples)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
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
        self._current = first
        return first.example

    def advance(self) -> None:
        """Allow the next examples to be mapped, up to the next barrier.

        Call it on the training thread, after the ids of the current example were mapped.
        """
        if self._thread is None or self._planner is None or not self._planner.foresees:
            return
        with self._changed:
            waiting = list(self._waiting)
        before = self._current
        for following in waiting:
            if following.example is None or following.example.batch is None:
                break
            if following.state is _State.READ:
                if self._is_barrier(before):
                    break
                self.ahead += 1
                with self._changed:
                    following.state = _State.ALLOWED
                    self._changed.notify_all()
            before = following

    def close(self) -> None:
        """End the thread; it closes the examples."""
        if self._thread is None:
            self._examples.close()
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)

    def _is_barrier(self, place: _Waiting) -> bool:
        if self._blocked != place.step and self._barrier(place.step, place.now):
            self._blocked = place.step
        return self._blocked == place.step

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
        last = self._current
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
                allowed = self._next_allowed()
                if allowed is not None:
                    allowed.state = _State.MAPPING
            if allowed is not None:
                self._map(allowed)
                continue
            try:
                last = _after(last, next(self._examples))
            except StopIteration:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                continue
            with self._changed:
                self._waiting.append(last)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        has_room = len(self._waiting) < self._depth
        return self._next_allowed() is not None or (has_room and not self._ended)

    def _next_allowed(self) -> _Waiting | None:
        """Return the next example to map; None while, or if, the one before it is not mapped."""
        if self._failed:
            return None
        for waiting in self._waiting:
            if waiting.state is _State.MAPPING:
                return None
            if waiting.state is _State.ALLOWED:
                return waiting
        return None

    def _map(self, waiting: _Waiting) -> None:
        example = waiting.example
        assert self._planner is not None
        assert example is not None
        assert example.batch is not None
        batch = self._planner.plan(example.batch)
        with self._changed:
            waiting.example = replace(example, arguments=(batch,), batch=batch)
            waiting.state = _State.MAPPED
            self._failed = batch.plans.error is not None
            self._changed.notify_all()


def _after(last: _Waiting, example: Example | None) -> _Waiting:
    """Return the place of `example` in the pass, behind `last`."""
    if example is None:
        return _Waiting(None, last.step, last.now)
    now = last.now
    batch = example.batch
    if batch is not None and batch.time is not None and len(batch.time):
        latest = int(batch.time.max())
        now = latest if now is None else max(now, latest)
    return _Waiting(example, last.step + 1, now)
