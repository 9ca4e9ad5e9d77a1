# SPDX-License-Identifier: Apache-2.0
"""Ahead: the ids of coming batches are mapped to rows while earlier batches train."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

from hotbed import checks
from hotbed.data.batch import Batch
from hotbed.embedding.modules import Planner
from hotbed.errors import ConfigError
from hotbed.training.learner import CPU, Example, prepare

__all__ = ["Ahead"]

log = logging.getLogger("hotbed")

Barrier = Callable[[int, int | None], bool]
"""barrier(step, now): whether tables are read or changed between this step and the next one.

`now` is the newest event time up to this step, in microseconds; None without times.
"""

CLOSING_SECONDS = 10.0
"""How long the end of a pass waits for a source that yields nothing."""


class Ahead:
    """Batches whose ids are mapped to rows on a thread of its own while earlier batches train.

    Results have the same bits as without it. Mapping inserts new ids, counts and times them, and
    evicts where a table is full; so it passes no barrier: a step after which tables are read or
    changed in another way (evict, evaluate, save). A batch behind a barrier is mapped when its turn
    comes.

    `RecModel` takes an `Ahead` of a Dataset, finds the network itself, and asks its callbacks for
    barriers. In a loop of your own, give the network and `barrier`. The network must look up the
    ids of each batch as they are, exactly once. Its first batch shows whether it does; a network
    that does not maps ids in its forward pass. Batches are yielded as tensors. If the loop ends
    before the data, up to `depth` batches are mapped and not learned, unless the last step is a
    barrier.

    Args:
        batches: a Dataset, or Batches to iterate over.
        network: the network that looks them up.
        depth: how many batches are mapped ahead; 0 = none.
        barrier: `barrier(step, now)` returns whether tables are read or changed between this step
            and the next one. `now` is the newest event time up to this step in microseconds. None =
            never. `EvictionSchedule.barrier` is one.
        step: number of steps that were learned before.
        now: newest event time before, in microseconds.

    Raises:
        ConfigError: a wrong `depth`; while iterating, the network is missing.

    Example:
        >>> model.fit(hb.Ahead(train), valid)
        >>> schedule = EvictionSchedule(tables, step_interval=1000)
        >>> for step, batch in enumerate(hb.Ahead(train, network, barrier=schedule.barrier), 1):
        ...     learn(batch)
        ...     schedule.step(step, now)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        network: nn.Module | None = None,
        depth: int = 2,
        *,
        barrier: Barrier | None = None,
        step: int = 0,
        now: int | None = None,
    ) -> None:
        checks.whole_number("Ahead.depth", depth, 0)
        self.batches = batches
        self.network = network
        self.depth = depth
        self.barrier = barrier
        self._step = step
        self._now = now

    def __iter__(self) -> Iterator[Batch]:
        if self.network is None:
            raise ConfigError(
                "Ahead: no network whose tables the ids are mapped for, got None. Give the "
                "network, or pass this to RecModel.fit()."
            )
        planner = Planner(self.network)
        stage = MapStage(
            self._examples(),
            planner,
            depth_for(planner, self.depth),
            self.barrier or _never,
            self._step,
            self._now,
        )
        with closing(stage):
            for example in stage:
                assert example is not None
                assert example.batch is not None
                batch = planner.map(example.batch)
                stage.advance()
                yield batch

    def _examples(self) -> Generator[Example | None, None, None]:
        for item in self.batches:
            if not isinstance(item, Batch):
                raise ConfigError(
                    f"Ahead: not a batch, got {type(item).__name__}. Give a hb.Dataset or hb.Batch "
                    "objects."
                )
            yield prepare(item, CPU, labelled=False)


def unwrap(data: Any) -> tuple[Any, int]:
    """Return the data of an `Ahead` and its depth; other data and 0.

    Raises:
        ConfigError: it has a network or barriers of its own, which are those of `RecModel`.
    """
    if not isinstance(data, Ahead):
        return data, 0
    if data.network is not None or data.barrier is not None:
        raise ConfigError(
            "Ahead: RecModel gives its own network and the barriers of its callbacks, got others. "
            "Give hb.Ahead(train, depth=…) alone."
        )
    return data.batches, data.depth


def depth_for(planner: Planner | None, depth: int) -> int:
    """Return how many batches can be mapped ahead: `depth`, or 0; the reason is logged."""
    if not depth:
        return 0
    reason = "the network is not one of hb.models, or is compiled"
    if planner is not None:
        reason = planner.obstacle()
    if reason:
        log.info("no batch is mapped ahead: %s", reason)
        return 0
    log.info("the ids of up to %d batches are mapped ahead", depth)
    return depth


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


def _never(step: int, now: int | None) -> bool:
    return False
