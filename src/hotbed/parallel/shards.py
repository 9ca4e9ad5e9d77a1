# SPDX-License-Identifier: Apache-2.0
"""The rows of each table that a process holds, for those who write and read states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from hotbed.data.batch import as_ids
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.snapshot import Spread
from hotbed.embedding.table import Table

from .calls import at
from .placement import Placement
from .ranks import SETTINGS, Ranks, Requirement, digest_of

T = TypeVar("T")
R = TypeVar("R")
Settings = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Shard(ABC):
    """The rows of every table that a process holds. The verbs are those of a process alone.

    Every process that holds a part of the rows makes the same calls in the same order.

    Attributes:
        size: number of processes that hold the rows.
        rank: the number of this one.
    """

    size = 1
    rank = 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all of them hold alike, and decides for all."""
        return self.rank == 0

    @abstractmethod
    def another(self) -> Shard:
        """Return the same with connections of its own, for a thread that saves."""

    @abstractmethod
    def enter(self, phase: str, step: int | None = None) -> None:
        """Note the phase of a training, and the step where it is given, for messages of errors."""

    def owned(self, table: str) -> NDArray[np.bool_]:
        """Return whether this process holds the rows of each partition of a table, [256]."""
        return np.ones(PARTITIONS, bool)

    def spread(self, table: str) -> Spread | None:
        """Return the processes over which the rows of a table are spread; None: there is one."""
        return None

    def spans(self, table: str, spans: Iterable[range]) -> list[range]:
        """Return the parts of spans of partitions that this process holds."""
        return list(spans)

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose errors are raised by all processes."""
        return nullcontext()

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns, or raise what it raises, in the first process."""
        return make()

    @abstractmethod
    def check_equal(self, settings: Settings, requirement: Requirement = SETTINGS) -> None:
        """Raise ConfigError, in all processes, if a setting is not the same in all of them.

        `settings`: by name, or a function that returns them, where there are others to ask.
        """

    def gathered(self, value: T) -> list[T]:
        """Return a small value of each process."""
        return [value]

    def any(self, here: bool) -> bool:
        """Return whether it is true in one of the processes."""
        return here

    def shared_out(
        self,
        count: int,
        grains: Callable[[range], Sequence[T]],
        asked: Callable[[range], Sequence[T]],
        work: Callable[[T], R],
    ) -> list[R] | None:
        """Return what `work` returns for each grain; each process works on a run of them.

        None: `work` draws random numbers, so only one grain after the other has those of one
        process. torch's generator is set back.

        Args:
            count: how many grains there are; each has samples.
            grains: returns those of some numbers.
            asked: returns them with what it has asked the other processes for. It is called if each
                process has a grain.
            work: changes nothing, and makes the same calls to other processes for each grain. What
                it returns is small.
        """
        return [work(grain) for grain in grains(range(count))]

    def collected(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the batches of all processes to the first one, by rising partition.

        Each is of one partition. The other processes get none.
        """
        return iter(batches)


class WholeShard(Shard):
    """All rows: there is one process."""

    def another(self) -> Shard:
        return self

    def enter(self, phase: str, step: int | None = None) -> None: ...

    def check_equal(self, settings: Settings, requirement: Requirement = SETTINGS) -> None: ...


WHOLE: Shard = WholeShard()


class RankShard(Shard):
    """The rows of the partitions that a rank owns."""

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self.size = ranks.size
        self.rank = ranks.rank

    def another(self) -> Shard:
        return RankShard(self._ranks.another(), self._placement)

    def enter(self, phase: str, step: int | None = None) -> None:
        place = self._ranks.place
        place.phase = phase
        place.step = place.step if step is None else step

    def owned(self, table: str) -> NDArray[np.bool_]:
        owned: NDArray[np.bool_] = self._placement.owners(table) == self._ranks.rank
        return owned

    def spread(self, table: str) -> Spread | None:
        return _TableShard(self, table)

    def spans(self, table: str, spans: Iterable[range]) -> list[range]:
        owned = self.owned(table)
        edges = np.flatnonzero(np.diff(owned, prepend=False, append=False)).tolist()
        parts = []
        for span in spans:
            for first, stop in zip(edges[::2], edges[1::2], strict=True):
                part = range(max(first, span.start), min(stop, span.stop))
                if part:
                    parts.append(part)
        return parts

    def together(self) -> AbstractContextManager[None]:
        return self._ranks.together()

    def from_first(self, make: Callable[[], T]) -> T:
        return self._ranks.from_first(make)

    def check_equal(self, settings: Settings, requirement: Requirement = SETTINGS) -> None:
        self._ranks.check_equal(settings() if callable(settings) else settings, requirement)

    def gathered(self, value: T) -> list[T]:
        return self._ranks.gather_objects(value)

    def any(self, here: bool) -> bool:
        return any(self._ranks.gather_objects(here))

    def shared_out(
        self,
        count: int,
        grains: Callable[[range], Sequence[T]],
        asked: Callable[[range], Sequence[T]],
        work: Callable[[T], R],
    ) -> list[R] | None:
        if count < 2:
            return super().shared_out(count, grains, asked, work)
        ends = [count * rank // self.size for rank in range(self.size + 1)]
        numbers = range(ends[self.rank], ends[self.rank + 1])
        if count >= self.size:
            with self._ranks.undivided():
                own_grains = asked(numbers)
        else:
            own_grains = grains(numbers)
        before = torch.get_rng_state()
        messages = self._ranks.traffic.messages
        done = [work(grain) for grain in own_grains]
        if not own_grains or self._ranks.traffic.messages > messages:
            most = max(last - first for first, last in pairwise(ends))
            repeated = own_grains or grains(range(1))
            for _ in range(len(own_grains), most):
                work(repeated[0])  # its calls answer those of ranks with more grains
        is_random = not torch.equal(torch.get_rng_state(), before)
        of_ranks = self.gathered((is_random, done))
        if any(random for random, _ in of_ranks):
            torch.set_rng_state(before)
            return None
        return [value for _, values in of_ranks for value in values]

    def collected(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        every: list[pa.RecordBatch] = []
        with self.together():
            packed = _packed(list(batches))
        for data in self._ranks.collect(packed):
            if len(data):
                every.extend(pa.ipc.open_stream(data))
        return iter(sorted(every, key=_partition))


class _TableShard(Spread):
    """The rows of one table, of which this rank has those that it owns."""

    def __init__(self, shard: Shard, table: str) -> None:
        self._shard = shard
        self._table = table
        self.owned = shard.owned(table)

    @at("remove")
    def removed(self, ids: Any, remove: Callable[[Any], int]) -> int:
        ids = as_ids(ids)
        self._shard.check_equal({f"ids to remove from table {self._table!r}": _brief(ids)})
        return sum(self._shard.gathered(remove(ids)))

    def gathered(self, value: Any) -> list[Any]:
        return self._shard.gathered(value)

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        self._shard.check_equal(settings)


def edits_of(tables: Iterable[Table]) -> dict[str, Any]:
    """Return the calls that changed rows outside of steps, which all ranks must make, by table."""
    return {f"rows of table {table.name!r} changed by": table.edits for table in tables}


def _brief(ids: NDArray[np.int64]) -> str:
    """Return the number of ids and their digest."""
    return f"{len(ids)} with the digest {digest_of([torch.from_numpy(ids)])}"


def _packed(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Return batches as an Arrow stream; no bytes for none."""
    sink = pa.BufferOutputStream()
    if batches:
        with pa.ipc.new_stream(sink, batches[0].schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
    return sink.getvalue()


def _partition(batch: pa.RecordBatch) -> int:
    return int(batch.column("partition")[0].as_py())
