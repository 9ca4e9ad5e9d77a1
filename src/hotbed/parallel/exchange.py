# SPDX-License-Identifier: Apache-2.0
"""TableExchange: the rows of a batch, and their gradients, between ranks.

A rank makes the ids of its grains distinct and asks the owners for their rows. An owner maps what
all ranks ask for as one batch, whose grains are the blocks of the ranks: so ids are counted,
admitted and inserted in the order of the whole batch. Sums of gradients go the same way.

The tables of all modules of a network go together: the number of messages does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotbed.data.batch import CountedTimes, Ids, SharedTimes
from hotbed.embedding.lookups import (
    FeatureLayout,
    GrainSums,
    HostIds,
    LocalIds,
    Plan,
    Sums,
    grain_sums,
    joined_sums,
)
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import Answer, Question, Step, Table

from .calls import RankCall
from .ids import AskedIds, Counts, OwnedIds
from .placement import GrainBlock, Placement
from .ranks import FAULT, STEP, Ranks, digest_of_values, name_difference

AnyStep = TypeVar("AnyStep", Step, Answer)


class TableExchange:
    """Exchanges ids, rows and gradients of some modules with the other ranks.

    Every rank makes the same calls in the same order.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
        layouts: of the modules, whose tables differ.
        learns: whether the batches are divided into the grains of a step, and sums of gradients may
            follow; else each rank has grains of its own, of any number.
    """

    def __init__(
        self,
        ranks: Ranks,
        placement: Placement,
        layouts: Sequence[FeatureLayout],
        *,
        learns: bool = True,
    ) -> None:
        self._ranks = ranks
        self._placement = placement
        self._blocks = placement.blocks[ranks.rank]
        self._modules = layouts
        self._learns = learns
        tables = [table for layout in layouts for table in layout.tables]
        features = [feature for layout in layouts for feature in layout.features]
        self._layout = FeatureLayout(tables, features)
        self._owners = np.concatenate([placement.owners(table.name) for table in tables])
        self._dims = [table.dim for table in tables]
        self._has_cap = any(map(_has_cap, tables))

    def ask(
        self,
        inputs: Sequence[Ids],
        time: Any,
        grain_ends: Sequence[int],
        *,
        training: bool,
        values: Mapping[str, Any] = MappingProxyType({}),
        logs: bool = False,
    ) -> AskedIds:
        """Ask the owners for the rows of a batch, and map what this rank is asked for.

        Args:
            inputs: the ids of each feature of all modules.
            time: int64 microseconds, or None.
            grain_ends: the samples before which the grains end; of those of other ranks, nothing is
                read.
            training: whether tables may change.
            values: plain ones, which must be equal on all ranks.
            logs: whether the map may be taken back.

        Raises:
            ConfigError: on every rank, before a table changes: the values differ.
        """
        times = self._times(inputs, time) if training else None
        counted = time.counted if training and isinstance(time, CountedTimes) else None
        blocks = self._blocks
        ends = [0, *grain_ends]
        if not self._learns:
            blocks, ends = _as_first_block(ends, len(blocks))
        fronts = []
        for block in blocks:
            ends_of_block = ends[block.first : block.first + block.size + 1]
            fronts.append(self._front(inputs, times, counted, ends_of_block))
        counts = [front.ask(self._owners, self._ranks.size) for front in fronts]
        timed = times is not None
        asked, words = self._exchange_ids(counts, _words(fronts, counts, timed), values)
        answer = Answer([table.native for table in self._layout.tables])
        if counted is not None:
            answer.mark()
        grains = self._grains(asked, words, lambda block: fronts[0].num_words(block, timed))
        num_rows: list[int] = []
        if training and self._has_cap:
            of_rank = torch.tensor(answer.count_rows(grains, timed=timed), dtype=torch.int64)
            num_rows = self._ranks.gather(of_rank).sum(0).tolist()
        of_batch = _of_whole(time, times)
        with self._layout.mapping(of_batch, training=training) as undo:
            answer.map(grains, timed=timed, training=training, num_rows=num_rows, logs=logs)
        asks_of = [list(of_owner) for of_owner in zip(*counts, strict=True)]
        return AskedIds(answer, blocks, fronts, asks_of, asked, undo=undo)

    def _grains(
        self, asked: Counts, words: Sequence[Tensor], num_words: Callable[[list[int]], int]
    ) -> list[tuple[list[int], int]]:
        """Return the counts of each grain that asks, and the address of its words.

        Args:
            asked: how much each block of each rank asks for.
            words: what each rank asks for.
            num_words: returns the number of words of a block, by its counts.
        """
        grains: list[tuple[list[int], int]]
        grains = [([0] * len(self._dims), 0)] * self._placement.leaves
        every_leaf = iter(self._placement.every_leaf)
        for blocks, of_rank in zip(asked, words, strict=True):
            address = of_rank.data_ptr()
            for block in blocks:
                grains[next(every_leaf)] = (block, address)
                address += 8 * num_words(block)
        return grains

    def _times(self, inputs: Sequence[Ids], time: Any) -> Any:
        """Return the checked times of a batch, as one process checks them; None without any."""
        num_samples = HostIds(self._layout.features, inputs).num_samples
        every = [layout.times(time, num_samples) for layout in self._modules]
        return next((checked for checked in every if checked is not None), None)

    def take(
        self, ids: AskedIds, inputs: Sequence[Sequence[Sequence[Ids]] | None]
    ) -> list[list[Plan | None]]:
        """Return the plans of the grains that this rank computes, [module][grain].

        Args:
            ids: of the batch.
            inputs: of each grain that `ask` was given, the ids of each feature of each module; None
                = it has no sample.
        """
        self._take_rows(ids)
        plans: list[list[Plan | None]] = [[None] * len(inputs) for _ in self._modules]
        for block, front in zip(ids.blocks, ids.fronts, strict=True):
            for grain, step in enumerate(front.divide(), block.first):
                of_grain = inputs[grain] if grain < len(inputs) else None
                if of_grain is None:
                    continue
                for number, part in enumerate(self._split(step)):
                    plans[number][grain] = self._plan(number, of_grain[number], part)
        return plans

    def take_whole(self, ids: AskedIds, inputs: Sequence[Ids]) -> Plan:
        """Return the plan of a batch that one module looks up as a whole, as the first grain."""
        self._take_rows(ids)
        # blocks without samples are divided, too: they send their sums
        grains = [front.divide() for front in ids.fronts]
        return self._plan(0, inputs, grains[0][0])

    def sums_to_owners(
        self, ids: AskedIds, parts: Sequence[Sequence[Sums | None]]
    ) -> list[Sequence[Tensor]]:
        """Return what `Ranks.exchange` sends: the sums of gradients, a tensor for each rank.

        Args:
            ids: of the batch.
            parts: the sums of each grain, [module][grain]; None = there are none.
        """
        sent: list[Sequence[Tensor]] = []
        for number, (block, front) in enumerate(zip(self._blocks, ids.fronts, strict=True)):
            sizes = [_floats(self._dims, of_rank[number]) for of_rank in ids.asks]
            sums = torch.empty(sum(sizes))
            grains = [
                self._of_grain([of_module[grain] for of_module in parts])
                for grain in range(block.first, block.first + block.size)
            ]
            front.write_sums(grains, sums.data_ptr())
            sent.append(sums.split(sizes))
        return sent

    def num_sums(self, ids: AskedIds) -> list[int]:
        """Return how many floats `sums_to_owners` of each rank sends to this one."""
        return [sum(_floats(self._dims, block) for block in blocks) for blocks in ids.asked]

    def sums_of_owner(self, ids: AskedIds, received: Sequence[Tensor]) -> list[Sums]:
        """Return the sums of the ids that this rank owns, of each module.

        Args:
            ids: of the batch.
            received: what `sums_to_owners` of each rank sent.
        """
        leaves = self._leaves(ids, [of_rank.data_ptr() for of_rank in received])
        owned = []
        for tables, layout, answer in self._each_module(self._split(ids.answer)):
            of_module: list[GrainSums] = []
            for counts, addresses in leaves:
                of_module.append((counts[tables], [*addresses[tables]]))
            sums = joined_sums(layout, answer, of_module)
            assert isinstance(sums.mapped, LocalIds), "the ids of a step are"
            mapped = OwnedIds(layout.tables, sums.mapped.step, ranks=self._ranks)
            owned.append(replace(sums, mapped=mapped))
        return owned

    def _front(
        self, inputs: Sequence[Ids], times: Any, counted: Any, ends: Sequence[int]
    ) -> Question:
        """Return the distinct ids of the samples between the first and the last of these ends."""
        first = ends[0]
        last = ends[-1]
        layout = self._layout
        host = HostIds(layout.features, [ids[first:last] for ids in inputs])
        natives = [table.native for table in layout.tables]
        front = Question(natives, layout.columns, [end - first for end in ends[1:]])
        address = 0
        if times is not None:
            moments = np.ascontiguousarray(times[first:last])
            address = moments.ctypes.data
        if counted is not None:
            marks = np.ascontiguousarray(counted[first:last], np.bool_)
            front.mark(marks.ctypes.data)
        try:
            front.find(host.addresses, address)
        except ValueError:
            host.check_offsets(layout.features)
            raise
        return front

    def _exchange_ids(
        self, counts: Counts, words: Sequence[Sequence[Tensor]], values: Mapping[str, Any]
    ) -> tuple[Counts, list[Tensor]]:
        """Ask each rank for the rows of ids; return what each rank asks of this one.

        Args:
            counts: how many ids this rank asks for, [block][rank][table].
            words: the ids and what belongs to them, [block][rank].
            values: plain ones, which must be equal on all ranks.

        Returns:
            How many each rank asks for, [rank][block][table], and their words.
        """
        digest = digest_of_values(values)
        num_tables = len(self._dims)
        sent = []
        for rank in range(self._ranks.size):
            numbers = [digest, *chain.from_iterable(of_block[rank] for of_block in counts)]
            sent.append(torch.cat([torch.tensor(numbers), *(of_block[rank] for of_block in words)]))
        received = self._ranks.meet(RankCall.of("ask", self._ranks.place), sent)
        digests = []
        asked: Counts = []
        words_of_ranks = []
        for part, blocks in zip(received, self._placement.blocks, strict=True):
            ends = [1 + num_tables * block for block in range(len(blocks) + 1)]
            other_digest, *numbers = part[: ends[-1]].tolist()
            digests.append(other_digest)
            asked.append([numbers[first - 1 : last - 1] for first, last in pairwise(ends)])
            words_of_ranks.append(part[ends[-1] :])
        if FAULT in values or any(other != digests[0] for other in digests):
            name_difference(self._ranks, values, STEP)
        return asked, words_of_ranks

    def _take_rows(self, ids: AskedIds) -> None:
        """Send the rows that this rank is asked for, and take those that it asked for."""
        to_rank = self.num_sums(ids)
        sent = torch.empty(sum(to_rank))
        starts = [of_rank.data_ptr() for of_rank in sent.split(to_rank)]
        ids.answer.write_rows([addresses for _, addresses in self._leaves(ids, starts)])
        of_blocks = [[_floats(self._dims, block) for block in blocks] for blocks in ids.asks]
        received = self._ranks.send(sent, to_rank, [sum(sizes) for sizes in of_blocks])
        pieces = received.split([size for sizes in of_blocks for size in sizes])
        for number, front in enumerate(ids.fronts):
            rows = received
            if len(ids.fronts) > 1:
                rows = torch.cat(pieces[number :: len(ids.fronts)])
            ids.rows.append(rows)
            front.take_rows(rows.data_ptr())

    def _leaves(self, ids: AskedIds, starts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Return of each leaf how many ids of each table are asked for, and where rows of them lie.

        `starts`: the address of the rows that each rank asks this one for, block after block.
        """
        nothing = [0] * len(self._dims)
        leaves = [(nothing, nothing)] * self._placement.leaves
        every_leaf = iter(self._placement.every_leaf)
        for address, blocks in zip(starts, ids.asked, strict=True):
            for counts in blocks:
                addresses = []
                for dim, count in zip(self._dims, counts, strict=True):
                    addresses.append(address)
                    address += 4 * count * dim
                leaves[next(every_leaf)] = (counts, addresses)
        return leaves

    def _of_grain(self, parts: Sequence[Sums | None]) -> GrainSums:
        """Return the sums of a grain for the tables of all modules; `parts`: of each module."""
        uniques: list[int] = []
        addresses: list[int | None] = []
        for _, layout, part in self._each_module(parts):
            of_module = grain_sums(part, len(layout.tables))
            uniques += of_module[0]
            addresses += of_module[1]
        return uniques, addresses

    def _each_module(self, values: Sequence[Any]) -> Iterator[tuple[slice, FeatureLayout, Any]]:
        """Yield, of each module, the numbers of its tables, its layout and its value."""
        ends = accumulate((len(layout.tables) for layout in self._modules), initial=0)
        for (first, last), layout, value in zip(pairwise(ends), self._modules, values, strict=True):
            yield slice(first, last), layout, value

    def _split(self, step: AnyStep) -> list[AnyStep]:
        """Return the parts of a step, or of an answer, that belong to each module."""
        if len(self._modules) == 1:
            return [step]
        return step.split([len(layout.tables) for layout in self._modules])

    def _plan(self, module: int, inputs: Sequence[Ids], step: Step) -> Plan:
        layout = self._modules[module]
        ids = LocalIds(layout.tables, step, HostIds(layout.features, inputs))
        return Plan(tuple(inputs), ids)


def _as_first_block(ends: list[int], num_blocks: int) -> tuple[list[GrainBlock], list[int]]:
    """Return grains of this rank as its first block of grains, and empty grains as its others.

    Args:
        ends: the samples between which the grains lie.
        num_blocks: of this rank.

    Returns:
        The blocks, and the samples between which their grains lie: as many as a power of two.
    """
    size = 1 << (len(ends) - 2).bit_length()
    others = [GrainBlock(size + number, 1) for number in range(num_blocks - 1)]
    blocks = [GrainBlock(0, size), *others]
    return blocks, ends + [ends[-1]] * (size + num_blocks - len(ends))


def _of_whole(time: Any, times: Any) -> Any:
    """Return the times of all samples of a batch; `times`: those that this rank has, or None."""
    return np.asarray(time.whole) if isinstance(time, SharedTimes) and times is not None else times


def _words(fronts: Sequence[Question], counts: Counts, timed: bool) -> list[Sequence[Tensor]]:
    """Return what each block asks each rank for, [block][rank]: ids and what belongs to them."""
    words: list[Sequence[Tensor]] = []
    for front, of_ranks in zip(fronts, counts, strict=True):
        sizes = [front.num_words(of_rank, timed) for of_rank in of_ranks]
        asks = torch.empty(sum(sizes), dtype=torch.int64)
        front.write_asked(asks.data_ptr())
        words.append(asks.split(sizes))
    return words


def _has_cap(table: Table) -> bool:
    return any(isinstance(policy, (Lru, Lfu)) and policy.is_on for policy in table.evictions)


def _floats(dims: Sequence[int], counts: Sequence[int]) -> int:
    """Return the number of floats of some rows; `counts`: by table."""
    return sum(count * dim for count, dim in zip(counts, dims, strict=True))
