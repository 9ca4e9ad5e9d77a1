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

from hotbed.data.arrays import series_of
from hotbed.data.transforms.base import Context, Transform
from hotbed.errors import ConfigError, SchemaError

# What depends on more than one row would differ between a file and a request.
_OF_MANY_ROWS = re.compile(
    r"\b(over|(array_agg|avg|corr|count|covar_pop|covar_samp|first|last|max|median|min"
    r"|quantile_cont|quantile_disc|std|stddev|stddev_pop|stddev_samp|stdev|stdev_samp|string_agg"
    r"|sum|unnest|var|var_samp|variance)(?=\s*\())",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Expression(Transform):
    """The value of a SQL expression of Polars over raw columns of the same row.

    It stands first in its column, and it needs no `column`. Functions and operators are those of
    `polars.sql_expr`; names with other characters than letters, digits and `_` are put in double
    quotes. Numbers are computed with 64 bits, whatever their columns have.

    Args:
        sql: The expression. It must not aggregate: each row counts by itself.

    Examples: `Dense("total", transforms=[Expression("price * quantity"), Log()])`,
        `Id("device", transforms=[Expression("lower(os) || ' ' || version"), Hash()])`
    """

    reads_text: ClassVar[bool] = True
    by_item: ClassVar[bool] = False

    sql: str

    def __post_init__(self) -> None:
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
        columns = [series_of(name, _wide(context.column(name))) for name in self.inputs()]
        try:
            result = pl.DataFrame(columns).select(self._parsed.alias("value"))
        except pl.exceptions.PolarsError as error:
            raise SchemaError(
                f"expression {self.sql!r}: it cannot be computed, got {str(error)!r:.200}. Correct "
                "it, or the types of its columns."
            ) from error
        if result.height != len(values):
            raise SchemaError(
                f"expression {self.sql!r}: expected one value a row, got {result.height} for "
                f"{len(values)} rows. Take functions of single values."
            )
        return _plain(result["value"].to_arrow())

    @cached_property
    def _parsed(self) -> pl.Expr:
        try:
            return pl.sql_expr(self.sql)
        except (pl.exceptions.PolarsError, TypeError) as error:
            raise ConfigError(
                f"expression.sql: it cannot be read, got {self.sql!r}: {str(error)!r:.200}. Give "
                "one SQL expression, such as 'price * quantity'."
            ) from error


def _wide(values: pa.Array) -> pa.Array:
    """Return numbers with 64 bits: narrow ones overflow, and differ between files and requests."""
    if pa.types.is_integer(values.type) and values.type.bit_width < 64:
        return values.cast(pa.int64())
    if pa.types.is_floating(values.type):
        return values.cast(pa.float64())
    return values


def _plain(values: pa.Array) -> pa.Array:
    """Return text of Polars in the type that other transforms take."""
    if pa.types.is_string_view(values.type):
        return values.cast(pa.large_string())
    return values
