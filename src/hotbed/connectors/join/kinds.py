# SPDX-License-Identifier: Apache-2.0
"""Which rows of an input are events of which kind, and what of them moves the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.first_times import FirstTimes
from hotbed.connectors.join.settings import JoinSettings, names_of
from hotbed.connectors.position import PLACE
from hotbed.connectors.times import LATEST, to_microseconds
from hotbed.errors import SchemaError


@dataclass(frozen=True)
class EventKind:
    """A kind of events of an input.

    Attributes:
        name: for messages.
        label: the number of the label that an outcome makes positive; None for impressions.
        on: the key columns.
        time: the column of event times.
        unit: its unit.
        where: only rows with these texts in these columns are events of the kind.
    """

    name: str
    label: int | None
    on: Sequence[str]
    time: str
    unit: str
    where: Mapping[str, str]

    @property
    def columns(self) -> list[str]:
        """The columns that the join itself needs of its events."""
        return list(dict.fromkeys([*self.on, self.time, *self.where]))


def kinds_by_input(join: JoinSettings) -> list[list[EventKind]]:
    """Return the kinds of events of each input."""
    on = names_of(join.on)
    shown = EventKind("join.impressions", None, on, join.time, join.unit, join.where)
    by_input: list[list[EventKind]] = [[] for _ in join.inputs]
    by_input[0].append(shown)
    for label, (name, outcome) in enumerate(join.kinds.items()):
        kind = EventKind(
            f"join.outcomes.{name}",
            label,
            on if outcome.on is None else names_of(outcome.on),
            outcome.time or join.time,
            outcome.unit or join.unit,
            outcome.where,
        )
        by_input[join.inputs.index(outcome.source)].append(kind)
    return by_input


class TimedRows:
    """Rows that a turn takes of an input, with the times of each kind of event.

    Args:
        rows: the rows.
        kinds: of events in the input.
        zones: those of event times before.
        latest: later times are of events of the future.

    Attributes:
        num_future: such events that were found so far.
    """

    def __init__(
        self, rows: pa.Table, kinds: Sequence[EventKind], zones: set[str], latest: int
    ) -> None:
        self.rows = rows
        self.kinds = kinds
        self.latest = latest
        self.num_future = 0
        self._micros: dict[tuple[str, str], pa.Array] = {}
        self._chosen: dict[str, np.ndarray] = {}
        for kind in kinds:
            clock = (kind.time, kind.unit)
            if clock not in self._micros:
                self._micros[clock] = to_microseconds(whole(rows[kind.time]), kind.unit, zones)
            if kind.where:
                self._chosen[kind.name] = _chosen(rows, kind.where)

    def of(self, kind: EventKind) -> tuple[pa.Table, pa.Array]:
        """Return the events of a kind, and their times in microseconds."""
        micros = self._micros[kind.time, kind.unit]
        if kind.name not in self._chosen:
            return self.rows, micros
        chosen = pa.array(self._chosen[kind.name])
        return self.rows.filter(chosen), micros.filter(chosen)

    def show(self, first: FirstTimes, *, last: bool) -> None:
        """Compare the times with the first ones of all kinds.

        `last`: whether no more rows of the input follow.
        """
        wanted = [kind for kind in self.kinds if first.wants(kind.name)]
        for kind in wanted:
            rows, micros = self.of(kind)
            first.add(kind.name, whole(rows[kind.time]), kind.unit, micros, last=last)
        if wanted:
            first.check_apart(self.latest)
        first.reach(self._newest())

    def _newest(self) -> dict[str, int]:
        """Return the newest time of each kind that has events here."""
        newest: dict[str, int] = {}
        for kind in self.kinds:
            times, chosen = self._times(kind)
            times = times[chosen & (times < LATEST)]
            if len(times):
                newest[kind.name] = int(times.max())
        return newest

    def _times(self, kind: EventKind) -> tuple[np.ndarray, np.ndarray]:
        """Return the times that a kind reads in all rows, and which rows are its events.

        Rows without a time, and rows of the future, have the time LATEST.
        """
        micros = self._micros[kind.time, kind.unit]
        times = micros.fill_null(LATEST).to_numpy(zero_copy_only=False)
        chosen = self._chosen.get(kind.name, np.ones(len(times), bool))
        return np.where(times <= self.latest, times, LATEST), chosen

    def highs(self) -> dict[str, int]:
        """Return the newest time of each partition that the rows come from.

        An event has the time of its own kind. A row that is of several kinds, or of none, has the
        earliest time that a kind reads in it. What lies in the future does not count. The partition
        is "" where a source has none.
        """
        count = self.rows.num_rows
        is_event = np.zeros(count, bool)
        of_kinds = np.full(count, LATEST)
        of_columns = np.full(count, LATEST)
        for kind in self.kinds:
            times, chosen = self._times(kind)
            np.minimum(of_columns, times, out=of_columns)
            is_event |= chosen
            np.minimum(of_kinds, times, out=of_kinds, where=chosen)
        times = np.where(is_event, of_kinds, of_columns)
        is_known = times < LATEST
        times = times[is_known]
        if not len(times):
            return {}
        places = pa.struct([])
        if PLACE in self.rows.schema.names:
            places = self.rows.schema.field(PLACE).type
        if places.get_field_index("partition") < 0:
            return {"": int(times.max())}
        filled = pc.fill_null(whole(self.rows[PLACE]).field("partition"), -1)
        partitions = filled.to_numpy()[is_known]
        highs: dict[str, int] = {}
        for partition in np.unique(partitions).tolist():
            lane = "" if partition < 0 else str(partition)
            highs[lane] = int(times[partitions == partition].max())
        return highs


def _chosen(rows: pa.Table, where: Mapping[str, str]) -> np.ndarray:
    """Return which rows have these texts in these columns."""
    chosen = np.ones(rows.num_rows, bool)
    for name, text in where.items():
        column = rows[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        try:
            texts = column.cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"join: `where` compares texts, got column {name!r} of {column.type}. Name a "
                "column of texts or numbers."
            ) from error
        chosen &= pc.fill_null(pc.equal(texts, text), False).to_numpy()
    return chosen


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        return array.chunk(0) if array.num_chunks else pa.array([], column.type)
    return array
