# SPDX-License-Identifier: Apache-2.0
"""Fitting: transforms learn from the training range, in passes over its rows.

Each learned step that follows another one in the same column takes one more pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.types import usual_rows
from hotbed.data.arrow_types import is_list
from hotbed.data.columns import Columns, require_columns, transformed
from hotbed.data.context import BadRows
from hotbed.data.learners import Learner
from hotbed.data.transforms import Transform
from hotbed.errors import ConfigError, DataError, SchemaError


class FittedColumn(Protocol):
    """A column whose transforms learn: `Dense` or `Id`."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def transforms(self) -> Sequence[Transform]: ...


class FittedSchema(Protocol):
    """What fitting asks of a `Schema`."""

    @property
    def dense(self) -> Sequence[FittedColumn]: ...

    @property
    def ids(self) -> Sequence[FittedColumn]: ...

    @property
    def rules(self) -> int: ...

    def with_transforms(self: AnySchema, name: str, transforms: Sequence[Transform]) -> AnySchema:
        """Return the schema with other transforms on the column `name`."""
        ...


AnySchema = TypeVar("AnySchema", bound=FittedSchema)


@dataclass(frozen=True)
class Task:
    """What one learner learns in a pass: for one transform, or for all of one `joint` name.

    `columns` and `steps`: the columns, and the index of the transform in each of them. All earlier
    transforms of these columns have learned.
    """

    columns: tuple[FittedColumn, ...]
    steps: tuple[int, ...]

    @property
    def transform(self) -> Transform:
        """The transform that learns; of a joint task, the first one."""
        return self.columns[0].transforms[self.steps[0]]

    def learner(self) -> Learner:
        """Return a learner that has seen no rows."""
        learner = self.transform.learner()
        assert learner is not None
        return learner

    def raw_columns(self) -> list[str]:
        """Return the raw columns that the learner needs, each once."""
        names: dict[str, None] = {}
        for column, step in zip(self.columns, self.steps, strict=True):
            names[column.source] = None
            for transform in column.transforms[: step + 1]:
                names.update(dict.fromkeys(transform.inputs()))
        return list(names)

    def add(self, learner: Learner, context: Columns) -> None:
        """Let `learner` learn from the rows of `context`."""
        for values in self.values(context):
            learner.add(values, context)

    def values(self, context: Columns) -> Iterator[pa.Array]:
        """Yield, for each column, the values that reach its transform, as learners take them."""
        for values in self.inputs(context):
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            yield flat(values)

    def inputs(self, context: Columns) -> Iterator[pa.Array]:
        """Yield, for each column, the values that reach its transform."""
        for column, step in zip(self.columns, self.steps, strict=True):
            yield transformed(column.source, column.transforms[:step], context)

    def filled(self, schema: AnySchema, learned: Any) -> AnySchema:
        """Return `schema` with what was learned."""
        for column, step in zip(self.columns, self.steps, strict=True):
            transforms = list(column.transforms)
            transforms[step] = transforms[step].learned(learned)
            schema = schema.with_transforms(column.name, transforms)
        return schema


def fit(schema: AnySchema, source: Source) -> AnySchema:
    """Return `schema` with all transforms fitted.

    `source` is read as many times as there are learned steps behind each other in one column.

    Raises:
        DataError: the source has no rows.
        SchemaError: a column is missing.
    """
    while tasks := open_tasks(schema):
        learners = _learn(source, tasks, schema.rules)
        for task, learner in zip(tasks, learners, strict=True):
            with _named(task):
                schema = task.filled(schema, learner.learned())
    return schema


@contextmanager
def _named(task: Task) -> Iterator[None]:
    """Name the columns of a task in errors about their types."""
    try:
        yield
    except SchemaError as error:
        names = ", ".join(repr(column.name) for column in task.columns)
        raise SchemaError(f"column {names}: {error}") from error


def open_tasks(schema: FittedSchema) -> list[Task]:
    """Return what the next pass learns: the first step of each column that has not learned yet.

    Transforms of one `joint` name learn together, in the pass that all of their columns have
    reached.

    Raises:
        ConfigError: two joint transforms wait for each other.
    """
    ready: list[Task] = []
    joint: dict[str, Task] = {}
    missing: dict[str, int] = {}
    columns: list[FittedColumn] = [*schema.dense, *schema.ids]
    for column in columns:
        is_first = True
        for step, transform in enumerate(column.transforms):
            if transform.learner() is None:
                continue
            name = transform.joint
            if name is None and is_first:
                ready.append(Task((column,), (step,)))
            elif name is not None and is_first:
                before = joint.get(name, Task((), ()))
                joint[name] = Task((*before.columns, column), (*before.steps, step))
            elif name is not None:
                missing[name] = missing.get(name, 0) + 1
            is_first = False
    ready += [task for name, task in joint.items() if name not in missing]
    if not ready and missing:
        raise ConfigError(
            f"schema: joint transforms wait for each other, got {sorted(missing)}. Put them in the "
            "same order in all columns, each once."
        )
    return ready


def raw_columns(tasks: Sequence[Task]) -> list[str]:
    """Return the raw columns that the learners of `tasks` need, each once."""
    names: dict[str, None] = {}
    for task in tasks:
        names.update(dict.fromkeys(task.raw_columns()))
    return list(names)


def _learn(source: Source, tasks: Sequence[Task], rules: int) -> list[Learner]:
    """Return the learners of `tasks` after one pass over `source`; `rules`: of the schema."""
    learners = [task.learner() for task in tasks]
    names = raw_columns(tasks)
    is_empty = True
    for rows, _ in source.read(None, plan=ReadPlan(tuple(names))):
        if not set(names) <= set(rows.schema.names):
            require_columns(names, source.schema().names)
        is_empty = False
        _learn_rows(rows, tasks, learners, rules)
    if is_empty:
        raise DataError(
            "fit: the source has no rows, got an empty source. Fit on the training range."
        )
    return learners


def _learn_rows(
    rows: pa.RecordBatch, tasks: Sequence[Task], learners: Sequence[Learner], rules: int
) -> None:
    """Let learners learn from rows, without those that a transform cannot read.

    A dataset of these rows raises for them, or leaves them out as well.
    """
    context = Columns(rows, rules)
    try:
        inputs = []
        for task in tasks:
            with _named(task):
                inputs.append(list(task.values(context)))
    except BadRows as bad:
        sound = usual_rows(rows).filter(pa.array(~bad.mask))
        _learn_rows(sound, tasks, learners, rules)
        return
    for task, learner, columns in zip(tasks, learners, inputs, strict=True):
        with _named(task):
            for values in columns:
                learner.add(values, context)


def flat(values: pa.Array) -> pa.Array:
    """Return the items of lists, or the values, with null for NaN and infinite numbers."""
    while is_list(values.type):
        values = values.flatten()
    if pa.types.is_null(values.type):
        return values.cast(pa.int64())
    if pa.types.is_floating(values.type):
        # an infinite number makes its row a bad one, unless a later transform mends it
        return pc.if_else(pc.is_finite(values), values, pa.scalar(None, values.type))
    return values
