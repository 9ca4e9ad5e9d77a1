# SPDX-License-Identifier: Apache-2.0
"""Count the messages of a step between ranks, and their bytes: what `Traffic` counts in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotbed.parallel.dense import LINE
from hotbed.parallel.hosts import Hosts
from hotbed.parallel.placement import Placement
from hotbed.parallel.ranks import HEAD_WORDS, ROOM

from .tables import Floats, TableFacts

WORD = 8
FLOAT = 4
CALLS_OF_ROWS = 3
"""The first calls of a step, which ask for rows: ids, those that had no room, rows."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sent:
    """What each rank sends in the calls of a step.

    The axes are calls, kinds of links (between hosts, on a host) and ranks. Each rank is a host of
    its own where there is one.

    Attributes:
        num_bytes: of the messages.
        messages: how many.
    """

    num_bytes: Floats
    messages: Floats

    def times(self, factor: float) -> Sent:
        """Return a multiple."""
        return Sent(factor * self.num_bytes, factor * self.messages)

    @classmethod
    def nothing(cls, ranks: int) -> Sent:
        """Return no call."""
        return cls(np.zeros((0, 2, ranks)), np.zeros((0, 2, ranks)))

    @classmethod
    def of_calls(cls, calls: Sequence[Sent]) -> Sent:
        """Return the calls one after the other."""
        return cls(
            np.concatenate([call.num_bytes for call in calls]),
            np.concatenate([call.messages for call in calls]),
        )

    @classmethod
    def mean(cls, steps: Sequence[Sent]) -> Sent:
        """Return the mean of some steps."""
        return cls(
            np.mean([step.num_bytes for step in steps], 0),
            np.mean([step.messages for step in steps], 0),
        )


@dataclass(frozen=True)
class StepFacts:
    """What decides the messages of a step.

    Attributes:
        tables: of all collections, but for those of histories.
        dense: numbers of values that ranks add, of each tensor.
        modules: collections of tables.
    """

    tables: Sequence[TableFacts]
    dense: Sequence[int]
    modules: int


def sent_in_step(facts: StepFacts, placement: Placement, hosts: Hosts, asked: Counts) -> Sent:
    """Return what each rank sends in a step: ids, those without room, rows, sums, totals.

    Where tables have a cap, their rows are counted in one more call.

    Args:
        facts: of the job.
        placement: of its rows and grains.
        hosts: of the ranks.
        asked: how many ids each block asks each rank for, [tables, blocks, ranks].
    """
    ranks = placement.ranks
    blocks = np.array([len(of_rank) for of_rank in placement.blocks])
    starts = blocks.cumsum() - blocks  # the first block of each rank
    words = np.repeat(1.0 + blocks[:, None] * len(facts.tables), ranks, 1)
    floats = np.zeros((ranks, ranks))
    for table, counts in zip(facts.tables, asked, strict=True):
        halves = table.counted * ((counts + 1) // 2)
        words += np.add.reduceat(table.words * counts + halves, starts)
        floats += table.dim * np.add.reduceat(counts, starts)
    np.fill_diagonal(words, 0)
    has_room = words <= ROOM
    num_values, width, shares = dense_shares(facts.dense, ranks)
    sums, on_host = _dense(placement, hosts, num_values, shares)
    present = WORD * (facts.modules + len(facts.dense))
    calls = [
        _exchanged(WORD * (HEAD_WORDS + words * has_room), hosts),
        _exchanged(WORD * words * ~has_room, hosts).times(not has_room.all()),
        _exchanged(FLOAT * floats.T, hosts),
        on_host,
        _exchanged(FLOAT * (floats + sums) + present, hosts),
        _gathered(FLOAT * (facts.modules + width), hosts),
    ]
    if any(table.capped for table in facts.tables):
        calls.append(_gathered(WORD * len(facts.tables), hosts))
    return Sent.of_calls(calls)


def sent_for_histories(tables: Sequence[TableFacts], hosts: Hosts, rows: Counts) -> Sent:
    """Return what each rank sends for the histories of a step: newest rows, older rows, serials.

    All ranks want the rows of the same keys, so each sends those that it owns to all others. Where
    keys get their first older row, the last serial numbers of their partitions are sent, too.

    Args:
        tables: of histories: the newest rows of each column, and its older rows.
        hosts: of the ranks.
        rows: how many rows of each table the batch reads of each rank, [tables, ranks].
    """
    newest = rows[::2]
    older = rows[1::2]
    calls = [
        _rows_sent(tables[::2], newest, hosts).times(float(newest.any())),
        _rows_sent(tables[1::2], older, hosts).times(float(older.any())),
    ]
    for table in tables[1::2]:
        each = np.full((1, rows.shape[1]), table.begun / rows.shape[1])
        calls.append(_rows_sent([table], each, hosts).times(min(table.begun, 1.0)))
    return Sent.of_calls(calls)


def _rows_sent(tables: Sequence[TableFacts], rows: Floats | Counts, hosts: Hosts) -> Sent:
    """Return a call in which each rank sends all others a digest and rows, [tables, ranks]."""
    ranks = rows.shape[1]
    dims = np.array([table.dim for table in tables])
    words = np.repeat(1.0 + np.ceil(dims @ rows / 2)[:, None], ranks, 1)
    np.fill_diagonal(words, 0)
    has_room = words <= ROOM
    first = _exchanged(WORD * (HEAD_WORDS + words * has_room), hosts)
    if has_room.all():
        return first
    rest = _exchanged(WORD * words * ~has_room, hosts)
    return Sent(first.num_bytes + rest.num_bytes, first.messages + rest.messages)


def _dense(
    placement: Placement, hosts: Hosts, num_values: int, shares: Counts
) -> tuple[Counts, Sent]:
    """Return the sums of dense values that each rank sends each other one, and what goes on hosts.

    Args:
        placement: of the grains.
        hosts: of the ranks.
        num_values: of all dense tensors.
        shares: of them, which are added by one rank each.
    """
    ranks = placement.ranks
    runs = shares.reshape(hosts.ranks, hosts.count)
    sums = np.zeros((ranks, ranks), np.int64)
    on_host = np.zeros(ranks)
    of_hosts = placement.blocks_of_hosts(hosts.ranks)
    for rank in range(ranks):
        host, number = hosts.place(rank)
        sums[rank, hosts.alike(rank)] = len(of_hosts[host]) * runs[number]
        if hosts.ranks > 1:
            others = num_values - runs[number].sum()
            on_host[rank] = FLOAT * len(placement.blocks[rank]) * others
    return sums, _sent(np.zeros(ranks), on_host, 0, hosts.ranks - 1)


def _exchanged(num_bytes: Floats, hosts: Hosts) -> Sent:
    """Return a call in which each rank has something for each, [ranks, ranks]; see `HostMail`."""
    ranks = len(num_bytes)
    cube = num_bytes.reshape(hosts.count, hosts.ranks, hosts.count, hosts.ranks)
    on_host = cube.sum(2)  # [host, rank of it, rank of it]
    between = cube.sum(1).transpose(0, 2, 1)  # [host, rank of it, other host]
    on_host[:, np.arange(hosts.ranks), np.arange(hosts.ranks)] = 0
    between[np.arange(hosts.count), :, np.arange(hosts.count)] = 0
    sizes = WORD * hosts.count * (hosts.ranks - 1)  # of the parts that others pass on
    return _sent(
        between.reshape(ranks, -1).sum(1),
        on_host.reshape(ranks, -1).sum(1) + sizes,
        hosts.count - 1,
        2 * (hosts.ranks - 1),
    )


def _gathered(num_bytes: float, hosts: Hosts) -> Sent:
    """Return a call in which each rank has the same for all."""
    each = np.full(hosts.count * hosts.ranks, num_bytes, float)
    others = hosts.count - 1
    beside = hosts.ranks - 1
    return _sent(others * each, beside * hosts.count * each, others, beside)


def _sent(between: Floats, on_host: Floats, num_between: int, num_on_host: int) -> Sent:
    """Return a call; the bytes and the messages of each rank to other hosts, and on its host."""
    messages = np.array([[num_between], [num_on_host]]) * np.ones(len(between))
    return Sent(np.stack([between, on_host])[None], messages[None])


def dense_shares(dense: Sequence[int], ranks: int) -> tuple[int, int, Counts]:
    """Return the dense values of a message, and of a share: the largest, and each of them.

    Each tensor begins with a line of memory, as in `DenseExchange`.
    """
    line = LINE // FLOAT
    num_values = sum(-(-size // line) * line for size in dense)
    width = -(-num_values // ranks)
    ends = np.minimum(np.arange(ranks + 1) * width, num_values)
    return num_values, width, np.diff(ends)
