# SPDX-License-Identifier: Apache-2.0
"""Evict: when it begins, by whose clock, what it leaves for the next steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.errors import ConfigError
from hotbed.training.callbacks import Evict
from hotbed.training.run import Callbacks, Goal, Run

SECOND = 1_000_000
EIGHT_SLICES = 256 * 1250
"""Rows of a table that eight steps sweep, 32 of 256 partitions each."""


class Script:
    """A run by hand: event times, ticks and a clock."""

    def __init__(
        self, evict: Evict, tables: Any = None, journal: Journal | None = None, step: int = 0
    ) -> None:
        table = Spy() if tables is None else None
        self.evict, self.spy = evict, table
        learner = SimpleNamespace(summed=list)
        model = SimpleNamespace(learner=learner, tables={"t": table} if tables is None else tables)
        self.run = Run(model, Goal((), online=True), Callbacks([evict]))
        self.run.counts.step = step
        self.run.clock.journal = journal
        self.wall = 1000.0
        self.run.clock.read = lambda: self.wall
        evict.on_fit_begin(self.run)
        if step:
            evict.load_state({**evict.state(), "step": step})

    def step(self, now: float | None = None, wall: float = 0.0) -> bool:
        """One step at event time `now` (seconds), after the wall clock moved; whether an eviction
        began.
        """
        self.wall += wall
        self.run.counts.step += 1
        if now is not None:
            self.run.counts.now = int(now * SECOND)
        return self._began(self.evict.on_step_end)

    def tick(self, wall: float = 0.0) -> bool:
        self.wall += wall
        return self._began(self.evict.on_idle)

    def _began(self, event: Any) -> bool:
        assert self.spy is not None
        before = len(self.spy.begun)
        event(self.run)
        return len(self.spy.begun) > before


class Spy:
    """The part of a table that Evict uses."""

    evictions = (hb.Ttl(days=1),)
    stats: ClassVar = {"rows": 1}

    def __init__(self) -> None:
        self.stats = {"rows": 1000}
        self.begun: list[int] = []
        self.swept: list[range] = []

    def evict(self, now: int, partitions: range) -> int:
        assert len(partitions) == 0
        self.begun.append(now)
        return 0

    def sweep(self, partitions: range) -> int:
        assert len(self.begun) > 0
        self.swept.append(partitions)
        return 0


def test_steps_alone() -> None:
    script = Script(Evict(step_interval=3))
    assert [script.step(now=100) for _ in range(7)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert script.spy.begun == [100 * SECOND] * 2


def test_seconds_of_event_time_alone() -> None:
    script = Script(Evict(seconds_interval=10))
    assert [script.step(now) for now in (100, 105, 109, 110, 119, 120, 300)] == [
        False,
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    assert not script.tick(wall=1e9)


def test_both_whichever_is_first() -> None:
    script = Script(Evict(step_interval=4, seconds_interval=10))
    began = [script.step(now) for now in (100, 112, 113, 114, 121, 122, 123, 124)]
    assert began == [
        False,
        True,
        False,
        True,
        False,
        False,
        False,
        True,
    ]  # at 124 s by both; the steps restart the seconds


def test_seconds_of_the_wall_clock_also_while_the_stream_is_idle() -> None:
    script = Script(Evict(seconds_interval=60, clock="wall"))
    assert [script.step(now=5, wall=wall) for wall in (1, 40, 20, 30)] == [
        False,
        False,
        True,
        False,
    ]
    assert [script.tick(wall=wall) for wall in (10, 20, 10)] == [False, True, False]
    assert script.spy.begun == [5 * SECOND, 5 * SECOND]


def test_a_clock_that_goes_back_starts_the_interval_anew() -> None:
    script = Script(Evict(seconds_interval=60, clock="wall"))
    assert [script.step(now=5, wall=wall) for wall in (50, -5000, 50, 20)] == [
        False,
        False,
        False,
        True,
    ]


def test_what_the_wall_clock_decided_is_on_record_first_and_decided_again() -> None:
    journal = Journal()
    first = Script(Evict(seconds_interval=60, clock="wall"), journal=journal)
    began = [first.step(now=5, wall=20) for _ in range(7)]
    assert began == [False, False, True, False, False, True, False]
    assert [number for number, _ in journal.after("evict", -1)] == [3, 6]
    # time stands still: the journal decides
    again = Script(Evict(seconds_interval=60, clock="wall"), journal=journal)
    assert [again.step(now=5) for _ in range(7)] == began
    assert not any(again.step(now=5, wall=20) for _ in range(2))
    assert again.step(now=5, wall=20)  # after the record, the clock again


def test_an_eviction_begun_while_idle_comes_again_before_the_next_batch() -> None:
    journal = Journal()
    first = Script(Evict(seconds_interval=60, clock="wall"), journal=journal)
    assert [first.step(now=5), first.step(now=5)] == [False, False]
    state = first.evict.state()  # a checkpoint here, then idle time
    assert first.tick(wall=100)
    again = Script(Evict(seconds_interval=60, clock="wall"), journal=journal, step=2)
    again.evict.load_state(state)
    again.run.counts.now = 5 * SECOND
    assert again._began(again.evict.on_epoch_begin)
    assert not again._began(again.evict.on_epoch_begin)


def test_late_events_keep_their_rows_for_a_while() -> None:
    script = Script(Evict(step_interval=1, lateness_seconds=30))
    script.step(now=100)
    assert script.spy.begun == [70 * SECOND]


def test_a_large_table_is_swept_over_several_steps_once_around() -> None:
    script = Script(Evict(step_interval=1000), step=999)
    script.spy.stats["rows"] = 256 * 10_000  # of 40,000 rows a step
    assert script.step(now=1)
    for _ in range(63):
        assert script.evict.schedule.sweeping
        script.tick()  # idle time sweeps nothing: how far a sweep is follows from the steps
        script.step()
    assert not script.evict.schedule.sweeping
    assert [len(part) for part in script.spy.swept] == [4] * 64
    assert [number for part in script.spy.swept for number in part] == list(range(256))


def test_a_slice_is_bounded_in_rows_whatever_the_tables_are() -> None:
    """Counted, not timed: no step looks at more rows than a slice holds, or than one partition of
    one table does.
    """
    tables = {name: Spy() for name in "abc"}
    for spy, rows in zip(tables.values(), (10_000_000, 1_000, 0), strict=True):
        spy.stats = {"rows": rows}
    script = Script(Evict(step_interval=1000), tables, step=999)
    script.run.counts.step, script.run.counts.now = 1000, 1
    steps = 0
    while script.evict.schedule.sweeping or not steps:
        before = {name: len(spy.swept) for name, spy in tables.items()}
        script.evict.on_step_end(script.run)
        script.run.counts.step += 1
        looked = sum(
            len(part) * (spy.stats["rows"] // 256)
            for name, spy in tables.items()
            for part in spy.swept[before[name] :]
        )
        assert looked <= 40_000
        steps += 1
    assert steps == 256 + 1  # a partition of the large table a step; both small ones in one step
    for spy in tables.values():
        assert [number for part in spy.swept for number in part] == list(range(256))


def test_an_eviction_that_is_due_during_a_sweep_begins_when_the_sweep_is_done() -> None:
    script = Script(Evict(step_interval=5))
    script.spy.stats["rows"] = EIGHT_SLICES
    sweeping = []
    for now in range(1, 31):
        script.step(now)  # 32 partitions a step, 8 steps a sweep
        sweeping.append(script.evict.schedule.sweeping)
    assert script.spy.begun == [at * SECOND for at in (5, 13, 21, 29)]
    assert [at + 1 for at, busy in enumerate(sweeping) if not busy] == [
        1,
        2,
        3,
        4,
        12,
        20,
        28,
    ]  # moments for a checkpoint
    assert script.spy.swept[8:10] == [range(32), range(32, 64)]


def test_what_is_swept_when_follows_from_the_steps_also_after_a_restart() -> None:
    whole = Script(Evict(step_interval=7))
    whole.spy.stats["rows"] = EIGHT_SLICES
    for now in range(1, 40):
        whole.step(now)
    for stop in (7, 8, 12, 15, 16, 20):
        first, second = Script(Evict(step_interval=7)), Script(Evict(step_interval=7), step=stop)
        first.spy.stats["rows"] = EIGHT_SLICES
        for now in range(1, stop + 1):
            first.step(now)
        second.spy.stats["rows"] = 1  # a capture has swept all that is stale
        second.spy.begun, second.spy.swept = list(first.spy.begun), list(first.spy.swept)
        second.evict.load_state(first.evict.state())
        second.evict.on_epoch_begin(second.run)
        assert second.evict.schedule.sweeping == first.evict.schedule.sweeping
        second.run.counts.now = first.run.now
        for now in range(stop + 1, 40):
            second.spy.stats["rows"] = EIGHT_SLICES if not second.evict.schedule.sweeping else 1
            second.step(now)
        assert second.spy.begun == whole.spy.begun
        assert second.spy.swept == whole.spy.swept


@pytest.mark.parametrize("names", ["", "u", "tu"])
def test_a_sweep_under_way_ends_though_other_tables_have_policies(names: str) -> None:
    first = Script(Evict(step_interval=7))
    first.spy.stats["rows"] = EIGHT_SLICES
    for now in range(1, 9):
        first.step(now)
    assert first.evict.schedule.sweeping
    tables: dict[str, Any] = {"t": SimpleNamespace(evictions=(), clock=None, stats={"rows": 5})}
    for name in names:
        tables[name] = Spy()
        tables[name].begun.append(0)
    script = Script(Evict(step_interval=7), tables, step=8)
    script.evict.load_state(first.evict.state())
    script.evict.on_epoch_begin(script.run)
    for step in range(9, 20):
        script.run.counts.step = step
        script.evict.on_step_end(script.run)
    assert not script.evict.schedule.sweeping
    for name in names:
        partitions = [partition for swept in tables[name].swept for partition in swept]
        assert partitions[-256:] == [*range(256)], "the eviction after it is whole"


def test_statistics_stand_still_while_a_sweep_is_under_way() -> None:
    from hotbed.training.watching.readings import statistics

    script = Script(Evict(step_interval=2))
    script.spy.stats = {"rows": 10_000_000, "row_bytes": 5}
    assert [script.step(now=1), script.step()] == [False, True]
    script.spy.stats = {"rows": 7, "row_bytes": 5}
    assert statistics(script.run) == {"t": {"rows": 10_000_000, "row_bytes": 5}}
    other = Script(Evict(step_interval=2), step=2)
    other.evict.load_state(script.evict.state())
    other.evict.on_epoch_begin(other.run)
    assert statistics(other.run) == {"t": {"rows": 10_000_000}}
    other.evict.load_state({**other.evict.state(), "left": 0})
    assert statistics(other.run) == {"t": {"rows": 1000}}


def test_the_end_of_an_epoch_evicts_at_once_but_that_of_a_stream_does_not() -> None:
    script = Script(Evict(step_interval=100))
    script.run.counts.now = 0
    assert not script._began(script.evict.on_epoch_end)
    script.run.goal = Goal(())
    assert script._began(script.evict.on_epoch_end)
    assert not script.evict.schedule.sweeping


def test_thresholds_mean_what_they_say(dataset: Any, network: Any) -> None:
    for off in (None, -1):
        assert not Script(Evict(step_interval=1, seconds_interval=off)).tick(wall=1e9)
    for wrong in (0, -2, -0.5):
        with pytest.raises(ConfigError, match=r"Evict\.seconds_interval: must be above 0"):
            Evict(seconds_interval=wrong)
    with pytest.raises(ConfigError, match=r"Evict\.step_interval"):
        Evict(step_interval=0)
    with pytest.raises(ConfigError, match=r"Evict\.clock"):
        Evict(clock="sun")
    with pytest.raises(ConfigError, match=r"Evict\.lateness_seconds"):
        Evict(lateness_seconds=-1)
    with pytest.raises(ConfigError, match="a stream has no epochs"):
        hb.RecModel(network(), "bce", "adam").online_train(dataset(64), Evict(), progress=False)


def test_its_state_comes_back() -> None:
    script = Script(Evict(step_interval=7, seconds_interval=10))
    for now in (100, 105, 109):
        script.step(now)
    other = Script(Evict(step_interval=7, seconds_interval=10), step=3)
    other.evict.load_state(script.evict.state())
    assert [script.step(now) for now in (110, 111, 112, 113)] == [
        other.step(now) for now in (110, 111, 112, 113)
    ]


@pytest.mark.parametrize("admit", [None, hb.MinCount(2, expire_seconds=500)])
def test_slices_and_ticks_change_no_row(admit: Any) -> None:
    """Training goes on between slices: the table holds what it holds when evicted at once."""

    def life(slice_rows: int, ticks: int) -> list[Any]:
        rng = np.random.default_rng(0)
        table = hb.Table("t", 2, rule=hb.Adagrad(), admit=admit, evict=hb.Ttl(seconds=300))
        script = Script(Evict(seconds_interval=200), {"t": table})
        script.evict.schedule.slice_rows = slice_rows
        for step in range(60):
            ids = rng.integers(0, 500, 200) + step * 5
            slots = table.find_or_insert(ids, (step * 20 + rng.integers(0, 20, 200)) * SECOND)
            table.update(slots, np.ones((200, 2), np.float32))
            script.run.counts.step += 1
            script.run.counts.now = (step * 20 + 19) * SECOND
            script.evict.on_step_end(script.run)
            for _ in range(ticks):
                script.evict.on_idle(script.run)
        assert table.stats["evicted"] > 0
        return [list(table.export()), len(table), list(table.candidates())]

    assert life(10**9, 0) == life(300, 0) == life(60, 1)
