# SPDX-License-Identifier: Apache-2.0
"""DensePart: the dense part of a step by grains, on one process or on the ranks of a job.

A `LocalDense` has all grains. A `RankDense` adds what they leave over ranks, by `DenseExchange`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotbed.embedding.device import link_to
from hotbed.embedding.table import Table

from .envelope import Letters, Talk
from .placement import GrainBlock, Placement
from .ranks import Ranks
from .traffic import RankWork, Traffic

LINE = 64
"""Bytes of a line of memory: each value begins with one, as it does in memory of its own."""


class DenseExchange:
    """Adds dense values of the grains of all ranks, by halves, as one process does.

    Each rank adds a share of the values and sends the sums to all. So a rank sends each number
    about twice. The ranks of a host add their grains before a value leaves it.

    Args:
        ranks: of the job.
        placement: which rank computes which grains.
        like: tensors of the shapes of all values.
        dtype: of the values that are added here; others are passed over.
    """

    def __init__(
        self, ranks: Ranks, placement: Placement, like: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self._ranks = ranks
        self._placement = placement
        self._dtype = dtype
        self._device = like[-1].device  # of all values; sums are made on the host
        self._numbers = [number for number, tensor in enumerate(like) if tensor.dtype == dtype]
        self._shapes = [like[number].shape for number in self._numbers]
        lines = LINE // dtype.itemsize
        self._lengths = [-(-shape.numel() // lines) * lines for shape in self._shapes]
        self._num_values = sum(self._lengths)
        self._width = -(-self._num_values // ranks.size)
        sizes = [
            max(min(self._width, self._num_values - share * self._width), 0)
            for share in range(ranks.size)
        ]
        # a rank of each host adds the shares of the ranks of its number, of which one is its own
        self._host, self._number = ranks.hosts.place(ranks.rank)
        count = ranks.hosts.count
        self._runs = [sum(sizes[first : first + count]) for first in range(0, ranks.size, count)]
        self._sizes = sizes[self._number * count : (self._number + 1) * count]
        self._blocks = placement.blocks_of_hosts(ranks.hosts.ranks)

    def to_owners(self, values: Sequence[Sequence[Tensor | None]]) -> list[Sequence[Tensor]]:
        """Return what `Ranks.exchange` sends: the values of each block, a tensor for each rank.

        `values`: all of them, [number][grain]; None is left out, and those of the grains of other
        ranks are not read.
        """
        flats = []
        for block in self._placement.blocks[self._ranks.rank]:
            flat = torch.empty(self._num_values, dtype=self._dtype, device=self._device)
            for number, part in zip(self._numbers, flat.split(self._lengths), strict=True):
                value = joined(values[number][block.first : block.first + block.size])
                length = 0 if value is None else value.numel()
                if value is not None:
                    part[:length] = value.reshape(-1)
                part[length:] = -0.0  # which adds nothing
            flats.append(flat)
        flats = self._on_host(flats)
        if self._ranks.hosts.ranks > 1:
            flats = self._of_host(flats)
        return [self._for_ranks(flat) for flat in flats]

    def _on_host(self, flats: list[Tensor]) -> list[Tensor]:
        """Return the values of each block of this rank on the host."""
        if self._device.type == "cpu":
            return flats
        return link_to(self._device).bring(flats).read(_copies)

    def _of_host(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return a run of the sums of each block of this host; `flats`: of each of this rank."""
        ranks = self._ranks.hosts.together_with(self._ranks.rank)
        runs = zip(*(flat.split(self._runs) for flat in flats), strict=True)
        sent = torch.cat([part for of_blocks in runs for part in of_blocks])
        sizes = [run * len(flats) for run in self._runs]
        size = self._runs[self._number]
        blocks = [self._placement.blocks[rank] for rank in ranks]
        received = self._ranks.mail.exchange_on_host(sent, sizes, [size * len(b) for b in blocks])
        values = list(received.view(-1, size)) if size else [received] * sum(map(len, blocks))
        leaves = self._at_leaves(blocks, values)
        leaf = self._placement.leaf
        sums = []
        for block in self._blocks[self._host]:
            first = block.first // leaf
            of_block = joined(leaves[first : first + block.size // leaf])
            assert of_block is not None, "each rank has a block"
            sums.append(of_block)
        return sums

    def _for_ranks(self, run: Tensor) -> list[Tensor]:
        """Return the shares of a run: one for each rank of this number, nothing for the others."""
        parts = [run[:0]] * self._ranks.size
        alike = self._ranks.hosts.alike(self._ranks.rank)
        for rank, share in zip(alike, run.split(self._sizes), strict=True):
            parts[rank] = share
        return parts

    def _at_leaves(
        self, blocks: Sequence[Sequence[GrainBlock]], values: Iterable[Tensor]
    ) -> list[Tensor | None]:
        """Return the values at the leaves of the tree where their blocks begin."""
        leaves: list[Tensor | None] = [None] * self._placement.leaves
        every_block = (block for of_one in blocks for block in of_one)
        for block, value in zip(every_block, values, strict=True):
            leaves[block.first // self._placement.leaf] = value
        return leaves

    def num_values(self) -> list[int]:
        """Return how many values `to_owners` of each rank sends to this one."""
        num_values = [0] * self._ranks.size
        alike = self._ranks.hosts.alike(self._ranks.rank)
        for rank, blocks in zip(alike, self._blocks, strict=True):
            num_values[rank] = self._sizes[self._host] * len(blocks)
        return num_values

    def share(self, received: Sequence[Tensor]) -> Tensor:
        """Return the sums of this rank's share, [width]; values beyond its share are 0.

        `received`: what `to_owners` of each rank sent.
        """
        share = torch.zeros(self._width, dtype=self._dtype)
        size = self._sizes[self._host]
        if size:
            alike = self._ranks.hosts.alike(self._ranks.rank)
            sent = [part for rank in alike for part in received[rank].split(size)]
            sums = joined(self._at_leaves(self._blocks, sent))
            assert sums is not None, "each host has a block"
            share[:size] = sums
        return share

    def totals(self, shares: Tensor) -> dict[int, Tensor]:
        """Return the sums by number, in their shapes; `shares`: of all ranks, [ranks, width]."""
        hosts = self._ranks.hosts
        in_order = shares.view(hosts.count, hosts.ranks, self._width).transpose(0, 1)
        flat = in_order.reshape(-1)
        if self._device.type != "cpu":
            flat = link_to(self._device).send_together({"sums": flat})["sums"]
        elif flat.data_ptr() % LINE:
            flat = flat.clone()
        parts = flat[: self._num_values].split(self._lengths)
        return {
            number: part[: shape.numel()].view(shape)
            for number, part, shape in zip(self._numbers, parts, self._shapes, strict=True)
        }

    def totals_of(self, values: Sequence[Sequence[Tensor | None]]) -> dict[int, Tensor]:
        """Return the sums of values, which go in messages of their own."""
        num_values = self.num_values()
        received = self._ranks.exchange(self.to_owners(values), num_values)
        return self.totals(self._ranks.gather(self.share(received.split(num_values))))


class DensePart(ABC):
    """The dense part of a network, in a step that joins what its grains leave.

    Every process that computes grains makes the same calls in the same order.

    Attributes:
        grains: the numbers of those that this process computes; None = all.
    """

    grains: range | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """How the grains are placed, which all processes must have alike."""
        return {}

    @abstractmethod
    def begin(self, like: Sequence[Tensor]) -> None:
        """Begin a training; `like`: tensors of the shapes of all values that `join` gets."""

    @abstractmethod
    def step(self, grain_ends: Sequence[int]) -> AbstractContextManager[None]:
        """Return the block of the passes of a step, whose grains end before these samples."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step whose update is made."""

    @abstractmethod
    def join(
        self, values: Sequence[Sequence[Tensor | None]]
    ) -> Callable[[], list[tuple[Tensor | None, int]]]:
        """Begin to add values of grains by halves; return what waits for the sums.

        It returns the sum of each value, None without any, and how many grains have it.

        Args:
            values: floats, [value][grain]; None is left out.
        """

    @abstractmethod
    def side_by_side(
        self, values: Mapping[str, Tensor], ends: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        """Return values of which each process has set the runs of its grains.

        Args:
            values: float32 [n] by name.
            ends: by name, the places at which the runs of the grains end.
        """

    @abstractmethod
    def work(self, tables: Iterable[Table]) -> list[RankWork]:
        """Return what each rank did since `begin`; [] where there is one process."""


class LocalDense(DensePart):
    """All grains are computed here."""

    def begin(self, like: Sequence[Tensor]) -> None: ...

    def step(self, grain_ends: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def end_step(self) -> None: ...

    def join(
        self, values: Sequence[Sequence[Tensor | None]]
    ) -> Callable[[], list[tuple[Tensor | None, int]]]:
        return lambda: [(joined(of_grains), _num_present(of_grains)) for of_grains in values]

    def side_by_side(
        self, values: Mapping[str, Tensor], ends: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        return dict(values)

    def work(self, tables: Iterable[Table]) -> list[RankWork]:
        return []


class RankDense(DensePart):
    """Each rank computes some of the grains, and counts its work.

    Args:
        ranks: of the job.
        placement: which of them computes which grains.
    """

    def __init__(self, ranks: Ranks, placement: Placement) -> None:
        self._ranks = ranks
        self._placement = placement
        self.grains: range = placement.grains_of(ranks.rank)
        self._count_anew()

    @property
    def settings(self) -> dict[str, Any]:
        placement = self._placement
        return {"grains": placement.grains, "whole_tables": sorted(placement.whole_tables)}

    def begin(self, like: Sequence[Tensor]) -> None:
        self._exchange = DenseExchange(self._ranks, self._placement, like, torch.float32)
        dtypes = {tensor.dtype for tensor in like if tensor.is_floating_point()} - {torch.float32}
        self._others = [
            DenseExchange(self._ranks, self._placement, like, dtype)
            for dtype in sorted(dtypes, key=str)
        ]
        self._count_anew()

    def _count_anew(self) -> None:
        self._steps = 0
        self._samples = 0
        self._traffic = Traffic()  # of steps, not of evaluations between them

    def step(self, grain_ends: Sequence[int]) -> AbstractContextManager[None]:
        ends = [0, *grain_ends]
        self._samples += ends[self.grains.stop] - ends[self.grains.start]
        self._ranks.traffic = self._traffic
        self._ranks.envelope.drop()
        return self._ranks.undivided()

    def end_step(self) -> None:
        self._steps += 1
        self._ranks.traffic = Traffic()

    def join(
        self, values: Sequence[Sequence[Tensor | None]]
    ) -> Callable[[], list[tuple[Tensor | None, int]]]:
        return self._ranks.envelope.begin(self._joined(values))

    def _joined(
        self, values: Sequence[Sequence[Tensor | None]]
    ) -> Talk[list[tuple[Tensor | None, int]]]:
        """Let each rank add a share of the values, and send the sums to all."""
        present = counts_as_floats(map(_num_present, values))
        length = present.numel()
        sizes = [length + size for size in self._exchange.num_values()]
        blocks = [[present] * self._ranks.size, *self._exchange.to_owners(values)]
        parts = yield Letters(blocks, sizes)
        counts = added_counts([part[:length] for part in parts])
        shares = yield self._exchange.share([part[length:] for part in parts])
        totals = self._exchange.totals(shares)
        for others in self._others:
            totals |= others.totals_of(values)
        return [
            (totals.get(number) if count else None, count) for number, count in enumerate(counts)
        ]

    def side_by_side(
        self, values: Mapping[str, Tensor], ends: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        if not values:
            return {}
        lengths = [len(of_grains) for of_grains in values.values()]
        every = self._ranks.gather(torch.cat(list(values.values()))).split(lengths, dim=1)
        whole = {}
        for name, of_ranks in zip(values, every, strict=True):
            starts = [0, *ends[name]]
            parts = []
            for rank, of_rank in enumerate(of_ranks):
                run = self._placement.grains_of(rank)
                parts.append(of_rank[starts[run.start] : starts[run.stop]])
            whole[name] = torch.cat(parts)
        return whole

    def work(self, tables: Iterable[Table]) -> list[RankWork]:
        here = RankWork(
            self._ranks.rank,
            self._steps,
            self._samples,
            sum(table.stats["rows"] for table in tables),
            self._traffic.sent_bytes,
            self._traffic.messages,
            self._traffic.wait_seconds,
        )
        return self._ranks.gather_objects(here)


def counts_as_floats(counts: Iterable[int]) -> Tensor:
    """Return counts as the bits of float32 numbers, on their way among such numbers."""
    return torch.tensor(list(counts), dtype=torch.int64).view(torch.float32)


def added_counts(of_ranks: Sequence[Tensor]) -> list[int]:
    """Return the sums of the counts of all ranks, from what each of them sent."""
    every = torch.stack([of_rank.clone().view(torch.int64) for of_rank in of_ranks])
    counts: list[int] = every.sum(0).tolist()
    return counts


def _copies(values: Sequence[Tensor | None]) -> list[Tensor]:
    """Return copies of values that have arrived."""
    return [value.clone() for value in values if value is not None]


def _num_present(of_grains: Sequence[Tensor | None]) -> int:
    return sum(value is not None for value in of_grains)


def joined(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the values of grains, added by halves: (0 + 1) + (2 + 3).

    None is left out. The size of the first half is the greatest power of two below that of all.
    """
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    first = joined(values[:middle])
    second = joined(values[middle:])
    if first is None or second is None:
        return second if first is None else first
    return first + second
