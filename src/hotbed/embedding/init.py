# SPDX-License-Identifier: Apache-2.0
"""Initial rows: a pure function of (seed, hash of the table's name, id).

The order of arrival, threads, sharding and re-admission do not matter, and an id may be read before
it has a row. This file is the slow, obvious reference; the native core computes the same bits.
`tests/golden` pins both.

The generator is counter-based: one murmur3 finalizer (`mix64`) for each pair of lanes. `Normal`
uses its own logarithm, cosine and sine, since those of a C library differ between machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotbed import checks

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Uint64Array = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_TWO_PI = 6.283185307179586
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
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


def mix64_int(value: int) -> int:
    """Return `mix64` of one Python integer, taken modulo 2^64."""
    x = value & _MASK
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ (x >> 33)


def partition(ids: ArrayLike) -> NDArray[np.uint8]:
    """Return the partition (0..255) of each id: the top 8 bits of its hash."""
    return (mix64(np.asarray(ids, np.int64)) >> np.uint64(56)).astype(np.uint8)


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
            lanes = [one_round(lane, word(position + 8 * i, 8)) for i, lane in enumerate(lanes)]
            position += 32
        h = (
            sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
            & _MASK
        )
        for lane in lanes:
            h = ((h ^ one_round(0, lane)) * p1 + p4) & _MASK
    else:
        h = (seed + p5) & _MASK
    h = (h + size) & _MASK
    while position + 8 <= size:
        h = (rotate(h ^ one_round(0, word(position, 8)), 27) * p1 + p4) & _MASK
        position += 8
    if position + 4 <= size:
        h = (rotate(h ^ (word(position, 4) * p1 & _MASK), 23) * p2 + p3) & _MASK
        position += 4
    for byte in data[position:]:
        h = (rotate(h ^ (byte * p5 & _MASK), 11) * p1) & _MASK
    h = ((h ^ (h >> 33)) * p2) & _MASK
    h = ((h ^ (h >> 29)) * p3) & _MASK
    return h ^ (h >> 32)


def name_hash(name: str) -> int:
    """Return the hash of a table's name: XXH64 of its UTF-8 bytes, seed 0.

    It is stored with a table, so that the table may be renamed.
    """
    return xxh64(name.encode("utf-8"))


def table_key(seed: int, name: int) -> int:
    """Return the uint64 key of a table's random streams, from its seed and its name's hash."""
    return mix64_int(mix64_int(seed + _GOLDEN) ^ name)


def _bits(seed: int, name: int, ids: ArrayLike, dim: int) -> tuple[Uint64Array, Uint64Array]:
    """Return 24 random bits for the even and for the odd lane of each lane pair.

    Returns two arrays [n, ceil(dim / 2)].
    """
    shifted = np.asarray(ids, np.int64).reshape(-1).view(np.uint64) + np.uint64(_GOLDEN)
    k = mix64(np.uint64(table_key(seed, name)) ^ mix64(shifted)) if len(shifted) else shifted
    counters = np.arange(1, (dim + 1) // 2 + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    u = mix64(k[:, None] + counters[None, :])
    return u >> np.uint64(40), (u & np.uint64(0xFFFFFFFF)) >> np.uint64(8)


def _lanes(even: Float32Array, odd: Float32Array, dim: int) -> Float32Array:
    return np.ascontiguousarray(
        np.stack([even, odd], axis=2).reshape(len(even), 2 * even.shape[1])[:, :dim]
    )


def own_log(r: Float64Array) -> Float64Array:
    """Return the logarithm of r in (0, 1] by the series of atanh, with equal bits everywhere."""
    m, e = np.frexp(r)
    low = m < _SQRT_HALF
    m = np.where(low, m * 2.0, m)
    e = np.where(low, e - 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 / 15.0 + z / 17.0
    for odd in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = 1.0 / odd + z * series
    log: Float64Array = e * _LN_2 + 2.0 * s * series
    return log


def own_cos_sin(r: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return (cos, sin) of 2 pi r for r in [0, 1), with the same bits on every machine.

    Both are Taylor series on [-pi/4, pi/4].
    """
    q = np.floor(4.0 * r + 0.5)
    x = (r - q * 0.25) * _TWO_PI
    x2 = x * x
    s = 1.0 - x2 / 110.0
    for divisor in (72.0, 42.0, 20.0, 6.0):
        s = 1.0 - x2 / divisor * s
    s = x * s
    c = 1.0 - x2 / 132.0
    for divisor in (90.0, 56.0, 30.0, 12.0, 2.0):
        c = 1.0 - x2 / divisor * c
    quarter = q.astype(np.int64) % 4
    cos = np.choose(quarter, [c, -s, -c, s])
    sin = np.choose(quarter, [s, c, -s, -c])
    return cos, sin


@dataclass(frozen=True)
class Init(ABC):
    """How a new row starts; use `Uniform`, `Normal`, `Zeros` or `Constant`."""

    @abstractmethod
    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        """Return the initial rows, float32 [n, dim], of int64 ids [n].

        `name`: the hash of the table's name, see `name_hash`.

        Example: `Uniform(0.05).rows(seed=0, name=name_hash("user"), ids=[7, -1], dim=16)`
        """


@dataclass(frozen=True)
class Uniform(Init):
    """Uniform in [-scale, scale). Raises `ConfigError` for a negative or non-finite scale."""

    scale: float = 0.05

    def __post_init__(self) -> None:
        checks.finite_number("Uniform.scale", self.scale, least=0)

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        scale = np.float32(self.scale)
        unit = np.float32(2.0**-24)

        def lane(bits: Uint64Array) -> Float32Array:
            r = bits.astype(np.float32) * unit
            return (r + r - np.float32(1.0)) * scale

        even, odd = _bits(seed, name, ids, dim)
        return _lanes(lane(even), lane(odd), dim)


@dataclass(frozen=True)
class Normal(Init):
    """Normal with mean 0 and deviation `std` (Box and Muller 1958, two lanes a draw).

    Raises `ConfigError` for a negative or non-finite `std`.
    """

    std: float = 0.01

    def __post_init__(self) -> None:
        checks.finite_number("Normal.std", self.std, least=0)

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        even, odd = _bits(seed, name, ids, dim)
        radius = np.sqrt(-2.0 * own_log((even + np.uint64(1)).astype(np.float64) * 2.0**-24))
        cos, sin = own_cos_sin(odd.astype(np.float64) * 2.0**-24)
        std = float(self.std)
        return _lanes(
            (radius * cos * std).astype(np.float32), (radius * sin * std).astype(np.float32), dim
        )


@dataclass(frozen=True)
class Zeros(Init):
    """Every lane 0."""

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        return np.zeros((np.size(np.asarray(ids)), dim), np.float32)


@dataclass(frozen=True)
class Constant(Init):
    """Every lane `value`. Raises `ConfigError` for a non-finite value."""

    value: float

    def __post_init__(self) -> None:
        checks.finite_number("Constant.value", self.value)

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        return np.full((np.size(np.asarray(ids)), dim), self.value, np.float32)
