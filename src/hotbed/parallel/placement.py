# SPDX-License-Identifier: Apache-2.0
"""Placement: which rank owns which rows, and which grains it computes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import ConfigError

SCORED_TOGETHER = 16_384
"""Samples of the batches that ranks score together: with more, messages take little of the time."""


@dataclass(frozen=True)
class GrainBlock:
    """A part of the tree of grains that one rank computes: `size` grains from `first` on."""

    first: int
    size: int


@dataclass(frozen=True)
class Placement:
    """The grains and the partitions of each table, in runs over the ranks.

    Attributes:
        ranks: their number, at most that of the grains.
        grains: of a step, a power of two.
        whole_tables: names of tables that lie on one rank each.

    Raises:
        ConfigError: there are more ranks than a table has partitions.
    """

    ranks: int
    grains: int
    whole_tables: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.ranks > PARTITIONS:
            raise ConfigError(
                f"ranks: the rows of a table lie on at most {PARTITIONS} ranks, got {self.ranks}. "
                "Start fewer."
            )

    def owners(self, table: str) -> NDArray[np.uint8]:
        """Return the rank that owns each partition of a table, [256].

        The runs of partitions begin at another one in each table, so that small tables do not all
        lie on the first rank. The name of a whole table says on which rank it lies.
        """
        number = zlib.crc32(table.encode())
        if table in self.whole_tables:
            return np.full(PARTITIONS, number % self.ranks, np.uint8)
        rotated = (np.arange(PARTITIONS) + number) % PARTITIONS
        return (rotated * self.ranks // PARTITIONS).astype(np.uint8)

    def grains_of(self, rank: int) -> range:
        """Return the grains that a rank computes."""
        return range(rank * self.grains // self.ranks, (rank + 1) * self.grains // self.ranks)

    @cached_property
    def blocks(self) -> list[list[GrainBlock]]:
        """The largest parts of the tree of grains that each rank computes alone, in order."""
        return [self._blocks_of(self.grains_of(rank)) for rank in range(self.ranks)]

    def blocks_of_hosts(self, ranks: int) -> list[list[GrainBlock]]:
        """Return the largest parts of the tree that the ranks of each host compute, in order.

        `ranks`: of a host.
        """
        firsts = range(0, self.ranks, ranks)
        runs = [
            (self.grains_of(rank).start, self.grains_of(rank + ranks - 1).stop) for rank in firsts
        ]
        return [self._blocks_of(range(*run)) for run in runs]

    @cached_property
    def leaf(self) -> int:
        """The grains of the smallest block of any rank."""
        return min(block.size for blocks in self.blocks for block in blocks)

    @property
    def leaves(self) -> int:
        """How many parts of that size the tree has."""
        return self.grains // self.leaf

    @cached_property
    def every_leaf(self) -> list[int]:
        """The leaf at which each block of each rank begins, rank after rank."""
        return [block.first // self.leaf for blocks in self.blocks for block in blocks]

    def _blocks_of(self, grains: range) -> list[GrainBlock]:
        blocks = []
        first = grains.start
        while first < grains.stop:
            size = first & -first or self.grains
            while size > grains.stop - first:
                size //= 2
            blocks.append(GrainBlock(first, size))
            first += size
        return blocks
