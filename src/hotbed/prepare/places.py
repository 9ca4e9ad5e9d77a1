# SPDX-License-Identifier: Apache-2.0
"""Places of rows, and the hashes of places that folds and samples are drawn by."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.hashing import GOLDEN, Uint64Array, mix64, mix64_int

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """The use of hashes of places. Those of two purposes are independent of each other."""

    FOLDS = 0
    SPLIT = 1
    DOWN_SAMPLE = 2
    NEGATIVES = 3
    SAMPLE = 4


def hash_places(
    file: int, rows: NDArray[np.int64], seed: int, purpose: Purpose = Purpose.FOLDS
) -> Uint64Array:
    """Return the hash of each place, uint64 [n].

    Args:
        file: number of the file in the source.
        rows: numbers of the good rows in the file, from 0.
        seed: the seed of the preparation.
        purpose: what the hashes are for.
    """
    key = mix64_int(mix64_int(seed + GOLDEN) ^ mix64_int(purpose * 2 + 1))
    of_file = mix64_int(key + GOLDEN * (file + 1))
    steps = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return mix64(mix64(steps ^ np.uint64(of_file & _MASK)) + np.uint64(key))


def hash_copies(hashes: Uint64Array, copies: NDArray[np.int64]) -> Uint64Array:
    """Return the hashes of copies of rows, [n]; copy 0 is the row itself and keeps its hash."""
    steps = copies.astype(np.uint64) * np.uint64(GOLDEN)
    return np.where(copies == 0, hashes, mix64(hashes + steps))


def shares_of(hashes: Uint64Array) -> NDArray[np.float64]:
    """Return numbers in [0, 1), one for each hash."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def folds_of(hashes: Uint64Array, num_folds: int) -> NDArray[np.int64]:
    """Return the fold of each hash, 0 .. `num_folds` - 1."""
    return (hashes % np.uint64(num_folds)).astype(np.int64)
