# SPDX-License-Identifier: Apache-2.0
"""Random rows, to try a model or to measure it without data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed import checks
from hotbed.connectors.files import cut
from hotbed.connectors.position import OPENED, ROWS, Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.samples import check_names, fixed_lists
from hotbed.connectors.source import Source, described

BLOCK_ROWS = 1 << 14
"""Rows that are drawn at once, whatever the reader asks for."""

WHOLE_BELOW = 100
"""Whole dense values are drawn below this number."""


class Distribution(ABC):
    """How often each key of a slot is drawn."""

    @abstractmethod
    def ranks(self, uniform: np.ndarray, size: int) -> np.ndarray:
        """Return numbers from 0 to size - 1, one for each of the numbers `uniform` in [0, 1)."""


@dataclass(frozen=True)
class UniformKeys(Distribution):
    """All keys are equally frequent."""

    def ranks(self, uniform: np.ndarray, size: int) -> np.ndarray:
        return (uniform * size).astype(np.int64)


@dataclass(frozen=True)
class PowerLaw(Distribution):
    """The key number n is drawn about in proportion to (n + 1) ** -alpha.

    Click logs have an `alpha` of about 1. HugeCTR's generator calls 0.9 a long tail, 1.1 a medium
    and 1.3 a short one.
    """

    alpha: float = 1.2

    def __post_init__(self) -> None:
        checks.above("power_law.alpha", self.alpha, 0)

    def ranks(self, uniform: np.ndarray, size: int) -> np.ndarray:
        # the inverse of the distribution function of the density x ** -alpha on [1, size + 1)
        end = float(size + 1)
        power = 1.0 - self.alpha
        if abs(power) < 1e-6:
            places = end**uniform
        else:
            places = (1.0 + uniform * (end**power - 1.0)) ** (1.0 / power)
        return np.minimum(places.astype(np.int64) - 1, size - 1)


@dataclass(frozen=True)
class Keys:
    """The keys of a slot: from `first` to `first + size - 1`.

    `count`: how many a row has. `varies`: each row has from 1 to `count`.
    """

    size: int
    count: int = 1
    first: int = 0
    varies: bool = False

    def __post_init__(self) -> None:
        checks.at_least("keys.size", self.size, 1)
        checks.at_least("keys.count", self.count, 1)


@dataclass(frozen=True)
class Generated(Source):
    """Random rows: labels of 0 and 1, dense values, and keys.

    The rows depend on `seed` and on their number only, however they are read.

    Args:
        rows: their number.
        labels: the names of the labels.
        dense: the names of dense columns, each with its width: single numbers for 1, else lists.
        slots: the names of slots, each with its keys: single ones for a count of 1, else lists.
        distribution: `UniformKeys()` or `PowerLaw(alpha)`.
        dense_type: "float32": from 0 to 1. "int32": from 0 to 99.
        seed: of all draws.

    Example:
        >>> slots = {"user": Keys(1_000_000), "genres": Keys(20, count=3, varies=True)}
        >>> source = hb.sources.Generated(10_000, dense={"price": 1}, slots=slots)
    """

    rows: int
    labels: Sequence[str] = ("label",)
    dense: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, Keys] = field(default_factory=dict)
    distribution: Distribution = PowerLaw()
    dense_type: Literal["float32", "int32"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.whole_number("generated.rows", self.rows, 0)
        checks.one_of("generated.dense_type", self.dense_type, ("float32", "int32"))
        object.__setattr__(self, "labels", checks.names(self.labels))
        check_names("generated", [*self.labels, *self.dense, *self.slots])

    def schema(self) -> pa.Schema:
        fields: list[pa.Field] = []
        for name in self.labels:
            fields.append(pa.field(name, pa.float32()))
        for name, width in self.dense.items():
            kind = pa.from_numpy_dtype(np.dtype(self.dense_type))
            if width != 1:
                kind = pa.list_(kind, width)
            fields.append(pa.field(name, kind))
        for name, keys in self.slots.items():
            kind = pa.int64()
            if keys.count != 1:
                kind = pa.list_(kind)
            fields.append(pa.field(name, kind))
        return pa.schema(fields)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = described(self, without="rows")
        return settings

    def num_rows(self) -> int:
        return self.rows

    def locate(self, position: Position, back: int) -> RowPlace:
        return RowPlace("generated rows", int(position["row"]) - back + 1)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        row = 0
        if position:
            position.require(ROWS, self)
            row = int(position["row"])
            position.require_rows(row, 0, self.rows)
        elif plan.opens:
            yield OPENED, Position.of(self, {"row": 0})
        for block in self._blocks(row // BLOCK_ROWS, plan):
            rest = block.slice(row % BLOCK_ROWS)
            for batch in cut(rest, batch_rows):
                row += batch.num_rows
                yield batch, Position.of(self, {"row": row})

    def _blocks(self, first: int, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        names = plan.wanted(schema.names)
        wanted = pa.schema([schema.field(name) for name in names])
        for number in range(first, -(-self.rows // BLOCK_ROWS)):
            num_rows = min(BLOCK_ROWS, self.rows - number * BLOCK_ROWS)
            arrays: list[pa.Array] = []
            for name in names:
                column = schema.get_field_index(name)
                random = np.random.default_rng((self.seed, column, number))
                arrays.append(self._column(name, random, num_rows))
            yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

    def _column(self, name: str, random: np.random.Generator, num_rows: int) -> pa.Array:
        if name in self.slots:
            return self._keys(self.slots[name], random, num_rows)
        if name in self.labels:
            bits = random.integers(0, 2, num_rows)
            return pa.array(bits.astype(np.float32))
        shape = (num_rows, self.dense[name])
        if self.dense_type == "int32":
            values = random.integers(0, WHOLE_BELOW, shape, np.int32)
        else:
            values = random.random(shape, np.float32)
        if self.dense[name] == 1:
            return pa.array(values.reshape(-1))
        return fixed_lists(values)

    def _keys(self, keys: Keys, random: np.random.Generator, num_rows: int) -> pa.Array:
        counts = np.full(num_rows, keys.count)
        if keys.varies:
            counts = random.integers(1, keys.count + 1, num_rows)
        uniform = random.random(counts.sum())
        drawn = self.distribution.ranks(uniform, keys.size) + keys.first
        values = pa.array(drawn)
        if keys.count == 1:
            return values
        ends = np.cumsum(counts)
        offsets = np.concatenate([[0], ends])
        return pa.ListArray.from_arrays(offsets.astype(np.int32), values)
