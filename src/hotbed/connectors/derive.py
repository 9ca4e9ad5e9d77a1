# SPDX-License-Identifier: Apache-2.0
"""Sources made from other sources: a range of rows, an order, a side table's columns; and labels
from later events.
"""

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
    """Rows `start` to `stop` (exclusive) of `source`: row numbers, or fractions of its length where
    a float is given.

    Splits by time: `events.sort("time").slice(0.0, 0.8)` trains, `.slice(0.8, 1.0)` tests;
    neighbouring fractions share no row.
    """

    source: Source
    start: int | float = 0
    stop: int | float | None = None

    def __post_init__(self) -> None:
        not_endless(self.source, "a slice")
        for name, value in (("start", self.start), ("stop", self.stop)):
            if value is not None and (value < 0 or (isinstance(value, float) and value > 1)):
                raise ConfigError(
                    f"{name}: a row number >= 0 or a fraction in [0, 1] — received {value!r} — "
                    "correct it"
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
        return self.source.locate(
            Position.from_json(position["source"]), back + int(position["cut"])
        )

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
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
    """The rows of `source` in ascending order of column `by`, ties in their old order. Reads them
    all into memory, once.
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
                    f"no column {self.by!r} to sort by — the source has {table.schema.names} — "
                    "correct `by`"
                )
            # ties keep their order by row
            keys = pa.table({"by": table[self.by], "row": np.arange(table.num_rows)})
            indices = pc.sort_indices(keys, sort_keys=[("by", "ascending"), ("row", "ascending")])
            cached = Memory(table.take(indices).combine_chunks())
            object.__setattr__(self, "_memory", cached)
        return cached


@dataclass(frozen=True)
class Join(Source):
    """Every row of `source` with the columns of `table`'s row of the same key(s) `on`; nulls where
    there is none (left join).

    `table` is small: it is read into memory once. Its keys must be unique and its other columns
    new. Order and positions are those of `source`.

    Raises SchemaError when a key column is absent or other columns clash, DataError when `table`
    holds a key twice.

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
                    f"join: the {side} has no key column {missing} — it has {schema.names} — "
                    "correct `on`"
                )
        added = [column for column in right if column.name not in self._keys()]
        if clash := [column.name for column in added if column.name in left.names]:
            raise SchemaError(
                f"join: both sides have a column {clash[0]!r} — left: {left.names} — rename one "
                "of them"
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
            kept = [PLACE] if PLACE in batch.schema.names else []
            arrays += [batch.column(name) for name in kept]
            yield (
                pa.RecordBatch.from_arrays(
                    [_one_chunk(array) for array in arrays], names=[*wanted, *kept]
                ),
                after,
            )

    def _keys(self) -> list[str]:
        return [self.on] if isinstance(self.on, str) else list(self.on)

    def _side(self) -> pa.Table:
        cached: pa.Table | None = self.__dict__.get("_table")
        if cached is None:
            cached = _read_table(self.table).combine_chunks()
            unique = cached.group_by(self._keys()).aggregate([]).num_rows
            if unique != cached.num_rows:
                raise DataError(
                    f"join: {cached.num_rows - unique} rows of the side table repeat a key of "
                    f"{self._keys()} — make "
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
        raise SchemaError(
            f"join: keys of two types — {error} — declare one type for them in both sources"
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
    """Labels that are events themselves: a view is positive when a purchase of the same keys
    follows
        in time.

    Rows whose `column` is `event` become samples with a column `label`: 1.0 where a row with
    `positive` there and equal `on` follows within `within_seconds`, 0.0 where none did. A sample
    comes at the moment its label is known: with the purchase, or when the events have passed the
    end of its window. Samples whose window reaches beyond the last event are left out, for nobody
    knows their labels.

    Example: `LateLabels(on=("user_id", "product_id"), column="event_type", event="view",
        positive="purchase")`
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
                f"late labels: key columns and seconds > 0 — received on={self.on!r}, "
                f"within_seconds={self.within_seconds!r} — correct them"
            )


@dataclass
class Run:
    """Some events in their order. `keys`: when each is due, rising; `times`: when each happened;
    `before`, `after`: where the sources are then; `place`: the position after so many of them.
    """

    table: pa.Table
    keys: np.ndarray
    times: np.ndarray
    before: Sequence[Any]
    after: Sequence[Any]
    place: Callable[[int], dict[str, Any]] = field(default=lambda row: {})


class LabelJoin:
    """Samples that wait for their labels, and what is needed to say where reading must begin to
    have them again.

    Events are numbered from where reading began, so that which sample is decided when does not
    depend on the runs.
    """

    def __init__(self, late: LateLabels) -> None:
        self.late = late
        self.window = int(late.within_seconds * 1e6)
        self.waiting: pa.Table | None = None
        self.numbers = self.times = np.zeros(0, np.int64)  # of the waiting samples
        self.num_events = 0
        # number of a run's first event, and where it begins
        self.starts: deque[tuple[int, Sequence[Any]]] = deque()
        # numbers of the samples handed out, back to the first start
        self.emitted = np.zeros(0, np.int64)

    def __call__(self, run: Run) -> Run:
        """The samples whose labels are known when these events have passed, in the order of
        decision.
        """
        first = self.num_events
        count = len(run.keys)
        self.starts.append((first, run.before))
        self.num_events += count
        new = self._are(run.table, self.late.event)
        causes = self._are(run.table, self.late.positive)
        samples = run.table.take(pa.array(new))
        samples = samples if self.waiting is None else pa.concat_tables([self.waiting, samples])
        numbers = np.concatenate([self.numbers, first + new])
        times = np.concatenate([self.times, run.times[new]])
        # The event at which each is decided: the first one past its window, or a cause before that.
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
        table = (
            table.drop_columns([self.late.label])
            if self.late.label in table.schema.names
            else table
        )
        table = table.append_column(self.late.label, pa.array(positive[order].astype(np.float64)))
        self.waiting = samples.take(pa.array(still))
        self.numbers = numbers[still]
        self.times = times[still]
        place = self._places(numbers[order], run)
        return Run(table, run.keys[when[order] - first], times[order], run.before, run.after, place)

    def _are(self, table: pa.Table, kind: str) -> np.ndarray:
        """Which rows are of a kind."""
        return np.flatnonzero(
            pc.fill_null(pc.equal(table[self.late.column], kind), False).to_numpy()
        )

    def _next_cause(
        self, samples: pa.Table, numbers: np.ndarray, causes: pa.Table, at: np.ndarray
    ) -> np.ndarray:
        """Number of the next positive event with the same keys after each sample; a huge one where
        there is none.
        """
        keys = list(self.late.on)
        left = pl.DataFrame(samples.select(keys)).with_columns(
            event=pl.Series(numbers), row=pl.int_range(pl.len())
        )
        right = (
            pl.DataFrame(causes.select(keys))
            .with_columns(event=pl.Series(at), cause=pl.Series(at))
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
        """The positions after each sample of a run: where to begin, and how many samples come again
        from there.
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
            number, at = next(start for start in reversed(starts) if start[0] <= oldest[row])
            return {
                "at": at,
                "emitted": int((history >= number).sum() + (done[:row] >= number).sum()),
            }

        while len(self.starts) > 1 and self.starts[1][0] <= waiting:
            self.starts.popleft()
        emitted = np.concatenate([history, done])
        self.emitted = emitted[emitted >= self.starts[0][0]]
        return place
