# SPDX-License-Identifier: Apache-2.0
"""Evict: remove stale rows from the tables while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hotbed import checks
from hotbed.config import described
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.training.loop import Run, passed
from hotbed.training.watching.columns import Tables, counters, tables_of

TOPIC = "evict"
SLICE_ROWS = 40_000
"""Rows that an eviction sweeps in one step, but at least one partition of one table."""


@described
class Evict:
    """Remove stale rows from the tables at intervals, by the tables' eviction policies.

    It evicts every `step_interval` steps and every `seconds_interval` seconds, whichever is first,
    and at the end of each epoch of a `fit`.

    A row's age is measured against the newest event time seen less `lateness_seconds`, so a table
    with `Ttl` needs data with a Time column.

    From one step to the next, stale rows are absent for every lookup. Their memory is freed over
    the following steps, about 40,000 rows a step, so that training never pauses for long. An
    eviction that falls due meanwhile begins when that is done. The steps alone determine which rows
    are swept at which step.

    Args:
        step_interval: steps between two evictions; None or -1 = not by steps.
        seconds_interval: seconds between two evictions; None or -1 = not by seconds.
        clock: "data" counts seconds of event time; "wall" counts seconds of this machine's clock.
            Decisions of the wall clock are journalled before they take effect, so that a resumed
            run takes the same ones.
        lateness_seconds: how late an event may be, in seconds.
    """

    def __init__(
        self,
        step_interval: int | None = None,
        seconds_interval: float | None = None,
        clock: Literal["data", "wall"] = "data",
        lateness_seconds: float = 0.0,
    ) -> None:
        checks.one_of("Evict.clock", clock, ("data", "wall"))
        checks.at_least("Evict.lateness_seconds", lateness_seconds, 0, "Give 0 or more seconds.")
        self._steps = _interval("Evict.step_interval", step_interval)
        self._seconds = _interval("Evict.seconds_interval", seconds_interval)
        self._wall = clock == "wall"
        self._lateness = int(lateness_seconds * 1e6)
        self._at: float | None = None  # begin of the interval, by the clock that counts
        self._step = 0
        self._begun = -1
        self._boundary = 0
        self._passed = False  # a multiple of step_interval, while a sweep was under way
        self._left = 0  # partitions still to be swept, of all tables one after another
        self._each: list[int] = []  # rows of a partition, by table, when the eviction began
        self._statistics: Tables = {}  # of the tables, when the eviction began

    def on_fit_begin(self, run: Run) -> None:
        if run.online and self._steps is None and self._seconds is None:
            raise ConfigError(
                "Evict: a stream has no epochs, got neither step_interval nor seconds_interval. "
                "Give one or both."
            )
        self._at = run.clock() if self._wall else None
        self._step = run.step
        self._begun = -1
        self._left = 0
        self._passed = False

    def on_epoch_begin(self, run: Run) -> None:
        run.sweeping = self._left > 0
        run.statistics = self._statistics
        # an eviction that began while the stream was idle, after the checkpoint that was resumed
        if self._on_record(run):
            self._begin(run)

    def on_step_end(self, run: Run) -> None:
        free = not run.sweeping  # between two long sweeps lies a step end that a checkpoint can use
        self._passed = self._passed or passed(run.step, self._step, self._steps)
        self._step = run.step
        if free and (self._passed or self._seconds_due(run)):
            self._begin(run)
        self._sweep(run, SLICE_ROWS)
        if self._on_record(run):  # an eviction that began after this step, on an idle stream
            self._begin(run)

    def on_idle(self, run: Run) -> None:
        if self._wall and not run.sweeping and self._wall_due(run, idle=True):
            self._begin(run)

    def on_epoch_end(self, run: Run) -> None:
        if not run.online:
            self._begin(run)
            self._sweep(run, None)

    def state(self) -> dict[str, Any]:
        return {
            "at": None if self._wall else self._at,
            "step": self._step,
            "begun": self._begun,
            "passed": self._passed,
            "boundary": self._boundary,
            "left": self._left,
            "each": list(self._each),
            "statistics": counters([self._statistics]),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not self._wall:
            self._at = state["at"]
        self._step = state["step"]
        self._begun = state["begun"]
        self._boundary = state["boundary"]
        self._passed = state["passed"]
        self._left = state["left"]
        self._each = list(state["each"])
        self._statistics = tables_of(state["statistics"])[0]

    def _seconds_due(self, run: Run) -> bool:
        return self._wall_due(run) if self._wall else self._data_due(run)

    def _data_due(self, run: Run) -> bool:
        if self._seconds is None or run.now is None:
            return False
        if self._at is None:
            self._at = run.now
        return bool(run.now - self._at >= self._seconds * 1e6)

    def _wall_due(self, run: Run, *, idle: bool = False) -> bool:
        """Return whether the wall clock makes an eviction due at this step.

        A decision in the journal is repeated. A new one is journalled first.
        """
        if self._seconds is None:
            return False
        if run.journal is not None and run.journal.last(TOPIC) >= run.step:
            entry = run.journal.get(TOPIC, run.step)
            return entry is not None and not entry["idle"] and self._begun != run.step
        now = run.clock()
        if self._at is None or now < self._at:  # a clock set back starts the interval anew
            self._at = now
        if now - self._at < self._seconds:
            return False
        if run.journal is not None:
            run.journal.append(TOPIC, run.step, {"now": run.now, "idle": idle})
        return True

    def _on_record(self, run: Run) -> bool:
        """Return whether the journal has an eviction of an idle stream that is to be repeated.

        It began after this step.
        """
        if not self._wall or run.journal is None:
            return False
        entry = run.journal.get(TOPIC, run.step)
        return entry is not None and entry["idle"] and self._begun != run.step

    def _begin(self, run: Run) -> None:
        """Make expired rows absent; this step and those after it sweep them."""
        tables = _evicting(run)
        # counted before rows expire: a count with expired rows among them visits each row
        self._statistics = {name: dict(table.stats) for name, table in run.tables.items()}
        run.statistics = self._statistics
        self._each = [max(1, table.stats["rows"] // PARTITIONS) for table in tables]
        # Lru and Lfu need no clock; 0 moves no watermark back
        self._boundary = 0 if run.now is None else run.now - self._lateness
        for table in tables:
            table.evict(self._boundary, range(0))
        self._left = PARTITIONS * len(tables)
        self._passed = False
        run.sweeping = self._left > 0
        self._at = run.clock() if self._wall else run.now
        self._begun = run.step

    def _sweep(self, run: Run, rows: int | None) -> None:
        """Free the memory of expired rows in the next partitions.

        `rows`: about how many rows to visit; None = sweep all partitions.
        """
        tables = _evicting(run)
        room = rows
        while self._left > 0:
            number, first = divmod(PARTITIONS * len(tables) - self._left, PARTITIONS)
            count = PARTITIONS - first
            if room is not None:
                count = min(count, max(room // self._each[number], 1 if room == rows else 0))
                room -= count * self._each[number]
            if count == 0:
                break
            tables[number].evict(self._boundary, range(first, first + count))
            self._left -= count
        run.sweeping = self._left > 0


def _evicting(run: Run) -> list[Table]:
    return [table for _, table in sorted(run.tables.items()) if table.evictions]


def _interval(name: str, value: Any) -> Any:
    """Return None if the interval is off, else the positive number."""
    if value is None or value == -1:
        return None
    checks.above(name, value, 0, "Give a positive number, or None for off.")
    return value
