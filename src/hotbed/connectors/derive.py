# SPDX-License-Identifier: Apache-2.0
"""Sources made from other sources: a range of rows, an order, a side table's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.base import PLACE, READ_ALL, READ_ROWS, Memory, Place, Position, ReadPlan, Source, not_endless
from hotbed.errors import ConfigError, DataError, SchemaError


@dataclass(frozen=True)
class Slice(Source):
    """Rows `start` to `stop` (exclusive) of `source`: row numbers, or fractions of its length where a float is given.

    Splits by time: `events.sort("time").slice(0.0, 0.8)` trains, `.slice(0.8, 1.0)` tests; neighbouring fractions
    share no row.
    """

    source: Source
    start: int | float = 0
    stop: int | float | None = None

    def __post_init__(self) -> None:
        not_endless(self.source, "a slice")
        for name, value in (("start", self.start), ("stop", self.stop)):
            if value is not None and (value < 0 or (isinstance(value, float) and value > 1)):
                raise ConfigError(
                    f"{name}: a row number >= 0 or a fraction in [0, 1] — received {value!r} — correct it"
                )

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def num_rows(self) -> int | None:
        whole = self.source.num_rows()
        if whole is None and not self._is_fraction():
            return None
        start, stop = self._rows()
        return (
            max(0, min(stop, whole if whole is not None else stop) - start)
            if stop is not None
            else max(0, (whole or 0) - start)
        )

    def locate(self, position: Position, back: int) -> Place:
        return self.source.locate(Position.from_json(position["source"]), back + int(position["cut"]))

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        start, stop = self._rows()
        row = int(position["row"]) if position else 0
        if position and (stop is not None and row >= stop):
            return
        inner = Position.from_json(position["source"]) if position and not position["cut"] else None
        row = row if inner else 0
        begin = max(start, int(position["row"])) if position else start
        for batch, after in self.source.read(inner, batch_rows, plan):
            end = row + batch.num_rows
            last = end if stop is None else min(end, stop)
            if last > begin:
                first = max(begin, row)
                yield (
                    batch.slice(first - row, last - first),
                    Position({"row": last, "cut": end - last, "source": after.to_json()}),
                )
            row = end
            if stop is not None and row >= stop:
                return

    def _is_fraction(self) -> bool:
        return isinstance(self.start, float) or isinstance(self.stop, float)

    def _rows(self) -> tuple[int, int | None]:
        """Start and stop as row numbers."""
        if not self._is_fraction():
            return int(self.start), None if self.stop is None else int(self.stop)
        cached: tuple[int, int] | None = self.__dict__.get("_bounds")
        if cached is None:
            count = self.source.count_rows()
            stop = 1.0 if self.stop is None else self.stop
            cached = round(self.start * count), round(stop * count)
            object.__setattr__(self, "_bounds", cached)
        return cached


@dataclass(frozen=True)
class Sort(Source):
    """The rows of `source` in ascending order of column `by`, ties in their old order. Reads them all into memory,
    once."""

    source: Source
    by: str

    def __post_init__(self) -> None:
        not_endless(self.source, "a sort")

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def num_rows(self) -> int:
        return int(self._sorted().table.num_rows)

    def locate(self, position: Position, back: int) -> Place:
        return Place(f"the source sorted by {self.by}", int(position["row"]) - back + 1)

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        return self._sorted().read(position, batch_rows, plan)

    def _sorted(self) -> Memory:
        cached: Memory | None = self.__dict__.get("_memory")
        if cached is None:
            table = _read_table(self.source)
            if self.by not in table.schema.names:
                raise SchemaError(
                    f"no column {self.by!r} to sort by — the source has {table.schema.names} — correct `by`"
                )
            keys = pa.table({"by": table[self.by], "row": np.arange(table.num_rows)})  # ties keep their order by row
            indices = pc.sort_indices(keys, sort_keys=[("by", "ascending"), ("row", "ascending")])
            cached = Memory(table.take(indices).combine_chunks())
            object.__setattr__(self, "_memory", cached)
        return cached


@dataclass(frozen=True)
class Join(Source):
    """Every row of `source` with the columns of `table`'s row of the same key(s) `on`; nulls where there is none (left
    join).

    `table` is small: it is read into memory once. Its keys must be unique and its other columns new. Order and
    positions are those of `source`.

    Raises SchemaError when a key column is absent or other columns clash, DataError when `table` holds a key twice.

    Example: `hb.sources.Csv("ratings.csv").join(hb.sources.Csv("movies.csv"), on="movieId")`
    """

    source: Source
    table: Source
    on: str | Sequence[str]

    def __post_init__(self) -> None:
        not_endless(self.table, "a side table")

    @property
    def endless(self) -> bool:
        return self.source.endless

    def commit(self, position: Position) -> None:
        self.source.commit(position)

    def schema(self) -> pa.Schema:
        left, right = self.source.schema(), self.table.schema()
        for side, schema in (("source", left), ("table", right)):
            missing = [key for key in self._keys() if key not in schema.names]
            if missing:
                raise SchemaError(
                    f"join: the {side} has no key column {missing} — it has {schema.names} — correct `on`"
                )
        fields = list(left)
        for field in right:
            if field.name in self._keys():
                continue
            if field.name in left.names:
                raise SchemaError(
                    f"join: both sides have a column {field.name!r} — left: {left.names} — rename one of them"
                )
            fields.append(field)
        return pa.schema(fields)

    def num_rows(self) -> int | None:
        return self.source.num_rows()

    def locate(self, position: Position, back: int) -> Place:
        return self.source.locate(position, back)

    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        schema, left, side = self.schema(), self.source.schema(), self._side()
        wanted = [name for name in schema.names if plan.columns is None or name in plan.columns]
        left_columns = tuple(name for name in left.names if name in wanted or name in self._keys())
        added = [name for name in wanted if name not in left.names]
        side_keys = side.select(self._keys())
        types = {name: kind for name, kind in plan.types.items() if name not in self._keys()}
        for batch, after in self.source.read(position, batch_rows, replace(plan, columns=left_columns, types=types)):
            if not batch.num_rows:
                yield batch, after
                continue
            rows = _match(batch, side_keys)
            arrays = [
                side[name].take(rows).combine_chunks() if name in added else batch.column(name) for name in wanted
            ]
            kept = [PLACE] if PLACE in batch.schema.names else []
            arrays += [batch.column(name) for name in kept]
            yield pa.RecordBatch.from_arrays([_one_chunk(array) for array in arrays], names=[*wanted, *kept]), after

    def _keys(self) -> list[str]:
        return [self.on] if isinstance(self.on, str) else list(self.on)

    def _side(self) -> pa.Table:
        cached: pa.Table | None = self.__dict__.get("_table")
        if cached is None:
            cached = _read_table(self.table).combine_chunks()
            unique = cached.group_by(self._keys()).aggregate([]).num_rows
            if unique != cached.num_rows:
                raise DataError(
                    f"join: {cached.num_rows - unique} rows of the side table repeat a key of {self._keys()} — make "
                    "the keys unique"
                )
            object.__setattr__(self, "_table", cached)
        return cached


def _match(batch: pa.RecordBatch, side_keys: pa.Table) -> pa.Array:
    """For every row of `batch` the row number in `side_keys` with the same keys, or null."""
    names = [f"key{i}" for i in range(side_keys.num_columns)]
    try:
        keys = [batch.column(field.name).cast(field.type) for field in side_keys.schema]
    except pa.ArrowException as error:
        raise SchemaError(f"join: keys of two types — {error} — declare one type for them in both sources") from error
    left = pa.table([*keys, np.arange(batch.num_rows)], names=[*names, "left"])
    right = pa.table([*side_keys.columns, np.arange(side_keys.num_rows)], names=[*names, "right"])
    joined = left.join(right, keys=names, join_type="left outer").sort_by("left")
    return _one_chunk(joined["right"])


def _one_chunk(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _read_table(source: Source) -> pa.Table:
    return pa.Table.from_batches([batch for batch, _ in source.read()], schema=source.schema())
