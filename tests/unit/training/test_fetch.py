# SPDX-License-Identifier: Apache-2.0
"""Rows of coming batches are fetched from the disk, and reading and learning are as without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.embedding.lookups import FeatureLayout, HostIds, LocalLookup
from hotbed.errors import RowShapeError
from hotbed.testing import FakeStream
from hotbed.training.ahead import Ahead, Fetcher
from hotbed.training.callbacks import Checkpoint, Validate
from hotbed.training.run import Run
from hotbed.training.stages.example import CPU, prepare

STEPS = 24
ROWS = 64 * STEPS
Ids = tuple[bytes, ...]
"""The ids of a batch, of the features "user" and "item"."""


@dataclass(frozen=True)
class ReadsAhead(hb.Ram):
    """A tier in memory that asks for the rows of coming batches as one on a disk."""

    fetch: int = 8


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Ids]:
    """The batches that were fetched so far; the core is not asked."""
    batches: list[Ids] = []

    def fetch(self: LocalLookup, layout: FeatureLayout, inputs: Sequence[hb.Ids]) -> None:
        HostIds(layout.features, inputs)
        batches.append(tuple(np.asarray(ids.values).tobytes() for ids in inputs))

    monkeypatch.setattr(LocalLookup, "fetch", fetch)
    return batches


@pytest.fixture
def model(network: Any) -> Callable[..., hb.RecModel]:
    """model(fetch): a model whose tables read ahead so many batches."""

    def make(fetch: int, **keywords: Any) -> hb.RecModel:
        model = hb.RecModel(network(), "bce", "adam", metrics={"auc"}, **keywords)
        for table in model.tables.values():
            table.tier = ReadsAhead(fetch)
        return model

    return make


@pytest.fixture
def many(world: Any) -> Callable[..., hb.Dataset]:
    """many(): STEPS batches of events."""

    def make(**keywords: Any) -> hb.Dataset:
        source = hb.sources.Memory(world.columns(ROWS))
        return hb.Dataset(source, world.schema, 64, **keywords)

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
        left = STEPS - len(self.seen) - 1
        wait_for(lambda: len(self.dataset.coming(8)) >= min(self.coming, left))

    def on_step_end(self, run: Any) -> None:
        self.seen.append(ids_of(run.example.batch))
        if self.fetched is not None:
            total = self.first + min(len(self.seen) + self.coming, STEPS) - 1
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


@pytest.mark.parametrize("fetch", [0, 8])
def test_nothing_is_fetched_for_evaluation_or_by_tables_that_do_not_read_ahead(
    model: Any, many: Any, fetched: list[Ids], fetch: int
) -> None:
    trained = model(fetch)
    if not fetch:
        trained.fit(many(), progress=False)
    trained.evaluate(many())
    trained.predict(many())
    assert not fetched


@pytest.mark.parametrize("fetch", [0, 8])
def test_tables_of_one_network_read_ahead_each_for_itself(
    model: Any, many: Any, fetched: list[Ids], fetch: int
) -> None:
    trained = model(fetch)
    trained.tables["item"].tier = ReadsAhead(8)
    data = many()
    watch = Watch(data, fetched, coming=1)
    trained.fit(data, callbacks=[watch], progress=False)
    assert [ids[-1] for ids in fetched] == [ids[-1] for ids in watch.seen[1:]]
    assert {len(ids) for ids in fetched} == {2 if fetch else 1}


def test_an_error_of_fetching_is_logged_once_and_stops_nothing(
    model: Any, many: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Any] = []

    def fetch(*args: Any) -> None:
        tried.append(args)
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
        self.user = nn.Embedding(50, 4)
        self.item = nn.Embedding(80, 4)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) * self.item((item + 7) % 80)).sum(1)


def test_the_ids_that_a_converted_model_computes_are_fetched(many: Any, fetched: list[Ids]) -> None:
    network = Product()
    optimizer = torch.optim.Adagrad(network.parameters())
    network, optimizer, _ = hb.auto(network, optimizer)
    model = hb.RecModel(network, "bce", optimizer)
    model.tables["item"].tier = ReadsAhead(8)
    data = many()
    watch = Watch(data, None, coming=0)
    model.fit(data, callbacks=[watch], max_steps=2, progress=False)
    first = len(fetched)

    watch = Watch(data, fetched, coming=3)
    model.fit(data, callbacks=[watch], progress=False)
    items = [np.frombuffer(ids[1], np.int64) for ids in watch.seen]
    assert fetched[first:] == [(((item + 7) % 80).tobytes(),) for item in items[1:]]

    item = {"user": torch.tensor([1, 2]), "item": torch.tensor([79, 4])}
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
    stream.live.clock = lambda: 43_200.0
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


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_learns_the_same_batches_whether_rows_are_fetched_or_not(
    model: Any, many: Any, fetched: list[Ids], loop: Loop, depth: int, tmp_path: Path
) -> None:
    watches = []
    for fetch in (0, 8):
        watch = Recorder()
        loop(partial(model, fetch), many, watch, depth, tmp_path / str(fetch))
        watches.append(watch)
    assert watches[0].seen == watches[1].seen
    assert watches[0].places == watches[1].places
    assert len(watches[0].seen) > 5
    assert set(fetched) <= set(watches[0].seen) | set(map(ids_of, many()))
