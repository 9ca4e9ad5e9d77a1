# SPDX-License-Identifier: Apache-2.0
"""The outcomes that met an impression, in the order in which they did."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hotbed.connectors.join.spill import Spill, SpilledArrays
from hotbed.connectors.times import EARLIEST

CHUNK_ROWS = 1 << 16
"""Outcomes of a whole chunk: smaller ones are merged."""


@dataclass(frozen=True)
class _Chunk:
    """Numbers and times of outcomes, [2, outcomes]; `file`: where they lie if on the disk."""

    rows: np.ndarray
    latest: int
    file: SpilledArrays | None = None


class Matches:
    """The outcomes that met an impression, in the order in which they did: numbers and times.

    Attributes:
        count: of all so far.
    """

    def __init__(self) -> None:
        self.count = 0
        # the number of outcomes before the chunks, and the chunks; another thread reads both
        self._rest: tuple[int, list[_Chunk]] = (0, [])

    def add(self, numbers: np.ndarray, times: np.ndarray) -> None:
        """Add the outcomes of a turn."""
        if not len(numbers):
            return
        first, chunks = self._rest
        rows = np.stack([numbers, times])
        chunks = list(chunks)
        while chunks and chunks[-1].rows.shape[1] <= min(rows.shape[1], CHUNK_ROWS):
            rows = np.concatenate([chunks.pop().rows, rows], axis=1)
        self._rest = (first, [*chunks, _Chunk(rows, int(rows[1].max()))])
        self.count += len(numbers)

    def put(self, numbers: np.ndarray, times: np.ndarray, count: int) -> None:
        """Take over the outcomes of a state, the last ones of `count`."""
        chunk = _Chunk(np.stack([numbers, times]), int(times.max(initial=EARLIEST)))
        self._rest = (count - len(numbers), [chunk])
        self.count = count

    def drop(self, before: int) -> None:
        """Drop the first chunks whose outcomes all happened before a time."""
        first, chunks = self._rest
        while chunks and chunks[0].latest < before:
            first += chunks[0].rows.shape[1]
            chunks = chunks[1:]
        self._rest = (first, chunks)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return outcomes `begin` to `end` of all so far that are left, [2, outcomes]."""
        first, chunks = self._rest
        parts = [np.zeros((2, 0), np.int64)]
        for chunk in chunks:
            last = first + chunk.rows.shape[1]
            if first < end and last > begin:
                parts.append(chunk.rows[:, max(0, begin - first) : end - first])
            first = last
        return np.concatenate(parts, axis=1)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return sum(int(chunk.rows.nbytes) for chunk in self._rest[1] if chunk.file is None)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(int(chunk.rows.nbytes) for chunk in self._rest[1] if chunk.file is not None)

    def spill(self, spill: Spill) -> None:
        """Move whole chunks to the disk, where they are read by pages."""
        first, chunks = self._rest
        self._rest = (first, [_spilled(chunk, spill) for chunk in chunks])


def _spilled(chunk: _Chunk, spill: Spill) -> _Chunk:
    if chunk.file is not None or chunk.rows.shape[1] < CHUNK_ROWS:
        return chunk
    file = SpilledArrays(spill)
    return replace(chunk, rows=file.put(chunk.rows), file=file)
