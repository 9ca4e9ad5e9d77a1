# SPDX-License-Identifier: Apache-2.0
"""Rows of a turn as events: their keys and times, and what is wrong with some of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.connectors.join.columns import together
from hotbed.connectors.join.events import TurnEvents
from hotbed.connectors.join.inputs import Input
from hotbed.connectors.join.keys import EventKeys, Family, family_of, keys_of
from hotbed.connectors.join.segment import Segment
from hotbed.connectors.join.settings import JoinSettings, Outcome, names_of
from hotbed.connectors.join.states import KIND, NUMBER, TIME
from hotbed.connectors.plan import ReadPlan
from hotbed.connectors.position import PLACE
from hotbed.connectors.times import to_microseconds
from hotbed.errors import DecodeError, SchemaError

PAYLOAD = "\0payload"
_LETTER = (PLACE, PAYLOAD)


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
        self._families: dict[str, Family] = {}
        self._zones: dict[tuple[int, str], set[str]] = {}

    def plan_for(self, number: int) -> ReadPlan | None:
        """Return what to read of an input; None: all columns."""
        needed: list[str] = []
        if number == 0:
            if self.columns is None:
                return None
            needed += [*self.columns, *self.join.own_columns]
        for outcome in self.join.kinds.values():
            if outcome.source == self.join.inputs[number]:
                needed += [*self._on(outcome), outcome.time or self.join.time, *outcome.where]
        types: dict[str, pa.DataType] = {}
        if number == 0:
            types = {**self.plan.types}
            for name in needed:
                if name not in (self.columns or ()) or name in self.join.own_columns:
                    types.pop(name, None)
        return ReadPlan(tuple(dict.fromkeys(needed)), types, self.plan.skips)

    def _on(self, outcome: Outcome) -> list[str]:
        return names_of(self.join.on if outcome.on is None else outcome.on)

    def require_columns(self, rows: pa.Table, number: int) -> None:
        """Raise SchemaError if rows of an input lack a column that the join needs."""
        join = self.join
        needed: dict[str, list[str]] = {}
        if number == 0:
            needed["join.impressions"] = join.own_columns
        for name, outcome in join.kinds.items():
            if outcome.source == join.inputs[number]:
                join_columns = [*self._on(outcome), outcome.time or join.time, *outcome.where]
                needed[f"join.outcomes.{name}"] = join_columns
        present = [name for name in rows.schema.names if name != PLACE]
        for event, names in needed.items():
            missing = [name for name in names if name not in present]
            if missing:
                raise SchemaError(
                    f"{event}: columns {missing} are absent; of those that the join needs, its "
                    f"rows have {present}. Correct `on`, `time` and `where`."
                )

    # --- events

    def impressions(self, rows: pa.Table, source: Input) -> TurnEvents:
        """Return the impressions among some rows, with the columns that they keep."""
        join = self.join
        rows = _where(rows, join.where)
        names = names_of(join.on)
        time = (join.time, join.unit)
        rows, times = self._sound(rows, names, time, source, "join.impressions")
        keys = self.keys(rows, names, names)
        columns = [name for name in rows.schema.names if name not in join.kinds]
        if self.columns is not None:
            needed = {*self.columns, *names, join.time, PLACE}
            columns = [name for name in columns if name in needed]
        return TurnEvents(rows.select(columns), keys, times)

    def outcomes(self, rows: pa.Table, number: int, source: Input) -> TurnEvents | None:
        """Return the outcomes among some rows of an input, of all kinds; None if it has none."""
        join = self.join
        parts: list[TurnEvents] = []
        for label, (name, outcome) in enumerate(join.kinds.items()):
            if outcome.source != join.inputs[number]:
                continue
            on = self._on(outcome)
            time = (outcome.time or join.time, outcome.unit or join.unit)
            chosen = _where(rows, outcome.where)
            chosen, times = self._sound(chosen, on, time, source, f"join.outcomes.{name}")
            names = names_of(join.on)
            keys = self.keys(chosen, on, names)
            table = chosen.select(on).rename_columns(names)
            if join.keeps_unmatched:
                table = self._with_letters(table, chosen, name)
            parts.append(TurnEvents(table, keys, times, np.full(len(times), label, np.uint8)))
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

    def highs(self, rows: pa.Table, number: int) -> dict[str, int]:
        """Return the newest time of each partition that rows of an input come from.

        The partition is "" where a source has none.
        """
        column = self.join.time
        unit = self.join.unit
        if number:
            outcomes = self.join.kinds.values()
            source = self.join.inputs[number]
            outcome = next(outcome for outcome in outcomes if outcome.source == source)
            column = outcome.time or column
            unit = outcome.unit or unit
        micros = self._micros(rows, column, unit)
        is_known = micros.is_valid().to_numpy(zero_copy_only=False)
        times = micros.to_numpy(zero_copy_only=False)[is_known].astype(np.int64)
        if not len(times):
            return {}
        kind = pa.struct([])
        if PLACE in rows.schema.names:
            kind = rows.schema.field(PLACE).type
        if kind.get_field_index("partition") < 0:
            return {"": int(times.max())}
        filled = pc.fill_null(_whole(rows[PLACE]).field("partition"), -1)
        partitions = filled.to_numpy()[is_known]
        highs: dict[str, int] = {}
        for partition in np.unique(partitions).tolist():
            lane = "" if partition < 0 else str(partition)
            highs[lane] = int(times[partitions == partition].max())
        return highs

    def keys(self, rows: pa.Table, on: Sequence[str], names: Sequence[str]) -> EventKeys:
        """Return the keys of rows.

        Args:
            rows: the rows.
            on: their key columns.
            names: the names of these columns in impressions.

        Raises:
            SchemaError: a key is of another kind than in the events before.
        """
        columns: list[pa.Array] = []
        for column, name in zip(on, names, strict=True):
            values = _whole(rows[column])
            family = family_of(column, values.type)
            if family is not None:
                before = self._families.setdefault(name, family)
                if before != family:
                    raise SchemaError(
                        f"join: the key {name!r} holds {before} on one side, got {family} in "
                        f"column {column!r} of another. Declare one type for both."
                    )
            columns.append(values)
        return keys_of(columns)

    def _micros(self, rows: pa.Table, column: str, unit: str) -> pa.Array:
        zones = self._zones.setdefault((0, column), set())
        return to_microseconds(_whole(rows[column]), unit, zones)

    def _sound(
        self, rows: pa.Table, on: Sequence[str], time: tuple[str, str], source: Input, event: str
    ) -> tuple[pa.Table, np.ndarray]:
        """Return the rows that have keys and a time, and their times; the others are bad rows."""
        column, unit = time
        micros = self._micros(rows, column, unit)
        is_sound = np.ones(rows.num_rows, bool)
        for name in (column, *on):
            values = micros
            if name != column:
                values = _whole(rows[name])
            if values.null_count:
                is_valid = values.is_valid().to_numpy(zero_copy_only=False)
                self._report(rows.filter(pa.array(~is_valid & is_sound)), name, source, event)
                is_sound &= is_valid
        if is_sound.all():
            return rows, micros.to_numpy(zero_copy_only=False)
        mask = pa.array(is_sound)
        return rows.filter(mask), micros.filter(mask).to_numpy(zero_copy_only=False)

    def _report(self, bad: pa.Table, name: str, source: Input, event: str) -> None:
        """Count bad rows, or raise DecodeError if the plan has no `skips`."""
        if not bad.num_rows:
            return
        where = ""
        if PLACE in bad.schema.names:
            where = f", {source.source.words_for(bad[PLACE][0].as_py())}"
        message = f"{event}{where}: column {name!r} of a row holds no key or time"
        if self.plan.skips is None:
            raise DecodeError(
                f"{message}, got {bad[name][0].as_py()!r}. Correct it or use on_error='skip'.",
                column=name,
            )
        self.plan.skips.add("value", message, bad.num_rows)
        self.put_aside(bad, "value")

    def _with_letters(self, keys: pa.Table, rows: pa.Table, label: str) -> pa.Table:
        """Return the keys of outcomes with what their dead letters would say."""
        if self.plan.live is None or PLACE not in rows.schema.names:
            return keys
        payloads = [
            json.dumps({**row, "outcome": label}, default=str, ensure_ascii=False)
            for row in rows.drop_columns([PLACE]).to_pylist()
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
        for row in rows.to_pylist():
            place = row.pop(PLACE)
            letters.append((place, reason, json.dumps(row, default=str, ensure_ascii=False)))
        self.plan.live.dead_letters.add_all(letters)


def _where(rows: pa.Table, where: Mapping[str, Any]) -> pa.Table:
    """Return the rows that have these texts in these columns."""
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
        rows = rows.filter(pc.fill_null(pc.equal(texts, text), False))
    return rows


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        return whole.chunk(0) if whole.num_chunks else pa.array([], column.type)
    return whole
