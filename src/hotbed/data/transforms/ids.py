# SPDX-License-Identifier: Apache-2.0
"""Transforms that give ids: hashes, combinations, places in a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.data.arrays import as_numpy, is_bytes, nulls_of
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Learner, ValueCounts
from hotbed.data.transforms.base import Context, Transform, not_fitted
from hotbed.errors import ConfigError, SchemaError

_BINS_ADVICE = "Give the number of ids to fold into, or None for no folding."
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Hash(Transform):
    """XXH64 of strings or integers.

    With `bins`, ids lie in 0 .. bins - 1, and collisions share a row. Without `bins`, ids keep all
    64 bits.
    """

    reads_text: ClassVar[bool] = True
    by_value: ClassVar[bool] = True
    gives_ids: ClassVar[bool] = True

    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.at_least("hash.bins", self.bins, 1, _BINS_ADVICE)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        return _into_bins(context.hash(values, self.seed), self.bins)


@dataclass(frozen=True)
class Cross(Transform):
    """One id for the combination of this column and the raw columns `with_` (not lists).

    The id is null if any part is null. The order of the parts matters.

    Example: `Id("user_hour", column="user", transforms=[Cross(["hour"])])`
    """

    gives_ids: ClassVar[bool] = True

    with_: Sequence[str]
    bins: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.with_, str):
            object.__setattr__(self, "with_", (self.with_,))
        else:
            object.__setattr__(self, "with_", tuple(self.with_))
        checks.at_least("cross.bins", self.bins, 1, _BINS_ADVICE)
        if not self.with_:
            raise ConfigError(
                "cross.with_: expected at least one column, got []. Name the columns to combine "
                "with."
            )

    def inputs(self) -> Sequence[str]:
        return self.with_

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        parts = [context.hash(values, self.seed)]
        for name in self.with_:
            other = context.column(name)
            if pa.types.is_nested(other.type) or len(other) != len(values):
                raise SchemaError(
                    f"cross: expected columns of single values, got {other.type} for column "
                    f"{name!r}. Leave it out."
                )
            parts.append(context.hash(other, self.seed))
        mixed = np.zeros(len(values), np.uint64)
        null = np.zeros(len(values), bool)
        for part in parts:
            null |= nulls_of(part)
            values_or_zero = part.fill_null(0)
            hashes = as_numpy(values_or_zero).view(np.uint64)
            mixed = (mixed ^ hashes) * _GOLDEN
            mixed ^= mixed >> np.uint64(32)
        ids = pa.array(mixed.view(np.int64), mask=null)
        return _into_bins(ids, self.bins)


@dataclass(frozen=True)
class Shift(Transform):
    """Add `by` to whole numbers, which stay within 64 bits by wrapping around.

    Columns that number their values from 0 and share a table get ranges of ids of their own so.

    Example: `Id("shop", table="places", transforms=[Shift(10_000)])`
    """

    by_value: ClassVar[bool] = True

    by: int = 0

    def __post_init__(self) -> None:
        limit = 1 << 63
        checks.whole_number("shift.by", self.by, -limit, limit - 1)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if pa.types.is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        if not pa.types.is_integer(values.type):
            raise SchemaError(
                f"shift: expected whole numbers, got a column of {values.type}. Declare the column "
                "an integer."
            )
        missing = None
        if values.null_count:
            missing = nulls_of(values)
            values = values.fill_null(0)
        shifted = as_numpy(values).astype(np.int64) + np.int64(self.by)
        return pa.array(shifted, mask=missing)


@dataclass(frozen=True)
class Map(Transform):
    """Replace a value by 1 + its place in a vocabulary, and an unknown value by 0.

    Without one, `Schema.fit` and `hotbed prepare` learn the values that occur at least `min_count`
    times, most frequent first, at most `max_size` of them.

    Args:
        vocabulary: The values, as a small vocabulary is kept.
        min_count: How often a value must occur.
        max_size: The most values that are kept.
        joint: Maps of the same name learn one vocabulary, from the values of all their columns.
        fitted: The values by their ids, as `hotbed prepare` keeps them.
    """

    reads_text: ClassVar[bool] = True
    by_value: ClassVar[bool] = True

    vocabulary: Sequence[str | int | bool] | None = None
    min_count: int = 1
    max_size: int | None = None
    joint: str | None = None
    fitted: FittedMap | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", tuple(self.vocabulary))
        if self.vocabulary is not None and self.fitted is not None:
            raise ConfigError(
                f"map: vocabulary and fitted exclude each other, got a vocabulary and "
                f"{str(self.fitted.path)!r}. Give one of them."
            )

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        if self.fitted is not None:
            slots = self.fitted.slots(context.ids(values))
            return pa.array(slots + 1, mask=nulls_of(values))
        if self.vocabulary is None:
            raise not_fitted("map")
        if pa.types.is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if values.type not in self._words:
            self._words[values.type] = _words_of(self.vocabulary, values.type)
        words, numbers = self._words[values.type]
        places = pc.index_in(values, value_set=words)
        ids = numbers.take(places).fill_null(0)
        missing = pa.scalar(None, pa.int64())
        return pc.if_else(values.is_null(), missing, ids)

    @cached_property
    def _words(self) -> dict[pa.DataType, tuple[pa.Array, pa.Array]]:
        """The vocabulary by the type of the column that it was used for."""
        return {}

    def learner(self) -> Learner | None:
        if self.vocabulary is not None or self.fitted is not None:
            return None
        return ValueCounts()

    def learned(self, value: pl.DataFrame | FittedMap) -> Map:
        if isinstance(value, FittedMap):
            return replace(self, fitted=value)
        is_frequent = pl.col("count") >= self.min_count
        words = value.filter(is_frequent).slice(0, self.max_size)
        return replace(self, vocabulary=_plain_words(words["value"]))


def _plain_words(words: pl.Series) -> list[str | int | bool]:
    """Return the words of a vocabulary as plain values, as a saved schema holds them."""
    if words.dtype == pl.Binary:
        try:
            return words.cast(pl.String).to_list()
        except pl.exceptions.PolarsError as error:
            raise SchemaError(
                f"map: expected text, got bytes that are not UTF-8 ({str(error)!r:.80}). Hash "
                "them, or write them as text."
            ) from error
    is_known = words.dtype.is_integer() or words.dtype in (pl.String, pl.Boolean)
    if not is_known and len(words):
        raise SchemaError(
            f"map: expected integers, booleans or text, got values of {words.dtype}. Write the "
            "column as one of them, or Bucketize it."
        )
    return words.to_list()


def _words_of(
    vocabulary: Sequence[str | int | bool], kind: pa.DataType
) -> tuple[pa.Array, pa.Array]:
    """Return the words that a column of type `kind` can hold, and the id of each.

    Raises:
        SchemaError: The vocabulary holds text and the column numbers, or the other way round.
    """
    has_text = any(isinstance(word, str) for word in vocabulary)
    if vocabulary and not (is_bytes(kind) if has_text else pa.types.is_integer(kind)):
        held = "text" if has_text else "integers"
        raise SchemaError(
            f"map: the vocabulary holds {held}, got a column of {kind}. Give the column the type "
            "that it had when the vocabulary was made."
        )
    if not vocabulary:
        return pa.array([], kind), pa.array([], pa.int64())
    words: Sequence[str | int] = vocabulary
    numbers = np.arange(1, len(vocabulary) + 1)
    if not has_text:
        whole = [int(word) for word in vocabulary]
        least, most = _range_of(kind)
        inside = [least <= word <= most for word in whole]
        words = [word for word, is_inside in zip(whole, inside, strict=True) if is_inside]
        numbers = numbers[inside]
    return pa.array(words, kind), pa.array(numbers)


def _range_of(kind: pa.DataType) -> tuple[int, int]:
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


def _into_bins(hashed: pa.Array, bins: int | None) -> pa.Array:
    if bins is None:
        return hashed
    hashes = as_numpy(hashed.fill_null(0)).view(np.uint64)
    values = hashes % np.uint64(bins)
    return pa.array(values.astype(np.int64), mask=nulls_of(hashed))
