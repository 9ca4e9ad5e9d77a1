# SPDX-License-Identifier: Apache-2.0
"""Batches whose ids are mapped ahead give the same bits, and nothing is mapped beyond a barrier."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from on_disk import on_disk
from schedule import in_soak
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.embedding.lookups import Feature
from hotbed.embedding.modules.base import table_modules
from hotbed.embedding.modules.state import dense_state
from hotbed.errors import TableFull
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest
from hotbed.training.ahead import Ahead
from hotbed.training.callbacks import Checkpoint, EarlyStopping, Evict, Validate, Windows
from hotbed.training.decisions.eviction_schedule import EvictionSchedule
from hotbed.training.run import Callbacks, Goal, Run
from hotbed.training.step.learner import StepLearner

STEPS = 28
ROWS = 64 * STEPS


class Declared:
    """A callback that declares no barrier, and records how many batches are mapped ahead."""

    def __init__(self) -> None:
        self.ahead: dict[int, int] = {}

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        self.ahead[run.step] = run.ahead


def everything(model: hb.RecModel) -> dict[str, Any]:
    """Every bit that training may change, policies included."""
    bits: dict[str, Any] = {
        name: tensor.numpy().tobytes() for name, tensor in dense_state(model.network).items()
    }
    assert model.learner.dense is not None
    for number, entries in model.learner.dense.state_dict()["state"].items():
        for key, value in entries.items():
            bits[f"optimizer/{number}/{key}"] = torch.as_tensor(value).numpy().tobytes()
    for name, table in model.tables.items():
        bits[name] = contents(table)
    return bits


def contents(table: hb.Table) -> Any:
    """The rows of a table, the ids that wait for one, and its counters."""
    rows = bits_of(table.export())
    candidates = bits_of(table.candidates())
    return rows, candidates, table.scalars(), counts(table.stats)


def counts(stats: Mapping[str, int]) -> dict[str, int]:
    """Statistics of a table that do not depend on the machine."""
    return {key: value for key, value in stats.items() if "bytes" not in key}


POLICIES: dict[str, dict[str, Any]] = {
    **{
        rule.__name__: {"rule": rule(lr=0.05)}
        for rule in (
            hb.Sgd,
            hb.Momentum,
            hb.Nesterov,
            hb.Adagrad,
            hb.RowwiseAdagrad,
            hb.RmsProp,
            hb.Adam,
            hb.Ftrl,
        )
    },
    "Adam, all rows": {"rule": hb.Adam(lr=0.05, scope="all")},
    "Adam, caught up": {"rule": hb.Adam(lr=0.05, scope="catch_up")},
    "Nesterov, caught up, bfloat16": {
        "rule": hb.Nesterov(lr=0.05, scope="catch_up"),
        "dtype": "bfloat16",
    },
    "RmsProp, all rows, age, admission": {
        "rule": hb.RmsProp(lr=0.05, scope="all"),
        "evict": hb.Ttl(seconds=64 * 5),
        "admit": hb.MinCount(2),
    },
    "Adagrad, caught up": {"rule": hb.Adagrad(lr=0.05, scope="catch_up")},
    "bfloat16": {"dtype": "bfloat16"},
    "admission by count": {"admit": hb.MinCount(3)},
    "admission by chance": {"admit": hb.Probability(0.3)},
    "age": {"evict": hb.Ttl(seconds=64 * 5)},
    "age, admission": {"evict": hb.Ttl(seconds=64 * 5), "admit": hb.MinCount(2)},
    "recency": {"evict": hb.Lru(1024)},
    "frequency": {"evict": hb.Lfu(1024)},
    "frequency, ageing, admission": {
        "evict": hb.Lfu(1024, half_life_seconds=600),
        "admit": hb.MinCount(2),
    },
}


LEAVES = [
    "Adagrad",
    "bfloat16",
    "admission by count",
    "admission by chance",
    "age, admission",
    "recency",
    "frequency, ageing, admission",
]
QUICK_LEAVES = {
    "bfloat16",
    "admission by chance",
    "age, admission",
    "recency",
    "frequency, ageing, admission",
}
QUICK = {
    "Ftrl",
    "Adagrad",
    "Adam, all rows",
    "Nesterov, caught up, bfloat16",
    "RmsProp, all rows, age, admission",
    "admission by chance",
    "recency",
    "frequency, ageing, admission",
}
"""Policies that each run of the suite maps ahead: each value once; `make soak` has the others."""


@pytest.fixture
def many(world: Any) -> Callable[[], hb.Dataset]:
    """many(): STEPS batches of events, some of them late, with more ids than a table may keep."""

    def make() -> hb.Dataset:
        columns = world.columns(ROWS)
        random = np.random.default_rng(5)
        columns["user"] = np.minimum(*random.integers(0, 4000, (2, ROWS)))
        columns["t"] = columns["t"] - random.integers(0, 400, ROWS) + 1000
        return hb.Dataset(hb.sources.Memory(columns), world.schema, 64, prefetch=0)

    return make


@pytest.fixture
def learned(many: Any, network: Any) -> Callable[..., Any]:
    """learned(depth, policies, epochs): a trained model's state, and what `Declared` saw."""

    def learn(depth: int, policies: dict[str, Any], epochs: int = 2) -> Any:
        model = hb.RecModel(network(**policies), "bce", "adam")
        watch = Declared()
        callbacks = [Evict(step_interval=17, seconds_interval=64 * 9), watch]
        model.fit(Ahead(many(), depth=depth), epochs=epochs, callbacks=callbacks, progress=False)
        return everything(model), watch

    return learn


@pytest.mark.parametrize("name", in_soak(POLICIES, QUICK))
def test_mapping_ahead_gives_the_bits_of_mapping_in_the_step(learned: Any, name: str) -> None:
    alone, none = learned(0, POLICIES[name])
    ahead, some = learned(3, POLICIES[name])
    assert alone == ahead
    assert not any(none.ahead.values())
    assert sum(some.ahead.values()) > STEPS / 2
    for step in (17, 34, 2 * STEPS):
        assert some.ahead[step] == 0, "a barrier was passed"


def test_threads_of_the_core_change_no_bit(learned: Any) -> None:
    states = []
    for threads in (1, 4):
        hb.set_num_threads(threads)
        states.append(learned(2, POLICIES["recency"])[0])
    hb.set_num_threads(2)
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("policies", "reason"),
    [
        ({"rule": hb.Adam(l2=0.1, scope="catch_up")}, "the rule of table 'user' decays rows"),
        ({"rule": hb.Adam(decay=0.1, scope="all")}, "the rule of table 'user' decays rows"),
        ({"rule": hb.Ftrl(scope="catch_up")}, "the rule of table 'user' decays rows"),
        (
            {"rule": hb.Momentum(scope="catch_up"), "evict": hb.Lru(1024)},
            "the rule of table 'user' has the scope 'catch_up'",
        ),
        ({"evict": hb.Ttl(steps=3)}, "the policies of table 'user' count its steps"),
        ({"admit": hb.MinCount(2, expire_steps=3)}, "the policies of table 'user' count its steps"),
    ],
)
def test_tables_whose_maps_depend_on_updates_are_not_mapped_ahead(
    learned: Any, policies: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone, _ = learned(0, policies, epochs=1)
    with caplog.at_level(logging.INFO, "hotbed"):
        ahead, watch = learned(2, policies, epochs=1)
    assert alone == ahead
    assert not any(watch.ahead.values())
    assert f"no batch is mapped ahead: {reason}" in caplog.text


def test_a_network_that_may_look_up_anything_is_not_mapped_ahead(
    dataset: Any, network: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, batch: Any) -> Any:
            return self.inner(batch)

    watch = Declared()
    with caplog.at_level(logging.INFO, "hotbed"):
        hb.RecModel(Own(), "bce", "adam").fit(
            Ahead(dataset(640)), callbacks=[watch], progress=False
        )
    assert not any(watch.ahead.values())
    assert "no batch is mapped ahead: the network is not one of hb.models" in caplog.text


# --- barriers -------------------------------------------------------------------------------------


class Undeclared:
    def __init__(self) -> None:
        self.ahead: list[int] = []

    def on_step_end(self, run: Run) -> None:
        self.ahead.append(run.ahead)


class Inherits(Declared):
    """Defines a method anew: what it inherits as `barrier` does not know this method."""

    def on_gradients(self, run: Run) -> None:
        self.ahead[run.step] = run.ahead


class Epochs:
    """Acts where nothing can be ahead."""

    def on_epoch_end(self, run: Run) -> None: ...


def test_barriers_are_those_of_the_callbacks_and_of_all_steps_where_one_declares_none() -> None:
    assert Callbacks([Undeclared()]).barrier(1, None)
    assert Callbacks([Declared(), Undeclared()]).barrier(1, None)
    assert Callbacks([Inherits()]).barrier(1, None)
    assert not Callbacks([Declared(), Epochs(), EarlyStopping()]).barrier(1, None)
    every = Callbacks([Declared(), Validate(every_steps=5)])
    assert [step for step in range(1, 12) if every.barrier(step, None)] == [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("callback", [Undeclared, Inherits])
def test_a_callback_that_declares_nothing_never_sees_tables_ahead(
    many: Any, network: Any, callback: Any
) -> None:
    watch = callback()
    model = hb.RecModel(network(), "bce", "adam")
    model.fit(Ahead(many(), depth=3), callbacks=[watch], progress=False)
    seen = watch.ahead.values() if isinstance(watch, Declared) else watch.ahead
    assert len(seen) >= STEPS
    assert not any(seen)


@pytest.mark.parametrize("progressive", [True, False, "training"])
def test_scoring_before_learning_sees_tables_as_they_were(
    many: Any, network: Any, progressive: Any
) -> None:
    results = []
    for depth in (0, 3):
        model = hb.RecModel(network(admit=hb.MinCount(2)), "bce", "adam", metrics={"auc"})
        watch = Declared()
        windows = Windows(seconds=64 * 7)
        history = model.online_train(
            Ahead(many(), depth=depth), [windows, watch], progressive=progressive, progress=False
        )
        tables = [list(map(counts, window.tables.values())) for window in windows.points]
        results.append((everything(model), dict(history.metrics), tables))
        assert any(watch.ahead.values()) == (depth > 0 and progressive is not True)
    assert results[0] == results[1]


def test_validation_and_history_see_the_tables_of_their_step(
    dataset: Any, many: Any, network: Any
) -> None:
    results = []
    for depth in (0, 3):
        model = hb.RecModel(network(evict=hb.Lru(1024)), "bce", "adam", metrics={"auc"})
        callbacks = [Validate(every_steps=7), EarlyStopping("auc", patience=3), Declared()]
        history = model.fit(
            Ahead(many(), depth=depth),
            dataset(640, 1),
            epochs=2,
            callbacks=callbacks,
            progress=False,
        )
        tables = [list(map(counts, point.tables.values())) for point in history.points]
        results.append((everything(model), dict(history.metrics), tables))
    assert results[0] == results[1]


# --- the end of a run -----------------------------------------------------------------------------


def test_nothing_is_mapped_beyond_max_steps(many: Any, network: Any) -> None:
    states = []
    for depth in (0, 3):
        model = hb.RecModel(network(), "bce", "adam")
        model.fit(Ahead(many(), depth=depth), max_steps=21, progress=False)
        assert model.counters["steps"] == 21
        states.append(everything(model))
    assert states[0] == states[1]


class StopsAt(Declared):
    """Stops in the middle, where batches are mapped ahead."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.stopped: dict[int, str] = {}

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        super().on_step_end(run)
        if run.step >= self.step and run.ahead:
            run.stop("a test")
        self.stopped[run.step] = run.stopped


def test_a_stop_takes_effect_when_the_mapped_batches_are_learned(
    many: Any, network: Any, tmp_path: Path
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    stops = StopsAt(15)
    callbacks = [stops, Checkpoint(tmp_path / "ahead", every_steps=10)]
    model.online_train(Ahead(many(), depth=3), callbacks, progressive=False, progress=False)
    steps = model.counters["steps"]
    assert 15 < steps < STEPS - 5
    assert stops.ahead[steps] == 0
    assert {step for step, reason in stops.stopped.items() if reason} == {steps}

    alone = hb.RecModel(network(), "bce", "adam")
    alone.online_train(many(), max_steps=steps, progressive=False, progress=False)
    assert everything(model) == everything(alone)
    saved = hb.RecModel(network(), "bce", "adam").restore(tmp_path / "ahead")
    assert saved.counters["steps"] == steps
    assert everything(saved) == everything(alone)


class Fails(Declared):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        if run.step >= self.step and run.ahead:
            raise RuntimeError("a test")


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_a_run_that_failed_ahead_of_a_barrier_resumes_to_the_bits_of_an_unbroken_one(
    many: Any, network: Any, tmp_path: Path, depth: int
) -> None:
    policies = {"admit": hb.MinCount(2), "evict": hb.Lru(1024)}

    def run(folder: Path, depth: int, *more: Any) -> hb.RecModel:
        model = hb.RecModel(network(**policies), "bce", "adam")
        callbacks = [*more, Evict(step_interval=9), Checkpoint(folder, every_steps=8, wait=True)]
        data = Ahead(many(), depth=depth)
        model.fit(data, epochs=2, callbacks=callbacks, progress=False)
        return model

    with pytest.raises(RuntimeError, match="a test"):
        run(tmp_path / "broken", 3, Fails(33))
    saved = open_checkpoint(tmp_path / "broken").progress["run"]["step"]
    assert saved == 32, "a batch that is mapped and not learned is in no state"
    resumed = run(tmp_path / "broken", depth, Declared())
    whole = run(tmp_path / "whole", 0)
    assert resumed.counters == whole.counters
    assert everything(resumed) == everything(whole)


def test_an_interrupt_while_batches_are_ahead_leaves_something_half_done() -> None:
    run = Run(None, Goal(()))  # type: ignore[arg-type]
    run.stage = SimpleNamespace(ahead=1)  # type: ignore[assignment]
    run.fail(KeyboardInterrupt())
    assert run.ending is not None
    assert not run.ending.whole


@pytest.mark.parametrize("fault", ["ids", "reading"])
def test_an_error_comes_at_the_turn_of_its_batch(many: Any, network: Any, fault: str) -> None:
    def batches() -> Iterator[hb.Batch]:
        for number, batch in enumerate(many()):
            if number == 20 and fault == "reading":
                raise OSError("cannot read")
            if number == 20:
                ids = {**batch.ids, "item": hb.Ids(np.zeros(3))}
                yield replace(batch, ids=ids)
            else:
                yield batch

    states = []
    for depth in (0, 3):
        model = hb.RecModel(network(), "bce", "adam")
        with pytest.raises((OSError, hb.errors.HotbedError)) as caught:
            model.online_train(Ahead(batches(), depth=depth), progressive=False, progress=False)
        states.append((everything(model), str(caught.value), model.counters["steps"]))
    assert states[0] == states[1]
    assert states[0][2] == 20


def test_ticks_are_barriers(many: Any, network: Any) -> None:
    class Ticking:
        """Data whose source has nothing new for a while after every fifth batch."""

        def stream(self) -> Iterator[hb.Batch | None]:
            for number, batch in enumerate(many()):
                yield batch
                if number % 5 == 4:
                    while number + 1 not in idle.ahead:
                        time.sleep(0.001)
                    yield None

        def __iter__(self) -> Any:
            raise NotImplementedError

    class Idle(Declared):
        def on_idle(self, run: Run) -> None:
            assert run.ahead == 0
            self.ahead[run.step] = -1

    idle = Idle()
    model = hb.RecModel(network(), "bce", "adam")
    model.online_train(Ahead(Ticking()), [idle], progressive=False, progress=False)
    assert [step for step, ahead in idle.ahead.items() if ahead == -1] == list(
        range(5, STEPS + 1, 5)
    )
    assert any(ahead > 0 for ahead in idle.ahead.values())


# --- barriers of the clock ------------------------------------------------------------------------


class Clock:
    """A clock that runs while a run looks at it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.3
        return self.seconds


class UsesClock:
    """Gives a run its clock and journal before other callbacks look at them."""

    def __init__(self, clock: Any, journal: Journal) -> None:
        self.clock = clock
        self.journal = journal

    def on_fit_begin(self, run: Run) -> None:
        run.clock.read = self.clock
        run.clock.journal = self.journal


def test_evictions_by_the_clock_are_repeated_from_the_journal(
    many: Any, network: Any, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal")

    def run(depth: int, clock: Any) -> tuple[Any, Declared]:
        watch = Declared()
        model = hb.RecModel(network(evict=hb.Ttl(seconds=64 * 4)), "bce", "adam")
        callbacks = [UsesClock(clock, journal), Evict(seconds_interval=4, clock="wall"), watch]
        data = Ahead(many(), depth=depth)
        model.online_train(data, callbacks, progressive=False, progress=False)
        return everything(model), watch

    ahead, watch = run(3, Clock())
    decided = [step for step, _ in journal.after("evict", -1)]
    assert 2 <= len(decided) < STEPS / 2
    assert all(watch.ahead.get(step, 0) == 0 for step in decided)
    assert any(watch.ahead.values())
    replayed, _ = run(0, lambda: 0.0)
    assert [step for step, _ in journal.after("evict", -1)] == decided
    assert ahead == replayed
    journal.close()


def test_a_checkpoint_by_the_clock_holds_no_batch_that_is_not_learned(
    many: Any, network: Any, tmp_path: Path
) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    clock = UsesClock(Clock(), Journal())
    saves: list[int] = []

    class Saves(Checkpoint):
        def barrier(self, step: int, now: int | None) -> bool:
            return super().barrier(step, now)

        def on_step_end(self, run: Run) -> None:
            super().on_step_end(run)
            saves.append(run.step)

        def _save(self, run: Run) -> None:
            assert run.ahead == 0
            super()._save(run)
            if run.step:
                raise KeyboardInterrupt

        def on_error(self, run: Run) -> None: ...

    checkpoint = Saves(tmp_path / "model", every_seconds=5)
    with pytest.raises(KeyboardInterrupt):
        model.fit(Ahead(many()), callbacks=[clock, checkpoint], progress=False)
    saved = hb.RecModel(network(), "bce", "adam").restore(tmp_path / "model")
    steps = saved.counters["steps"]
    assert 0 < steps < STEPS
    alone = hb.RecModel(network(), "bce", "adam")
    alone.fit(many(), max_steps=steps, progress=False)
    assert everything(saved) == everything(alone)


# --- the end before the data's ---------------------------------------------------------------------


class Leaves:
    """A callback that ends a fit in one of the ways in which a fit may end."""

    def __init__(self, way: str, steps: int) -> None:
        self.way = way
        self.steps = steps

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_begin(self, run: Run) -> None:
        if self.way == "error before a step" and run.step == self.steps:
            raise RuntimeError("left")

    def on_step_end(self, run: Run) -> None:
        if run.step == self.steps and self.way == "error":
            raise RuntimeError("left")
        if run.step == self.steps and self.way == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)


def leave(model: hb.RecModel, way: str, steps: int, data: Any) -> None:
    """Learn `steps` batches ahead, and leave the loop in a way."""
    if way.startswith("break"):
        depth = 0 if way.endswith("not ahead") else 3
        is_barrier = way.endswith("in its turn")
        batches = Ahead(data, model.network, depth, barrier=lambda step, now: is_barrier)
        for number, batch in enumerate(batches):
            if way.startswith("break before a batch") and number == steps:
                break
            model.step(batch)
            if way == "break" and number == steps - 1:
                break
        return
    # a process that was started in the background ignores interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        model.fit(Ahead(data, depth=3), callbacks=[Leaves(way, steps)], progress=False)
    signal.signal(signal.SIGINT, before)


BEFORE_A_BATCH = (
    "break before a batch",
    "break before a batch that was mapped in its turn",
    "break before a batch that was not ahead",
)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            pytest.param(name, "error", marks=[] if name in QUICK_LEAVES else pytest.mark.soak)
            for name in LEAVES
        ),
        *(
            ("frequency, ageing, admission", way)
            for way in ("error before a step", "interrupt", "break", *BEFORE_A_BATCH)
        ),
    ],
)
def test_left_loop_holds_what_was_learned_and_no_more(
    many: Any, network: Any, tmp_path: Path, name: str, way: str
) -> None:
    """Compared with a model that learned these batches without Ahead; and so is what follows."""
    steps = 12 + len(name) % 5
    batches = list(many())
    alone, left = (hb.RecModel(network(**POLICIES[name]), "bce", "adam") for _ in range(2))
    for batch in batches[:steps]:
        alone.step(batch)
    leave(left, way, steps, many())
    assert left.counters["steps"] == steps
    learned = everything(alone)
    assert everything(left) == learned
    left.save(tmp_path / "saved")
    assert everything(hb.load(tmp_path / "saved", network(**POLICIES[name]))) == learned
    for model in (alone, left):
        for batch in batches[steps : steps + 8]:
            model.step(batch)
    assert everything(left) == everything(alone)


EXPIRING: dict[str, dict[str, Any]] = {
    "age": {"evict": hb.Ttl(seconds=3)},
    "age and recency": {"evict": [hb.Ttl(seconds=3), hb.Lru(1024)]},
    "age and frequency": {"evict": [hb.Ttl(seconds=3), hb.Lfu(1024, half_life_seconds=5)]},
    "waiting ids that expire": {
        "admit": hb.MinCount(2, expire_seconds=2),
        "evict": [hb.Ttl(seconds=3), hb.Lru(1024)],
    },
}
HALF_SECOND = 500_000


def late_batches(rng: np.random.Generator, num: int, refused: int) -> list[hb.Batch]:
    """Batches with ids that come late; one of them has more ids than any table may keep."""
    batches = []
    for number in range(num):
        ids = rng.integers(0, 4000, 400)
        if number == refused:
            ids = np.concatenate([ids, np.repeat(np.arange(10_000, 13_000), 2)])
        times = number * HALF_SECOND - rng.integers(0, 8 * HALF_SECOND, len(ids))
        batches.append(hb.Batch(ids={"item": hb.Ids(ids)}, time=times))
    return batches


def learn_late(
    table: hb.Table, batches: Any, stop: int, sweeps: Mapping[int, range], depth: int | None = None
) -> int:
    """Learn up to `stop` batches, ahead if there is a depth; return how many were learned."""
    net = hb.EmbeddingCollection([Feature("item", table.name)], [table])
    optimizer = hb.SparseOptimizer(net)
    steps = 0
    if depth is not None:
        batches = hb.Ahead(batches, net, depth, barrier=lambda step, now: step in sweeps)
    with suppress(TableFull):
        for batch in batches:
            if steps == stop:
                break
            net(batch)["item"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps in sweeps:
                table.evict(steps * HALF_SECOND, sweeps[steps])
    return steps


def table_state(table: hb.Table) -> Any:
    stats = {name: count for name, count in table.stats.items() if "bytes" not in name}
    candidates = bits_of(table.candidates())
    return content_digest({"table": table}), stats, table.scalars(), candidates


@pytest.mark.parametrize("tier", [hb.Ram(), on_disk(2600)], ids=["ram", "disk"])
@pytest.mark.parametrize("policy", EXPIRING)
def test_batches_that_are_refused_or_left_change_nothing_whatever_expires(
    tier: Any, policy: str
) -> None:
    """Partitions wait to be swept, and batches ahead sweep some: rows, updates and counts return."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        stop = int(rng.integers(2, 5))
        refused = int(rng.integers(stop, stop + 3))
        batches = late_batches(rng, stop + 4, refused)
        sweeps = {stop - 1: range(int(rng.integers(0, 200)))}
        ahead, alone = (hb.Table("item", 2, tier=tier, **EXPIRING[policy]) for _ in range(2))
        steps = learn_late(ahead, batches, stop + seed % 2, sweeps, depth=1 + seed)
        learn_late(alone, batches, steps, sweeps)
        assert table_state(ahead) == table_state(alone)
        for table in (ahead, alone):
            table.find_or_insert(np.repeat(np.arange(900, 960), 2), 8 * HALF_SECOND)
            table.evict(16 * HALF_SECOND)
        assert table_state(ahead) == table_state(alone)


# --- loops of one's own ---------------------------------------------------------------------------


def plain_loop(data: Any, net: Any, depth: int | None) -> Any:
    """Learn `data` in a plain loop, ahead or, for None, without Ahead."""
    tables = {table.name: table for module in table_modules(net) for table in module.tables}
    schedule = EvictionSchedule(tables, step_interval=11, seconds_interval=64 * 9)
    dense = torch.optim.Adam(hb.dense_parameters(net))
    sparse = hb.SparseOptimizer(net)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    batches: Any = (batch.map_arrays(torch.from_numpy) for batch in data)
    if depth is not None:
        batches = hb.Ahead(data, net, depth, barrier=schedule.barrier)
    now = 0
    planned = 0
    for step, batch in enumerate(batches, start=1):
        planned += batch.plans is not None and bool(batch.plans.left())
        loss_of(net(batch).squeeze(), batch.labels["y"]).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        now = max(now, int(batch.time.max()))
        schedule.step(step, now)
    dense_bits = {name: tensor.numpy().tobytes() for name, tensor in dense_state(net).items()}
    return dense_bits, {name: contents(table) for name, table in tables.items()}, planned


@pytest.mark.parametrize("evict", [hb.Ttl(seconds=64 * 5), hb.Lru(1024)], ids=["age", "recency"])
def test_plain_loop_gives_the_same_bits(many: Any, network: Any, evict: Any) -> None:
    alone = plain_loop(many(), network(evict=evict), None)
    ahead = plain_loop(many(), network(evict=evict), 2)
    assert alone[:2] == ahead[:2]
    assert alone[2] == 0
    assert ahead[2] == STEPS - 1, "the first batch shows what the network looks up"


def test_steps_of_a_model_give_the_bits_of_fit(many: Any, network: Any) -> None:
    policies = {"admit": hb.MinCount(2), "evict": hb.Lru(1024)}
    model = hb.RecModel(network(**policies), "bce", "adam")
    planned = 0
    for batch in hb.Ahead(many(), model.network, barrier=lambda step, now: step % 9 == 0):
        planned += bool(batch.plans.left())
        model.step(batch)
    assert planned == STEPS - 1
    fitted = hb.RecModel(network(**policies), "bce", "adam")
    fitted.fit(many(), progress=False)
    assert everything(model) == everything(fitted)


def test_a_loop_may_end_early_and_begin_again(many: Any, network: Any) -> None:
    net = network()
    batches = hb.Ahead(many(), net)
    for _, batch in zip(range(3), batches, strict=False):
        net(batch).sum().backward()
    assert len(list(batches)) == STEPS


def test_wrong_arguments_are_rejected(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam")
    with pytest.raises(hb.errors.ConfigError, match=r"Ahead.depth"):
        hb.Ahead(dataset(64), depth=-1)
    with pytest.raises(hb.errors.ConfigError, match=r"Ahead.torch_threads"):
        hb.Ahead(dataset(64), torch_threads=0)
    with pytest.raises(hb.errors.ConfigError, match=r"Ahead: no network"):
        iter(hb.Ahead(dataset(64))).__next__()
    with pytest.raises(hb.errors.ConfigError, match=r"RecModel gives its own network"):
        model.fit(hb.Ahead(dataset(64), network()))
    with pytest.raises(hb.errors.ConfigError, match=r"not a batch, got tuple"):
        list(hb.Ahead([(1, 2)], model.network))
    assert isinstance(model.learner, StepLearner)
