# SPDX-License-Identifier: Apache-2.0
"""Transforms of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.types import is_text
from hotbed.data.arrays import list_array, require_text_form
from hotbed.data.context import Context
from hotbed.data.transforms.base import Transform
from hotbed.errors import SchemaError


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
    by_type: ClassVar[bool] = True

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
