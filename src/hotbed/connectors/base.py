# SPDX-License-Identifier: Apache-2.0
"""What every source of events is: a value that yields Arrow record batches, each with the position after it."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hotbed.errors import DataError

if TYPE_CHECKING:
    from hotbed.connectors.derive import Join, Slice, Sort

logger = logging.getLogger("hotbed.connectors")

READ_ROWS = 65_536
"""Rows that one `read` step hands out unless told otherwise."""


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
            raise DataError(f"a position is a JSON object — received {value!r} — pass what Position.to_json() returned")
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
    """Counts what a reader left out because the user asked for `on_error="skip"`; logs the first of each kind."""

    counts: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def add(self, reason: str, message: str, count: int = 1) -> None:
        """Counts `count` bad rows (or one torn file) under `reason`."""
        first = reason not in self.counts
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.last = message
        logger.log(logging.WARNING if first else logging.DEBUG, "skipped (%s): %s", reason, message)

    @property
    def total(self) -> int:
        """Everything left out so far."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class ReadPlan:
    """What the reader of a source wants from it.

    `columns`: only these are needed (None = all). `types`: types that text columns are to be read as, where the source
    has no types of its own. `skips`: None = the first bad row or file raises; else bad ones are counted there and left
    out.
    """

    columns: tuple[str, ...] | None = None
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    skips: Skips | None = None


READ_ALL = ReadPlan()


class Source(ABC):
    """A readable, re-readable sequence of rows. Sources are values: they hold no open file and no state.

    Example:
        >>> source = hb.sources.Csv("ratings.csv").join(hb.sources.Csv("movies.csv"), on="movieId").sort("timestamp")
        >>> train, test = source.slice(0.0, 0.8), source.slice(0.8, 1.0)
    """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Names and types of the raw columns. Raises DataError when nothing can be read."""

    @abstractmethod
    def read(
        self, position: Position | None = None, batch_rows: int = READ_ROWS, plan: ReadPlan = READ_ALL
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Record batches of 1 to `batch_rows` rows, each with the position AFTER it.

        `position`: None = from the start. The sequence of rows does not depend on `batch_rows` or on where reading
        began.
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
        first = tuple(self.schema().names[:1])
        return sum(batch.num_rows for batch, _ in self.read(plan=ReadPlan(columns=first)))

    def slice(self, start: int | float = 0, stop: int | float | None = None) -> Slice:
        """Rows `start` to `stop` (exclusive). Floats are fractions of the whole: `slice(0.0, 0.8)`; integers are row
        numbers."""
        from hotbed.connectors.derive import Slice

        return Slice(self, start, stop)

    def sort(self, by: str) -> Sort:
        """The same rows in ascending order of column `by`, ties in their old order. Holds them all in memory."""
        from hotbed.connectors.derive import Sort

        return Sort(self, by)

    def join(self, table: Source, on: str | Sequence[str]) -> Join:
        """Adds the columns of a small side `table` to every row with the same key; rows without a match get nulls."""
        from hotbed.connectors.derive import Join

        return Join(self, table, on)


def cut(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """`batch` in pieces of at most `batch_rows` rows (views, no copy); nothing for an empty batch."""
    for start in range(0, batch.num_rows, batch_rows):
        yield batch.slice(start, batch_rows)
