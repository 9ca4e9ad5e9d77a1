# SPDX-License-Identifier: Apache-2.0
"""The base of every source of events, and the sources that its methods return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.config import describe, kind_of
from hotbed.connectors.position import OPENED, ROWS, Batches, Position, RowPlace, with_marks
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.status import SourceReading, ended, status_of
from hotbed.connectors.types import (
    joined,
    opened,
    plain,
    present_keys,
    recast,
    usual_rows,
    usual_types,
)
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError


class Source(ABC):
    """A sequence of rows that can be read any number of times.

    Sources are values: equal ones read the same rows, and they hold no open file. Inferred
    properties, such as types, are cached and are not part of the value. Only `Kafka` remembers the
    reader that is running, whose connection `commit` uses.

    An endless source (Kafka, a followed directory) yields blocks. The clock decides once which rows
    are in a block. This decision is in the plan's journal before the rows are yielded, so that a
    run after a crash reads the same blocks.

    Example:
        >>> movies = hb.sources.Csv("movies.csv")
        >>> source = hb.sources.Csv("ratings.csv").join(movies, on="movieId").sort("timestamp")
        >>> train, test = source.slice(0.0, 0.8), source.slice(0.8, 1.0)
    """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Return names and types of the raw columns.

        Raises:
            DataError: nothing can be read.
        """

    @abstractmethod
    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        """Yield record batches of 1 to `batch_rows` rows, each with the position AFTER it.

        The sequence of rows does not depend on `batch_rows` or on where reading began.

        An endless source never ends, and yields at least every `plan.live.tick_seconds`: rows, or
        `TICK`, an empty batch, with an unchanged position. Before the rows of a block it yields
        `OPENED` with a position that holds the decision about the block. Its positions have
        "block", the number of the block that holds the next row, and "now", the clock in
        microseconds when the block of the last row was decided.

        Args:
            position: the position to resume from; None = the start.
        """

    @property
    def inferred(self) -> pa.Schema:
        """Names and types of the columns; a type is null where no value of the source tells it.

        Where sources are read together, such a column has the type of the others.
        """
        return self.schema()

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments on which its positions depend, as plain values.

        They decide which rows come, and in which order. Reading does not resume from a position
        that was written with others; docs/persist.md says which these are.
        """
        return {}

    @property
    def endless(self) -> bool:
        """Whether `read` never ends."""
        return False

    @property
    def holds_rows(self) -> bool:
        """Whether reading resumes only with rows that are saved beside its position."""
        return False

    @property
    def divisible(self) -> bool:
        """Whether the grains of a batch take their rows from places of their own in the source.

        These are ranges of rows whose number is known, or partitions of a topic. The rows of other
        sources are read in their order, and each batch is cut into grains.
        """
        return False

    def commit(self, position: Position) -> None:  # noqa: B027 - most sources have nothing to do
        """Note that a checkpoint with this position is safe on disk.

        Failures elsewhere, such as in a broker, never raise.
        """

    def num_rows(self) -> int | None:
        """Return the number of rows if it is known without reading them, else None."""
        return None

    def locate(self, position: Position, back: int) -> RowPlace:
        """Return the place of the row `back` rows before `position`, for error messages."""
        return RowPlace("", None)

    def words_for(self, place: Mapping[str, Any]) -> str:
        """Return the place of a row of an endless source, as its column has it, for messages."""
        return ", ".join(f"{key} {value}" for key, value in place.items())

    def count_rows(self) -> int:
        """Return the number of rows; read the whole source if `num_rows` does not know it."""
        count = self.num_rows()
        if count is not None:
            return count
        not_endless(self, "a count of rows")
        first = tuple(self.schema().names[:1])
        count = 0
        for batch, _ in self.read(plan=ReadPlan(columns=first)):
            count += batch.num_rows
        return count

    def slice(self, start: int | float = 0, stop: int | float | None = None) -> Slice:
        """Return rows `start` to `stop` (exclusive) as a source.

        Floats are fractions of the whole, as in `slice(0.0, 0.8)`; integers are row numbers.
        """
        return Slice(self, start, stop)

    def sort(self, by: str) -> Sort:
        """Return the same rows in ascending order of column `by`, ties in their old order.

        All rows are held in memory.
        """
        return Sort(self, by)

    def join(
        self, table: Source, on: str | Sequence[str], table_on: str | Sequence[str] | None = None
    ) -> TableJoin:
        """Return the rows with the columns of a small side `table`, matched by the key(s) `on`.

        Rows without a match get nulls. `table_on`: the names of the keys in `table`, where they
        differ.
        """
        return TableJoin(self, table, on, table_on)

    def parts(self, count: int) -> list[Source]:
        """Return `count` sources that together have the rows of this one, each row once.

        Part i lies before part i + 1. The cuts depend on the files and on `count` only, and all
        parts have the columns and types of the whole. A part may be empty. Its positions are its
        own: no other part resumes from them. docs/connectors.md says how each source is cut.

        Raises:
            ConfigError: the source is endless and not a topic of Kafka.
        """
        checks.whole_number("parts.count", count, 1)
        if count == 1:
            return [self]
        if self.endless:
            raise ConfigError(
                f"parts: a source without an end has no parts, got {type(self).__name__}. Cut a "
                "topic of Kafka, or a source that ends: files, or a Replay without a speed."
            )
        bounds = [Fraction(number, count) for number in range(count + 1)]
        return [self.share(begin, end) for begin, end in pairwise(bounds)]

    def share(self, begin: Fraction, end: Fraction) -> Source:
        """Return the rows from the fraction `begin` of this source up to the fraction `end`.

        Shares of neighbouring fractions share no row and lose none. By default a share is a slice,
        which reads the source from its start.
        """
        return self.slice(float(begin), float(end))


@dataclass(frozen=True)
class Slice(Source):
    """Rows `start` to `stop` (exclusive) of `source`.

    Integers are row numbers, floats are fractions of the length. Slices of neighbouring fractions
    share no row, so that they split by time: `events.sort("time").slice(0.0, 0.8)` to train,
    `.slice(0.8, 1.0)` to test.
    """

    source: Source
    start: int | float = 0
    stop: int | float | None = None

    def __post_init__(self) -> None:
        not_endless(self.source, "a slice")
        for name, value in (("start", self.start), ("stop", self.stop)):
            advice = "Give a row number from 0 on, or a fraction from 0.0 to 1.0."
            checks.at_least(name, value, 0, advice)
            if isinstance(value, float):
                checks.between(name, value, 0, 1, advice)

    def schema(self) -> pa.Schema:
        return self.source.schema()

    @property
    def inferred(self) -> pa.Schema:
        return self.source.inferred

    @property
    def settings(self) -> Mapping[str, Any]:
        # its own positions hold numbers of rows, and need none
        return {"start": self.start, "stop": self.stop, "source": self.source.settings}

    @property
    def divisible(self) -> bool:
        return self.source.divisible

    def num_rows(self) -> int | None:
        whole = self.source.num_rows()
        if whole is None and not self._is_fraction():
            return None
        start, stop = self._rows()
        if stop is None:
            return max(0, (whole or 0) - start)
        if whole is not None:
            stop = min(stop, whole)
        return max(0, stop - start)

    def share(self, begin: Fraction, end: Fraction) -> Source:
        try:
            whole = self.source.num_rows()
        except DecodeError:  # reading the rows reports the damage
            whole = None
        count = self.num_rows() if whole else None
        if not whole or not count:
            return super().share(begin, end)
        start, _ = self._rows()
        bounds = [start + int(bound * count) for bound in (begin, end)]
        return self.source.share(*(Fraction(row, whole) for row in bounds))

    def locate(self, position: Position, back: int) -> RowPlace:
        inner = Position.from_json(position["source"])
        return self.source.locate(inner, back + int(position["cut"]))

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        start, stop = self._rows()
        inner = None
        begin = start
        row = 0
        if position:
            position.require("Slice", self)
            begin = int(position["row"])
            last = begin
            if stop is not None:
                last = stop
            position.require_rows(begin, start, last)
            if begin == stop:
                return
            source = Position.from_json(position["source"])
            if position["cut"] <= 0:
                inner = source
                row = begin + int(position["cut"])
            else:  # inside of a cut batch `source` has no position: read it from the start
                source.require_settings(self.source)
        for batch, after in self.source.read(inner, batch_rows, plan):
            if batch is OPENED:
                first = max(begin, row)
                state = {"row": first, "cut": row - first, "source": after.to_json()}
                yield OPENED, Position(state)
                continue
            end = row + batch.num_rows
            last = end
            if stop is not None:
                last = min(end, stop)
            if last > begin:
                first = max(begin, row)
                state = {"row": last, "cut": end - last, "source": after.to_json()}
                yield batch.slice(first - row, last - first), Position(state)
            row = end
            if stop is not None and row >= stop:
                return

    def _is_fraction(self) -> bool:
        return isinstance(self.start, float) or isinstance(self.stop, float)

    def _rows(self) -> tuple[int, int | None]:
        """Return start and stop as row numbers."""
        if self._is_fraction():
            return self._bounds
        if self.stop is None:
            return int(self.start), None
        return int(self.start), int(self.stop)

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """Start and stop of fractions, as row numbers."""
        count = self.source.count_rows()
        stop = count
        if self.stop is not None:
            stop = round(self.stop * count)
        return round(self.start * count), stop


@dataclass(frozen=True)
class Sort(Source):
    """The rows of `source` in ascending order of column `by`, ties in their old order.

    All rows are read into memory, once.

    Raises:
        SchemaError: the source has no column `by`, or its type has no order.
    """

    source: Source
    by: str

    def __post_init__(self) -> None:
        not_endless(self.source, "a sort")

    def schema(self) -> pa.Schema:
        return usual_types(self.source.schema())

    @property
    def inferred(self) -> pa.Schema:
        return usual_types(self.source.inferred)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return {"by": self.by, "rows": self.num_rows(), "source": self.source.settings}

    def num_rows(self) -> int:
        return int(self._sorted.num_rows)

    def locate(self, position: Position, back: int) -> RowPlace:
        number = int(position["row"]) - back + 1
        return RowPlace(f"the source sorted by {self.by}", number)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        return rows_of(self, self._sorted, position, batch_rows, plan)

    @cached_property
    def _sorted(self) -> pa.Table:
        """All rows in their order."""
        table = _read_table(self.source)
        if self.by not in table.schema.names:
            raise SchemaError(
                f"sort: no column {self.by!r} to sort by, got {table.schema.names}. Correct `by`."
            )
        # ties keep their order by row
        values = _one_chunk(table[self.by])
        values = recast(values, _comparable(values.type))
        keys = pa.table({"by": values, "row": np.arange(table.num_rows)})
        rising = [("by", "ascending"), ("row", "ascending")]
        try:
            if pa.types.is_nested(values.type):
                raise pa.ArrowInvalid("not single values")
            indices = pc.sort_indices(keys, sort_keys=rising)
        except pa.ArrowException as error:
            raise SchemaError(
                f"sort: column {self.by!r} has no order, got {values.type}. Sort by a column of "
                "numbers, times or text."
            ) from error
        return table.take(indices).combine_chunks()


@dataclass(frozen=True)
class TableJoin(Source):
    """Every row of `source` with the columns of the row of `table` that has the same key(s) `on`.

    Rows without a match get nulls (left join). Order and positions are those of `source`.

    Args:
        source: the rows.
        table: a small table, which is read into memory once. Its keys must be unique, and its other
            columns must not be in `source`.
        on: the key column(s).
        table_on: the key column(s) of `table`, in the same order; None = of the same names.

    Raises:
        ConfigError: `on` and `table_on` have different numbers of columns.
        SchemaError: a key column is absent, the types of its two sides do not go together, or other
            columns clash.
        DataError: `table` holds a key twice.

    Example: `hb.sources.Csv("ratings.csv").join(hb.sources.Csv("movies.csv"), on="movieId")`
    """

    source: Source
    table: Source
    on: str | Sequence[str]
    table_on: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        not_endless(self.table, "a side table")
        keys = self._keys()
        if not keys or len(keys) != len(self._table_keys()):
            raise ConfigError(
                f"join: expected as many keys of the table as of the source, got on={self.on!r}, "
                f"table_on={self.table_on!r}. Name the keys of both in the same order."
            )

    @property
    def endless(self) -> bool:
        return self.source.endless

    @property
    def holds_rows(self) -> bool:
        return self.source.holds_rows

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.source.settings

    def commit(self, position: Position) -> None:
        self.source.commit(position)

    def schema(self) -> pa.Schema:
        left = self.source.schema()
        right = self.table.schema()
        sides = [
            ("source", left, self._keys(), "Correct `on`."),
            (
                "table",
                right,
                self._table_keys(),
                "Correct it, or name its own key with `table_on`.",
            ),
        ]
        for side, schema, keys, advice in sides:
            missing = [repr(key) for key in keys if key not in schema.names]
            if missing:
                raise SchemaError(
                    f"join: the {side} has no key column {', '.join(missing)}, got columns "
                    f"{schema.names}. {advice}"
                )
        for key, table_key in zip(self._keys(), self._table_keys(), strict=True):
            _key_type(key, left.field(key).type, right.field(table_key).type)
        columns = list(left)
        for column in usual_types(right):
            if column.name in self._table_keys():
                continue
            if column.name in left.names:
                raise SchemaError(
                    f"join: both sides have a column {column.name!r}, got {left.names} on the "
                    "left. Rename one of them."
                )
            columns.append(column)
        return pa.schema(columns)

    @property
    def inferred(self) -> pa.Schema:
        return opened(opened(self.schema(), self.table.inferred), self.source.inferred)

    @property
    def divisible(self) -> bool:
        return self.source.divisible

    def num_rows(self) -> int | None:
        return self.source.num_rows()

    def parts(self, count: int) -> list[Source]:
        return [replace(self, source=part) for part in self.source.parts(count)]

    def share(self, begin: Fraction, end: Fraction) -> Source:
        return replace(self, source=self.source.share(begin, end))

    def locate(self, position: Position, back: int) -> RowPlace:
        return self.source.locate(position, back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        schema = self.schema()
        left = self.source.schema()
        side = self._side
        keys = self._keys()
        wanted = plan.wanted(schema.names)
        needed = {*wanted, *keys}
        types = {name: kind for name, kind in plan.types.items() if name not in keys}
        left_columns = tuple(name for name in left.names if name in needed)
        words = [name for name in plan.words if name not in keys]
        left_plan = replace(plan, columns=left_columns, types=types, words=words)
        side_keys = side.select(self._table_keys()).rename_columns(keys)
        left_rows = self.source.read(position, batch_rows, left_plan)
        matched = self._matched(left_rows, wanted, left.names, side_keys)
        return SourceReading(matched, lambda: status_of(left_rows))

    def _matched(
        self, left_rows: Batches, wanted: Sequence[str], left: Sequence[str], side_keys: pa.Table
    ) -> Batches:
        """Yield rows of the source with the columns `wanted`; `left`: those of the source."""
        side = self._side
        with ended(left_rows):
            for batch, after in left_rows:
                if not batch.num_rows:
                    yield batch, after
                    continue
                rows = _match(batch, side_keys)
                columns: dict[str, pa.Array] = {}
                for name in wanted:
                    if name in batch.schema.names:
                        columns[name] = batch.column(name)
                    elif name not in left:  # a preview has no labels
                        columns[name] = _one_chunk(side[name].take(rows))
                yield with_marks(batch, columns), after

    def _keys(self) -> list[str]:
        return list(checks.names(self.on))

    def _table_keys(self) -> list[str]:
        return self._keys() if self.table_on is None else list(checks.names(self.table_on))

    @cached_property
    def _side(self) -> pa.Table:
        """All rows of the side table."""
        table = _read_table(self.table).combine_chunks()
        for key in self._table_keys():
            place = table.schema.get_field_index(key)
            values = _one_chunk(table[key])
            kind = _key_type(key, values.type, values.type)
            values = present_keys(recast(values, kind))
            table = table.set_column(place, key, values).filter(values.is_valid())
        num_unique = table.group_by(self._table_keys()).aggregate([]).num_rows
        if num_unique != table.num_rows:
            raise DataError(
                f"join: keys {self._table_keys()} of the side table must be unique, got "
                f"{table.num_rows - num_unique} rows that repeat one. Leave them out."
            )
        return table


def described(value: Any, without: str = "") -> Any:
    """Return a value as plain values without one argument; of other values the kind."""
    try:
        plain_value = describe(value)
    except ConfigError:
        return {"kind": kind_of(type(value))}
    if without:
        plain_value = {name: item for name, item in plain_value.items() if name != without}
    return plain_value


def _match(batch: pa.RecordBatch, side_keys: pa.Table) -> pa.Array:
    """Return for every row of `batch` the row number in `side_keys` with the same keys, or null."""
    names = [f"key{number}" for number in range(side_keys.num_columns)]
    left_keys: list[pa.Array] = []
    right_keys: list[pa.Array] = []
    for key in side_keys.schema.names:
        values = batch.column(key)
        side_values = _one_chunk(side_keys[key])
        kind = _key_type(key, values.type, side_values.type)
        left_keys.append(present_keys(recast(values, kind)))
        right_keys.append(recast(side_values, kind))
    left = pa.table(left_keys, names=names)
    left = left.append_column("left", pa.array(np.arange(batch.num_rows)))
    right = pa.table(right_keys, names=names)
    right = right.append_column("right", pa.array(np.arange(side_keys.num_rows)))
    joined = left.join(right, keys=names, join_type="left outer").sort_by("left")
    return _one_chunk(joined["right"])


def _comparable(kind: pa.DataType) -> pa.DataType:
    """Return the type in which Arrow compares values of a type."""
    if pa.types.is_float16(kind):
        return pa.float32()
    return plain(kind)


def _key_type(key: str, left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the type in which the keys of both sides are compared."""
    both = joined(left, right)
    if both is None:
        raise SchemaError(
            f"join: the key {key!r} is {left} in the source, got {right} in the table. Declare one "
            "type for it in both."
        )
    kind = _comparable(both)
    if pa.types.is_null(kind):  # no key has a value
        return pa.int64()
    if pa.types.is_nested(kind) or pa.types.is_interval(kind):
        raise SchemaError(
            f"join: the key {key!r} must hold single values, got {kind}. Join by another column."
        )
    return kind


def _one_chunk(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(array, pa.ChunkedArray):
        return array.combine_chunks()
    return array


def rows_of(
    source: Source, table: pa.Table, position: Position | None, batch_rows: int, plan: ReadPlan
) -> Batches:
    """Yield the rows of `table` after `position`, as `source.read` does."""
    row = 0
    if position:
        position.require(ROWS, source)
        row = int(position["row"])
        position.require_rows(row, 0, table.num_rows)
    elif plan.opens:
        yield OPENED, Position.of(source, {"row": 0})
    table = table.select(plan.wanted(table.schema.names))
    for batch in table.slice(row).to_batches(max_chunksize=batch_rows):
        if batch.num_rows:
            row += batch.num_rows
            yield batch, Position.of(source, {"row": row})


def _read_table(source: Source) -> pa.Table:
    batches = [usual_rows(batch) for batch, _ in source.read()]
    return pa.Table.from_batches(batches, schema=usual_types(source.schema()))


def not_endless(source: Source, what: str) -> None:
    """Raise ConfigError if `source` is endless; `what` names the operation that needs an end."""
    if source.endless:
        raise ConfigError(
            f"source: {what} needs a source that ends, got {type(source).__name__}. Use it on the "
            "table that the endless source is joined with, or read files."
        )
