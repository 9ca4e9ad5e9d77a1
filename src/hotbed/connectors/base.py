# SPDX-License-Identifier: Apache-2.0
"""The base of every source of events.

A source is a value that yields Arrow record batches, each with the position after it.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from hotbed.connectors.journal import Live
from hotbed.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from hotbed.connectors.derive import Join, Slice, Sort

logger = logging.getLogger("hotbed.connectors")
T = TypeVar("T")

READ_ROWS = 65_536
"""Default of the rows that `read` yields at once."""

PLACE = "\0place"
"""Column of an endless source's batches: a struct that says where each row came from."""

TICK = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch that an endless source yields when it has nothing new."""

OPENED = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch that an endless source yields before the rows of a block.

Its position holds the decision about the block, so that reading resumes without the journal too.
"""


@dataclass(frozen=True)
class Position:
    """The place that a reader has reached: a small JSON object.

    Only the source that wrote a position knows its keys. Reading that resumes from a position
    repeats nothing and loses nothing.

    Example: `Position.from_json(json.loads(text))`, `json.dumps(position.to_json())`.
    """

    state: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return this position as plain JSON values (dict, list, str, int, float, bool, None)."""
        value: dict[str, Any] = json.loads(json.dumps(dict(self.state)))
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str | Position) -> Position:
        """Return the position of a JSON object or its text, as `to_json` returns it.

        Raises:
            DataError: `value` is not a JSON object.
        """
        if isinstance(value, Position):
            return value
        state = json.loads(value) if isinstance(value, str) else value
        if not isinstance(state, Mapping):
            raise DataError(
                f"position: a position is a JSON object, got {value!r}. Pass the value that "
                "Position.to_json() returned."
            )
        return cls(dict(state))

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


@dataclass(frozen=True)
class Place:
    """A row of a file, such as "clicks.csv, line 12"; `number` counts from 1, None = unknown."""

    file: str
    number: int | None
    word: str = "row"

    def __str__(self) -> str:
        if self.number is None:
            return self.file
        return f"{self.file}, {self.word} {self.number}"


@dataclass
class Skips:
    """Counts of the bad rows and files that a reader skipped because of `on_error="skip"`.

    The first of each kind is logged as a warning, later ones at debug level.
    """

    counts: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def add(self, reason: str, message: str, count: int = 1) -> None:
        """Count `count` bad rows (or one torn file) under `reason`, and log `message`."""
        level = logging.DEBUG if reason in self.counts else logging.WARNING
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.last = printable(message)
        logger.log(level, "skipped (%s): %s", reason, self.last)

    @property
    def total(self) -> int:
        """All rows and files skipped so far."""
        return sum(self.counts.values())


BadRow = tuple[int, str | bytes]
"""Number of a row in its file, from 1, and its content."""


@dataclass(frozen=True)
class ReadPlan:
    """The reader's wishes for a source.

    Args:
        columns: The columns to read (None = all).
        types: Types to read text columns as, where the source has no types of its own.
        skips: Counts the bad rows and files, which are then skipped. None = the first one raises.
        live: Journal, dead letters and clock of an endless source. None = the source makes its
            own, in memory.
        aside: Called with the rows of a file that are skipped because they cannot be read.
    """

    columns: tuple[str, ...] | None = None
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    skips: Skips | None = None
    live: Live | None = None
    aside: Callable[[Sequence[BadRow]], None] | None = None

    def leave_out(self, reason: str, message: str, rows: Sequence[BadRow]) -> None:
        """Count bad rows in `skips`, and pass them to `aside`."""
        assert self.skips is not None
        self.skips.add(reason, message, len(rows))
        if self.aside is not None:
            self.aside(rows)


READ_ALL = ReadPlan()


class Source(ABC):
    """A sequence of rows that can be read any number of times.

    Sources are values: they hold no open file and no state.

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
            DataError: Nothing can be read.
        """

    @abstractmethod
    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield record batches of 1 to `batch_rows` rows, each with the position AFTER it.

        The sequence of rows does not depend on `batch_rows` or on where reading began.

        An endless source never ends, and yields at least every `plan.live.tick_seconds`: rows, or
        `TICK`, an empty batch, with an unchanged position. Before the rows of a block it yields
        `OPENED` with a position that holds the decision about the block. Its positions have
        "block", the number of the block that holds the next row, and "now", the clock in
        microseconds when the block of the last row was decided.

        Args:
            position: The position to resume from; None = the start.
        """

    @property
    def endless(self) -> bool:
        """Whether `read` never ends."""
        return False

    def commit(self, position: Position) -> None:  # noqa: B027 - most sources have nothing to do
        """Note that a checkpoint with this position is safe on disk.

        Failures elsewhere, such as in a broker, never raise.
        """

    def num_rows(self) -> int | None:
        """Return the number of rows if it is known without reading them, else None."""
        return None

    def locate(self, position: Position, back: int) -> Place:
        """Return the place of the row `back` rows before `position`, for error messages."""
        return Place("", None)

    def count_rows(self) -> int:
        """Return the number of rows; read the whole source if `num_rows` does not know it."""
        count = self.num_rows()
        if count is not None:
            return count
        not_endless(self, "a count of rows")
        first = tuple(self.schema().names[:1])
        return sum(batch.num_rows for batch, _ in self.read(plan=ReadPlan(columns=first)))

    def slice(self, start: int | float = 0, stop: int | float | None = None) -> Slice:
        """Return rows `start` to `stop` (exclusive) as a source.

        Floats are fractions of the whole, as in `slice(0.0, 0.8)`; integers are row numbers.
        """
        from hotbed.connectors.derive import Slice

        return Slice(self, start, stop)

    def sort(self, by: str) -> Sort:
        """Return the same rows in ascending order of column `by`, ties in their old order.

        All rows are held in memory.
        """
        from hotbed.connectors.derive import Sort

        return Sort(self, by)

    def join(self, table: Source, on: str | Sequence[str]) -> Join:
        """Return the rows with the columns of a small side `table`, matched by the key(s) `on`.

        Rows without a match get nulls.
        """
        from hotbed.connectors.derive import Join

        return Join(self, table, on)


def cut(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in views of at most `batch_rows` rows; nothing for an empty batch."""
    for start in range(0, batch.num_rows, batch_rows):
        yield batch.slice(start, batch_rows)


def check_source(source: Any) -> None:
    """Raise ConfigError, with the source to use instead, if `source` is not a Source."""
    if isinstance(source, Source):
        return
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        advice = "Give a value of hb.sources, such as hb.sources.Memory(columns)."
        raise ConfigError(f"dataset.source: not a source, got {kind}. {advice}")
    path = os.fspath(source)
    kinds = {".parquet": "Parquet", ".jsonl": "Jsonl", ".svm": "Libsvm", ".libsvm": "Libsvm"}
    kind = kinds.get(os.path.splitext(path)[1].lower(), "Csv")
    raise ConfigError(
        f"dataset.source: not a source, got {path!r}. Give hb.sources.{kind}({path!r})."
    )


def run_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield `items`, of which a thread makes at most `depth` ahead.

    Closing the generator stops the thread and waits for it. `None` items are ticks: one is passed
    on only if nothing else waits.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        if item is None and not ready.empty():
            return not stop.is_set()
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    break
            put(_End())
        except BaseException as error:  # handed to the consumer, which raises it
            put(_End(error))
        finally:
            if isinstance(items, Generator):
                items.close()

    thread = threading.Thread(target=work, name="hotbed-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        while not ready.empty():  # so that a producer that waits for room stops at once
            ready.get_nowait()
        thread.join()


class _End:
    """The last item of the queue: the iterator ended, with `error` if it raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def schema_to_text(schema: pa.Schema) -> str:
    """Return names and types as text for a position."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def schema_from_text(text: str) -> pa.Schema:
    """Return the schema that `schema_to_text` wrote; no columns for an empty text."""
    if not text:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def not_endless(source: Source, what: str) -> None:
    """Raise ConfigError if `source` is endless; `what` names the operation that needs an end."""
    if source.endless:
        raise ConfigError(
            f"source: {what} needs a source that ends, got {type(source).__name__}. Use it on the "
            "table that the endless source is joined with, or read files."
        )


@dataclass(frozen=True, eq=False)
class Memory(Source):
    """Rows in memory.

    Args:
        columns: A pyarrow Table or RecordBatch, a DataFrame of Polars or pandas, or a mapping of
            column names to lists or NumPy arrays of one length.

    Raises:
        DataError: The columns differ in length or cannot become Arrow arrays.

    Example: `hb.sources.Memory({"user": [1, 2], "genres": [["a", "b"], []], "label": [0, 1]})`
    """

    columns: Mapping[str, Any] | pa.Table | pa.RecordBatch

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _as_table(self.columns))

    @property
    def table(self) -> pa.Table:
        """The rows as one Arrow table."""
        assert isinstance(self.columns, pa.Table)
        return self.columns

    def schema(self) -> pa.Schema:
        return self.table.schema

    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def locate(self, position: Position, back: int) -> Place:
        return Place("memory", int(position["row"]) - back + 1)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        row = int(position["row"]) if position else 0
        table = self.table
        if plan.columns is not None:
            table = table.select([name for name in table.schema.names if name in plan.columns])
        for batch in table.slice(row).to_batches(max_chunksize=batch_rows):
            if batch.num_rows:
                row += batch.num_rows
                yield batch, Position({"row": row})


def _as_table(columns: Any) -> pa.Table:
    if isinstance(columns, pa.Table):
        return columns
    if isinstance(columns, pa.RecordBatch):
        return pa.Table.from_batches([columns])
    if hasattr(columns, "__arrow_c_stream__"):
        return pa.table(columns)
    if not isinstance(columns, Mapping):
        raise DataError(
            "memory source: neither a table nor a mapping of columns, got "
            f"{type(columns).__name__}. Give an Arrow table, a DataFrame or a dict of columns."
        )
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        try:
            arrays[name] = _as_array(values)
        except OverflowError as error:
            raise DataError(
                f"memory source: column {name!r} holds whole numbers beyond 64 bits. Hash them, "
                "or give them as text."
            ) from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"memory source: column {name!r} is not one Arrow type, got {error}. Give each "
                "column values of one type."
            ) from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"memory source: columns differ in length, got {lengths}. Give every column the same "
            "number of rows."
        )
    return pa.table(arrays)


def _as_array(values: Any) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, np.ndarray) and values.ndim == 2 and not values.shape[1]:
        return pa.nulls(len(values)).cast(pa.list_(pa.null())).fill_null([])
    if isinstance(values, np.ndarray) and values.ndim == 2:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    try:
        return pa.array(values)
    except OverflowError:  # Python integers above int64: ids that use the upper half of 64 bits
        return pa.array(values, type=pa.uint64())
