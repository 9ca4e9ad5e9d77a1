# SPDX-License-Identifier: Apache-2.0
"""Expressions over the raw columns of a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import polars as pl
import pyarrow as pa

from hotbed.connectors.times import YEAR, to_microseconds, unreadable
from hotbed.data.arrays import as_numpy, first_of, series_of
from hotbed.data.arrow_types import is_moment, is_number
from hotbed.data.context import BadRows, Context
from hotbed.data.transforms.base import Transform
from hotbed.errors import ConfigError, SchemaError

# What depends on more than one row would differ between a file and a request.
_OF_MANY_ROWS = re.compile(
    r"\b(over|(array_agg|avg|corr|count|covar_pop|covar_samp|first|last|max|median|min"
    r"|quantile_cont|quantile_disc|std|stddev|stddev_pop|stddev_samp|stdev|stdev_samp|string_agg"
    r"|sum|unnest|var|var_samp|variance)(?=\s*\())",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NAMES = re.compile(r"'[^']*'|\"([^\"]*)\"")
_FURTHEST = 260_000 * YEAR  # from 1970; Polars panics at the year 262,143
_COMMENT = re.compile(r"--|/\*")


@dataclass(frozen=True)
class Expression(Transform):
    """The value of a SQL expression of Polars over raw columns of the same row.

    It stands first in its column, and it needs no `column`. Functions and operators are those of
    `polars.sql_expr`. Put a name in double quotes if it is a word of SQL (`"order"`, `"user"`), or
    has other characters than letters, digits and `_`; a double quote inside it is written twice.
    Integers are computed with 64 bits and wrap around, whatever their columns have; unsigned values
    from 2^63 on are exact, and a result that fits neither int64 nor uint64 is an error.

    Args:
        sql: the expression. It must not aggregate: each row counts by itself.

    Examples: `Dense("total", transforms=[Expression("price * quantity"), Log()])`,
        `Id("device", transforms=[Expression("lower(os) || ' ' || version"), Hash()])`
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False
    by_type: ClassVar[bool] = True

    sql: str

    def __post_init__(self) -> None:
        self._check_names()
        if not self.inputs():
            raise ConfigError(
                f"expression.sql: it must read a raw column, got {self.sql!r}. Name at least one."
            )
        aggregate = _OF_MANY_ROWS.search(_QUOTED.sub("", self.sql))
        if aggregate is not None:
            raise ConfigError(
                f"expression.sql: each row counts by itself, got {aggregate[0]!r} in "
                f"{self.sql!r}. Take JoinGroupby for a statistic of many rows."
            )

    def inputs(self) -> Sequence[str]:
        return tuple(dict.fromkeys(self._parsed.meta.root_names()))

    def apply(self, values: pa.Array, context: Context) -> pa.Array:
        columns = [_wide(name, context.column(name)) for name in self.inputs()]
        try:
            result = pl.DataFrame(columns).select(self._parsed.alias("value"))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise SchemaError(
                f"expression {self.sql!r}: it cannot be computed, got {str(error)!r:.200}. Correct "
                "it, or the types of its columns."
            ) from error
        if result.height != len(values):
            raise SchemaError(
                f"expression {self.sql!r}: expected one value a row, got {result.height} for "
                f"{len(values)} rows. Take functions of single values."
            )
        return context.with_nulls(_plain(result["value"], self.sql))

    def _check_names(self) -> None:
        """Raise ConfigError for text that Polars reads as something else than it looks like."""
        for name in _NAMES.findall(self.sql):
            if name == "*" or (name.startswith("^") and name.endswith("$")):
                raise ConfigError(
                    f"expression.sql: Polars reads the name {name!r} as a pattern, got "
                    f"{self.sql!r}. Rename the column."
                )
        comment = _COMMENT.search(_QUOTED.sub("", self.sql))
        if comment is not None:
            raise ConfigError(
                f"expression.sql: {comment[0]!r} begins a comment, got {self.sql!r}. Leave it out; "
                "put a blank between two minus signs."
            )

    @cached_property
    def _parsed(self) -> pl.Expr:
        try:
            return pl.sql_expr(self.sql)
        except (pl.exceptions.PolarsError, TypeError) as error:
            raise ConfigError(
                f"expression.sql: it cannot be read, got {self.sql!r}: {str(error)!r:.200}. Give "
                "one SQL expression, such as 'price * quantity', with names that are words of SQL "
                'in double quotes, such as "order".'
            ) from error


def _wide(name: str, values: pa.Array) -> pl.Series:
    """Return numbers with 64 bits: narrow ones overflow, and differ between files and requests.

    Unsigned integers are signed ones, of 128 bits if that is needed: they differ between files and
    requests, too.
    """
    if pa.types.is_dictionary(values.type) and is_number(values.type.value_type):
        values = values.dictionary_decode()
    kind = values.type
    if is_moment(kind):
        _check_range(values)
    if pa.types.is_uint64(kind):
        numbers = pl.Series(name, values)
        is_large = bool((numbers >= 1 << 63).any())
        return numbers.cast(pl.Int128 if is_large else pl.Int64)
    if pa.types.is_integer(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_floating(kind) or pa.types.is_decimal256(kind):
        values = values.cast(pa.float64(), safe=False)
    return series_of(name, values)


def _check_range(values: pa.Array) -> None:
    """Raise BadRows for timestamps and dates beyond the calendar of Polars."""
    micros = to_microseconds(values, "us")
    times = as_numpy(micros.fill_null(0))
    is_bad = as_numpy(unreadable(values, micros)) | (times < -_FURTHEST) | (times > _FURTHEST)
    if is_bad.any():
        raise BadRows(
            "",
            is_bad,
            f"expected times of the years -260,000 to 260,000, got {first_of(values, is_bad)!r}. "
            "Correct the row or its unit.",
        )


def _plain(result: pl.Series, sql: str) -> pa.Array:
    """Return a result of Polars in a type that other transforms take."""
    if result.dtype == pl.Int128:
        for kind in (pl.Int64, pl.UInt64):
            whole = result.cast(kind, strict=False)
            if whole.null_count() == result.null_count():
                return whole.to_arrow()
        raise SchemaError(
            f"expression {sql!r}: expected integers of 64 bits, got {result.min()!r} to "
            f"{result.max()!r}. Compute smaller ones, or hash them."
        )
    values = result.to_arrow()
    if pa.types.is_string_view(values.type):
        return values.cast(pa.large_string())
    return values
