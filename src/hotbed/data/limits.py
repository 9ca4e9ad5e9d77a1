# SPDX-License-Identifier: Apache-2.0
"""Ids that were declared otherwise than they are: counted, and logged once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hotbed.data.batch import Batch, Ids

log = logging.getLogger("hotbed")


@dataclass(frozen=True)
class IdLimits:
    """What was declared of the ids of a column.

    Attributes:
        first: the smallest id.
        size: number of ids from `first` on; 0 = any.
        length: most ids of a sample; 0 = any.
    """

    first: int = 0
    size: int = 0
    length: int = 0


class LimitCheck:
    """Counts what exceeds its limits in the batches that it is called with, and changes nothing.

    The first batch with an excess is logged as a warning, one line for each column.

    Args:
        limits: by the name of the column.

    Attributes:
        outside: ids outside of the range of their column, by its name, of all batches so far.
        too_long: samples with more ids than declared, by the name of the column.

    Example:
        >>> check = LimitCheck({"item": IdLimits(0, 1000)})
        >>> data = dataset.map(check)
    """

    def __init__(self, limits: Mapping[str, IdLimits]) -> None:
        self._limits = dict(limits)
        self.outside: dict[str, int] = {}
        self.too_long: dict[str, int] = {}

    def __call__(self, batch: Batch) -> Batch:
        is_first = not (self.outside or self.too_long)
        lines = []
        for name, limits in self._limits.items():
            ids = batch.ids[name]
            if limits.size and len(ids.values):
                lines += self._count_outside(name, ids, limits)
            if limits.length and ids.offsets is not None:
                lines += self._count_too_long(name, ids, limits)
        if is_first:
            for line in lines:
                log.warning("%s. Nothing is dropped; later ones are counted, not logged.", line)
        return batch

    def _count_outside(self, name: str, ids: Ids, limits: IdLimits) -> list[str]:
        last = limits.first + limits.size - 1
        if ids.values.min() >= limits.first and ids.values.max() <= last:
            return []
        outside = (ids.values < limits.first) | (ids.values > last)
        count = int(np.count_nonzero(outside))
        self.outside[name] = self.outside.get(name, 0) + count
        example = int(ids.values[outside][0])
        return [
            f"column {name!r}: {count} ids of a batch lie outside of {limits.first} to {last}, "
            f"which were declared, such as {example}"
        ]

    def _count_too_long(self, name: str, ids: Ids, limits: IdLimits) -> list[str]:
        longest = ids.lengths().max(initial=0)
        if longest <= limits.length:
            return []
        count = int(np.count_nonzero(ids.lengths() > limits.length))
        self.too_long[name] = self.too_long.get(name, 0) + count
        return [
            f"column {name!r}: {count} samples of a batch have more ids than {limits.length}, "
            f"which was declared, the longest {longest}"
        ]
