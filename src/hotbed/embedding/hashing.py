# SPDX-License-Identifier: Apache-2.0
"""The hashes of ids and of the names of tables; `csrc/core` computes the same bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Uint64Array = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the distance of two counters."""
_MASK = (1 << 64) - 1
_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_XXH = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)


def mix64(values: ArrayLike) -> Uint64Array:
    """Return the id hash of each value: Murmur3's 64-bit finalizer, as uint64.

    Signed integers are reinterpreted.
    """
    x = np.array(values, ndmin=1)
    if x.dtype == np.int64:
        x = x.view(np.uint64)
    else:
        x = x.astype(np.uint64)
    shift = np.uint64(33)
    for factor in _FACTORS:
        x ^= x >> shift
        x *= np.uint64(factor)
    x ^= x >> shift
    return x


def mix64_int(value: int) -> int:
    """Return `mix64` of one Python integer, taken modulo 2^64."""
    x = value & _MASK
    for factor in _FACTORS:
        x ^= x >> 33
        x = x * factor & _MASK
    return x ^ (x >> 33)


def partition(ids: ArrayLike) -> NDArray[np.uint8]:
    """Return the partition (0..255) of each id: the top 8 bits of its hash."""
    hashes = mix64(np.asarray(ids, np.int64))
    return (hashes >> np.uint64(56)).astype(np.uint8)


def xxh64(data: bytes, seed: int = 0) -> int:
    """Return the XXH64 of `data` (Collet, xxHash specification 0.1.1); slow, for names."""
    p1, p2, p3, p4, p5 = _XXH
    size = len(data)
    position = 0

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & _MASK

    def one_round(acc: int, word: int) -> int:
        return (rotate((acc + word * p2) & _MASK, 31) * p1) & _MASK

    def word(start: int, width: int) -> int:
        return int.from_bytes(data[start : start + width], "little")

    if size >= 32:
        lanes = [(seed + p1 + p2) & _MASK, (seed + p2) & _MASK, seed & _MASK, (seed - p1) & _MASK]
        while position + 32 <= size:
            for number in range(4):
                lanes[number] = one_round(lanes[number], word(position, 8))
                position += 8
        h = 0
        for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
            h = (h + rotate(lane, bits)) & _MASK
        for lane in lanes:
            h = ((h ^ one_round(0, lane)) * p1 + p4) & _MASK
    else:
        h = (seed + p5) & _MASK
    h = (h + size) & _MASK
    while position + 8 <= size:
        h ^= one_round(0, word(position, 8))
        h = (rotate(h, 27) * p1 + p4) & _MASK
        position += 8
    if position + 4 <= size:
        h ^= word(position, 4) * p1 & _MASK
        h = (rotate(h, 23) * p2 + p3) & _MASK
        position += 4
    for byte in data[position:]:
        h ^= byte * p5 & _MASK
        h = rotate(h, 11) * p1 & _MASK
    h ^= h >> 33
    h = h * p2 & _MASK
    h ^= h >> 29
    h = h * p3 & _MASK
    return h ^ (h >> 32)


def name_hash(name: str) -> int:
    """Return the hash of a table's name: XXH64 of its UTF-8 bytes, seed 0.

    It is stored with a table, so that the table may be renamed.
    """
    return xxh64(name.encode("utf-8"))


def table_key(seed: int, name: int) -> int:
    """Return the uint64 key of a table's random streams, from its seed and its name's hash."""
    return mix64_int(mix64_int(seed + GOLDEN) ^ name)
