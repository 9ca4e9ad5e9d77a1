# SPDX-License-Identifier: Apache-2.0
"""Transforms of text and times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.connectors.times import check_unit, to_microseconds
from hotbed.data.arrays import as_numpy, is_text, list_array, nulls_of, require_text_form
from hotbed.data.context import Context
from hotbed.data.transforms.base import Transform
from hotbed.errors import ConfigError, SchemaError


@dataclass(frozen=True)
class Split(Transform):
    """Split text into a list of texts at `delimiter`; empty parts are left out.

    Example: `"Comedy|Drama"` becomes Comedy and Drama.
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False

    delimiter: str = "|"

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        is_missing = pa.types.is_null(values.type)
        if not is_missing and not is_text(values.type):
            raise SchemaError(
                f"split: expected a column of text, got {values.type}. Drop the transform or "
                "declare the column a string."
            )
        parts = pc.split_pattern(values.cast(pa.large_string()), self.delimiter)
        items = parts.flatten()
        lengths = pc.list_value_length(parts).fill_null(0).to_numpy(zero_copy_only=False)
        filled = pc.binary_length(items).to_numpy(zero_copy_only=False) > 0
        if not filled.all():
            owner = np.repeat(np.arange(len(values)), lengths)
            lengths = np.bincount(owner[filled], minlength=len(values))
            items = items.filter(pa.array(filled))
        return list_array(items, lengths, values)


@dataclass(frozen=True)
class Extract(Transform):
    r"""The first group of the regular expression `pattern`; null where it does not match.

    `number`: read the group as an integer of 64 bits, signed or unsigned; others are null.

    Example: `Id("year", column="title", transforms=[Extract(r"\((\d{4})\)\s*$", number=True)])`
    """

    reads_text: ClassVar[bool] = True

    pattern: str
    number: bool = False

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        require_text_form("extract", values.type)
        text = pl.Series(values.cast(pa.string()))
        groups = text.str.extract(self.pattern, 1)
        if self.number:
            return _whole_numbers(groups)
        return context.with_nulls(groups.to_arrow().cast(pa.string()))


def _whole_numbers(texts: pl.Series) -> pa.Array:
    """Return texts as int64, or as uint64 where one of them needs it; null for others."""
    signed = texts.cast(pl.Int64, strict=False)
    if signed.null_count() == texts.null_count():
        return signed.to_arrow()
    unsigned = texts.cast(pl.UInt64, strict=False)
    is_large = signed.is_null() & unsigned.is_not_null()
    if not is_large.any():
        return signed.to_arrow()
    is_below = signed < 0
    if is_below.any():
        raise SchemaError(
            f"extract: expected numbers that fit int64, or that fit uint64, got "
            f"{texts.filter(is_below)[0]!r} and {texts.filter(is_large)[0]!r}. Extract them as "
            "text."
        )
    return unsigned.to_arrow()


@dataclass(frozen=True)
class TimeOfDay(Transform):
    """An integer part of a time, UTC.

    `part`: "hour" 0..23, "minute" of the day 0..1439, "weekday" 0 (Monday)..6, or "hour_of_week"
    0..167. `unit`: as in `Time`; where the schema has a `Time` of the same raw column, its unit.

    Example: `Id("hour", column="timestamp", transforms=[TimeOfDay()])`
    """

    part: str = "hour"
    unit: str = "s"

    def __post_init__(self) -> None:
        parts = ("hour", "minute", "weekday", "hour_of_week")
        checks.one_of("time_of_day.part", self.part, parts)
        check_unit("time_of_day.unit", self.unit)

    def in_unit(self, unit: str, place: str) -> TimeOfDay:
        """Return this transform with the unit of the schema's time; `place`: for messages.

        Raises:
            ConfigError: it has another unit than the default one and this one.
        """
        if self.unit not in ("s", unit):
            raise ConfigError(
                f"time_of_day.unit: {place} has the unit {unit!r} in the schema's time, got "
                f"{self.unit!r}. Leave it out."
            )
        return replace(self, unit=unit)

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        micros = to_microseconds(values, self.unit)
        times = as_numpy(micros.fill_null(0))
        hours = np.floor_divide(times, 3_600_000_000)
        minutes = np.floor_divide(times, 60_000_000)
        weekday = (hours // 24 + 3) % 7  # 1970-01-01 was a Thursday
        parts = {
            "hour": hours % 24,
            "minute": minutes % 1440,
            "weekday": weekday,
            "hour_of_week": weekday * 24 + hours % 24,
        }
        return pa.array(parts[self.part], mask=nulls_of(micros))
