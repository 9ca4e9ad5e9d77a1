# SPDX-License-Identifier: Apache-2.0
"""AskedIds and OwnedIds: the ids of a batch whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.embedding.lookups import NativeIds, Sums, step_without_ids
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Answer, Question

from .placement import GrainBlock
from .ranks import Ranks

Counts = list[list[list[int]]]
"""Numbers of ids, [rank][block][table]."""


@dataclass(frozen=True, eq=False)
class AskedIds:
    """The ids of a batch.

    Attributes:
        answer: maps all that this rank owns, of those that any rank asks for.
        blocks: of grains, which this rank asks for.
        fronts: of each block, its distinct ids, whose rows are asked for.
        asks: how many each block of this rank asks each rank for, [rank][block][table].
        asked: how many each block of each rank asks this rank for.
        rows: which the owners sent, of each block.
        undo: undoes what tables have noted of the batch; see `dates.take_times`.
    """

    answer: Answer
    blocks: Sequence[GrainBlock]
    fronts: Sequence[Question]
    asks: Counts
    asked: Counts
    rows: list[Tensor] = field(default_factory=list)
    undo: Callable[[], None] | None = None

    def take_back(self) -> None:
        """Make the tables of this rank what they were before, unless the ids were looked up."""
        if self.answer.take_back() and self.undo is not None:
            self.undo()


@dataclass(frozen=True, eq=False)
class OwnedIds(NativeIds):
    """The distinct ids of a batch of all ranks that this rank owns.

    Their sums are checked and measured together with those of the other ranks.
    """

    ranks: Ranks | None = None

    def find_nonfinite(self, sums: Sums) -> tuple[int, int] | None:
        assert self.ranks is not None
        places = self.ranks.gather_objects(super().find_nonfinite(sums))
        return min((place for place in places if place), key=lambda place: place[0], default=None)

    def has_value(self, grads: Sequence[Tensor]) -> bool:
        assert self.ranks is not None
        return any(self.ranks.gather_objects(super().has_value(grads)))

    def squares(self, sums: Sums) -> NDArray[np.float64]:
        assert self.ranks is not None
        here = np.zeros((len(self.tables), PARTITIONS))
        for number, address in enumerate(self.addresses(sums.groups, sums.grads)):
            if address is not None:
                self.step.add_squares(number, address, here[number].ctypes.data)
        every = np.stack(self.ranks.gather_objects(here))
        of_tables = every.sum(0)  # only the owner of a partition has squares
        squares = np.zeros(PARTITIONS)
        for of_table in of_tables:
            squares += of_table
        return squares

    def without_ids(self) -> OwnedIds:
        return OwnedIds(self.tables, step_without_ids(self.tables), ranks=self.ranks)
