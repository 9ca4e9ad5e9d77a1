# SPDX-License-Identifier: Apache-2.0
"""RankMapper: asks for the ids of coming batches whose rows lie on several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any

import torch

from hotbed.data.batch import Batch, changed
from hotbed.embedding.table import MapQueue
from hotbed.errors import HotbedError
from hotbed.parallel import AskedIds, Placement, RankCall, Ranks, TableExchange, Traffic
from hotbed.training.stages.example import Example
from hotbed.training.stages.network import NetworkLookups

from .planner import obstacle_of

Ask = Callable[[TableExchange, Batch, Mapping[str, Any]], AskedIds]
"""Ask for the ids of a batch, to be taken back; the values must be equal on all ranks."""
Statistics = dict[str, dict[str, int]]
NOTHING = torch.empty(0, dtype=torch.int64)
GRACE_SECONDS = 5
"""How long a rank that ends a pass waits for the others, which end it, too."""


class Question:
    """The ids of a batch, which are asked for on a thread.

    Attributes:
        batch: of the ids.
        values: what was equal on all ranks when the batch was planned.
        answer: the ids, and the statistics of the tables after their map; None = not begun.
    """

    def __init__(self, batch: Batch, values: Mapping[str, Any]) -> None:
        self.batch = batch
        self.values = values
        self.answer: Future[tuple[AskedIds, Statistics]] | None = None

    @property
    def asked(self) -> AskedIds:
        """The ids, once the owners have mapped them."""
        assert self.answer is not None, "the mapper began it"
        return self.answer.result()[0]


class RankMapper:
    """A `Mapper` of a network whose rows several ranks own: asks the owners ahead, on a thread.

    Questions go over connections of their own, in the order of the batches, so that ranks need not
    ask at the same moment. They wait until the rows of the batch under way are here. All ranks plan
    the same batches at the same step.

    Attributes:
        sent_bytes: to other ranks; assign 0 to count anew.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
        lookups: of the network.
        ask: asks for the ids of a batch.
        values_of: returns what must be equal on all ranks in the step of a batch.
    """

    waits = True

    def __init__(
        self,
        ranks: Ranks,
        placement: Placement,
        lookups: NetworkLookups,
        ask: Ask,
        values_of: Callable[[Batch], Mapping[str, Any]],
    ) -> None:
        self._ranks = ranks
        self._placement = placement
        self._lookups = lookups
        self._ask = ask
        self._values_of = values_of
        self._is_ahead = False
        self._exchange: TableExchange | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Question] = deque()
        self._error: Exception | None = None  # of a question of this pass
        self.sent_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RankMapper:
        """Return the mapper of a copied learner, with a thread and connections of its own."""
        parts = (self._lookups, self._ask, self._values_of)
        return RankMapper(self._ranks, self._placement, *copy.deepcopy(parts, memo))

    def begin(self, *, ahead: bool, queue: MapQueue | None = None) -> None:
        self._is_ahead = ahead
        self._waiting.clear()
        self._error = None
        if ahead and self._thread is None:
            self._connections = self._ranks.another()
            self._thread = ThreadPoolExecutor(1, "hotbed-map")

    @property
    def foresees(self) -> bool:
        """Whether later batches may be mapped: a network of grains looks up each batch once."""
        return self._is_ahead

    def obstacle(self) -> str:
        if self._lookups.runs_network:
            return "the ids of its lookups are those of a forward pass"
        return obstacle_of(self._lookups.tables)

    def map(self, example: Example) -> Example:
        if not self._is_ahead:
            return example
        # questions meet on other connections: a rank that is in another call is found here
        call = RankCall.of("map", self._ranks.place)
        self._ranks.meet(call, [NOTHING] * self._ranks.size)
        if example.error is not None:
            raise example.error
        batch = example.batch
        assert batch is not None, "the loop divides batches"
        if batch.plans is None:
            example = self._asked_later(example.foreseen_by(self._lookups))
            assert example.batch is not None
            batch = example.batch
        question = batch.plans
        while question.answer is None:
            self._begin_first()
        with self._ranks.traffic.waiting():
            question.answer.result()
        return example

    def plan(self, example: Example) -> Example:
        try:
            foreseen = example.foreseen_by(self._lookups)
        except HotbedError as error:
            return changed(example, {"error": error})
        return self._asked_later(foreseen)

    def go_on(self) -> None:
        """Let the thread ask what waits: the rows of the batch under way are here."""
        while self._waiting:
            self._begin_first()

    def take_back(self, example: Example) -> None:
        assert example.batch is not None
        question: Question | None = example.batch.plans
        if question is None or question.answer is None:
            return
        try:
            error = question.answer.exception(GRACE_SECONDS)
        except TimeoutError:
            return  # this rank has failed alone, and the others do not ask
        if error is None:
            question.asked.take_back()

    def statistics(self, example: Example) -> Statistics:
        question = None if example.batch is None else example.batch.plans
        if question is None or question.answer is None:
            return {}
        statistics: Statistics = question.answer.result()[1]
        return statistics

    def latest(self, example: Example) -> int | None:
        return example.latest

    def _asked_later(self, example: Example) -> Example:
        assert example.batch is not None, "the loop divides batches"
        question = Question(example.looked_up, self._values_of(example.batch))
        self._waiting.append(question)
        return example.planned(question)

    def _begin_first(self) -> None:
        question = self._waiting.popleft()
        assert self._thread is not None, "a pass has begun"
        question.answer = self._thread.submit(self._answer, question)

    def _answer(self, question: Question) -> tuple[AskedIds, Statistics]:
        if self._error is not None:
            raise self._error  # nothing is mapped behind a batch that could not be
        if self._exchange is None:
            layouts = [module.layout for module in self._lookups.collections]
            self._exchange = TableExchange(self._connections, self._placement, layouts)
        try:
            asked = self._ask(self._exchange, question.batch, question.values)
        except Exception as error:
            self._error = error
            raise
        self.sent_bytes += self._connections.traffic.sent_bytes
        self._connections.traffic = Traffic()
        return asked, {table.name: table.stats for table in self._lookups.tables}
