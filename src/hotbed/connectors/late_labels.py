# SPDX-License-Identifier: Apache-2.0
"""Labels from later events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from hotbed import checks
from hotbed.connectors.merge import Events, PlaceAfter
from hotbed.connectors.times import LATEST, text_of_time
from hotbed.connectors.types import is_text_or_bytes, present_keys
from hotbed.errors import ConfigError, SchemaError

logger = logging.getLogger("hotbed.connectors")


@dataclass(frozen=True)
class LateLabels:
    """Labels from later events: a view is positive if a purchase with the same keys follows.

    A sample is yielded as soon as its label is known: with the purchase, or when the events have
    passed the end of its window. Samples whose window reaches beyond the last event are left out,
    because their labels are unknown. This is for recorded events; `Join` joins topics and folders.

    Args:
        on: key column or columns, which are equal in a sample and its positive event.
        column: the column that holds the kind of an event.
        event: the kind of the events that become samples.
        positive: the kind of the events that make a sample positive.
        within_seconds: the window: how long after a sample its positive event may follow.
        label: the column to write: 1.0 for a positive event within the window, else 0.0.

    Example:
        >>> keys = ("user_id", "product_id")
        >>> LateLabels(on=keys, column="event_type", event="view", positive="purchase")
    """

    on: str | Sequence[str]
    column: str
    event: str
    positive: str
    within_seconds: float = 1800.0
    label: str = "label"

    def __post_init__(self) -> None:
        if not self.on:
            raise ConfigError(f"late labels: needs key columns, got on={self.on!r}. Name one.")
        object.__setattr__(self, "on", checks.names(self.on))
        checks.seconds("late labels: within_seconds", self.within_seconds, above=0)

    def check_types(self, columns: pa.Schema) -> None:
        """Raise SchemaError if the columns of the events are not of types that can be compared."""
        kind = columns.field(self.column).type
        if not is_text_or_bytes(kind) and not pa.types.is_null(kind):
            raise SchemaError(
                f"late labels: column {self.column!r} must be text, as {self.event!r} is, got "
                f"{kind}. Write the kinds of events as text."
            )
        for name in self.on:
            kind = columns.field(name).type
            if (
                pa.types.is_nested(kind)
                or pa.types.is_interval(kind)
                or pa.types.is_decimal256(kind)
            ):
                raise SchemaError(
                    f"late labels: the key {name!r} must hold single values, got {kind}. Name "
                    "another column."
                )

    def without_key(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.Array, str]]:
        """Yield for each key column which events lack their key, and a message about them."""
        if self.column not in rows.schema.names:
            return
        kinds = present_keys(rows.column(self.column))
        is_event = pc.or_(pc.equal(kinds, self.event), pc.equal(kinds, self.positive))
        is_event = pc.fill_null(is_event, False)
        for name in self.on:
            is_missing: pa.Array = pa.scalar(True)
            if name in rows.schema.names:
                is_missing = present_keys(rows.column(name)).is_null()
            yield pc.and_(is_event, is_missing), f"column {name!r} of an event holds no key"


class LabelJoin:
    """Samples that wait for their labels, and the places from which reading yields them again.

    Events are numbered from the place where reading began, so that the order of the labels does not
    depend on how the events are cut into runs.
    """

    def __init__(self, late: LateLabels, unit: str) -> None:
        self.late = late
        self.unit = unit
        self.window = int(late.within_seconds * 1e6)
        self.waiting: pa.Table | None = None
        self.numbers = np.zeros(0, np.int64)  # of the waiting samples
        self.times = np.zeros(0, np.int64)
        self.num_events = 0
        # number of a run's first event, and the state of the sources before it
        self.starts: deque[tuple[int, Sequence[Any]]] = deque()
        # numbers of the samples that were yielded, back to the first start
        self.emitted = np.zeros(0, np.int64)

    def over(self, runs: Iterable[Events]) -> Iterator[Events]:
        """Yield the samples that each run of events decides; say at the end if there were none."""
        num_samples = 0
        for run in runs:
            samples = self.decided(run)
            num_samples += len(samples.keys)
            yield samples
        if len(self.times) and not num_samples:
            logger.warning(
                "replay: no sample comes of %d events %r, the windows of all reach beyond the last "
                "event, the newest of them is of %s (unit %r). Check the unit and within_seconds",
                len(self.times),
                self.late.event,
                text_of_time(int(self.times.max())),
                self.unit,
            )

    def decided(self, run: Events) -> Events:
        """Return the samples that these events decide, in the order of decision."""
        first = self.num_events
        count = len(run.keys)
        self.starts.append((first, run.before))
        self.num_events += count
        new = self._rows_of(run.table, self.late.event)
        samples = run.table.take(pa.array(new))
        if self.waiting is not None:
            samples = pa.concat_tables([self.waiting, samples])
        numbers = np.concatenate([self.numbers, first + new])
        times = np.concatenate([self.times, run.times[new]])
        # The event that decides a sample: the first past its window, or a cause before that.
        ends = np.searchsorted(run.keys, times + self.window, "right")
        past = np.maximum(first + ends, numbers + 1)
        causes = self._rows_of(run.table, self.late.positive)
        cause = self._next_cause(samples, numbers, run.table.take(pa.array(causes)), first + causes)
        positive = cause < past
        when = np.where(positive, cause, past)
        tie = np.where(positive, 0, times)
        order = np.lexsort((numbers, tie, positive, when))
        order = order[when[order] < first + count]
        still = np.setdiff1d(np.arange(len(numbers)), order)
        decided = samples.take(pa.array(order))
        table = self._labelled(decided, positive[order])
        self.waiting = samples.take(pa.array(still))
        self.numbers = numbers[still]
        self.times = times[still]
        place = self._places(numbers[order], run)
        return Events(
            table, run.keys[when[order] - first], times[order], run.before, run.after, place
        )

    def _labelled(self, samples: pa.Table, positive: np.ndarray) -> pa.Table:
        """Return the samples with their labels, which replace a column of that name."""
        if self.late.label in samples.schema.names:
            samples = samples.drop_columns([self.late.label])
        labels = pa.array(positive.astype(np.float64))
        return samples.append_column(self.late.label, labels)

    def _rows_of(self, table: pa.Table, kind: str) -> np.ndarray:
        """Return the row numbers of the events of a kind."""
        equal = pc.equal(table[self.late.column], kind)
        matches = pc.fill_null(equal, False)
        return np.flatnonzero(matches.to_numpy())

    def _next_cause(
        self, samples: pa.Table, numbers: np.ndarray, causes: pa.Table, cause_numbers: np.ndarray
    ) -> np.ndarray:
        """Return the number of the next positive event with the same keys after each sample.

        Samples without one get the largest int64.
        """
        keys = list(self.late.on)
        left = pl.DataFrame(samples.select(keys))
        rows = pl.int_range(pl.len())
        left = left.with_columns(event=pl.Series(numbers), row=rows)
        right = pl.DataFrame(causes.select(keys))
        events = pl.Series(cause_numbers)
        right = right.with_columns(event=events, cause=events).drop_nulls()
        joined = left.sort("event").join_asof(
            right,
            on="event",
            by=keys,
            strategy="forward",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        next_causes = joined.sort("row")["cause"]
        return np.asarray(next_causes.fill_null(LATEST).to_numpy())

    def _places(self, done: np.ndarray, run: Events) -> PlaceAfter:
        """Return a function that gives the position after each sample of a run.

        A position holds the state to resume reading from, and how many samples come again from
        there.

        Args:
            done: numbers of the samples that the run decides, in the order of decision.
            run: the run.
        """
        history = self.emitted
        starts = list(self.starts)
        events = self.num_events
        after = run.after
        waiting = self.numbers.min(initial=events)
        from_last = np.append(done, waiting)[::-1]
        oldest = np.minimum.accumulate(from_last)[::-1]

        def place(row: int) -> dict[str, Any]:
            if oldest[row] == events:
                return {"at": after, "emitted": 0}
            number, state = next(start for start in reversed(starts) if start[0] <= oldest[row])
            repeated = np.count_nonzero(history >= number)
            repeated += np.count_nonzero(done[:row] >= number)
            return {"at": state, "emitted": int(repeated)}

        while len(self.starts) > 1:
            second, _ = self.starts[1]
            if second > waiting:
                break
            self.starts.popleft()
        emitted = np.concatenate([history, done])
        oldest_start, _ = self.starts[0]
        self.emitted = emitted[emitted >= oldest_start]
        return place
