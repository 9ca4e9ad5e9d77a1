# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch: encoded chunks as they come, or buffers of them permuted, each with a
place to go on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotbed.connectors.base import Position
from hotbed.data.batch import Batch

Encoded = tuple[Batch, Position | None, Position]
"""Encoded rows (none = a tick of an endless source) and the source's position before and after
them.
"""


@dataclass(frozen=True)
class Buffer:
    """Rows in the order of emission, with the reader's place before the first and after the last."""

    rows: Batch
    before: dict[str, Any]
    after: dict[str, Any]
    permuted: bool = False

    def place(self, emitted: int) -> dict[str, Any]:
        """Where a reader is that has handed out `emitted` of the rows."""
        if emitted == self.rows.num_samples:
            return self.after
        # the whole buffer is read again, permuted again, and the rows handed out are
        # passed over
        if self.permuted:
            return {**self.before, "emitted": emitted}
        return {**self.before, "skip": self.before["skip"] + emitted}


def place_at(source: Position | None, skip: int, buffer: int = 0) -> dict[str, Any]:
    """A reader's place: `skip` encoded rows after the position `source`, at the start of shuffle
    buffer `buffer`.
    """
    return {
        "source": None if source is None else dict(source.state),
        "skip": skip,
        "buffer": buffer,
        "emitted": 0,
    }


def in_order(chunks: Iterator[Encoded], skip: int) -> Iterator[Buffer]:
    """Chunks as they come, without their first `skip` rows."""
    for rows, before, after in chunks:
        if skip < rows.num_samples:
            yield Buffer(rows[skip:] if skip else rows, place_at(before, skip), place_at(after, 0))
        skip = max(0, skip - rows.num_samples)


@dataclass(frozen=True)
class Shuffle:
    """Buffers of `size` rows, each permuted by (seed, epoch, its number). The first is shorter by a
    random part, so that buffers of different epochs do not hold the same rows.
    """

    size: int
    seed: int
    epoch: int

    def buffers(self, chunks: Iterator[Encoded], index: int, skip: int) -> Iterator[Buffer]:
        """The buffers from number `index` on, of the rows of `chunks` after the first `skip`."""
        held: list[Encoded] = []
        num_held = -skip
        for chunk in chunks:
            held.append(chunk)
            num_held += chunk[0].num_samples
            while num_held >= (size := self._rows(index)):
                buffer, skip = self._permuted(held, skip, size, index)
                yield buffer
                index = index + 1
                num_held = num_held - size
        if num_held > 0:
            yield self._permuted(held, skip, num_held, index)[0]

    def _permuted(
        self, held: list[Encoded], skip: int, size: int, index: int
    ) -> tuple[Buffer, int]:
        """The next `size` rows of `held` after `skip`, permuted; removes used chunks; returns the
        new skip.
        """
        while skip >= held[0][0].num_samples:
            skip -= held.pop(0)[0].num_samples
        before = place_at(held[0][1], skip, index)
        parts: list[Batch] = []
        need = size
        while True:
            rows = held[0][0]
            taken = min(need, rows.num_samples - skip)
            parts.append(rows[skip : skip + taken])
            need = need - taken
            skip = skip + taken
            if need == 0:
                break
            held.pop(0)
            skip = 0
        whole = skip == held[0][0].num_samples
        after = place_at(held[0][2] if whole else held[0][1], 0 if whole else skip, index + 1)
        order = np.random.default_rng((self.seed, self.epoch, index)).permutation(size)
        return Buffer(Batch.concat(parts).take(order), before, after, permuted=True), skip

    def _rows(self, index: int) -> int:
        if index:
            return self.size
        return int(
            np.random.default_rng((self.seed, self.epoch)).integers(
                self.size // 2 + 1, self.size + 1
            )
        )
