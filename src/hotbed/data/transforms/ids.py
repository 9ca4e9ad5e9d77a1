# SPDX-License-Identifier: Apache-2.0
"""Transforms that give ids: hashes, combinations, places in a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.data.arrays import as_numpy, nulls_of
from hotbed.data.arrow_types import is_bytes
from hotbed.data.context import Context
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Learner, ValueCounts
from hotbed.data.transforms.base import Transform, not_fitted
from hotbed.errors import ConfigError, SchemaError

_BINS_ADVICE = "Give the number of ids to fold into, or None for no folding."
_NUM_IDS = 1 << 64
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
        object.__setattr__(self, "with_", checks.names(self.with_))
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
            try:
                parts.append(context.hash(other, self.seed))
            except SchemaError as error:
                raise SchemaError(f"cross with {name!r}: {error}") from error
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

    With it, columns that number their values from 0 and share a table get ranges of their own.

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
    times, most frequent first, at most `max_size` of them. Integers are compared as ids, whatever
    their type is: unsigned ones keep their 64 bits. A float is the integer that it equals.

    Args:
        vocabulary: the values, text or integers, as a small vocabulary is kept.
        min_count: how often a value must occur.
        max_size: the most values that are kept.
        joint: maps of the same name learn one vocabulary, from the values of all their columns.
        fitted: the values by their ids, as `hotbed prepare` keeps them.
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
            object.__setattr__(self, "vocabulary", _words(self.vocabulary))
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
        keys = values
        if pa.types.is_floating(values.type):
            keys = _whole_numbers(values)
        elif not is_bytes(values.type):
            keys = pa.array(context.ids(values), mask=nulls_of(values))
        if len(self._keys) and is_bytes(keys.type) != is_bytes(self._keys.type):
            raise SchemaError(
                f"map: the vocabulary holds {self._keys.type}, got a column of {values.type}. Give "
                "values of that type."
            )
        places = pc.index_in(keys, value_set=self._keys.cast(keys.type)).cast(pa.int64())
        ids = pc.add(places, 1).fill_null(0)
        missing = pa.scalar(None, pa.int64())
        return pc.if_else(values.is_null(), missing, ids)

    @cached_property
    def _keys(self) -> pa.Array:
        """The vocabulary as text, or as ids."""
        words = self.vocabulary or ()
        if words and isinstance(words[0], str):
            return pa.array(words, pa.large_string())
        keys = np.array([int(word) % _NUM_IDS for word in words], np.uint64)
        return pa.array(keys.view(np.int64))

    def learner(self) -> Learner | None:
        if self.vocabulary is not None or self.fitted is not None:
            return None
        return ValueCounts()

    def learned(self, value: pl.DataFrame | FittedMap) -> Map:
        if isinstance(value, FittedMap):
            return replace(self, fitted=value)
        kind = value["value"].dtype
        if kind.is_float() and _is_exact(value["value"]):
            value = value.with_columns(pl.col("value").cast(pl.Int64))
        elif not kind.is_integer() and kind not in (pl.String, pl.Binary):
            raise SchemaError(
                f"map: expected integers or text, got a column of {kind}. Declare it an integer or "
                "string, or Bucketize it."
            )
        if kind == pl.Binary and not _is_text(value["value"]):
            raise SchemaError(
                "map: expected text in UTF-8, got other bytes. Hash the column instead."
            )
        is_frequent = pl.col("count") >= self.min_count
        words = value.filter(is_frequent).slice(0, self.max_size)
        return replace(self, vocabulary=words["value"].to_list())


def _words(vocabulary: Sequence[Any]) -> tuple[str | int, ...]:
    """Return the values of a vocabulary; bytes as text, booleans as 0 and 1."""
    words: list[Any] = []
    for word in vocabulary:
        if isinstance(word, bytes):
            words.append(_text(word))
        elif isinstance(word, (bool, np.bool_, np.integer)):
            words.append(int(word))
        else:
            words.append(word)
    are_texts = all(isinstance(word, str) for word in words)
    are_ids = all(isinstance(word, int) and _is_id(word) for word in words)
    if not are_texts and not are_ids:
        raise ConfigError(
            f"map.vocabulary: expected text, or integers of 64 bits, got {words[:8]!r}. Give "
            "values of one type."
        )
    return tuple(words)


def _is_text(words: pl.Series) -> bool:
    """Return whether bytes are text in UTF-8."""
    try:
        words.cast(pl.String)
    except pl.exceptions.PolarsError:
        return False
    return True


def _is_exact(numbers: pl.Series) -> bool:
    """Return whether floats are integers that float32 holds: requests may have that type."""
    return bool((numbers.abs() <= 1 << 24).all() and (numbers == numbers.floor()).all())


def _whole_numbers(values: pa.Array) -> pa.Array:
    """Return floats as int64, null where they are not integers of 64 bits."""
    numbers = as_numpy(values).astype(np.float64)
    is_whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < _NUM_IDS // 2)
    return pa.array(np.where(is_whole, numbers, 0).astype(np.int64), mask=~is_whole)


def _is_id(number: int) -> bool:
    return -_NUM_IDS // 2 <= number < _NUM_IDS


def _text(word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"map.vocabulary: expected text in UTF-8, got {word[:40]!r}. Hash the column instead."
        ) from None


def _into_bins(hashed: pa.Array, bins: int | None) -> pa.Array:
    if bins is None:
        return hashed
    hashes = as_numpy(hashed.fill_null(0)).view(np.uint64)
    values = hashes % np.uint64(bins)
    return pa.array(values.astype(np.int64), mask=nulls_of(hashed))
