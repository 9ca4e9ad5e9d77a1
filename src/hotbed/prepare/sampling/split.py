# SPDX-License-Identifier: Apache-2.0
"""Splits: which rows train, and which are only for validation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import checks
from hotbed.connectors.times import to_microseconds
from hotbed.data import numbers
from hotbed.data.arrays import nulls_of
from hotbed.data.columns import Columns, ids_of
from hotbed.data.learners import Quantiles
from hotbed.data.schema import Schema
from hotbed.embedding.hashing import mix64
from hotbed.errors import ConfigError, DataError
from hotbed.prepare.partitions import Chunk
from hotbed.prepare.places import Purpose, hash_places, shares_of

BoolArray = NDArray[np.bool_]


class Holdout(ABC):
    """Base of the splits into the parts `train` and `valid`.

    A split decides on the rows of the source. A sampled negative is in the part of its positive.
    """

    reads_time: ClassVar[bool] = False
    """Whether it reads the schema's time."""

    @abstractmethod
    def inputs(self) -> Sequence[str]:
        """Return the raw columns that it reads, without the schema's time."""

    @abstractmethod
    def valid_rows(self, chunk: Chunk, schema: Schema, seed: int) -> BoolArray:
        """Return which rows of `chunk` are for validation, bool [n].

        Args:
            chunk: raw rows.
            schema: has the time of the rows.
            seed: the seed of the preparation.

        Raises:
            BadRows: rows have no time.
        """

    def learner(self) -> Quantiles | None:
        """Return what learns from the times of all rows; None if there is nothing to learn."""
        return None

    def learned(self, quantiles: Sequence[float]) -> Holdout:
        """Return this split with the quantiles of its learner filled in."""
        return self


@dataclass(frozen=True)
class ByTime(Holdout):
    """The latest rows are for validation: a share `valid`, or those since `from_`.

    Rows of one time are in one part, so the share may be off by the number of rows of one time.
    Apart from that it is met to 1/4096 of the rows. `from_`: a date or a time, UTC unless
    it has a zone.

    Examples: `ByTime(valid=0.1)`, `ByTime(from_="2020-01-01")`
    """

    reads_time: ClassVar[bool] = True

    valid: float | None = None
    from_: str | None = None

    def __post_init__(self) -> None:
        if (self.valid is None) == (self.from_ is None):
            raise ConfigError(
                f"by_time: expected one of valid and from, got valid={self.valid!r} and "
                f"from={self.from_!r}. Give a share of the rows, or the time of the first row."
            )
        if self.valid is not None:
            _check_share("by_time.valid", self.valid)
        if self.from_ is not None:
            first = to_microseconds(pa.array([self.from_]), "iso")[0]
            if not first.is_valid:
                raise ConfigError(
                    f"by_time.from_: not a date or a time, got {self.from_!r}. Write it as "
                    "2020-01-31 or 2020-01-31T18:30:00."
                )

    def inputs(self) -> Sequence[str]:
        return ()

    def valid_rows(self, chunk: Chunk, schema: Schema, seed: int) -> BoolArray:
        if schema.time is None:
            raise ConfigError(
                "split: by_time needs the time of each row, got a schema without a time column. "
                "Add {kind: time, name: …} to the schema."
            )
        if self.from_ is None:
            raise ConfigError(
                f"by_time: the split has not learned its first time, got valid={self.valid}. Give "
                "from, or use the split that learned() returns."
            )
        first = to_microseconds(pa.array([self.from_]), "iso")[0].as_py()
        raw = Columns(chunk.rows).column(schema.time.source)
        return np.asarray(numbers.time(schema.time, raw) >= first)

    def learner(self) -> Quantiles | None:
        if self.valid is None:
            return None
        return Quantiles([1 - self.valid])

    def learned(self, quantiles: Sequence[float]) -> ByTime:
        if not quantiles:
            raise DataError("split: expected rows with times, got no rows. Check the source.")
        first = np.datetime64(math.ceil(quantiles[0]), "us")
        return ByTime(from_=str(first))


@dataclass(frozen=True)
class ByFold(Holdout):
    """A share `valid` of the rows is for validation, chosen by a hash of their places."""

    valid: float = 0.1

    def __post_init__(self) -> None:
        _check_share("by_fold.valid", self.valid)

    def inputs(self) -> Sequence[str]:
        return ()

    def valid_rows(self, chunk: Chunk, schema: Schema, seed: int) -> BoolArray:
        return shares_of(chunk.hashes(seed, Purpose.SPLIT)) < self.valid


@dataclass(frozen=True)
class ByGroup(Holdout):
    """All rows of a share `valid` of the values of `column` are for validation.

    `column` holds integers or text. Rows without a value, or with an empty text, are not a
    group: each is for itself.

    Example: `ByGroup("user")` validates on users that training does not know.
    """

    column: str
    valid: float = 0.1

    def __post_init__(self) -> None:
        _check_share("by_group.valid", self.valid)

    def inputs(self) -> Sequence[str]:
        return (self.column,)

    def valid_rows(self, chunk: Chunk, schema: Schema, seed: int) -> BoolArray:
        values = Columns(chunk.rows).column(self.column)
        key = hash_places(0, np.zeros(1, np.int64), seed, Purpose.SPLIT)
        groups = mix64(mix64(ids_of(values, self.column)) ^ key)
        hashes = np.where(nulls_of(values), chunk.hashes(seed, Purpose.SPLIT), groups)
        return shares_of(hashes) < self.valid


def _check_share(where: str, valid: float) -> None:
    checks.finite_number(
        where, valid, above=0, below=1, advice="Give the share of the rows that are for validation."
    )
