# SPDX-License-Identifier: Apache-2.0
"""ShardedLookup: the verbs of a lookup over the rows of all ranks."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.data.batch import Ids
from hotbed.embedding import hashing
from hotbed.embedding.histories import Int64Array, Rows, rows_here
from hotbed.embedding.lookups import (
    Asked,
    FeatureLayout,
    MappedIds,
    NativeLookup,
    Plan,
    Pooled,
    RowMemory,
    Statistics,
    Sums,
    WantedRows,
    native_ids,
    new_rows,
)
from hotbed.embedding.table import MapQueue, Table
from hotbed.errors import ConfigError

from .calls import RankCall
from .dense import added_counts, counts_as_floats
from .envelope import Letters, Talk
from .exchange import TableExchange
from .ids import AskedIds, OwnedIds
from .own_batches import OwnBatches
from .placement import Placement
from .ranks import STEP, Ranks, name_difference
from .traffic import Traffic

NOTHING = torch.empty(0, dtype=torch.int64)
GRACE_SECONDS = 5
"""How long a rank that ends a pass waits for the others, which end it, too."""
Layouts = tuple[FeatureLayout, ...]


@dataclass(frozen=True)
class RankAnswer:
    """What the owners of rows did with a question.

    Attributes:
        ids: those that were asked for.
        statistics: of the tables of this rank, after its map.
        traffic: to other ranks, on connections of their own.
    """

    ids: AskedIds
    statistics: Statistics
    traffic: Traffic


@dataclass(eq=False)
class RankAsked:
    """The ids of a batch of grains, which the owners of their rows are asked for.

    Attributes:
        wanted: what is asked.
        values: what is equal on all ranks.
        thread: asks; None = the question was asked at once.
        answer: None = not begun.
    """

    wanted: WantedRows
    values: Mapping[str, Any]
    thread: AskingThread | None = None
    answer: Future[RankAnswer] | None = None

    def ask(self, exchange: TableExchange, *, logs: bool = False) -> AskedIds:
        """Ask the owners; `logs`: whether the map may be taken back."""
        return exchange.ask(
            [ids for of_module in self.wanted.inputs for ids in of_module],
            self.wanted.time,
            self.wanted.grain_ends,
            training=self.wanted.training,
            values=self.values,
            logs=logs,
        )

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.wait_for(self)

    def take_back(self) -> None:
        if self.thread is None or self.answer is None:
            return
        try:
            error = self.answer.exception(GRACE_SECONDS)
        except TimeoutError:
            return  # this rank has failed alone, and the others do not ask
        if error is None:
            self.answer.result().ids.take_back()

    def statistics(self) -> Statistics:
        if self.thread is None or self.answer is None:
            return {}
        return self.answer.result().statistics


class AskingThread:
    """Asks the questions of a pass over connections of its own, in the order of the batches.

    So ranks need not ask at the same moment. Questions wait until the rows of the batch under way
    are here. All ranks plan the same batches at the same step.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
    """

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self._connections = ranks.another()
        self._thread = ThreadPoolExecutor(1, "hotbed-map")
        self._exchanges: dict[Layouts, TableExchange] = {}
        self._queue: MapQueue | None = None
        self._waiting: deque[RankAsked] = deque()
        self._error: Exception | None = None  # of a question of this pass

    def add(self, asked: RankAsked, queue: MapQueue) -> None:
        """Let a question wait for its turn; `queue`: of the pass, which begins with a new one."""
        if queue is not self._queue:
            self._queue = queue
            self._waiting.clear()
            self._error = None
        asked.thread = self
        self._waiting.append(asked)

    def go_on(self) -> None:
        """Ask what waits: the rows of the batch under way are here."""
        while self._waiting:
            self._begin_first()

    def wait_for(self, asked: RankAsked) -> None:
        """Wait for the answer to a question, whose batch is the next one of all ranks."""
        # questions meet on other connections: a rank that is in another call is found here
        call = RankCall.of("map", self._ranks.place)
        self._ranks.meet(call, [NOTHING] * self._ranks.size)
        while asked.answer is None:
            self._begin_first()
        with self._ranks.traffic.waiting():
            asked.answer.result()

    def _begin_first(self) -> None:
        asked = self._waiting.popleft()
        asked.answer = self._thread.submit(self._answer, asked)

    def _answer(self, asked: RankAsked) -> RankAnswer:
        if self._error is not None:
            raise self._error  # nothing is mapped behind a batch that could not be
        layouts = asked.wanted.layouts
        exchange = self._exchanges.get(layouts)
        if exchange is None:
            exchange = TableExchange(self._connections, self._placement, layouts)
            self._exchanges[layouts] = exchange
        try:
            ids = asked.ask(exchange, logs=True)
        except Exception as error:
            self._error = error
            raise
        traffic = self._connections.traffic
        self._connections.traffic = Traffic()
        tables = [table for layout in layouts for table in layout.tables]
        return RankAnswer(ids, {table.name: table.stats for table in tables}, traffic)


class ShardedLookup(NativeLookup):
    """Performs the verbs over the rows of all ranks, for batches of grains.

    A network in eval mode is called on every rank as often, with the same batch or its own.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
    """

    spans_ranks = True

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self._batches = OwnBatches(ranks, placement)
        self._exchanges: dict[tuple[Layouts, bool], TableExchange] = {}
        self._thread: AskingThread | None = None
        self._read_traffic = Traffic()  # to read histories for the next step

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLookup:
        """Return the lookup of a copied network: the copy has the same connections."""
        return ShardedLookup(self._ranks, self._placement)

    def ask(self, wanted: WantedRows) -> Asked:
        if not wanted.grain_ends:
            raise ConfigError(
                "ranks: ids that several ranks share are mapped by the steps of RecModel or "
                "hb.shard, grain by grain, got a batch to map on its own. Call model.fit(), "
                "model.step(), or the backward() of hb.shard."
            )
        asked = RankAsked(wanted, wanted.agreed())
        if wanted.queue is None:
            asked.answer = Future()
            asked.answer.set_result(RankAnswer(asked.ask(self._exchange(asked)), {}, Traffic()))
        else:
            self._thread = self._thread or AskingThread(self._ranks, self._placement)
            self._thread.add(asked, wanted.queue)
        return asked

    def take(
        self, asked: Asked, grains: Sequence[Sequence[Sequence[Ids]] | None]
    ) -> list[list[Plan | None]]:
        assert isinstance(asked, RankAsked), "this lookup was asked"
        answer = _answer_of(asked)
        self._ranks.traffic.add_sent(answer.traffic.sent_bytes, answer.traffic.messages)
        if asked.wanted.training:
            self._ranks.traffic.add(self._read_traffic)
            self._read_traffic = Traffic()
        plans = self._exchange(asked).take(answer.ids, grains)
        if self._thread is not None and asked.wanted.training:
            self._thread.go_on()
        return plans

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        memory: RowMemory = new_rows,
        *,
        training: bool,
        keep: bool,
    ) -> tuple[Pooled, MappedIds]:
        if training:
            raise ConfigError(
                "ranks: tables that several ranks share learn in the steps of RecModel or "
                "hb.shard, got a lookup in train mode that no step has mapped. Look up the ids "
                "of a batch as they are, once, in model.fit(), model.step(), or the loss_of of "
                "loop.backward()."
            )
        plan = self._batches.plan_of(layout, inputs, None, training=False)
        return self.pool_plan(layout, inputs, plan, memory)

    def join(self, parts: Sequence[Sums]) -> Sums:
        joined = super().join(parts)
        if not all(isinstance(part.mapped, OwnedIds) for part in parts):
            return joined
        step = native_ids(joined.mapped).step
        return replace(joined, mapped=OwnedIds(joined.mapped.tables, step, ranks=self._ranks))

    def join_grains(
        self, asked: Asked, parts: Sequence[Sequence[Sums | None]]
    ) -> Callable[[], list[Sums | None]]:
        talk = self._joined(self._exchange(asked), _answer_of(asked).ids, parts)
        return self._ranks.envelope.begin(talk)

    def _joined(
        self, exchange: TableExchange, ids: AskedIds, parts: Sequence[Sequence[Sums | None]]
    ) -> Talk[list[Sums | None]]:
        """Let each rank join the sums of the rows that it owns; all say whether they are finite."""
        present = counts_as_floats(
            sum(part is not None for part in of_module) for of_module in parts
        )
        length = present.numel()
        sizes = [length + size for size in exchange.num_sums(ids)]
        blocks = [[present] * self._ranks.size, *exchange.sums_to_owners(ids, parts)]
        received = yield Letters(blocks, sizes)
        counts = added_counts([part[:length] for part in received])
        owned = exchange.sums_of_owner(ids, [part[length:] for part in received])
        faults = yield torch.tensor([float(not sums.finite) for sums in owned])
        return [
            replace(of_module, finite=not faulty) if count else None
            for of_module, faulty, count in zip(owned, faults.any(0).tolist(), counts, strict=True)
        ]

    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        if not all(isinstance(part.mapped, OwnedIds) for part in parts):
            raise ConfigError(
                "ranks: tables that several ranks share learn in the steps of RecModel or "
                "hb.shard, got gradients of another backward pass. Call model.fit(), model.step(), "
                "or the backward() of hb.shard."
            )
        super().update(parts, rates)

    def read_tables(
        self, tables: Mapping[str, Table], wanted: Mapping[str, Int64Array], *, learns: bool = False
    ) -> Rows:
        """Return the rows [n, dim] of ids [n] by table, from their owners.

        All ranks want the rows of the same ids, so each sends those that it owns unasked.

        Args:
            tables: by name.
            wanted: ids by table.
            learns: whether they are read for the next step, to whose traffic they then count.

        Raises:
            ConfigError: on every rank: they want the rows of different ids.
        """
        owners = {
            name: self._placement.owners(name)[hashing.partition(ids)]
            for name, ids in wanted.items()
        }
        rows = rows_here(tables, wanted)
        own_rows = [
            of_table[owners[name] == self._ranks.rank].reshape(-1)
            for name, of_table in rows.items()
        ]
        digest = 0
        for name, ids in wanted.items():
            digest = zlib.crc32(ids.tobytes(), zlib.crc32(name.encode(), digest))
        call = RankCall.of("read", self._ranks.place)
        with _counting(self._ranks, self._read_traffic if learns else self._ranks.traffic):
            received = self._ranks.meet(call, [_words(digest, own_rows)] * self._ranks.size)
        if any(int(words[0]) != digest for words in received):
            name_difference(self._ranks, {"rows of a batch with histories": digest}, STEP)
        for rank, words in enumerate(received):
            values = words[1:].numpy().view(np.float32)
            for name, of_table in rows.items():
                places = np.flatnonzero(owners[name] == rank)
                shape = (len(places), of_table.shape[1])
                num_values = len(places) * of_table.shape[1]
                of_table[places] = values[:num_values].reshape(shape)
                values = values[num_values:]
        return rows

    def _exchange(self, asked: Asked) -> TableExchange:
        assert isinstance(asked, RankAsked), "this lookup was asked"
        key = (asked.wanted.layouts, asked.wanted.training)
        exchange = self._exchanges.get(key)
        if exchange is None:
            layouts, learns = key
            exchange = TableExchange(self._ranks, self._placement, layouts, learns=learns)
            self._exchanges[key] = exchange
        return exchange


def _words(digest: int, rows: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """Return a digest, and numbers of 4 bytes behind it, as int64 numbers."""
    num_values = sum(map(len, rows))
    words = np.zeros(1 + (num_values + 1) // 2, np.int64)
    words[0] = digest
    words[1:].view(np.float32)[:num_values] = np.concatenate(rows)
    return torch.from_numpy(words)


def _answer_of(asked: Asked) -> RankAnswer:
    assert isinstance(asked, RankAsked), "this lookup was asked"
    assert asked.answer is not None, "the question was waited for"
    return asked.answer.result()


@contextmanager
def _counting(ranks: Ranks, traffic: Traffic) -> Iterator[None]:
    """Add what is sent in the `with` block to a traffic of its own."""
    before = ranks.traffic
    ranks.traffic = traffic
    try:
        yield
    finally:
        ranks.traffic = before
