# SPDX-License-Identifier: Apache-2.0
"""The map stage: decides how far ids are mapped and rows fetched, and lets threads do it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hotbed.connectors.read_ahead import ReadAhead
from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.embedding.table import MapQueue
from hotbed.training.step.example import Example

from .fetcher import Fetcher
from .planner import Planner

Barrier = Callable[[int, int | None], bool]
"""barrier(step, now): whether tables are read or changed between this step and the next one.

`now` is the newest event time up to this step, in microseconds; None without times.
"""


@dataclass
class _ReadExample:
    """An example that was read, and its step; None = a tick."""

    example: Example | None
    step: int
    is_mapped: bool = False
    is_declined: bool = False  # it is mapped in its step, and nothing behind it before


class MapStage:
    """Yields the examples of a pass in order, and maps some before their turn.

    Everything is decided on the training thread, in `advance`: which examples are read, and which
    of them are given to the thread that maps, those up to the next barrier. An example that was not
    mapped is mapped when its turn comes. None among the examples is a tick, a barrier of its own.

    Args:
        examples: closed at the end.
        data: what the examples come from. A Dataset reads ahead itself; for other data a thread
            does, so that a step never waits for the example after it.
        planner: maps the ids.
        depth: how many examples are read and mapped ahead; 0 = none.
        barrier: see `Barrier`; asked once a step at most, with rising steps.
        step: number of steps that were learned before this pass.
        now: the newest event time before it.

    Attributes:
        ahead: number of examples after the current one that are mapped, or are being mapped.
    """

    def __init__(
        self,
        examples: Generator[Example | None, None, None],
        data: Any,
        planner: Planner | None,
        depth: int,
        barrier: Barrier,
        step: int,
        now: int | None,
    ) -> None:
        self.ahead = 0
        self._fetcher: Fetcher | None = None
        self._planner = planner
        self._depth = depth
        self._barrier = barrier
        self._blocked = -1  # the step of the barrier in front
        self._current = _ReadExample(None, step)
        self._now = now  # the newest event time before the current example
        self._read_step = step  # of the newest example that was read
        self._waiting: deque[_ReadExample] = deque()
        self._error: Exception | None = None  # of reading; its turn comes behind what waits
        self._examples: Generator[Example | None, None, None] | ReadAhead[Example | None] = examples
        self._num_read = 0  # examples and ticks
        self._reader: Dataset | ReadAhead[Example | None] | None = None
        self._listed: list[Any] = []  # the data, if they are a list that nothing reads ahead
        self._queue: MapQueue | None = None
        if isinstance(data, Dataset) and data.prefetch:
            self._reader = data
        elif depth and planner is not None and not planner.waits:
            self._reader = self._examples = ReadAhead(examples, depth)
        elif isinstance(data, list):
            self._listed = data
        if depth:
            self._queue = MapQueue()
        if planner is not None:
            planner.begin(ahead=depth > 0, queue=self._queue)

    def __iter__(self) -> MapStage:
        return self

    def __next__(self) -> Example | None:
        if self._waiting:
            place = self._waiting.popleft()
            self.ahead -= place.is_mapped
        else:
            place = self._read()
        self._now = self._later(self._now, self._current)
        self._current = place
        if self._queue is not None:  # until the lookup of this example is over
            self._queue.hold()
        return place.example

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """Statistics of the tables that are mapped ahead, as they are without later examples."""
        if self._planner is None or self._current.example is None:
            return {}
        return self._planner.statistics(self._current.example)

    def fetch_for(self, network: nn.Module) -> None:
        """Let tables of a network that lie on a disk read the rows of coming batches."""
        self._fetcher = Fetcher.of(network)

    def advance(self, example: Example) -> None:
        """Let the next examples be mapped, up to the next barrier, and rows of others be fetched.

        Args:
            example: the current one; its ids are mapped.
        """
        self._current.example = example
        self._fetch()
        if self._queue is None or self._planner is None or not self._planner.foresees:
            return
        self._read_ahead()
        before = self._current
        now = self._later(self._now, before)
        for place in self._waiting:
            if not place.is_mapped:
                self._map(place, before.step, now)
            if not place.is_mapped or _failed(place):
                break
            before = place
            now = self._later(now, before)

    def close(self) -> None:
        """End the thread and close the examples.

        Examples that were mapped and will not be looked up are taken back, so that the tables hold
        what was learned and no more.
        """
        if self._fetcher is not None:
            self._fetcher.close()
        if self._queue is not None:
            self._queue.close()
            assert self._planner is not None
            mapped = [place for place in self._waiting if place.is_mapped]
            for place in (*reversed(mapped), self._current):  # that one was mapped in its turn, too
                if place.example is not None:
                    self._planner.take_back(place.example)
            self._waiting.clear()
            self.ahead = 0
        self._examples.close()

    def _fetch(self) -> None:
        """Let rows be fetched of the batches that were read and do not wait here yet."""
        if self._fetcher is None:
            return
        number = max(0, self._fetcher.depth - len(self._waiting))
        if self._listed:
            batches = self._listed[self._num_read : self._num_read + number]
            self._fetcher.look([batch for batch in batches if isinstance(batch, Batch)])
        reading: ReadAhead[Any] | None
        if isinstance(self._reader, Dataset):
            reading = self._reader.reading
            if reading is not None:  # an iterator of the user's own is read no further ahead
                reading.deepen(self._fetcher.depth)
        else:
            reading = self._reader
        if reading is not None:
            coming = reading.coming(number)
            self._fetcher.look([batch for batch in coming if batch is not None])

    def _read_ahead(self) -> None:
        """Read examples up to the depth: those that can be had without waiting, or all."""
        assert self._planner is not None
        while len(self._waiting) < self._depth and self._error is None:
            if not self._planner.waits and self._reader is not None and not self._reader.has_next:
                return
            try:
                self._waiting.append(self._read())
            except StopIteration:
                return
            except Exception as error:  # raised when its turn comes
                self._error = error

    def _read(self) -> _ReadExample:
        if self._error is not None:
            raise self._error
        example = next(self._examples)
        self._num_read += 1
        self._read_step += example is not None
        return _ReadExample(example, self._read_step)

    def _map(self, place: _ReadExample, step: int, now: int | None) -> None:
        """Give an example to the thread, unless a barrier lies before it, after `step`."""
        assert self._planner is not None
        example = place.example
        if example is None or place.is_declined or self._is_barrier(step, now):
            return
        place.example = self._planner.plan(example)
        place.is_declined = place.example is example
        place.is_mapped = not place.is_declined
        self.ahead += place.is_mapped

    def _is_barrier(self, step: int, now: int | None) -> bool:
        if self._blocked != step and self._barrier(step, now):
            self._blocked = step
        return self._blocked == step

    def _later(self, now: int | None, place: _ReadExample) -> int | None:
        """Return the newest event time up to an example."""
        latest = None
        if self._planner is not None and place.example is not None:
            latest = self._planner.latest(place.example)
        if latest is None or now is None:
            return now if latest is None else latest
        return max(now, latest)


def _failed(place: _ReadExample) -> bool:
    return place.example is not None and place.example.error is not None
