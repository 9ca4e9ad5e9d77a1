# SPDX-License-Identifier: Apache-2.0
"""Rows of coming batches are fetched from the disk, and reading and learning are as without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from tests.on_disk import on_disk
from torch import nn

import hotbed as hb
from hotbed.embedding.lookups import FeatureLayout, LocalLookup
from hotbed.errors import RowShapeError
from hotbed.testing import FakeStream
from hotbed.training.ahead import Ahead
from hotbed.training.callbacks import Checkpoint, Validate
from hotbed.training.run import Run
from hotbed.training.step.example import CPU, prepare
from hotbed.training.step.fetcher import Fetcher

STEPS = 24
ROWS = 64 * STEPS
RAM_ROWS = 320
"""Of about a thousand ids; a batch has at most 64, and depth 2 keeps three of them."""
Ids = tuple[bytes, ...]
"""The ids of a batch, of the features "user" and "item"."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Ids]:
    """The batches that were fetched so far."""
    batches: list[Ids] = []
    native = LocalLookup.fetch

    def fetch(self: LocalLookup, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        native(self, layout, inputs)
        columns = [np.asarray(ids.values) for ids in inputs]
        for first in range(0, len(columns[0]), 64):  # several batches at once
            batches.append(tuple(column[first : first + 64].tobytes() for column in columns))

    monkeypatch.setattr(LocalLookup, "fetch", fetch)
    return batches


@pytest.fixture
def model(network: Any) -> Callable[..., hb.RecModel]:
    """model(fetch): a model whose tables on a disk read ahead so many batches; None: in memory."""

    def make(fetch: int | None, **keywords: Any) -> hb.RecModel:
        tier = hb.Ram() if fetch is None else on_disk(RAM_ROWS, fetch=fetch)
        return hb.RecModel(network(tier=tier), "bce", "adam", metrics={"auc"}, **keywords)

    return make


@pytest.fixture
def many(world: Any) -> Callable[..., hb.Dataset]:
    """many(): STEPS batches of events, with more ids than rows are in memory."""
    columns = world.columns(ROWS)
    random = np.random.default_rng(5)
    for name in ("user", "item"):
        columns[name] = np.minimum(*random.integers(0, 4000, (2, ROWS)))

    def make(**keywords: Any) -> hb.Dataset:
        return hb.Dataset(hb.sources.Memory(columns), world.schema, 64, **keywords)

    return make


def ids_of(batch: hb.Batch) -> Ids:
    return tuple(np.asarray(batch.ids[name].values).tobytes() for name in ("user", "item"))


class Watch:
    """Records what each step learned; waits for `coming` batches to be read, and to be fetched."""

    def __init__(self, dataset: hb.Dataset, fetched: list[Any] | None, coming: int) -> None:
        self.dataset = dataset
        self.fetched = fetched
        self.coming = coming
        self.first = len(fetched or ())
        self.seen: list[Ids] = []
        self.num_fetched: list[int] = []  # after each step

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_begin(self, run: Run) -> None:
        reading = self.dataset.reading
        assert reading is not None
        left = STEPS - len(self.seen) - 1
        # the first step lets the reader go on
        coming = min(self.coming, left if self.seen else 1)
        wait_for(lambda: len(reading.coming(8)) >= coming)

    def on_step_end(self, run: Any) -> None:
        self.seen.append(ids_of(run.example.batch))
        if self.fetched is not None:  # what comes next is fetched before its turn
            coming = self.coming if len(self.seen) > 1 else min(self.coming, 1)
            total = self.first + min(len(self.seen) + coming, STEPS) - 1
            wait_for(lambda: len(self.fetched) >= total)
            self.num_fetched.append(len(self.fetched))


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until, "it was waited for in vain"
        time.sleep(0.001)


def test_each_batch_is_fetched_once_in_order_and_never_deeper_than_asked(
    model: Any, many: Any, fetched: list[Ids]
) -> None:
    data = many(prefetch=2)
    watch = Watch(data, fetched, coming=3)  # the reader sleeps until half of five are taken
    model(5).fit(data, callbacks=[watch], progress=False)
    assert fetched == watch.seen[1:]
    assert all(number <= step + 5 for step, number in enumerate(watch.num_fetched, start=1))


def test_nothing_is_fetched_by_tables_that_do_not_read_ahead(
    model: Any, many: Any, fetched: list[Ids]
) -> None:
    trained = model(0)
    trained.fit(many(), many(), progress=False)
    trained.evaluate(many())
    trained.predict(many())
    assert not fetched


def test_the_batches_of_an_evaluation_are_fetched_once_in_order(
    model: Any, many: Any, fetched: list[Ids]
) -> None:
    trained = model(5)
    data = many()
    watch = Watch(data, fetched, coming=3)
    trained.evaluate(data, [watch])
    assert fetched == watch.seen[1:]


@pytest.mark.parametrize("kind", ["predict", "validate"])
def test_prediction_and_validation_look_for_coming_batches(
    model: Any, many: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Ids] = []
    monkeypatch.setattr(Fetcher, "look", lambda self, coming: looked.extend(map(ids_of, coming)))
    trained = model(5)
    if kind == "predict":
        trained.predict(many())
    else:
        trained.fit(iter(list(many())), many(), progress=False)  # of it, nothing is read ahead
    assert set(looked) <= set(map(ids_of, many()))
    assert len(set(looked)) > STEPS / 2


@pytest.mark.parametrize("kind", ["evaluate", "predict", "fit"])
def test_batches_of_a_list_are_fetched_some_at_once(
    model: Any, many: Any, fetched: list[Ids], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of those that are read ahead: a block that has rows of several is read once."""
    num_batches: list[int] = []
    native = LocalLookup.fetch

    def fetch(self: LocalLookup, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        native(self, layout, inputs)
        num_batches.append(len(inputs[0]) // 64)

    monkeypatch.setattr(LocalLookup, "fetch", fetch)
    batches = list(many())
    keywords = {"progress": False} if kind == "fit" else {}
    getattr(model(8), kind)(batches, **keywords)
    coming = iter([ids_of(batch) for batch in batches[1:]])
    assert all(batch in coming for batch in fetched)  # in order; a busy machine passes some over
    assert num_batches[0] == 8
    assert max(num_batches) == 8


def test_tables_of_one_network_read_ahead_each_for_itself(
    world: Any, many: Any, fetched: list[Ids]
) -> None:
    tables = {
        "user": hb.Table("user", 4, tier=on_disk(RAM_ROWS)),
        "item": hb.Table("item", 4, tier=on_disk(RAM_ROWS, fetch=2)),
    }
    trained = hb.RecModel(hb.models.DNN(world.schema, tables, hidden=(4,)), "bce", "adam")
    data = many()
    watch = Watch(data, fetched, coming=1)
    trained.fit(data, callbacks=[watch], progress=False)
    assert fetched == [ids[1:] for ids in watch.seen[1:]]
    assert tables["item"].tier_stats["fetched"]
    assert not tables["user"].tier_stats["fetched"]


def test_an_error_of_fetching_is_logged_once_and_stops_nothing(
    model: Any, many: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Any] = []

    def fetch(lookup: LocalLookup, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        tried.extend(range(len(inputs[0]) // 64))
        raise OSError("the disk is away")

    monkeypatch.setattr(LocalLookup, "fetch", fetch)
    data = many()
    watch = Watch(data, tried, coming=3)
    model(8).fit(data, callbacks=[watch], progress=False)
    assert len(watch.seen) == STEPS
    assert caplog.text.count("the disk is away") == 1


def test_ids_that_are_wrong_raise_at_the_turn_of_their_batch(
    model: Any, many: Any, fetched: list[Ids]
) -> None:
    def spoil(batch: hb.Batch) -> hb.Batch:
        if batch.time[0] < 10 * 64 * 1_000_000:  # a row a second
            return batch
        return replace(batch, ids={**batch.ids, "item": hb.Ids(np.zeros(3))})

    errors = []
    for reads in (0, 8):
        data = many().map(spoil)
        watch = Watch(data, None, coming=min(reads, 3))
        with pytest.raises(RowShapeError) as caught:
            model(reads).fit(data, callbacks=[watch], progress=False)
        errors.append((str(caught.value), len(watch.seen)))
    assert errors[0] == errors[1]
    assert errors[0][1] == 10


# --- models of hb.auto ----------------------------------------------------------------------------


class Product(nn.Module):
    """Looks up users, and items whose ids it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(4000, 4)
        self.item = nn.Embedding(4000, 4)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) * self.item((item + 7) % 4000)).sum(1)


def test_the_ids_that_a_converted_model_computes_are_fetched(many: Any, fetched: list[Ids]) -> None:
    network = Product()
    optimizer = torch.optim.Adagrad(network.parameters())
    tiers = {"item": {"tier": on_disk(RAM_ROWS, fetch=8)}}
    network, optimizer, _ = hb.auto(network, optimizer, tables=tiers)
    model = hb.RecModel(network, "bce", optimizer)
    data = many()
    watch = Watch(data, None, coming=0)
    model.fit(data, callbacks=[watch], max_steps=2, progress=False)
    first = len(fetched)

    watch = Watch(data, fetched, coming=3)
    model.fit(data, callbacks=[watch], progress=False)
    items = [np.frombuffer(ids[1], np.int64) for ids in watch.seen]
    assert fetched[first:] == [(((item + 7) % 4000).tobytes(),) for item in items[1:]]

    item = {"user": torch.tensor([1, 2]), "item": torch.tensor([3999, 4])}
    fetcher = Fetcher.of(network)
    assert fetcher is not None
    fetcher.look([prepare(item, CPU, labelled=False, network=network)])
    wait_for(lambda: len(fetched) == first + STEPS)
    fetcher.close()
    assert np.frombuffer(fetched[-1][0], np.int64).tolist() == [6, 11]


# --- every loop -----------------------------------------------------------------------------------


class Recorder:
    """What every model of a loop learned, step by step."""

    def __init__(self) -> None:
        self.seen: list[Ids] = []
        self.places: list[tuple[Any, int]] = []
        self.ticks = 0

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Any) -> None:
        self.seen.append(ids_of(run.example.batch))
        self.places.append((run.position, run.samples))
        if not run.goal.depth:
            assert run.dataset.position == run.position

    def on_idle(self, run: Run) -> None:
        self.ticks += 1


Loop = Callable[[Callable[[], hb.RecModel], Any, Recorder, int, Path], hb.RecModel]


def at_noon(stream: hb.Dataset) -> hb.Dataset:
    """Let a stream write one moment into all its positions."""
    stream.live = replace(stream.live, clock=lambda: 43_200.0)
    return stream


def fit(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    model = make()
    data = Ahead(many(shuffle=200, seed=3), depth=depth)
    model.fit(data, epochs=2, callbacks=[watch], progress=False)
    return model


def fit_in_parts(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    """End inside an epoch and go on, with evaluations in between."""
    model = make()
    data = many(shuffle=200)
    for steps in (7, STEPS - 7):
        callbacks = [watch, Validate(every_steps=5)]
        model.fit(Ahead(data, depth=depth), many(), 1, callbacks, max_steps=steps, progress=False)
        data.resume(watch.places[-1][0])
    return model


def fit_grains(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    model = make(grains=4)
    model.fit(Ahead(many(), depth=depth), callbacks=[watch], progress=False)
    return model


def follow(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    """Follow a stream with ticks, and resume it from a checkpoint in the middle."""
    rows = many().source.table
    schema = many().schema
    for steps in (11, None):
        stream = FakeStream(rows, takes=[100, 0, 100, 0], ends=True)
        data = Ahead(at_noon(hb.Dataset(stream, schema, 64)), depth=depth)
        callbacks = [watch, Checkpoint(folder / "state", every_steps=4)]
        model = make()
        model.online_train(data, callbacks, max_steps=steps, progress=False)
    return model


def fail(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    """Follow a stream that breaks."""
    model = make()
    stream = FakeStream(many().source.table, fails=10 * 64, ends=True)
    data = Ahead(at_noon(hb.Dataset(stream, many().schema, 64)), depth=depth)
    with pytest.raises(OSError, match="the stream broke"):
        model.online_train(data, [watch], progressive=False, progress=False)
    return model


def step(make: Any, many: Any, watch: Recorder, depth: int, folder: Path) -> hb.RecModel:
    """Learn in a loop of one's own, and leave it early."""
    model = make()
    for number, batch in enumerate(Ahead(many(), model.network, depth=depth)):
        if number == 15:
            break
        model.step(batch)
        watch.seen.append(ids_of(batch))
    return model


LOOPS: list[Loop] = [fit, fit_in_parts, fit_grains, follow, fail, step]


SLOW = {(fit_in_parts, 0), (fit_grains, 0), (follow, 2)}
"""Loops and depths that `make soak` runs; each loop and each depth is in every run."""


@pytest.mark.parametrize(
    ("loop", "depth"),
    [
        pytest.param(loop, depth, marks=pytest.mark.soak if (loop, depth) in SLOW else ())
        for loop in LOOPS
        for depth in (0, 2)
    ],
)
def test_each_loop_learns_the_same_batches_to_the_same_bits_however_many_are_fetched(
    model: Any, many: Any, world: Any, loop: Loop, depth: int, tmp_path: Path
) -> None:
    runs = []
    for fetch in (None, 0, 8):
        watch = Recorder()
        learned = loop(partial(model, fetch), many, watch, depth, tmp_path / str(fetch))
        runs.append((watch, world.snapshot(learned)))
    (alone, state), *others = runs
    assert len(alone.seen) > 5
    for watch, other in others:
        assert watch.seen == alone.seen
        assert watch.places == alone.places
        assert world.same(other, state)


def test_most_rows_that_are_missing_were_fetched(model: Any, many: Any, fetched: list[Ids]) -> None:
    counts = {}
    for fetch in (0, 2):
        trained = model(fetch)
        data = many()
        trained.fit(data, progress=False)  # inserts all ids
        before = trained.tables["user"].tier_stats
        watch = Watch(data, fetched if fetch else None, coming=fetch)
        trained.fit(data, callbacks=[watch], progress=False)
        after = trained.tables["user"].tier_stats
        counts[fetch] = {name: after[name] - before[name] for name in ("misses", "fetched")}
    assert counts[0]["misses"] > STEPS
    assert counts[0]["fetched"] == 0
    assert counts[2]["fetched"] > counts[2]["misses"] / 2
