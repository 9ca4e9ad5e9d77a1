# SPDX-License-Identifier: Apache-2.0
"""Models that `hb.auto` converted: their ids are mapped ahead by the id graph, with the same bits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_bits import bits_of

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.embedding.modules import table_modules
from hotbed.training.auto import converted
from hotbed.training.decisions.eviction_schedule import EvictionSchedule
from hotbed.training.run import Run

STEPS = 24
SAMPLES = 64
TABLES = {
    "user": {"admit": hb.MinCount(2)},
    "item": {"evict": hb.Lru(1024)},
    "bag": {"evict": hb.Lfu(1024)},
}


class Ranker(nn.Module):
    """Two embeddings, one of crossed ids, and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(60, 4)
        self.item = nn.Embedding(80, 4)
        self.bag = nn.EmbeddingBag(50, 4, mode="mean")
        self.out = nn.Linear(13, 1)

    def forward(self, user: Tensor, item: Tensor, tags: Tensor, price: Tensor) -> Tensor:
        crossed = (user * 31 + item) % 3001
        rows = [self.user(user), self.item(crossed), self.bag(tags), price[:, None].float()]
        return self.out(torch.cat(rows, 1)).squeeze(1)


@dataclass
class Record:
    user: Tensor
    item: Tensor
    tags: Tensor
    price: Tensor
    y: Tensor


def columns(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)

    def ids(bound: int, *shape: int) -> Tensor:
        draws = torch.randint(0, bound, (2, *shape), generator=random)
        return draws.min(0).values

    return {
        "user": ids(400, SAMPLES),
        "item": ids(3000, SAMPLES),
        "tags": ids(3000, SAMPLES, 3),
        "price": torch.rand(SAMPLES, generator=random),
        "y": (torch.rand(SAMPLES, generator=random) < 0.4).float(),
    }


def as_tuple(step: int) -> Any:
    own = columns(step)
    return (own["user"], own["item"], own["tags"], own["price"]), own["y"]


def as_record(step: int) -> Record:
    return Record(**columns(step))


def call_columns(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    arguments = {name: batch[name] for name in ("user", "item", "tags", "price")}
    return model(**arguments), batch["y"]


def call_tuple(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    (user, item, tags, price), y = batch
    return model(user, item, price=price.double(), tags=tags), y


def call_record(model: nn.Module, batch: Record) -> tuple[Tensor, Tensor]:
    return model(batch.user, batch.item, batch.tags, batch.price), batch.y


KINDS: dict[str, tuple[Callable[[int], Any], Callable[..., Any]]] = {
    "dict": (columns, call_columns),
    "tuple": (as_tuple, call_tuple),
    "dataclass": (as_record, call_record),
}


@pytest.fixture
def converted_model() -> Callable[..., Any]:
    """converted_model(): a new model with its optimizer."""

    def make(tables: Any = TABLES, optimizer: Any = None, **keywords: Any) -> Any:
        torch.manual_seed(3)
        model = Ranker()
        made = (optimizer or torch.optim.Adagrad)(model.parameters(), lr=0.05)
        model, made, _ = hb.auto(model, made, tables=tables, **keywords)
        return model, made

    return make


def contents(model: nn.Module) -> dict[str, Any]:
    """Every bit of a model: rows, candidates, counters, dense parameters."""
    bits: dict[str, Any] = {}
    for module in table_modules(model):
        for table in module.tables:
            rows = bits_of(table.export())
            waiting = bits_of(table.candidates())
            stats = {key: value for key, value in table.stats.items() if "bytes" not in key}
            bits[table.name] = (rows, waiting, table.scalars(), stats)
    for name in ("out.weight", "out.bias"):
        bits[name] = model.get_parameter(name).detach().numpy().tobytes()
    return bits


def learn(model: nn.Module, optimizer: Any, scores: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(scores, y).backward()
    optimizer.step()


def num_ahead(model: nn.Module) -> int:
    """Return how many batches of a loop were mapped before their turn, by the tables' counts."""
    state = converted(model)
    assert state is not None
    return 0 if state.expected is None else len(state.expected.left())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_loops_give_the_bits_of_mapping_in_the_forward_pass(
    converted_model: Any, kind: str
) -> None:
    make, call = KINDS[kind]
    results = []
    planned = 0
    for depth in (0, 3):
        model, optimizer = converted_model()
        batches = [make(step) for step in range(STEPS)]
        for batch in hb.Ahead(batches, model, depth, torch_threads=1):
            planned += num_ahead(model) > 0
            learn(model, optimizer, *call(model, batch))
        results.append(contents(model))
    assert results[0] == results[1]
    assert planned == STEPS - 1, "the first batch shows the arguments"


def test_insert_maps_each_batch_right_before_its_step(converted_model: Any) -> None:
    results = []
    for inserts in (False, True):
        model, optimizer = converted_model()
        insert = hb.Insert(model)
        planned = 0
        for step in range(STEPS):
            batch = columns(step)
            if inserts:
                before = len(model.get_submodule("user").tables[0])
                batch = insert(batch)
                planned += num_ahead(model) > 0
                assert step == 0 or len(model.get_submodule("user").tables[0]) >= before
            learn(model, optimizer, *call_columns(model, batch))
        assert planned == (STEPS - 1 if inserts else 0)
        results.append(contents(model))
    assert results[0] == results[1]


def test_evictions_are_barriers_in_a_plain_loop_by_the_times_of_the_batch(
    converted_model: Any,
) -> None:
    tables = {"user": {"evict": hb.Ttl(seconds=40)}}
    results = []
    for depth in (0, 3):

        class Timed(Ranker):
            def forward(  # type: ignore[override]
                self, user: Tensor, item: Tensor, tags: Tensor, price: Tensor, time: Tensor
            ) -> Tensor:
                return super().forward(user, item, tags, price)

        torch.manual_seed(3)
        model: Any = Timed()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, _ = hb.auto(model, optimizer, tables=tables, times="time")
        batches = []
        for step in range(STEPS):
            times = 1_000_000 * (10 * step + torch.arange(SAMPLES) // 8) + 10**12
            batches.append({**columns(step), "time": times})
        own = {table.name: table for module in table_modules(model) for table in module.tables}
        schedule = EvictionSchedule(own, seconds_interval=35)
        ahead = hb.Ahead(batches, model, depth, barrier=schedule.barrier, torch_threads=1)
        now = 0
        for step, batch in enumerate(ahead, 1):
            arguments = {name: value for name, value in batch.items() if name != "y"}
            learn(model, optimizer, model(**arguments), batch["y"])
            now = max(now, int(batch["time"].max()))
            schedule.step(step, now)
        assert own["user"].stats["evicted"] > 100
        results.append(contents(model))
    assert results[0] == results[1]


def loop(model: nn.Module, optimizer: Any, change: Callable[[int, Any], None]) -> None:
    """Learn all batches ahead; `change` may do something with a batch before its step."""
    batches = [columns(step) for step in range(STEPS)]
    for step, batch in enumerate(hb.Ahead(batches, model)):
        change(step, batch)
        learn(model, optimizer, *call_columns(model, batch))


def test_other_ids_than_those_of_the_batch_are_an_error(converted_model: Any) -> None:
    model, optimizer = converted_model()

    def change(step: int, batch: Any) -> None:
        if step == 7:
            batch["user"] = batch["user"] + 1

    with pytest.raises(hb.errors.ConfigError, match="user: the forward pass looks up other ids"):
        loop(model, optimizer, change)


def test_a_second_pass_over_a_batch_is_an_error(converted_model: Any) -> None:
    model, optimizer = converted_model()

    def change(step: int, batch: Any) -> None:
        if step == 7:
            learn(model, optimizer, *call_columns(model, batch))

    with pytest.raises(hb.errors.ConfigError, match=r"user: .* got 2 lookups in one step"):
        loop(model, optimizer, change)


def test_an_evaluation_between_two_steps_leaves_the_plans_to_the_step(converted_model: Any) -> None:
    results = []
    for depth in (0, 2):
        model, optimizer = converted_model(tables={"user": {}, "item": {}, "bag": {}})
        batches = [columns(step) for step in range(STEPS)]
        for batch in hb.Ahead(batches, model, depth, torch_threads=1):
            with torch.no_grad():
                model.eval()
                call_columns(model, columns(1000))
                model.train()
            learn(model, optimizer, *call_columns(model, batch))
        results.append(contents(model))
    assert results[0] == results[1]


def test_a_batch_whose_arguments_are_made_in_the_loop_is_not_mapped_ahead(
    converted_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = converted_model()
    batches = [columns(step) for step in range(6)]
    with caplog.at_level(logging.INFO, "hotbed"):
        for batch in hb.Ahead(batches, model):
            assert not num_ahead(model)
            scores, y = call_columns(model, {**batch, "item": batch["item"] + 1})
            learn(model, optimizer, scores, y)
    assert "argument 'item' of the model is not a tensor of the batch" in caplog.text


def test_a_model_that_is_called_twice_a_step_maps_in_its_forward_passes(
    converted_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    for depth in (0, 2):
        model, optimizer = converted_model()
        batches = [columns(step) for step in range(8)]
        with caplog.at_level(logging.INFO, "hotbed"):
            for batch in hb.Ahead(batches, model, depth, torch_threads=1):
                call_columns(model, batch)
                learn(model, optimizer, *call_columns(model, batch))
        results.append(contents(model))
    assert results[0] == results[1]
    assert "it was looked up 2 times in the step of the first batch" in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "obstacle"),
    [
        (torch.optim.Adam, ""),
        (torch.optim.RMSprop, ""),
        (torch.optim.AdamW, "the rule of table 'user' decays rows without a gradient"),
    ],
)
def test_tables_that_decay_idle_rows_are_mapped_in_the_forward_pass(
    converted_model: Any, caplog: pytest.LogCaptureFixture, optimizer: Any, obstacle: str
) -> None:
    results = []
    for depth in (0, 2):
        model, made = converted_model(optimizer=optimizer, tables={})
        with caplog.at_level(logging.INFO, "hotbed"):
            batches = [columns(step) for step in range(8)]
            for batch in hb.Ahead(batches, model, depth, torch_threads=1):
                learn(model, made, *call_columns(model, batch))
        results.append(contents(model))
    assert results[0] == results[1]
    assert ("no batch is mapped ahead" in caplog.text) == bool(obstacle)
    assert obstacle in caplog.text


# --- in RecModel ----------------------------------------------------------------------------------


class Watches:
    """Declares no barrier, and records how many batches are ahead."""

    def __init__(self) -> None:
        self.ahead: list[int] = []

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        self.ahead.append(run.ahead)


class Batched(Ranker):
    """Takes the columns of a Batch by name."""

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(user, item, torch.stack([user, item], 1) % 2999, price)


def dataset() -> hb.Dataset:
    random = np.random.default_rng(1)
    rows = SAMPLES * STEPS
    schema = hb.Schema(
        [hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("item"), hb.Dense("price")]
    )
    data = {
        "user": np.minimum(*random.integers(0, 400, (2, rows))),
        "item": np.minimum(*random.integers(0, 500, (2, rows))),
        "price": random.random(rows).astype(np.float32),
        "y": (random.random(rows) < 0.4).astype(np.float32),
        "t": np.arange(rows) + 10**9,
    }
    return hb.Dataset(hb.sources.Memory(data), schema, SAMPLES)


def make_model() -> hb.RecModel:
    torch.manual_seed(3)
    network: Any = Batched()
    optimizer: Any = torch.optim.Adagrad(network.parameters(), lr=0.05)
    tables = {**TABLES, "user": {"evict": hb.Ttl(seconds=200)}}
    network, optimizer, _ = hb.auto(network, optimizer, tables=tables)
    return hb.RecModel(network, "bce", optimizer)


@pytest.mark.parametrize("ways", ["Ahead", "Insert"])
def test_a_stream_of_a_dataset_gives_the_same_bits(ways: str) -> None:
    results = []
    for depth in (0, 3):
        model = make_model()
        network = model.network
        data: Any = hb.Ahead(dataset(), depth=depth, torch_threads=1)
        if ways == "Insert":
            data = dataset().map(hb.Insert(network, depth))
        watch = Watches()
        callbacks = [watch, hb.callbacks.Evict(seconds_interval=300)]
        history = model.online_train(data, callbacks, progressive=False, progress=False)
        assert any(watch.ahead) == bool(depth)
        points = [
            {name: (stats["rows"], stats["admitted"]) for name, stats in point.tables.items()}
            for point in history.points
        ]
        assert len(points) == STEPS
        results.append((contents(network), points))
    assert results[0] == results[1]


def make_own() -> hb.RecModel:
    torch.manual_seed(3)
    schema = dataset().schema
    tables = hb.make_tables(schema, 4, evict=hb.Lru(1024))
    return hb.RecModel(hb.models.DNN(schema, tables, hidden=[4]), "bce", "adam")


@pytest.mark.parametrize("make", [make_model, make_own])
def test_a_copy_of_a_model_that_was_trained_ahead_learns_as_the_model_does(
    make: Callable[[], hb.RecModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    data = hb.Ahead(dataset(), depth=2, torch_threads=1)
    model.fit(data, max_steps=8, progress=False)
    caplog.clear()
    twin = copy.deepcopy(model)
    digests = []
    for each in (model, twin):
        each.fit(data, max_steps=8, progress=False)
        each.save(tmp_path / "state")
        state = hb.checkpoints.open_checkpoint(tmp_path / "state")
        digests.append(hb.checkpoints.content_digest(state))
    assert digests[0] == digests[1]
    assert not caplog.records


class Clock:
    """A clock that runs while a run looks at it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.3
        return self.seconds


class UsesClock:
    """Gives a run its clock and journal before other callbacks look at them."""

    def __init__(self, clock: Callable[[], float], journal: Journal) -> None:
        self.clock = clock
        self.journal = journal

    def on_fit_begin(self, run: Run) -> None:
        run.clock.read = self.clock
        run.clock.journal = self.journal


def test_evictions_by_the_clock_are_repeated_without_mapping_ahead() -> None:
    journal = Journal()

    def run(depth: int, clock: Callable[[], float]) -> tuple[Any, list[int]]:
        model = make_model()
        watch = Watches()
        callbacks = [
            UsesClock(clock, journal),
            hb.callbacks.Evict(seconds_interval=2, clock="wall"),
            watch,
        ]
        data = hb.Ahead(dataset(), depth=depth, torch_threads=1)
        model.online_train(data, callbacks, progressive=False, progress=False)
        return contents(model.network), watch.ahead

    ahead, some = run(3, Clock())
    decided = list(journal.after("evict", -1))
    assert decided
    assert any(some)
    replayed, none = run(0, lambda: 0.0)
    assert list(journal.after("evict", -1)) == decided
    assert not any(none)
    assert ahead == replayed


class Fails(Watches):
    """Ends a run in a step in which batches are ahead."""

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Run) -> None:
        super().on_step_end(run)
        if run.step > 8 and run.ahead:
            raise KeyboardInterrupt


def test_a_run_that_failed_while_batches_were_ahead_resumes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    def run(folder: Path, depth: int, *more: Any) -> hb.RecModel:
        model = make_model()
        callbacks = [
            *more,
            hb.callbacks.Evict(step_interval=11),
            hb.callbacks.Checkpoint(folder, every_steps=8, wait=True),
        ]
        data = hb.Ahead(dataset(), depth=depth, torch_threads=1)
        model.online_train(data, callbacks, progressive=False, progress=False)
        return model

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", 3, Fails())
    resumed = run(tmp_path / "broken", 3, Watches())
    whole = run(tmp_path / "whole", 0)
    assert resumed.counters == whole.counters
    assert contents(resumed.network) == contents(whole.network)
