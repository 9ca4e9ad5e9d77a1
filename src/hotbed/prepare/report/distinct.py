# SPDX-License-Identifier: Apache-2.0
"""Count different values without holding them."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data.arrays import as_numpy
from hotbed.data.arrow_types import is_bytes
from hotbed.data.columns import hash_strings
from hotbed.embedding.hashing import Uint64Array, mix64

FEW = 1024
"""Up to as many different values, the number is exact."""

BITS = 14
"""Two to this power is the number of registers."""

ERROR = 1.04 / math.sqrt(1 << BITS)
"""The standard deviation of a number that is not exact, as a share of it: 0.8 %."""

_REGISTERS = 1 << BITS
_SAMPLE = 4 * FEW
_REST = 64 - BITS


class Distinct:
    """The number of different values in a column, in at most 16 KiB.

    Beyond `FEW` values it is the HyperLogLog of Flajolet, Fusy, Gandouet and Meunier (2007), with
    the estimate of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017).
    What it gives depends on the set of values only: neither their order nor their parts matter.
    """

    def __init__(self) -> None:
        self._few: Uint64Array | None = np.zeros(0, np.uint64)
        self._registers = np.zeros(0, np.uint8)
        self._is_repetitive = False

    @property
    def is_exact(self) -> bool:
        """Whether `count` is exact."""
        return self._few is not None

    def add(self, values: pa.Array) -> None:
        """Add a flat column; nulls are left out."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary.take(pc.unique(values.indices))
        values = values.drop_null()
        if self._few is not None and not self._is_repetitive:
            sample = _hashes(values.slice(0, _SAMPLE))
            num_different = len(np.unique(sample))
            self._is_repetitive = num_different < len(sample) // 4
            if num_different > FEW:
                self._into_registers()
        if self._is_repetitive:
            values = pc.unique(values)
        hashes = _hashes(values)
        if self._few is not None:
            hashes = np.unique(hashes)
        self._add_hashes(hashes)

    def merge(self, later: Distinct) -> None:
        """Add the values of `later`."""
        self._is_repetitive = self._is_repetitive or later._is_repetitive
        if later._few is not None:
            self._add_hashes(later._few)
            return
        self._into_registers()
        self._registers = np.maximum(self._registers, later._registers)

    def count(self) -> int:
        """Return the number of different values."""
        if self._few is not None:
            return len(self._few)
        histogram = np.bincount(self._registers, minlength=_REST + 2)
        shares = [float(number) / _REGISTERS for number in histogram]
        indicator = _tau(1.0 - shares[_REST + 1])
        for rank in range(_REST, 0, -1):
            indicator = 0.5 * (indicator + shares[rank])
        indicator += _sigma(shares[0])
        return round(_REGISTERS / (2 * math.log(2) * indicator))

    def _add_hashes(self, hashes: Uint64Array) -> None:
        if self._few is not None:
            self._few = np.union1d(self._few, hashes)
            if len(self._few) > FEW:
                self._into_registers()
            return
        self._raise(hashes)

    def _into_registers(self) -> None:
        if self._few is None:
            return
        few = self._few
        self._few = None
        self._registers = np.zeros(_REGISTERS, np.uint8)
        self._raise(few)

    def _raise(self, hashes: Uint64Array) -> None:
        """Raise each register to 1 + the number of leading zeros behind its bits of the hash."""
        least = int(self._registers.min())
        rest = hashes << np.uint64(BITS)
        if least:  # a rank of at most `least` raises nothing
            raising = rest < np.uint64(1 << (64 - least))
            hashes = hashes[raising]
            rest = rest[raising]
        places = (hashes >> np.uint64(_REST)).astype(np.intp)
        # The exponent of a double is the place of its highest bit; the bit that is set here ends
        # the search, and is far below the 53 bits that decide about rounding up.
        ended = rest | np.uint64(1 << (BITS - 1))
        ended &= ~(ended >> np.uint64(1))  # no run of ones may round up to the next power
        exponents = ended.astype(np.float64).view(np.uint64) >> np.uint64(52)
        ranks = np.uint64(1023 + 64) - exponents
        np.maximum.at(self._registers, places, ranks.astype(np.uint8))


def _hashes(values: pa.Array) -> Uint64Array:
    """Return a hash of each value; equal values of one type have equal hashes."""
    kind = values.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        values = values.cast(pa.large_binary())
    if is_bytes(values.type):
        return hash_strings(values, 0).view(np.uint64)
    if pa.types.is_boolean(kind):
        return mix64(as_numpy(values).astype(np.int64))
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        values = values.view(width)
    numbers = as_numpy(values)
    if numbers.dtype.kind == "f":
        doubles = numbers.astype(np.float64) + 0.0  # -0.0 becomes 0.0
        return mix64(doubles.view(np.int64))
    if numbers.dtype.kind in "iu":
        return mix64(numbers.astype(np.int64))
    text = pa.array([str(value) for value in values.to_pylist()], pa.large_string())
    return hash_strings(text, 0).view(np.uint64)


def _sigma(share: float) -> float:
    """Return Ertl's sum for registers that are empty."""
    if share == 1.0:
        return math.inf
    weight = 1.0
    total = share
    before = math.nan
    while total != before:
        share *= share
        before = total
        total += share * weight
        weight += weight
    return total


def _tau(share: float) -> float:
    """Return Ertl's sum for registers that are full."""
    if share in (0.0, 1.0):
        return 0.0
    weight = 1.0
    total = 1.0 - share
    before = math.nan
    while total != before:
        share = math.sqrt(share)
        before = total
        weight *= 0.5
        total -= (1.0 - share) ** 2 * weight
    return total / 3.0
