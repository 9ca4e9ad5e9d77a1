# SPDX-License-Identifier: Apache-2.0
"""Remove stale rows from tables during training: in `RecModel`, or in a loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from hotbed import checks
from hotbed.config import described
from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.training.columns import Tables, counters, tables_of
from hotbed.training.run import Run, WallClock, passed

__all__ = ["EvictionSchedule"]

TOPIC = "evict"

Clock = Literal["data", "wall"]
T = TypeVar("T")


class EvictionSchedule:
    """Evicts from tables at intervals, in a loop of your own; `Evict` does so in `RecModel`.

    From one step to the next, stale rows are absent for every lookup. Their memory is freed over
    the following steps, about 40,000 rows a step, so that training never pauses for long. An
    eviction that falls due meanwhile begins when that is done. The steps alone determine which rows
    are swept at which step.

    Args:
        tables: by name; those where neither rows nor candidates go are left alone.
        step_interval: steps between two evictions; None or -1 = not by steps.
        seconds_interval: seconds between two evictions; None or -1 = not by seconds.
        clock: "data" counts seconds of event time; "wall" counts seconds of this machine's clock.
        lateness_seconds: how late an event may be, in seconds.
        wall_clock: the clock of this machine, with the journal of its decisions. None = without a
            journal.
        slice_rows: rows to sweep in one step, but at least one partition of one table.

    Attributes:
        summed: returns the statistics of tables at some moments, added over all ranks.

    Raises:
        ConfigError: an interval is not above 0, or another argument is out of range.

    Example:
        >>> schedule = EvictionSchedule({"user": table}, step_interval=1000)
        >>> for step, batch in enumerate(batches, start=1):
        ...     learn(batch)
        ...     schedule.step(step, newest_event_time)
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        step_interval: int | None = None,
        seconds_interval: float | None = None,
        clock: Clock = "data",
        lateness_seconds: float = 0.0,
        wall_clock: WallClock | None = None,
        slice_rows: int = 40_000,
    ) -> None:
        _check("EvictionSchedule", step_interval, seconds_interval, clock, lateness_seconds)
        self.tables = tables
        self.slice_rows = slice_rows
        self.summed: Callable[[Sequence[Tables]], Sequence[Tables]] = list
        # a table without evictions may still have candidates that expire
        evicting = {name: table for name, table in tables.items() if table.evictions or table.clock}
        self._evicting = dict(sorted(evicting.items()))
        self._steps = _interval(step_interval)
        self._seconds = _interval(seconds_interval)
        self._by_wall = clock == "wall"
        self._lateness = int(lateness_seconds * 1e6)
        self._clock = wall_clock or WallClock()
        self._at: float | None = None  # begin of the interval, by the clock that counts
        if self._by_wall:
            self._at = self._clock()
        self._step = 0
        self._begun = -1
        self._cleared = -1  # the last step that batches may be mapped beyond, by `barrier`
        self._passed = False  # a multiple of step_interval, while a sweep was under way
        self._left = 0  # partitions still to be swept, of all tables one after another
        self._each: list[int] = []  # rows of a partition, by table, when the eviction began
        self._statistics: Tables = {}  # of the tables, when the eviction began

    @property
    def sweeping(self) -> bool:
        """Whether an eviction is under way: memory of expired rows is still to be freed."""
        return self._left > 0

    @property
    def statistics(self) -> Tables:
        """Statistics of the tables when the last eviction began."""
        return self._statistics

    def step(self, step: int, now: int | None) -> None:
        """Begin an eviction if one is due after this step, and sweep a part of one under way.

        Args:
            step: number of the step, counted from 1 over all resumptions.
            now: the newest event time so far, in microseconds; None without times.
        """
        # between two long sweeps lies a step end that a checkpoint can use
        is_free = not self.sweeping
        self._passed = self._passed or passed(step, self._step, self._steps)
        self._step = step
        if is_free and (self._passed or self._seconds_due(step, now)):
            self._begin(step, now)
        self._sweep(self.slice_rows)
        self.repeat(step, now)

    def barrier(self, step: int, now: int | None) -> bool:
        """Return whether `step(step, now)` will evict, so that no later batch is mapped before it.

        It may be asked before the step, once, with rising steps; `now` is then the newest event
        time up to that step. A decision of the wall clock is taken here, and journalled.
        """
        due = (
            self.sweeping
            or passed(step, self._step, self._steps)
            or self._decision(step) is not None
            or self._seconds_due(step, now)
        )
        if not due:
            self._cleared = step
        return due

    def repeat(self, step: int, now: int | None) -> None:
        """Begin an eviction that the journal holds after this step: it began while a stream idled.

        Call it after a resumption, before the first step.
        """
        entry = self._decision(step)
        if entry is not None and entry["idle"] and self._begun != step:
            self._begin(step, now)

    def idle(self, step: int, now: int | None) -> None:
        """Begin an eviction if the wall clock makes one due while there is nothing to learn."""
        if self._by_wall and not self.sweeping and self._wall_due(step, now, idle=True):
            self._begin(step, now)

    def evict(self, step: int, now: int | None) -> None:
        """Evict at once, whether or not it is due."""
        self._begin(step, now)
        self._sweep(None)

    def state(self) -> dict[str, Any]:
        """Return what a resumed schedule needs, as plain values and NumPy arrays."""
        return {
            "at": None if self._by_wall else self._at,
            "step": self._step,
            "begun": self._begun,
            "passed": self._passed,
            "left": self._left,
            "each": list(self._each),
            "statistics": counters(self.summed([self._statistics])),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if not self._by_wall:
            self._at = state["at"]
        self._step = state["step"]
        self._begun = state["begun"]
        self._passed = state["passed"]
        self._left = state["left"]
        self._each = list(state["each"])
        if len(self._each) != len(self._evicting):  # by tables with other policies
            self._left = 0
        self._statistics = tables_of(state["statistics"])[0]
        if not self._clock.shard.is_first:  # whose counts are those of all
            for counts in self._statistics.values():
                counts.update(dict.fromkeys(counts, 0))

    def _seconds_due(self, step: int, now: int | None) -> bool:
        if self._by_wall:
            return self._wall_due(step, now, idle=False)
        if self._seconds is None or now is None:
            return False
        if self._at is None:
            self._at = now
        return bool(now - self._at >= self._seconds * 1e6)

    def _wall_due(self, step: int, now: int | None, *, idle: bool) -> bool:
        """Return whether the wall clock makes an eviction due at this step.

        A decision in the journal is repeated. A new one is journalled first.
        """
        interval = self._seconds
        if interval is None:
            return False

        def propose() -> Mapping[str, Any] | None:
            if step <= self._cleared and not idle:
                return None  # batches after this step may be mapped already
            seconds = self._clock()
            if self._at is None or seconds < self._at:  # a clock set back starts the interval anew
                self._at = seconds
            return {"now": now, "idle": idle} if seconds - self._at >= interval else None

        decision = self._clock.decide(TOPIC, step, propose)
        return decision is not None and decision["idle"] == idle and self._begun != step

    def _decision(self, step: int) -> Mapping[str, Any] | None:
        """Return the decision of the wall clock at this step that the journal holds."""
        return self._clock.decided(TOPIC, step) if self._by_wall else None

    def _begin(self, step: int, now: int | None) -> None:
        """Make expired rows absent; this step and those after it sweep them."""
        # counted before rows expire: a count with expired rows among them visits each row
        self._statistics = {name: dict(table.stats) for name, table in self.tables.items()}
        (every,) = self.summed([self._statistics])
        self._each = [max(1, every[name]["rows"] // PARTITIONS) for name in self._evicting]
        boundary = 0  # Lru and Lfu need no clock; 0 moves no watermark back
        if now is not None:
            boundary = now - self._lateness
        for table in self._evicting.values():
            table.evict(boundary, range(0))
        self._left = PARTITIONS * len(self._evicting)
        self._passed = False
        self._at = now
        if self._by_wall:
            self._at = self._clock()
        self._begun = step

    def _sweep(self, num_rows: int | None) -> None:
        """Free the memory of expired rows in the next partitions.

        `num_rows`: about how many rows to visit; None = sweep all partitions.
        """
        room = num_rows
        tables = list(self._evicting.values())
        while self._left > 0:
            swept = PARTITIONS * len(self._evicting) - self._left
            number, first = divmod(swept, PARTITIONS)
            count = PARTITIONS - first
            if room is not None:
                least = 1 if room == num_rows else 0  # one partition, however large it is
                count = min(count, max(room // self._each[number], least))
                room -= count * self._each[number]
            if count == 0:
                break
            tables[number].sweep(range(first, first + count))
            self._left -= count


@described
class Evict:
    """Remove stale rows from the tables at intervals, by the tables' eviction policies.

    It evicts every `step_interval` steps and every `seconds_interval` seconds, whichever is first,
    and at the end of each epoch of a `fit`.

    A row's age is measured against the newest event time seen less `lateness_seconds`, so a table
    with `Ttl` in seconds, hours or days needs data with a Time column. With `Ttl(steps=)`, it is
    measured against the steps of the table.

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
        clock: Clock = "data",
        lateness_seconds: float = 0.0,
    ) -> None:
        _check("Evict", step_interval, seconds_interval, clock, lateness_seconds)
        self._steps = step_interval
        self._seconds = seconds_interval
        self._clock: Clock = clock
        self._lateness = lateness_seconds
        self.schedule = self._schedule({}, None)

    def on_fit_begin(self, run: Run) -> None:
        if run.online and _interval(self._steps) is None and _interval(self._seconds) is None:
            raise ConfigError(
                "Evict: a stream has no epochs, got neither step_interval nor seconds_interval. "
                "Give one or both."
            )
        self.schedule = self._schedule(run.tables, run.clock)
        self.schedule.summed = run.learner.summed

    def on_epoch_begin(self, run: Run) -> None:
        self.schedule.repeat(run.step, run.now)

    def barrier(self, step: int, now: int | None) -> bool:
        return self.schedule.barrier(step, now)

    def on_step_end(self, run: Run) -> None:
        self.schedule.step(run.step, run.now)

    def on_idle(self, run: Run) -> None:
        self.schedule.idle(run.step, run.now)

    def on_epoch_end(self, run: Run) -> None:
        if not run.online:
            self.schedule.evict(run.step, run.now)

    def state(self) -> dict[str, Any]:
        return self.schedule.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state(state)

    def _schedule(self, tables: Mapping[str, Table], clock: WallClock | None) -> EvictionSchedule:
        return EvictionSchedule(
            tables, self._steps, self._seconds, self._clock, self._lateness, wall_clock=clock
        )


def sweeping(run: Run) -> EvictionSchedule | None:
    """Return the schedule whose eviction is under way in a run; None outside evictions."""
    for callback in run.callbacks.of(Evict):
        if callback.schedule.sweeping:
            return callback.schedule
    return None


def _check(owner: str, steps: Any, seconds: Any, clock: str, lateness_seconds: float) -> None:
    """Raise ConfigError if an argument of `owner` is out of range."""
    checks.one_of(f"{owner}.clock", clock, ("data", "wall"))
    checks.seconds(f"{owner}.lateness_seconds", lateness_seconds, least=0)
    for name, interval in (("step_interval", steps), ("seconds_interval", seconds)):
        if interval != -1:
            advice = "Give a positive number, or None for off."
            checks.above(f"{owner}.{name}", interval, 0, advice)


def _interval(value: T | None) -> T | None:
    """Return the interval; None if it is off."""
    return None if value == -1 else value
