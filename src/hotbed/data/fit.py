# SPDX-License-Identifier: Apache-2.0
"""Fitting: transforms learn from the training range in one out-of-core pass (one more for each
learned step behind another).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from hotbed.connectors.base import ReadPlan, Source
from hotbed.data.encode import Columns, apply, require_columns
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError

Task = tuple[Dense | Id, int]
"""A column and the index of its first transform that has yet to learn."""


def fit(schema: Schema, source: Source) -> Schema:
    """`schema` with everything learned that its transforms ask for; reads `source` as often as
    learned steps are chained.
    """
    while tasks := _tasks(schema):
        for (column, step), value in zip(tasks, _learn(schema, source, tasks), strict=True):
            transforms = list(column.transforms)
            transforms[step] = transforms[step].learned(value)
            schema = schema.with_transforms(column.name, transforms)
    return schema


def _tasks(schema: Schema) -> list[Task]:
    found: list[Task] = []
    columns: list[Dense | Id] = [*schema.dense, *schema.ids]
    for column in columns:
        steps = [
            step
            for step, transform in enumerate(column.transforms)
            if transform.expression(pl.lit(0)) is not None
        ]
        if steps:
            found.append((column, steps[0]))
    return found


def _learn(schema: Schema, source: Source, tasks: list[Task]) -> list[Any]:
    """The values of all tasks from one streaming pass over `source`."""
    columns = _raw_columns(tasks)
    plan = ReadPlan(tuple(columns))
    first = next(iter(source.read(None, 1000, plan)), None)
    if first is None:
        raise DataError(
            "fit: the source has no rows — received an empty source — fit on the training range"
        )
    if not set(columns) <= set(first[0].schema.names):
        require_columns(columns, source.schema().names)
    frame = _frame(first[0], tasks)

    def batches(
        _columns: Any, predicate: pl.Expr | None, _rows: int | None, _size: int | None
    ) -> Iterator[pl.DataFrame]:
        for raw, _ in source.read(None, plan=plan):
            data = _frame(raw, tasks)
            data = data if predicate is None else data.filter(predicate)
            yield data if _columns is None else data.select(_columns)

    lazy = register_io_source(batches, schema=frame.schema)
    expressions = []
    for number, (column, step) in enumerate(tasks):
        name = f"x{number}"
        values = pl.col(name).explode() if isinstance(frame.schema[name], pl.List) else pl.col(name)
        asked = column.transforms[step].expression(values.alias("x"))
        assert asked is not None
        expressions.append(asked.alias(name))
    learned = lazy.select(expressions).collect(engine="streaming")
    return [learned[f"x{number}"][0] for number in range(len(tasks))]


def _raw_columns(tasks: list[Task]) -> list[str]:
    found: dict[str, None] = {}
    for column, step in tasks:
        found[column.source] = None
        for transform in column.transforms[:step]:
            found.update(dict.fromkeys(transform.inputs()))
    return list(found)


def _frame(raw: pa.RecordBatch, tasks: list[Task]) -> pl.DataFrame:
    """What each task's transform will see, as columns x0, x1, ...; NaN is missing."""
    context = Columns(raw)
    series = []
    for number, (column, step) in enumerate(tasks):
        values = context.column(column.source)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        for transform in column.transforms[:step]:
            values = apply(transform, values, context)
        series.append(
            pl.Series(
                f"x{number}", values.cast(pa.int64()) if pa.types.is_null(values.type) else values
            )
        )
    return pl.DataFrame(series).with_columns(pl.selectors.float().fill_nan(None))
