# SPDX-License-Identifier: Apache-2.0
"""DenseExchange: losses, gradients and buffers of the dense part, added over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .halves import joined
from .placement import Placement
from .ranks import Ranks

LINE = 64
"""Bytes of a line of memory: each value begins with one, as it does in memory of its own."""


class DenseExchange:
    """Adds dense values of the grains of all ranks, by halves, as one process does.

    Each rank adds a share of the values and sends the sums to all. So a rank sends each number
    about twice.

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
        self._numbers = [number for number, tensor in enumerate(like) if tensor.dtype == dtype]
        self._shapes = [like[number].shape for number in self._numbers]
        lines = LINE // dtype.itemsize
        self._lengths = [-(-shape.numel() // lines) * lines for shape in self._shapes]
        self._num_values = sum(self._lengths)
        self._width = -(-self._num_values // ranks.size)
        self._sizes = [
            max(min(self._width, self._num_values - rank * self._width), 0)
            for rank in range(ranks.size)
        ]

    def to_owners(self, values: Sequence[Sequence[Tensor | None]]) -> list[Sequence[Tensor]]:
        """Return what `Ranks.exchange` sends: the values of each block, a tensor for each rank.

        `values`: all of them, [number][grain]; None is left out, and those of the grains of other
        ranks are not read.
        """
        sent: list[Sequence[Tensor]] = []
        for block in self._placement.blocks[self._ranks.rank]:
            flat = torch.empty(self._num_values, dtype=self._dtype)
            for number, part in zip(self._numbers, flat.split(self._lengths), strict=True):
                value = joined(values[number][block.first : block.first + block.size])
                length = 0 if value is None else value.numel()
                if value is not None:
                    part[:length] = value.reshape(-1)
                part[length:] = -0.0  # which adds nothing
            sent.append(flat.split(self._sizes))
        return sent

    def num_values(self) -> list[int]:
        """Return how many values `to_owners` of each rank sends to this one."""
        share = self._sizes[self._ranks.rank]
        return [share * len(blocks) for blocks in self._placement.blocks]

    def share(self, received: Sequence[Tensor]) -> Tensor:
        """Return the sums of this rank's share, [width]; values beyond its share are 0.

        `received`: what `to_owners` of each rank sent.
        """
        size = self._sizes[self._ranks.rank]
        leaves: list[Tensor | None] = [None] * self._placement.leaves
        every_leaf = iter(self._placement.every_leaf)
        for of_rank, blocks in zip(received, self._placement.blocks, strict=True):
            for part in of_rank.view(len(blocks), size):
                leaves[next(every_leaf)] = part
        share = torch.zeros(self._width, dtype=self._dtype)
        if size:
            sums = joined(leaves)
            assert sums is not None, "each rank has a block"
            share[:size] = sums
        return share

    def totals(self, shares: Tensor) -> dict[int, Tensor]:
        """Return the sums by number, in their shapes; `shares`: of all ranks, [ranks, width]."""
        flat = shares.reshape(-1)
        if flat.data_ptr() % LINE:
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
