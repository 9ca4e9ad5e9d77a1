# SPDX-License-Identifier: Apache-2.0
"""Fitting: transforms learn from the training range in one out-of-core pass.

Each learned step that follows another one in the same column takes one more pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.source import Source
from hotbed.data.columns import Columns, require_columns, transformed
from hotbed.errors import DataError

if TYPE_CHECKING:
    from hotbed.data.schema import Dense, Id, Schema

Task: TypeAlias = "tuple[Dense | Id, int]"
"""A column and the index of its first transform that has not learned yet."""


def fit(schema: Schema, source: Source) -> Schema:
    """Return `schema` with all transforms fitted.

    `source` is read as many times as there are learned steps behind each other in one column.
    """
    tasks = _tasks(schema)
    while tasks:
        learned = _learn(source, tasks)
        for (column, step), value in zip(tasks, learned, strict=True):
            transforms = list(column.transforms)
            transforms[step] = transforms[step].learned(value)
            schema = schema.with_transforms(column.name, transforms)
        tasks = _tasks(schema)
    return schema


def _tasks(schema: Schema) -> list[Task]:
    tasks: list[Task] = []
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        for step, transform in enumerate(column.transforms):
            if transform.expression(pl.lit(0)) is not None:
                tasks.append((column, step))
                break
    return tasks


def _learn(source: Source, tasks: list[Task]) -> list[Any]:
    """Return the values of all tasks from one streaming pass over `source`."""
    columns = _raw_columns(tasks)
    plan = ReadPlan(tuple(columns))
    types = _types(source, plan, tasks)

    def batches(
        _columns: Any,
        predicate: pl.Expr | None,
        _rows: int | None,
        _size: int | None,
    ) -> Iterator[pl.DataFrame]:
        for raw, _ in source.read(None, plan=plan):
            data = _frame(raw, tasks)
            if predicate is not None:
                data = data.filter(predicate)
            if _columns is not None:
                data = data.select(_columns)
            yield data

    lazy = register_io_source(batches, schema=types)
    expressions = []
    for number, (column, step) in enumerate(tasks):
        name = f"x{number}"
        values = pl.col(name)
        if isinstance(types[name], pl.List):
            values = values.explode()
        expression = column.transforms[step].expression(values.alias("x"))
        assert expression is not None
        expressions.append(expression.alias(name))
    learned = lazy.select(expressions).collect(engine="streaming")
    learned_values: list[Any] = []
    for number in range(len(tasks)):
        (value,) = learned[f"x{number}"]
        learned_values.append(value)
    return learned_values


def _types(
    source: Source,
    plan: ReadPlan,
    tasks: list[Task],
) -> pl.Schema:
    """Return the types of the inputs of all tasks, from the first rows of `source`.

    Raises:
        DataError: The source has no rows.
        SchemaError: A column is missing.
    """
    first = next(iter(source.read(None, 1000, plan)), None)
    if first is None:
        raise DataError(
            "fit: the source has no rows, got an empty source. Fit on the training range."
        )
    rows, _ = first
    columns = list(plan.columns or ())
    if not set(columns) <= set(rows.schema.names):
        require_columns(columns, source.schema().names)
    return _frame(rows, tasks).schema


def _raw_columns(tasks: list[Task]) -> list[str]:
    names: dict[str, None] = {}
    for column, step in tasks:
        names[column.source] = None
        for transform in column.transforms[:step]:
            names.update(dict.fromkeys(transform.inputs()))
    return list(names)


def _frame(raw: pa.RecordBatch, tasks: list[Task]) -> pl.DataFrame:
    """Return the input of each task's transform as columns x0, x1, ...; NaN becomes null."""
    context = Columns(raw)
    series = []
    for number, (column, step) in enumerate(tasks):
        values = transformed(column.source, column.transforms[:step], context)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_null(values.type):
            values = values.cast(pa.int64())
        series.append(pl.Series(f"x{number}", values))
    without_nan = pl.selectors.float().fill_nan(None)
    return pl.DataFrame(series).with_columns(without_nan)
