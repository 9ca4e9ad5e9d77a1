# SPDX-License-Identifier: Apache-2.0
"""Sources made from other sources: slices, sorts and joins; and labels from later events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.base import (
    PLACE,
    READ_ALL,
    READ_ROWS,
    Memory,
    Place,
    Position,
    ReadPlan,
    Source,
    not_endless,
)
from hotbed.errors import ConfigError, DataError, SchemaError


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
            if value is not None and (value < 0 or (isinstance(value, float) and value > 1)):
                raise ConfigError(
                    f"{name}: must be a row number >= 0 or a fraction in [0, 1], got {value!r}. "
                    "Correct it."
                )

    def schema(self) -> pa.Schema:
        return self.source.schema()

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

    def locate(self, position: Position, back: int) -> Place:
        inner = Position.from_json(position["source"])
        return self.source.locate(inner, back + int(position["cut"]))

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        start, stop = self._rows()
        inner = None
        begin = start
        row = 0
        if position:
            begin = max(start, int(position["row"]))
            if stop is not None and int(position["row"]) >= stop:
                return
            # inside of a cut batch `source` has no position: read it from the start
            if not position["cut"]:
                inner = Position.from_json(position["source"])
                row = int(position["row"])
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
        """Return start and stop as row numbers."""
        if not self._is_fraction():
            stop_row = None if self.stop is None else int(self.stop)
            return int(self.start), stop_row
        cached: tuple[int, int] | None = self.__dict__.get("_bounds")
        if cached is None:
            count = self.source.count_rows()
            stop = 1.0 if self.stop is None else self.stop
            cached = round(self.start * count), round(stop * count)
            object.__setattr__(self, "_bounds", cached)
        return cached


@dataclass(frozen=True)
class Sort(Source):
    """The rows of `source` in ascending order of column `by`, ties in their old order.

    All rows are read into memory, once.

    Raises:
        SchemaError: The source has no column `by`.
    """

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
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        return self._sorted().read(position, batch_rows, plan)

    def _sorted(self) -> Memory:
        cached: Memory | None = self.__dict__.get("_memory")
        if cached is None:
            table = _read_table(self.source)
            if self.by not in table.schema.names:
                raise SchemaError(
                    f"sort: no column {self.by!r} to sort by; the source has {table.schema.names}. "
                    "Correct `by`."
                )
            # ties keep their order by row
            keys = pa.table({"by": table[self.by], "row": np.arange(table.num_rows)})
            indices = pc.sort_indices(keys, sort_keys=[("by", "ascending"), ("row", "ascending")])
            cached = Memory(table.take(indices).combine_chunks())
            object.__setattr__(self, "_memory", cached)
        return cached


@dataclass(frozen=True)
class Join(Source):
    """Every row of `source` with the columns of the row of `table` that has the same key(s) `on`.

    Rows without a match get nulls (left join). Order and positions are those of `source`.

    Args:
        source: The rows.
        table: A small table, which is read into memory once. Its keys must be unique, and its other
            columns must not be in `source`.
        on: The key column(s).

    Raises:
        SchemaError: A key column is absent, keys have two types, or other columns clash.
        DataError: `table` holds a key twice.

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
        left = self.source.schema()
        right = self.table.schema()
        for side, schema in (("source", left), ("table", right)):
            missing = [key for key in self._keys() if key not in schema.names]
            if missing:
                raise SchemaError(
                    f"join: the {side} has no key column {missing}; it has {schema.names}. "
                    "Correct `on`."
                )
        added = [column for column in right if column.name not in self._keys()]
        if clash := [column.name for column in added if column.name in left.names]:
            raise SchemaError(
                f"join: both sides have a column {clash[0]!r}, got {left.names} on the left. "
                "Rename one of them."
            )
        return pa.schema([*left, *added])

    def num_rows(self) -> int | None:
        return self.source.num_rows()

    def locate(self, position: Position, back: int) -> Place:
        return self.source.locate(position, back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        schema = self.schema()
        left = self.source.schema()
        side = self._side()
        wanted = [name for name in schema.names if plan.columns is None or name in plan.columns]
        left_columns = tuple(name for name in left.names if name in wanted or name in self._keys())
        added = [name for name in wanted if name not in left.names]
        side_keys = side.select(self._keys())
        types = {name: kind for name, kind in plan.types.items() if name not in self._keys()}
        for batch, after in self.source.read(
            position, batch_rows, replace(plan, columns=left_columns, types=types)
        ):
            if not batch.num_rows:
                yield batch, after
                continue
            rows = _match(batch, side_keys)
            arrays = [
                side[name].take(rows).combine_chunks() if name in added else batch.column(name)
                for name in wanted
            ]
            names = list(wanted)
            if PLACE in batch.schema.names:
                names.append(PLACE)
                arrays.append(batch.column(PLACE))
            chunks = [_one_chunk(array) for array in arrays]
            yield pa.RecordBatch.from_arrays(chunks, names=names), after

    def _keys(self) -> list[str]:
        if isinstance(self.on, str):
            return [self.on]
        return list(self.on)

    def _side(self) -> pa.Table:
        cached: pa.Table | None = self.__dict__.get("_table")
        if cached is None:
            cached = _read_table(self.table).combine_chunks()
            unique = cached.group_by(self._keys()).aggregate([]).num_rows
            if unique != cached.num_rows:
                raise DataError(
                    f"join: {cached.num_rows - unique} rows of the side table repeat a key of "
                    f"{self._keys()}. Make the keys unique."
                )
            object.__setattr__(self, "_table", cached)
        return cached


def _match(batch: pa.RecordBatch, side_keys: pa.Table) -> pa.Array:
    """Return for every row of `batch` the row number in `side_keys` with the same keys, or null."""
    names = [f"key{i}" for i in range(side_keys.num_columns)]
    try:
        keys = [batch.column(field.name).cast(field.type) for field in side_keys.schema]
    except pa.ArrowException as error:
        raise SchemaError(
            f"join: keys of two types, got {error}. Declare one type for them in both sources."
        ) from error
    left = pa.table([*keys, np.arange(batch.num_rows)], names=[*names, "left"])
    right = pa.table([*side_keys.columns, np.arange(side_keys.num_rows)], names=[*names, "right"])
    joined = left.join(right, keys=names, join_type="left outer").sort_by("left")
    return _one_chunk(joined["right"])


def _one_chunk(array: pa.ChunkedArray | pa.Array) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _read_table(source: Source) -> pa.Table:
    return pa.Table.from_batches([batch for batch, _ in source.read()], schema=source.schema())


@dataclass(frozen=True)
class LateLabels:
    """Labels from later events: a view is positive if a purchase with the same keys follows.

    A sample is yielded as soon as its label is known: with the purchase, or when the events have
    passed the end of its window. Samples whose window reaches beyond the last event are left out,
    because their labels are unknown.

    Args:
        on: Key columns, which are equal in a sample and its positive event.
        column: The column that holds the kind of an event.
        event: The kind of the events that become samples.
        positive: The kind of the events that make a sample positive.
        within_seconds: The window: how long after a sample its positive event may follow.
        label: The column to write: 1.0 for a positive event within the window, else 0.0.

    Example:
        >>> keys = ("user_id", "product_id")
        >>> LateLabels(on=keys, column="event_type", event="view", positive="purchase")
    """

    on: Sequence[str]
    column: str
    event: str
    positive: str
    within_seconds: float = 1800.0
    label: str = "label"

    def __post_init__(self) -> None:
        if not self.on or not self.within_seconds > 0:
            raise ConfigError(
                f"late labels: needs key columns and seconds > 0, got on={self.on!r}, "
                f"within_seconds={self.within_seconds!r}. Correct them."
            )


@dataclass
class Run:
    """Some events in their order.

    Args:
        table: The events.
        keys: The time at which each event is due, rising, in microseconds.
        times: The time at which each event happened, in microseconds.
        before: State of the sources before the events.
        after: State of the sources after the events.
        place: Returns the position after a number of these events.
    """

    table: pa.Table
    keys: np.ndarray
    times: np.ndarray
    before: Sequence[Any]
    after: Sequence[Any]
    place: Callable[[int], dict[str, Any]] = field(default=lambda row: {})


class LabelJoin:
    """Samples that wait for their labels, and the places from which reading yields them again.

    Events are numbered from the place where reading began, so that the order of the labels does not
    depend on how the events are cut into runs.
    """

    def __init__(self, late: LateLabels) -> None:
        self.late = late
        self.window = int(late.within_seconds * 1e6)
        self.waiting: pa.Table | None = None
        self.numbers = self.times = np.zeros(0, np.int64)  # of the waiting samples
        self.num_events = 0
        # number of a run's first event, and the state of the sources before it
        self.starts: deque[tuple[int, Sequence[Any]]] = deque()
        # numbers of the samples that were yielded, back to the first start
        self.emitted = np.zeros(0, np.int64)

    def __call__(self, run: Run) -> Run:
        """Return the samples that these events decide, in the order of decision."""
        first = self.num_events
        count = len(run.keys)
        self.starts.append((first, run.before))
        self.num_events += count
        new = self._rows_of(run.table, self.late.event)
        causes = self._rows_of(run.table, self.late.positive)
        samples = run.table.take(pa.array(new))
        if self.waiting is not None:
            samples = pa.concat_tables([self.waiting, samples])
        numbers = np.concatenate([self.numbers, first + new])
        times = np.concatenate([self.times, run.times[new]])
        # The event that decides a sample: the first past its window, or a cause before that.
        past = np.maximum(
            first + np.searchsorted(run.keys, times + self.window, "right"), numbers + 1
        )
        cause = self._next_cause(samples, numbers, run.table.take(pa.array(causes)), first + causes)
        positive = cause < past
        when = np.where(positive, cause, past)
        order = np.lexsort((numbers, np.where(positive, 0, times), positive, when))
        order = order[when[order] < first + count]
        still = np.setdiff1d(np.arange(len(numbers)), order)
        table = samples.take(pa.array(order))
        if self.late.label in table.schema.names:
            table = table.drop_columns([self.late.label])
        table = table.append_column(self.late.label, pa.array(positive[order].astype(np.float64)))
        self.waiting = samples.take(pa.array(still))
        self.numbers = numbers[still]
        self.times = times[still]
        place = self._places(numbers[order], run)
        return Run(table, run.keys[when[order] - first], times[order], run.before, run.after, place)

    def _rows_of(self, table: pa.Table, kind: str) -> np.ndarray:
        """Return the row numbers of the events of a kind."""
        matches = pc.fill_null(pc.equal(table[self.late.column], kind), False)
        return np.flatnonzero(matches.to_numpy())

    def _next_cause(
        self, samples: pa.Table, numbers: np.ndarray, causes: pa.Table, cause_numbers: np.ndarray
    ) -> np.ndarray:
        """Return the number of the next positive event with the same keys after each sample.

        Samples without one get the largest int64.
        """
        keys = list(self.late.on)
        left = pl.DataFrame(samples.select(keys)).with_columns(
            event=pl.Series(numbers), row=pl.int_range(pl.len())
        )
        right = (
            pl.DataFrame(causes.select(keys))
            .with_columns(event=pl.Series(cause_numbers), cause=pl.Series(cause_numbers))
            .drop_nulls()
        )
        joined = left.sort("event").join_asof(
            right,
            on="event",
            by=keys,
            strategy="forward",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        return np.asarray(joined.sort("row")["cause"].fill_null(2**63 - 1).to_numpy())

    def _places(self, done: np.ndarray, run: Run) -> Callable[[int], dict[str, Any]]:
        """Return a function that gives the position after each sample of a run.

        A position holds the state to resume reading from, and how many samples come again from
        there.

        Args:
            done: Numbers of the samples that the run decides, in the order of decision.
            run: The run.
        """
        history = self.emitted
        starts = list(self.starts)
        events = self.num_events
        after = run.after
        waiting = self.numbers.min(initial=events)
        oldest = np.minimum.accumulate(np.append(done, waiting)[::-1])[::-1]

        def place(row: int) -> dict[str, Any]:
            if oldest[row] == events:
                return {"at": after, "emitted": 0}
            number, state = next(start for start in reversed(starts) if start[0] <= oldest[row])
            repeated = (history >= number).sum() + (done[:row] >= number).sum()
            return {"at": state, "emitted": int(repeated)}

        while len(self.starts) > 1 and self.starts[1][0] <= waiting:
            self.starts.popleft()
        emitted = np.concatenate([history, done])
        self.emitted = emitted[emitted >= self.starts[0][0]]
        return place
