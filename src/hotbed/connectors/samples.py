# SPDX-License-Identifier: Apache-2.0
"""Columns of binary samples as Arrow arrays, and back: for `Norm` and `Raw`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.source import Source, not_endless
from hotbed.errors import ConfigError, SchemaError

KeyBits = Literal[32, 64]


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise ConfigError if two columns have one name."""
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(
            f"{where}: two columns have one name, got {sorted(repeated)}. Rename one."
        )


def wanted_fields(schema: pa.Schema, plan: ReadPlan) -> pa.Schema:
    """Return the columns of `schema` that a reader asks for."""
    names = plan.wanted(schema.names)
    return pa.schema([schema.field(name) for name in names])


def fixed_lists(values: np.ndarray) -> pa.Array:
    """Return the rows of an array [n, width] as lists of fixed length."""
    contiguous = np.ascontiguousarray(values)
    flat = pa.array(contiguous.reshape(-1))
    _, width = values.shape
    return pa.FixedSizeListArray.from_arrays(flat, width)


def batches_to_write(
    rows: Source, columns: Sequence[str], where: str
) -> Iterator[dict[str, pa.Array]]:
    """Yield the columns of `rows` in parts.

    Raises:
        SchemaError: a column is absent, or holds nulls.
    """
    not_endless(rows, "a file to write")
    present = rows.schema().names
    missing = [name for name in columns if name not in present]
    if missing:
        raise SchemaError(
            f"{where}: columns {missing} are absent, got {present}. Add them to the rows, or name "
            "other columns."
        )
    plan = ReadPlan(columns=tuple(columns))
    for batch, _ in rows.read(plan=plan):
        arrays: dict[str, pa.Array] = {}
        for name in columns:
            array = batch.column(name)
            if array.null_count:
                raise SchemaError(
                    f"{where}: column {name!r} has nulls, which the format cannot hold, got "
                    f"{array.null_count}. Fill them first."
                )
            arrays[name] = array
        yield arrays


def matrix(array: pa.Array, name: str, where: str, width: int | None) -> np.ndarray:
    """Return numbers [n, width] of a column of lists, or of single values.

    Args:
        array: the column, without nulls.
        name: its name, for messages.
        where: the file, for messages.
        width: the length of the lists; None = that of the first.

    Raises:
        SchemaError: a list has another length.
    """
    counts = num_keys(array)
    if width is None:
        width = int(counts[0])
    wrong = counts != width
    if wrong.any():
        raise SchemaError(
            f"{where}: expected {width} values a row of column {name!r}, got {counts[wrong][0]}. "
            "Correct the rows."
        )
    numbers: np.ndarray = keys_of(array).reshape(len(array), width)
    return numbers


def num_keys(array: pa.Array) -> np.ndarray:
    """Return the number of values in each row of a column of lists, or of single values."""
    if not pa.types.is_nested(array.type):
        return np.ones(len(array), np.int64)
    counts: np.ndarray = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    return counts.astype(np.int64)


def keys_of(array: pa.Array) -> np.ndarray:
    """Return the values of all rows of a column of lists, or of single values."""
    if pa.types.is_nested(array.type):
        array = array.flatten()
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
