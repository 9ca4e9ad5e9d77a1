# SPDX-License-Identifier: Apache-2.0
"""Concat: the rows of several sources one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.endings import check_source
from hotbed.connectors.live import Live
from hotbed.connectors.position import (
    IMPRESSION,
    MARKS,
    PLACE,
    Batches,
    Position,
    RowPlace,
    is_preview,
    with_marks,
)
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source
from hotbed.connectors.status import UNKNOWN, SourceReading, ended, status_of
from hotbed.connectors.types import completed, conform, has_open, is_number, plain_types, widened
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError


@dataclass(frozen=True)
class Concat(Source):
    """The rows of several sources one after another, such as files of several formats.

    The columns are those of the first source; further columns of the others are not read. A column
    has the type that holds the values of all sources: of whole numbers and floats it is float64.
    Types that do not go together are an error where the column is read. The last source may be
    endless: first its history from files, then the stream itself.

    Args:
        sources: the sources, one or more.

    Raises:
        ConfigError: `sources` is empty, or an endless source is not the last.
        SchemaError: a source lacks a column of the first one, or has a type that does not go with
            the others, such as text beside numbers. The message names the source by its number.

    Example:
        >>> old, new = hb.sources.Csv("2023-*.csv"), hb.sources.Parquet("2024-*.parquet")
        >>> source = hb.sources.Concat([old, new])
    """

    sources: Sequence[Source]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise ConfigError("concat.sources: must not be empty, got []. Give one or more.")
        last = len(self.sources) - 1
        for number, source in enumerate(self.sources):
            check_source(source, f"concat.sources.{number}")
            if source.endless and number != last:
                kind = type(source).__name__
                raise ConfigError(
                    f"concat.sources.{number}: nothing can follow an endless source, got {kind} "
                    f"before {last - number} more. Put it last."
                )

    @property
    def endless(self) -> bool:
        return self.sources[-1].endless

    @property
    def holds_rows(self) -> bool:
        return self.sources[-1].holds_rows

    @property
    def settings(self) -> Mapping[str, Any]:
        # its own positions hold those of the source that they lie in
        return {"sources": [source.settings for source in self.sources]}

    def commit(self, position: Position) -> None:
        part = int(position["part"])
        if position["source"] is not None:
            self.sources[part].commit(Position.from_json(position["source"]))

    @property
    def divisible(self) -> bool:
        return not self.endless and all(source.divisible for source in self.sources)

    def num_rows(self) -> int | None:
        total = 0
        for source in self.sources:
            count = source.num_rows()
            if count is None:
                return None
            total += count
        return total

    def parts(self, count: int) -> list[Source]:
        if not self.endless or count == 1:
            return super().parts(count)
        columns = [source.parts(count) for source in self.sources]
        return [Concat(sources) for sources in zip(*columns, strict=True)]

    def share(self, begin: Fraction, end: Fraction) -> Source:
        weights = self._weights()
        total = sum(weights)
        shares: list[Source] = []
        first = 0
        for source, weight in zip(self.sources, weights, strict=True):
            bounds = [Fraction(0), Fraction(0)]
            if weight:
                inner = [(bound * total - first) / weight for bound in (begin, end)]
                bounds = [min(max(bound, Fraction(0)), Fraction(1)) for bound in inner]
            shares.append(source.share(*bounds))
            first += weight
        return Concat(shares)

    def _weights(self) -> list[int]:
        """Return the rows of each source; 1 of each if one does not know its number."""
        counts: list[int] = []
        for source in self.sources:
            try:
                count = source.num_rows()
            except DecodeError:  # reading the rows reports the damage
                count = None
            if count is None:
                return [1] * len(self.sources)
            counts.append(count)
        return counts

    def locate(self, position: Position, back: int) -> RowPlace:
        part = int(position["part"])
        place = self.sources[part].locate(Position.from_json(position["source"]), back)
        return replace(place, file=": ".join(filter(None, [_name(part), place.file])))

    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def _parts(self) -> Sequence[Source]:
        """The sources that tell types: an endless one only if it is alone; it may have no rows."""
        return [source for source in self.sources if not source.endless] or self.sources

    @cached_property
    def inferred(self) -> pa.Schema:
        """The columns of the first source, with types that hold the values of all."""
        first, *others = self._parts
        whole = plain_types(first.inferred)
        for number, source in enumerate(others, start=1):
            schema = source.inferred
            _require(whole.names, schema.names, number)
            whole = widened(whole, schema)
        return whole

    @cached_property
    def _schema(self) -> pa.Schema:
        whole = self.inferred
        for source in self._parts:
            if has_open(whole):
                whole = completed(whole, plain_types(source.schema()))
        return whole

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        current: list[Batches] = []
        batches = self._batches(position, batch_rows, plan, current)
        return SourceReading(batches, lambda: status_of(current[0]) if current else UNKNOWN)

    def _batches(
        self, position: Position | None, batch_rows: int, plan: ReadPlan, current: list[Batches]
    ) -> Batches:
        """Yield the rows of all sources; `current` gets the reading of one after another."""
        part = 0
        inner = None
        row = 0  # rows of the part that were read
        if position:
            part, row = self._begin(position)
            if position["source"] is not None:
                inner = Position.from_json(position["source"])
        now = (plan.live or Live()).now()
        if position:
            now = position.state.get("now", now)
        schema = self.schema()
        names = plan.wanted(schema.names)
        types = {name: schema.field(name).type for name in names if name not in plan.types}
        if self.endless:  # numbers of the history become what the stream decodes them to
            for name in plan.types.keys() & names:
                if is_number(schema.field(name).type):
                    types[name] = plan.types[name]
        part_plan = replace(plan, columns=tuple(names))
        for number in range(part, len(self.sources)):
            source = self.sources[number]
            current[:] = [source.read(inner, batch_rows, part_plan)]
            with ended(current[0]):
                yield from self._conformed(number, row, current[0], types, part_plan, now)
            inner = None
            row = 0

    def _conformed(
        self,
        number: int,
        row: int,
        batches: Batches,
        types: dict[str, pa.DataType],
        plan: ReadPlan,
        now: int,
    ) -> Batches:
        """Yield the rows of source `number` after `row`, with the columns and types of all.

        `now`: the clock when reading began; rows before a stream are in no block of it.
        """
        names: Sequence[str] = plan.columns or ()
        is_history = self.endless and not self.sources[number].endless
        for batch, after in batches:
            if not batch.num_rows:  # a tick, or the start of a block
                yield batch, self._position(number, row, after, now)
                continue
            present = names
            if is_preview(batch):  # its rows are counted when they are samples
                present = [name for name in names if name in batch.schema.names]
            conformed = _conform(batch, present, types, number)
            if is_history:
                conformed = _with_places(conformed, number, row)
                if plan.wishes.previews:  # samples bring the number of their impression
                    conformed = conformed.append_column(IMPRESSION, _no_impressions(batch))
            if not is_preview(batch):
                row += batch.num_rows
            yield conformed, self._position(number, row, after, now)

    def _begin(self, position: Position) -> tuple[int, int]:
        """Return the part and the row in it where reading resumes."""
        position.require("Concat", self)
        part = int(position["part"])
        if part >= len(self.sources):
            raise DataError(
                f"position: it lies in {_name(part)}, got {len(self.sources)} sources. Give the "
                "sources that the position was made with; more may follow them."
            )
        return part, int(position["row"])

    def _position(self, part: int, row: int, inner: Position, now: int) -> Position:
        """Return the position after `row` rows of a part; `inner` is the part's own.

        `now`: the clock of a part that is not a stream.
        """
        state: dict[str, Any] = {"part": part, "row": row, "source": inner.to_json()}
        if self.endless:
            state["block"] = inner.state.get("block", -1)
            state["now"] = inner["now"] if self.sources[part].endless else now
        return Position(state)


def _name(part: int) -> str:
    return f"sources[{part}]"


def _require(wanted: Sequence[str], names: Sequence[str], part: int) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        names = [name for name in names if name not in MARKS]
        raise SchemaError(
            f"{_name(part)}: columns {missing} of the first source are absent, got {names}. Give "
            "every source the columns of the first."
        )


def _conform(
    batch: pa.RecordBatch, names: Sequence[str], types: dict[str, pa.DataType], part: int
) -> pa.RecordBatch:
    """Return the columns `names` of a batch of source `part`, cast where `types` has a type."""
    _require(names, batch.schema.names, part)
    columns: dict[str, pa.Array] = {}
    for name in names:
        column = batch.column(name)
        columns[name] = conform(column, types.get(name, column.type), _name(part), name)
    return with_marks(batch, columns)


def _no_impressions(batch: pa.RecordBatch) -> pa.Array:
    """Return the numbers of the impressions of samples that no join has made."""
    return pa.array(np.full(batch.num_rows, -1))


def _with_places(batch: pa.RecordBatch, part: int, row: int) -> pa.RecordBatch:
    """Return a batch with the place of each row, as a stream needs it; `row`: rows before it."""
    numbers = np.arange(row, row + batch.num_rows) + 1
    texts = pa.array([_name(part)] * batch.num_rows)
    places = pa.StructArray.from_arrays([texts, pa.array(numbers)], names=["source", "row"])
    return batch.append_column(PLACE, places)
