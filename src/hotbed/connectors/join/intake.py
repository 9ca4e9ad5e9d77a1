# SPDX-License-Identifier: Apache-2.0
"""Rows of a turn as events: their keys and times, and what is wrong with some of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.connectors.first_times import FirstTimes
from hotbed.connectors.join.columns import together
from hotbed.connectors.join.events import TurnEvents
from hotbed.connectors.join.inputs import Input
from hotbed.connectors.join.keys import EventKeys, keys_of, require_key
from hotbed.connectors.join.kinds import EventKind, TimedRows, kinds_by_input, whole
from hotbed.connectors.join.segment import Segment
from hotbed.connectors.join.settings import JoinSettings, names_of
from hotbed.connectors.join.states import KIND, NUMBER, TIME
from hotbed.connectors.position import PLACE
from hotbed.connectors.read_plan import READ_ALL, ReadPlan
from hotbed.connectors.times import EARLIEST, LATEST, check_same_unit, with_readable_times
from hotbed.connectors.types import joined, plain, present_keys
from hotbed.errors import DecodeError, SchemaError

PAYLOAD = "\0payload"
_LETTER = (PLACE, PAYLOAD)
FUTURE = "future"
_FAULTS = {"value": "no key or time", FUTURE: "a time ahead of the clock"}
COMPARED_ROWS = 100
"""Repeated impressions of a turn that are compared with their first ones."""


class Intake:
    """Turns the rows of an input into impressions and outcomes.

    Attributes:
        columns: of the samples, without labels and places; None = all that impressions have.
    """

    def __init__(self, join: JoinSettings, plan: ReadPlan) -> None:
        self.join = join
        self.plan = plan
        self.columns: list[str] | None = None
        if plan.columns is not None:
            self.columns = [name for name in plan.columns if name not in join.kinds]
        self._kinds = kinds_by_input(join)
        self._key_types: dict[str, pa.DataType] = {}
        self._zones: set[str] = set()
        self._first = FirstTimes("join")
        self._latest = LATEST  # of the events that these were among
        self._has_warned = False

    def plan_for(self, number: int) -> ReadPlan | None:
        """Return what to read of an input; None: all columns."""
        needed: list[str] = []
        if number == 0:
            if self.columns is None:
                return None
            needed += self.columns
        for kind in self._kinds[number]:
            needed += kind.columns
        types: dict[str, pa.DataType] = {}
        if number == 0:
            types = {**self.plan.types}
            for name in needed:
                if name not in (self.columns or ()) or name in self.join.own_columns:
                    types.pop(name, None)
        return replace(
            READ_ALL,
            columns=tuple(dict.fromkeys(needed)),
            types=types,
            skips=self.plan.skips,
            max_ahead_seconds=self.plan.max_ahead_seconds,
        )

    # --- events

    def timed(self, rows: pa.Table, number: int, source: Input, latest: int) -> TimedRows:
        """Return rows of an input with their times.

        Args:
            rows: the rows.
            number: of the input.
            source: the input.
            latest: later times are of events of the future.

        Raises:
            SchemaError: a column that the join needs is absent, or a unit is wrong.
            ConfigError: the schema reads the time of impressions by another unit.
        """
        for kind in self._kinds[number]:
            self._require_columns(rows, kind)
        join = self.join
        if number == 0:
            time_type = rows.schema.field(join.time).type
            check_same_unit("join", join.time, time_type, join.unit, self.plan.time)
        timed = TimedRows(rows, self._kinds[number], self._zones, latest)
        if source.has_begun_here:
            timed.show(self._first, last=source.ended and not source.num_rows)
            self._latest = latest
        return timed

    def end(self) -> None:
        """Note that no more rows follow.

        Raises:
            SchemaError: the times of the inputs lie years apart.
        """
        self._first.check_apart(self._latest, last=True)

    def _require_columns(self, rows: pa.Table, kind: EventKind) -> None:
        present = [name for name in rows.schema.names if name != PLACE]
        missing = [name for name in kind.columns if name not in present]
        if missing:
            raise SchemaError(
                f"{kind.name}: columns {missing} are absent; of those that the join needs, its "
                f"rows have {present}. Correct `on`, `time` and `where`."
            )

    def impressions(self, timed: TimedRows, source: Input) -> TurnEvents:
        """Return the impressions among some rows, with the columns that they keep."""
        join = self.join
        names = names_of(join.on)
        (kind,) = (kind for kind in timed.kinds if kind.label is None)
        rows, times = self._sound(timed, kind, source)
        keys = self.keys(rows, names, names)
        columns = [name for name in rows.schema.names if name not in join.kinds]
        if self.columns is not None:
            needed = {*self.columns, *names, join.time, PLACE}
            columns = [name for name in columns if name in needed]
        return TurnEvents(rows.select(columns), keys, times)

    def outcomes(self, timed: TimedRows, source: Input) -> TurnEvents | None:
        """Return the outcomes among some rows, of all kinds; None if an input has none."""
        join = self.join
        names = names_of(join.on)
        parts: list[TurnEvents] = []
        for kind in timed.kinds:
            if kind.label is None:
                continue
            rows, times = self._sound(timed, kind, source)
            keys = self.keys(rows, kind.on, names)
            table = rows.select(kind.on).rename_columns(names)
            if join.keeps_unmatched:
                table = self._with_letters(table, rows, list(join.kinds)[kind.label])
            parts.append(TurnEvents(table, keys, times, np.full(len(times), kind.label, np.uint8)))
        if len(parts) < 2:
            return parts[0] if parts else None
        tables = [part.table for part in parts]
        firsts = np.concatenate([part.keys.first for part in parts])
        seconds = np.concatenate([part.keys.second for part in parts])
        return TurnEvents(
            together(tables),
            EventKeys(firsts, seconds),
            np.concatenate([part.times for part in parts]),
            np.concatenate([part.kinds for part in parts if part.kinds is not None]),
        )

    def warn_of_pages(self, impressions: TurnEvents, repeated: np.ndarray) -> None:
        """Warn once if impressions with one key and time differ: they become one sample.

        Args:
            impressions: of a turn.
            repeated: the rows of those that count as repeated.
        """
        if self._has_warned:
            return
        for row in repeated[:COMPARED_ROWS].tolist():
            is_alike = impressions.times == impressions.times[row]
            for part in impressions.keys:
                is_alike &= part == part[row]
            places = [int(np.flatnonzero(is_alike)[0]), row]
            first, second = _values(impressions.table.take(places))
            names = [name for name in first if repr(first[name]) != repr(second[name])]
            if set(names) - {PLACE}:
                self._has_warned = True
                keys = {name: first[name] for name in names_of(self.join.on)}
                warnings.warn(
                    "join.on: impressions of one key and time count as one that came twice, got "
                    f"several with {keys} that differ in {sorted(set(names) - {PLACE})}. Only the "
                    "first one becomes a sample: name more key columns, such as the item.",
                    UserWarning,
                    stacklevel=2,
                )
                return

    def saved_impressions(self, rows: pa.Table) -> Segment:
        """Return impressions of a saved state."""
        names = names_of(self.join.on)
        numbers, times = (rows[name].to_numpy() for name in (NUMBER, TIME))
        rows = rows.drop_columns([NUMBER, TIME])
        return Segment(rows, self.keys(rows, names, names), times, numbers)

    def saved_outcomes(self, rows: pa.Table) -> Segment:
        """Return outcomes of a saved state."""
        names = names_of(self.join.on)
        numbers, times, kinds = (rows[name].to_numpy() for name in (NUMBER, TIME, KIND))
        keys = self.keys(rows, names, names)
        columns = [name for name in (*names, *_LETTER) if name in rows.schema.names]
        return Segment(rows.select(columns), keys, times, numbers, kinds)

    def keys(self, rows: pa.Table, on: Sequence[str], names: Sequence[str]) -> EventKeys:
        """Return the keys of rows.

        Args:
            rows: the rows.
            on: their key columns.
            names: the names of these columns in impressions.

        Raises:
            SchemaError: the type of a key does not meet that of the events before.
        """
        columns: list[pa.Array] = []
        for column, name in zip(on, names, strict=True):
            values = whole(rows[column])
            kind = plain(values.type)
            require_key(column, kind)
            before = self._key_types.get(name, kind)
            both = joined(before, kind)
            if both is None:
                raise SchemaError(
                    f"join: the key {name!r} holds {before} on one side, got {kind} in column "
                    f"{column!r} of another. Declare one type for both."
                )
            self._key_types[name] = both
            columns.append(values)
        return keys_of(columns)

    def _sound(
        self, timed: TimedRows, kind: EventKind, source: Input
    ) -> tuple[pa.Table, np.ndarray]:
        """Return the events of a kind that have keys and a time in the past, and their times.

        The others are bad rows, or events of the future.
        """
        rows, micros = timed.of(kind)
        is_sound = np.ones(rows.num_rows, bool)
        for name in (kind.time, *kind.on):
            values = micros if name == kind.time else present_keys(whole(rows[name]))
            if values.null_count:
                is_valid = values.is_valid().to_numpy(zero_copy_only=False)
                bad = rows.filter(pa.array(~is_valid & is_sound))
                self._report(bad, kind, name, "value", source)
                is_sound &= is_valid
        times = micros.fill_null(EARLIEST).to_numpy(zero_copy_only=False)
        is_future = is_sound & (times > timed.latest)
        if is_future.any():
            timed.num_future += int(is_future.sum())
            self._report(rows.filter(pa.array(is_future)), kind, kind.time, FUTURE, source)
            is_sound &= ~is_future
        if is_sound.all():
            return rows, micros.to_numpy(zero_copy_only=False)
        mask = pa.array(is_sound)
        return rows.filter(mask), micros.filter(mask).to_numpy(zero_copy_only=False)

    def _report(
        self, bad: pa.Table, kind: EventKind, column: str, reason: str, source: Input
    ) -> None:
        """Leave out rows, or raise DecodeError if the plan has no `skips`.

        Events of the future are left out of a live join in any case.
        """
        if not bad.num_rows:
            return
        where = ""
        if PLACE in bad.schema.names:
            where = f", {source.source.words_for(bad[PLACE][0].as_py())}"
        message = f"{kind.name}{where}: column {column!r} of a row holds {_FAULTS[reason]}"
        is_left_out = reason == FUTURE and self.join.endless
        if self.plan.skips is not None:
            self.plan.skips.add(reason, message, bad.num_rows)
        elif not is_left_out:
            value = with_readable_times(whole(bad[column]).slice(0, 1))[0].as_py()
            raise DecodeError(
                f"{message}, got {value!r}. Correct it or use on_error='skip'.", column=column
            )
        self.put_aside(bad, reason)

    def _with_letters(self, keys: pa.Table, rows: pa.Table, label: str) -> pa.Table:
        """Return the keys of outcomes with what their dead letters would say."""
        if self.plan.live is None or PLACE not in rows.schema.names:
            return keys
        payloads = [
            json.dumps({**row, "outcome": label}, default=str, ensure_ascii=False)
            for row in _values(rows.drop_columns([PLACE]))
        ]
        keys = keys.append_column(PLACE, rows[PLACE])
        return keys.append_column(PAYLOAD, pa.array(payloads, pa.string()))

    def put_aside_outcomes(self, outcomes: pa.Table) -> None:
        """Write outcomes that met no impression to the dead letters."""
        if self.plan.live is None or PAYLOAD not in outcomes.schema.names:
            return
        rows = zip(outcomes[PLACE].to_pylist(), outcomes[PAYLOAD].to_pylist(), strict=True)
        letters = [(place, "unmatched", text) for place, text in rows if text is not None]
        self.plan.live.dead_letters.add_all(letters)

    def put_aside(self, rows: pa.Table, reason: str) -> None:
        """Write rows of an endless join to the dead letters."""
        if self.plan.live is None or PLACE not in rows.schema.names:
            return
        letters = []
        for row in _values(rows):
            place = row.pop(PLACE)
            letters.append((place, reason, json.dumps(row, default=str, ensure_ascii=False)))
        self.plan.live.dead_letters.add_all(letters)


def _values(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows as values of Python, timestamps as text."""
    columns = [with_readable_times(whole(column)) for column in rows.columns]
    values: list[dict[str, Any]] = pa.table(columns, names=rows.schema.names).to_pylist()
    return values
