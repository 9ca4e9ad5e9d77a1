# SPDX-License-Identifier: Apache-2.0
"""What every source of events is: a value that yields Arrow record batches, each with the position
after it.
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
"""Rows that one `read` step hands out unless told otherwise."""

PLACE = "\0place"
"""Column of an endless source's batches: where each row came from (a struct), for dead letters and
messages.
"""

TICK = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch of an endless source that has nothing new."""

OPENED = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
"""The empty batch before the rows of a block: its position knows what is in the block, also without
the journal.
"""


@dataclass(frozen=True)
class Position:
    """Where a reader is: a small JSON object whose keys are known only to what wrote it.

    Reading again from a position repeats nothing and loses nothing.

    Example: `Position.from_json(json.loads(text))`, `json.dumps(position.to_json())`.
    """

    state: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """This position as plain JSON values (dict, list, str, int, float, bool, None)."""
        value: dict[str, Any] = json.loads(json.dumps(dict(self.state)))
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str | Position) -> Position:
        """Inverse of `to_json`; takes the object or its text."""
        if isinstance(value, Position):
            return value
        state = json.loads(value) if isinstance(value, str) else value
        if not isinstance(state, Mapping):
            raise DataError(
                f"a position is a JSON object — received {value!r} — pass what Position.to_json() "
                "returned"
            )
        return cls(dict(state))

    def __getitem__(self, key: str) -> Any:
        return self.state[key]


@dataclass(frozen=True)
class Place:
    """A row of a file: "clicks.csv, line 12". `number` counts from 1."""

    file: str
    number: int | None
    word: str = "row"

    def __str__(self) -> str:
        return self.file if self.number is None else f"{self.file}, {self.word} {self.number}"


@dataclass
class Skips:
    """Counts what a reader left out because the user asked for `on_error="skip"`; logs the first of
    each kind.
    """

    counts: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def add(self, reason: str, message: str, count: int = 1) -> None:
        """Counts `count` bad rows (or one torn file) under `reason`."""
        first = reason not in self.counts
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.last = printable(message)
        logger.log(
            logging.WARNING if first else logging.DEBUG, "skipped (%s): %s", reason, self.last
        )

    @property
    def total(self) -> int:
        """Everything left out so far."""
        return sum(self.counts.values())


BadRow = tuple[int, str | bytes]
"""Number of a row in its file, from 1, and what it holds."""


@dataclass(frozen=True)
class ReadPlan:
    """What the reader of a source wants from it.

    `columns`: only these are needed (None = all). `types`: types that text columns are to be read
    as, where the source has no types of its own. `skips`: None = the first bad row or file raises;
    else bad ones are counted there and left out. `live`: journal, dead letters and clock of an
    endless source; None = it makes some of its own, in memory. `aside`: takes the rows of a file
    that are left out because they cannot be read.
    """

    columns: tuple[str, ...] | None = None
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    skips: Skips | None = None
    live: Live | None = None
    aside: Callable[[Sequence[BadRow]], None] | None = None

    def leave_out(self, reason: str, message: str, rows: Sequence[BadRow]) -> None:
        """Counts bad rows in `skips` and puts them aside."""
        assert self.skips is not None
        self.skips.add(reason, message, len(rows))
        if self.aside is not None:
            self.aside(rows)


READ_ALL = ReadPlan()


class Source(ABC):
    """A readable, re-readable sequence of rows. Sources are values: they hold no open file and no
    state.

    An endless source (Kafka, a followed directory) hands out blocks. What is in a block was decided
    by the clock, once, and stands in the journal of the plan before its rows are handed out, so
    that a run after a crash reads the same blocks.

    Example:
        >>> source = hb.sources.Csv("ratings.csv").join(hb.sources.Csv("movies.csv"), on="movieId").sort("timestamp")
        >>> train, test = source.slice(0.0, 0.8), source.slice(0.8, 1.0)
    """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the raw columns. Raises DataError when nothing can be read."""

    @abstractmethod
    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Record batches of 1 to `batch_rows` rows, each with the position AFTER it.

        `position`: None = from the start. The sequence of rows does not depend on `batch_rows` or
        on where reading began.

        An endless source never ends, and yields at least every `plan.live.tick_seconds`: rows, or
        `TICK`, an empty batch, with the position as it was. Before the rows of a block it yields
        `OPENED` with a position that holds the decision about the block. Its positions have
        "block", the number of the block that holds the next row, and "now", the clock in
        microseconds at which the block of the last row was taken.
        """

    @property
    def endless(self) -> bool:
        """Whether `read` never ends."""
        return False

    def commit(self, position: Position) -> None:  # noqa: B027 - most sources have nobody to tell
        """Told when a checkpoint with this position is safe on disk. Never raises for what goes
        wrong elsewhere.
        """

    def num_rows(self) -> int | None:
        """Number of rows where that is known without reading them, else None."""
        return None

    def locate(self, position: Position, back: int) -> Place:
        """Where the row is that lies `back` rows before `position`; for error messages."""
        return Place("", None)

    def count_rows(self) -> int:
        """Number of rows; reads the source through where nothing else tells."""
        known = self.num_rows()
        if known is not None:
            return known
        not_endless(self, "a count of rows")
        first = tuple(self.schema().names[:1])
        return sum(batch.num_rows for batch, _ in self.read(plan=ReadPlan(columns=first)))

    def slice(self, start: int | float = 0, stop: int | float | None = None) -> Slice:
        """Rows `start` to `stop` (exclusive). Floats are fractions of the whole: `slice(0.0, 0.8)`;
        integers are row numbers.
        """
        from hotbed.connectors.derive import Slice

        return Slice(self, start, stop)

    def sort(self, by: str) -> Sort:
        """The same rows in ascending order of column `by`, ties in their old order. Holds them all
        in memory.
        """
        from hotbed.connectors.derive import Sort

        return Sort(self, by)

    def join(self, table: Source, on: str | Sequence[str]) -> Join:
        """Adds the columns of a small side `table` to every row with the same key; rows without a
        match get nulls.
        """
        from hotbed.connectors.derive import Join

        return Join(self, table, on)


def cut(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """`batch` in pieces of at most `batch_rows` rows (views, no copy); nothing for an empty batch."""
    for start in range(0, batch.num_rows, batch_rows):
        yield batch.slice(start, batch_rows)


def check_source(source: Any) -> None:
    """Raise ConfigError, which says which source to give, for a path, columns or anything else."""
    if isinstance(source, Source):
        return
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        advice = "give a value of hb.sources, such as hb.sources.Memory(columns)"
        raise ConfigError(f"dataset.source: not a source — received {kind} — {advice}")
    path = os.fspath(source)
    kinds = {".parquet": "Parquet", ".jsonl": "Jsonl", ".svm": "Libsvm", ".libsvm": "Libsvm"}
    kind = kinds.get(os.path.splitext(path)[1].lower(), "Csv")
    raise ConfigError(
        f"dataset.source: not a source — received {path!r} — give hb.sources.{kind}({path!r})"
    )


def run_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yields `items`, at most `depth` of them made ahead on a thread. Closing the generator stops
    the thread and waits for it.

    `None` items are ticks: one is passed on only where nothing else waits.
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
        while not ready.empty():  # a producer that waits for room sees the stop at once
            ready.get_nowait()
        thread.join()


class _End:
    """The last thing in the queue: the iterator ended, by `error` or well."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def schema_to_text(schema: pa.Schema) -> str:
    """Names and types as text for a position."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def schema_from_text(text: str) -> pa.Schema:
    """Inverse of `schema_to_text`; no columns for an empty text."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else pa.schema([])


def not_endless(source: Source, what: str) -> None:
    """Raises ConfigError where `what` needs a source that ends."""
    if source.endless:
        raise ConfigError(
            f"source: {what} needs a source that ends — received {type(source).__name__} — use it "
            "on what the endless "
            "source is joined with, or read files"
        )


@dataclass(frozen=True, eq=False)
class Memory(Source):
    """A pyarrow Table or RecordBatch, a DataFrame of Polars or pandas, or a mapping of column names
    to lists or NumPy arrays of one length.

    Raises DataError when the columns differ in length or cannot become Arrow arrays.

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
            f"{type(columns).__name__}. Give an Arrow "
            "table, a DataFrame or a dict of columns."
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
                f"memory source: column {name!r} is not one Arrow type — {error} — give each "
                "column values of one type"
            ) from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"memory source: columns differ in length — {lengths} — give every column the same "
            "number of rows"
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
