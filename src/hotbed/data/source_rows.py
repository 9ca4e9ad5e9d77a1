# SPDX-License-Identifier: Apache-2.0
"""SourceRows: the rows of one reading of a source, and what the source knows of them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

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
        """Yield what `source.read` yields.

        Raises DataError where an endless source of one's own lacks what others have.
        """
        batches = source.read(position, batch_rows, plan)
        with ended(batches):
            if not source.endless:
                yield from batches
                return
            self._batches = batches
            for rows, after in batches:
                if rows.num_rows:
                    _require_place_and_clock(source, rows, after)
                yield rows, after


def _require_place_and_clock(source: Source, rows: pa.RecordBatch, after: Position) -> None:
    kind = type(source).__name__
    if PLACE not in rows.schema.names:
        raise DataError(
            f"{kind}: the rows of an endless source have a column with their places, {PLACE!r}, "
            f"got {rows.schema.names}. Add it, as hb.testing.FakeStream does."
        )
    if "now" not in after.state:
        raise DataError(
            f"{kind}: the positions of an endless source have the member 'now', the clock in "
            f"microseconds when their block was decided, got {sorted(after.state)}. Add it, as "
            "hb.testing.FakeStream does."
        )


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
