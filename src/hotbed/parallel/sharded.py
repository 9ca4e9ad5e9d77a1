# SPDX-License-Identifier: Apache-2.0
"""ShardedLookup: the verbs of a lookup over the rows of all ranks.

A rank makes the ids of its grains distinct and asks the owners for their rows. An owner maps what
all ranks ask for as one batch, whose grains are the blocks of the ranks: so ids are counted,
admitted and inserted in the order of the whole batch. Sums of gradients go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.batch import Ids
from hotbed.embedding.lookups import (
    FeatureLayout,
    Group,
    HostIds,
    LocalIds,
    LocalLookup,
    Lookup,
    MappedIds,
    Plan,
    Pooled,
    Sums,
    merged_sums,
    with_empty_sums,
)
from hotbed.embedding.policy import Lfu, Lru
from hotbed.embedding.table import MapQueue, Step, Table
from hotbed.errors import ConfigError

from .ids import AskedIds, Counts, OwnedIds
from .placement import Placement
from .ranks import Ranks


class ShardedLookup(Lookup):
    """Performs the verbs over the rows of all ranks, for steps by grains.

    Every rank calls the same verbs in the same order, with the whole batch.

    Args:
        ranks: of the job.
        placement: which of them owns which rows and computes which grains.
    """

    spans_ranks = True

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self._blocks = placement.blocks[ranks.rank]
        self._local = LocalLookup()
        self._owners: dict[tuple[str, ...], NDArray[np.uint8]] = {}

    def map(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        *,
        training: bool,
        queue: MapQueue | None = None,
        grain_ends: Sequence[int] = (),
    ) -> Plan:
        if not grain_ends:
            raise ConfigError(
                "ranks: ids that several ranks share are mapped by the steps of RecModel, grain by "
                "grain, got a batch without grains. Call model.fit() or model.step()."
            )
        ends = [0, *grain_ends]
        spans = [ends[block.first : block.first + block.size + 1] for block in self._blocks]
        return Plan(tuple(inputs), self._ask(layout, inputs, time, spans, training=training))

    def divide(
        self, layout: FeatureLayout, plan: Plan, grains: Sequence[Sequence[Ids] | None]
    ) -> list[Plan | None]:
        plans: list[Plan | None] = [None] * len(grains)
        steps = self._fetch(layout, _asked(plan.mapped))
        for block, of_block in zip(self._blocks, steps, strict=True):
            for number, step in enumerate(of_block, block.first):
                inputs = grains[number]
                if inputs is not None:
                    plans[number] = _plan(layout, inputs, step)
        return plans

    def pool(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        plan: Plan | None,
        *,
        training: bool,
        keeps: bool,
    ) -> tuple[Pooled, MappedIds]:
        if plan is None:
            if training:
                raise ConfigError(
                    "ranks: tables that several ranks share learn in the steps of RecModel, got a "
                    "lookup in train mode that no step has mapped. Look up the ids of a batch as "
                    "they are, once, in model.fit() or model.step()."
                )
            num_samples = HostIds(layout.features, inputs).num_samples
            spans = [[0, num_samples], *[[0, 0]] * (len(self._blocks) - 1)]
            asked = self._ask(layout, inputs, None, spans, training=False)
            steps = self._fetch(layout, asked)
            plan = _plan(layout, inputs, steps[0][0])
        return self._local.pool(layout, inputs, time, plan, training=training, keeps=keeps)

    def sum_gradients(
        self,
        layout: FeatureLayout,
        mapped: MappedIds,
        flat: Tensor | None,
        sequences: Sequence[Tensor | None],
        groups: Sequence[Group],
    ) -> Sums:
        return self._local.sum_gradients(layout, mapped, flat, sequences, groups)

    def join(self, parts: Sequence[Sums]) -> Sums:
        return self._local.join(parts)

    def join_grains(
        self, layout: FeatureLayout, mapped: MappedIds, parts: Sequence[Sums | None]
    ) -> Sums:
        asked = _asked(mapped)
        tables = layout.tables
        sent = []
        for number, block in enumerate(self._blocks):
            parts_of_block = with_empty_sums(layout, parts[block.first : block.first + block.size])
            counts = [of_rank[number] for of_rank in asked.asks]
            sums = torch.empty(_floats(tables, counts))
            if parts_of_block:
                ids, arrays = merged_sums(parts_of_block, "tree")
                ids.step.ask(self._owners_of(layout), self._ranks.size)
                addresses = [array.__array_interface__["data"][0] for array in arrays]
                ids.step.write_sums(addresses, sums.data_ptr())
            sent.append(sums.split([_floats(tables, [of_rank]) for of_rank in counts]))
        received = self._ranks.exchange(sent, [_floats(tables, blocks) for blocks in asked.asked])
        nothing = torch.zeros(1)
        addresses_of = [[nothing.data_ptr()] * len(tables) for _ in asked.leaves]
        for leaf, rows in self._rows_of_leaves(layout, asked, received.data_ptr()):
            addresses_of[leaf] = [address for address, _ in rows]
        step, arrays = Step.merge(asked.leaves, addresses_of, "tree")
        grads = []
        for group in layout.groups:
            of_tables = [torch.from_numpy(arrays[n]).view(-1, group.dim) for n in group.tables]
            grads.append(torch.cat(of_tables))
        owned = OwnedIds(tables, step, ranks=self._ranks)
        return Sums(owned, layout.groups, grads, finite=False)

    def update(self, parts: Sequence[Sums], rates: Sequence[Sequence[float]]) -> None:
        if not all(isinstance(part.mapped, OwnedIds) for part in parts):
            raise ConfigError(
                "ranks: tables that several ranks share learn in the steps of RecModel, got "
                "gradients of another backward pass. Call model.fit() or model.step()."
            )
        self._local.update(parts, rates)

    def _ask(
        self,
        layout: FeatureLayout,
        inputs: Sequence[Ids],
        time: Any,
        spans: Sequence[Sequence[int]],
        *,
        training: bool,
    ) -> AskedIds:
        """Ask the owners for the rows of some samples; `spans`: the ends of grains, by block."""
        times = None
        if training:
            times = layout.times(time, HostIds(layout.features, inputs).num_samples)
        fronts = [_front(layout, inputs, times, ends) for ends in spans]
        counts = [front.ask(self._owners_of(layout), self._ranks.size) for front in fronts]
        timed = times is not None
        words = []
        for front, of_ranks in zip(fronts, counts, strict=True):
            sizes = [front.num_words(of_rank, timed) for of_rank in of_ranks]
            asks = torch.empty(sum(sizes), dtype=torch.int64)
            front.write_asked(asks.data_ptr())
            words.append(asks.split(sizes))
        asked = self._exchange_counts(counts)
        tables = [table.native for table in layout.tables]
        step = Step(tables, [(number, "none") for number in range(len(tables))])
        sizes = [step.num_words(block, timed) for blocks in asked for block in blocks]
        ends = np.cumsum([0, *(len(blocks) for blocks in asked)])
        received = self._ranks.exchange(
            words, [sum(sizes[first:last]) for first, last in pairwise(ends.tolist())]
        )
        grains: list[tuple[list[int], int]] = [([0] * len(tables), 0)] * self._placement.leaves
        address = received.data_ptr()
        every_block = [block for blocks in asked for block in blocks]
        for leaf, block, size in zip(self._placement.every_leaf, every_block, sizes, strict=True):
            grains[leaf] = (block, address)
            address += 8 * size
        num_rows: list[int] = []
        if training and any(map(_has_cap, layout.tables)):
            counted = torch.tensor(step.count_rows(grains, timed=timed), dtype=torch.int64)
            num_rows = self._ranks.gather(counted).sum(0).tolist()
        step.map_asked(grains, timed=timed, training=training, num_rows=num_rows)
        for table in layout.admitting:
            table.watch_admission()
        asks_of = [list(of_rank) for of_rank in zip(*counts, strict=True)]
        return AskedIds(layout.tables, step, fronts=fronts, asks=asks_of, asked=asked)

    def _exchange_counts(self, counts: Counts) -> Counts:
        """Tell each rank how much is asked of it; return how much each rank asks of this one.

        `counts`: [block][rank][table]. Returned: [rank][block][table].
        """
        num_tables = len(counts[0][0])
        received = self._ranks.exchange(
            [torch.tensor(of_ranks).unbind() for of_ranks in counts],
            [len(blocks) * num_tables for blocks in self._placement.blocks],
        )
        every_block = iter(received.view(-1, num_tables).tolist())
        return [[next(every_block) for _ in blocks] for blocks in self._placement.blocks]

    def _fetch(self, layout: FeatureLayout, ids: AskedIds) -> list[list[Step]]:
        """Return the grains of each block of this rank, with the rows that the owners sent."""
        tables = layout.tables
        ids.leaves.extend(ids.step.divide())
        sizes = [_floats(tables, [block]) for blocks in ids.asked for block in blocks]
        rows = torch.empty(sum(sizes))
        for leaf, out in self._rows_of_leaves(layout, ids, rows.data_ptr()):
            ids.leaves[leaf].pool(out)
        by_rank = iter(rows.split(sizes))
        parts = [torch.cat([next(by_rank) for _ in blocks]) for blocks in ids.asked]
        received = self._ranks.exchange([parts], [_floats(tables, blocks) for blocks in ids.asks])
        of_blocks = received.split(
            [_floats(tables, [block]) for blocks in ids.asks for block in blocks]
        )
        steps = []
        for number, front in enumerate(ids.fronts):
            rows_of_block = torch.cat(of_blocks[number :: len(ids.fronts)])
            ids.rows.append(rows_of_block)
            front.take_rows(rows_of_block.data_ptr())
            steps.append(front.divide())
        return steps

    def _rows_of_leaves(
        self, layout: FeatureLayout, ids: AskedIds, address: int
    ) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the leaf of each block, and where the rows of each table lie: address, dim.

        `address`: of the rows that this rank is asked for, block after block.
        """
        leaves = []
        every_block = [block for blocks in ids.asked for block in blocks]
        for leaf, counts in zip(self._placement.every_leaf, every_block, strict=True):
            rows = []
            for table, count in zip(layout.tables, counts, strict=True):
                rows.append((address, table.dim))
                address += 4 * count * table.dim
            leaves.append((leaf, rows))
        return leaves

    def _owners_of(self, layout: FeatureLayout) -> NDArray[np.uint8]:
        """Return the rank that owns each partition of each table, table after table."""
        names = tuple(table.name for table in layout.tables)
        if names not in self._owners:
            owners = [self._placement.owners(name) for name in names]
            self._owners[names] = np.concatenate(owners)
        return self._owners[names]


def _front(layout: FeatureLayout, inputs: Sequence[Ids], times: Any, ends: Sequence[int]) -> Step:
    """Return the distinct ids of the samples between the first and the last of these ends."""
    first = ends[0]
    last = ends[-1]
    host = HostIds(layout.features, [ids[first:last] for ids in inputs])
    step = Step(
        [table.native for table in layout.tables], layout.columns, [end - first for end in ends[1:]]
    )
    address = 0
    if times is not None:
        moments = np.ascontiguousarray(times[first:last])
        address = moments.ctypes.data
    try:
        step.find(host.addresses, address)
    except ValueError:
        host.check_offsets(layout.features)
        raise
    return step


def _plan(layout: FeatureLayout, inputs: Sequence[Ids], step: Step) -> Plan:
    ids = LocalIds(layout.tables, step, HostIds(layout.features, inputs))
    return Plan(tuple(inputs), ids)


def _has_cap(table: Table) -> bool:
    return any(isinstance(policy, (Lru, Lfu)) and policy.is_on for policy in table.evictions)


def _floats(tables: Sequence[Table], counts: Sequence[Sequence[int]]) -> int:
    """Return the number of floats of some rows; `counts`: [block][table]."""
    return sum(
        count * table.dim
        for of_tables in counts
        for count, table in zip(of_tables, tables, strict=True)
    )


def _asked(mapped: MappedIds) -> AskedIds:
    assert isinstance(mapped, AskedIds), "the plan is of this lookup"
    return mapped
