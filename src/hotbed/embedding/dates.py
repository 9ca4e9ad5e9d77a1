# SPDX-License-Identifier: Apache-2.0
"""Whether the batches of a table have times, and times of rows that came without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.errors import ConfigError, PersistError, RowShapeError

from .policy import Clock

NEVER = -(2**63)
"""The watermark of a table that was never evicted from; when a row was seen that never was."""


class DatedTable(Protocol):
    """A table whose batches and rows may have times.

    Attributes:
        timed: whether batches come with times; None = before the first batch.
        undated: whether some rows may have no time.
    """

    name: str
    timed: bool | None
    undated: bool

    @property
    def needs_times(self) -> bool: ...
    @property
    def clock(self) -> Clock | None: ...
    def export(self) -> Iterator[pa.RecordBatch]: ...
    def load_rows(self, batches: Iterable[pa.RecordBatch]) -> None: ...


def checked_times(table: DatedTable, time: Any, num_samples: int) -> NDArray[np.int64] | None:
    """Return the times of a batch as int64 [num_samples], or None.

    A table that counts steps takes batches with times and without.

    Raises:
        ConfigError: the policies need times and get none, or the table got batches with times
            and without.
        RowShapeError: the times are not int64, or not one or [num_samples].
    """
    if table.clock == "steps":
        return None
    if time is None and table.needs_times:
        raise ConfigError(
            f"table {table.name!r}: its eviction needs times, got none. Give the schema a Time "
            "column, or `time`, or count steps: hb.Ttl(steps=…)."
        )
    if table.timed not in (None, time is not None):
        raise ConfigError(
            f"table {table.name!r}: batches with and without times cannot be mixed, got "
            f"time={time!r}. Give times always or never."
        )
    if time is None:
        return None
    times = np.asarray(time)
    if times.dtype != np.int64 or times.shape not in ((), (num_samples,)):
        raise RowShapeError(
            f"table {table.name!r}: times must be int64 microseconds, one or [{num_samples}], "
            f"got {times.dtype} {list(times.shape)}. Convert them."
        )
    return np.ascontiguousarray(np.broadcast_to(times, (num_samples,)))


def check_clock(table: DatedTable, scalars: Mapping[str, Any]) -> None:
    """Raise PersistError if a state with these scalars has ages by another clock.

    Steps would be read as microseconds, or microseconds as steps.
    """
    if "watermark_step" in scalars:
        saved = "in steps"
        differs = table.clock == "time"
    else:
        saved = "with times in microseconds"
        differs = table.clock == "steps" and bool(scalars["timed"])
    if differs:
        raise PersistError(
            f"table {table.name!r}: its state was trained {saved}, got policies that count "
            f"{table.clock}. Keep the clock of the policies, or load the rows by a warm start."
        )


def take_times(table: DatedTable, times: NDArray[np.int64] | None) -> Callable[[], None]:
    """Note that a table maps a batch with these times, or without any; the two must not mix.

    Return what undoes it, for a batch that is refused or taken back.
    """
    before = table.timed
    if table.clock != "steps":
        table.timed = times is not None
    undo_dates = _date_rows(table, times)

    def undo() -> None:
        table.timed = before
        undo_dates()

    return undo


def _date_rows(table: DatedTable, times: NDArray[np.int64] | None) -> Callable[[], None]:
    """Let rows without a time be as old as a batch with these times; return what undoes it.

    A weight says nothing about when its rows were used last; without this, the first eviction by
    age would remove them all.
    """
    if not table.undated or times is None or not len(times) or table.clock == "steps":
        return lambda: None
    dated = _set_seen(table, lambda rows: pc.equal(rows["last_seen"], NEVER), int(times.min()))
    table.undated = False

    def undo() -> None:
        table.undated = True
        if dated:
            ids = pa.concat_arrays(dated)
            _set_seen(table, lambda rows: pc.is_in(rows["id"], ids), NEVER)

    return undo


def _set_seen(
    table: DatedTable, chosen: Callable[[pa.RecordBatch], pa.Array], time: int
) -> list[pa.Array]:
    """Let the chosen rows be last seen at `time`; return their ids.

    No rows of a table have times where only its admission uses them.
    """
    ids = []
    for batch in table.export():
        if "last_seen" not in batch.schema.names:
            break
        rows = batch.filter(chosen(batch))
        if rows.num_rows:
            number = rows.schema.get_field_index("last_seen")
            times = pa.array(np.full(rows.num_rows, time, np.int64))
            table.load_rows([rows.set_column(number, "last_seen", times)])
            ids.append(rows["id"])
    return ids
