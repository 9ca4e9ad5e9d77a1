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

from .hashing import GOLDEN, Uint64Array, mix64, table_key

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_TWO_PI = 6.283185307179586


def _bits(seed: int, name: int, ids: ArrayLike, dim: int) -> tuple[Uint64Array, Uint64Array]:
    """Return 24 random bits for the even and for the odd lane of each lane pair.

    Returns two arrays [n, ceil(dim / 2)].
    """
    shifted = np.asarray(ids, np.int64).reshape(-1).view(np.uint64) + np.uint64(GOLDEN)
    k = mix64(np.uint64(table_key(seed, name)) ^ mix64(shifted)) if len(shifted) else shifted
    counters = np.arange(1, (dim + 1) // 2 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    u = mix64(k[:, None] + counters[None, :])
    return u >> np.uint64(40), (u & np.uint64(0xFFFFFFFF)) >> np.uint64(8)


def _lanes(even: Float32Array, odd: Float32Array, dim: int) -> Float32Array:
    pairs = np.stack([even, odd], axis=2)
    lanes = pairs.reshape(len(even), 2 * even.shape[1])
    return np.ascontiguousarray(lanes[:, :dim])


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

    @abstractmethod
    def scaled(self, factor: float) -> Init:
        """Return the start whose rows are distributed as `factor` times those of this one."""


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

    def scaled(self, factor: float) -> Uniform:
        return Uniform(self.scale * abs(factor))


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

    def scaled(self, factor: float) -> Normal:
        return Normal(self.std * abs(factor))


@dataclass(frozen=True)
class Zeros(Init):
    """Every lane 0."""

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        return np.zeros((np.size(np.asarray(ids)), dim), np.float32)

    def scaled(self, factor: float) -> Zeros:
        return self


@dataclass(frozen=True)
class Constant(Init):
    """Every lane `value`. Raises `ConfigError` for a non-finite value."""

    value: float

    def __post_init__(self) -> None:
        checks.finite_number("Constant.value", self.value)

    def rows(self, seed: int, name: int, ids: ArrayLike, dim: int) -> Float32Array:
        return np.full((np.size(np.asarray(ids)), dim), self.value, np.float32)

    def scaled(self, factor: float) -> Constant:
        return Constant(self.value * factor)
