# SPDX-License-Identifier: Apache-2.0
"""SourceRows: the rows of one reading of a source, and what the source knows of them."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.connectors import Position, Source
from hotbed.connectors.position import PLACE, Batches
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.status import UNKNOWN, SourceStatus, ended, status_of
from hotbed.data.arrow_types import Shape, Type, shape_of, type_of
from hotbed.data.columns import require_columns
from hotbed.data.schema import Schema
from hotbed.errors import DataError


class SourceRows:
    """The rows of one reading of a source, and its status."""

    def __init__(self) -> None:
        self._batches: Batches | None = None  # of an endless source

    @property
    def status(self) -> SourceStatus:
        """What an endless source knows now."""
        return UNKNOWN if self._batches is None else status_of(self._batches)

    def read(
        self, source: Source, position: Position | None, batch_rows: int, plan: ReadPlan
    ) -> Batches:
        """Yield what `source.read` yields."""
        batches = source.read(position, batch_rows, plan)
        if source.endless:
            self._batches = batches
        with ended(batches):
            yield from batches


def require_from(source: Source, required: list[str], names: Sequence[str]) -> None:
    """Raise SchemaError if the columns `names` do not include all that are `required`.

    The error lists all columns of the source.
    """
    if set(required) <= set(names):
        return
    try:
        present = source.schema().names
    except DataError:
        present = [name for name in names if name != PLACE]
        if not present:
            return  # reading raises the fault of the source
    require_columns(required, present)


def raw_types(source: Source, schema: Schema) -> tuple[dict[str, Type], dict[str, Shape]]:
    """Return the types and shapes of the raw columns of features, as far as a source knows them."""
    types: dict[str, Type] = {}
    shapes: dict[str, Shape] = {}
    try:
        raw = source.inferred
    except DataError:  # an empty folder or topic; a real fault is raised when reading begins
        return types, shapes
    numbers = schema.number_types()
    for name in schema.raw_columns(labels=False):
        if name in raw.names:
            kind = type_of(numbers.get(name, raw.field(name).type))
            if kind is not None:
                types[name] = kind
            shape = shape_of(raw.field(name).type)
            if shape is not None:
                shapes[name] = shape
    return types, shapes
