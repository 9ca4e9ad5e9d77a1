# SPDX-License-Identifier: Apache-2.0
"""What trains on a CPU trains on a device to the same bits: rules, tiers, modules, loops, ranks.

A few cases run in `make test`. `make soak` runs all of them over 300 steps, in nine orders each and
in 200 drawn ones in turn, and over three steps in 1,000 drawn orders.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import devices
import torch
from devices import Schedule, schedules
from forked import SERVER, ranks_of
from table_bits import bits_of
from torch import Tensor, nn

import hotbed as hb

BATCH = 16
DIM = 4
MAX_SEEN = 3


def schema(pooling: str) -> hb.Schema:
    seen = hb.Id("seen", table="item", pooling=pooling)
    return hb.Schema([hb.Label("click"), hb.Id("user"), hb.Id("item"), seen, hb.Dense("price")])


BAGS = schema("sum")
SEQUENCES = schema("none")
RULES: dict[str, hb.Rule] = {
    "sgd": hb.Sgd(lr=0.1),
    "momentum": hb.Momentum(lr=0.1),
    "adagrad": hb.Adagrad(lr=0.1),
    "row-wise adagrad": hb.RowwiseAdagrad(lr=0.1),
    "adam": hb.Adam(lr=0.1),
    "adam of all rows": hb.Adam(lr=0.1, scope="all"),
    "ftrl": hb.Ftrl(lr=0.1),
}


def data(steps: int, schema: hb.Schema = BAGS) -> hb.Dataset:
    draw = np.random.default_rng(0)
    num = BATCH * steps
    lengths = draw.integers(0, MAX_SEEN + 1, num)
    columns = {
        "user": draw.integers(0, 300, num),
        "item": draw.integers(0, 300, num),
        "seen": [draw.integers(0, 300, length) for length in lengths],
        "price": draw.normal(size=num).astype(np.float32),
        "click": (draw.random(num) < 0.4).astype(np.float32),
    }
    return hb.Dataset(hb.sources.Memory(columns), schema, batch_size=BATCH)


class Network(nn.Module):
    """Bags of two tables, sequences, a module that shares a table, and weights of ids that learn.

    Args:
        rule: of the tables.
        schema: of its batches.
        shares: whether a second module looks up the items once more.
        weighs: whether the network computes weights of the items.
        tables: keywords of the tables.
    """

    looks_up_once = True

    def __init__(
        self,
        rule: hb.Rule,
        schema: hb.Schema = BAGS,
        *,
        shares: bool = False,
        weighs: bool = False,
        **tables: Any,
    ) -> None:
        super().__init__()
        self.schema = schema
        made = hb.make_tables(schema, dim=DIM, rule=rule, **tables)
        self.rows = hb.EmbeddingCollection(schema, made)
        self.again = hb.EmbeddingBag(made["item"]) if shares else None
        self.weight = nn.Linear(1, 1) if weighs else None
        self.hidden = nn.Linear((2 if schema is SEQUENCES else 3) * DIM + 1, 6)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(6, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        price = batch.dense["price"].reshape(-1, 1)
        ids = dict(batch.ids)
        if self.weight is not None:
            weights = torch.sigmoid(self.weight(price)).reshape(-1)
            ids["item"] = hb.Ids(ids["item"].values, ids["item"].offsets, weights)
            batch = replace(batch, ids=ids)
        pooled, sequences = self.rows.flat_and_sequences(batch)
        logits = self.out(self.dropout(torch.relu(self.hidden(torch.cat([pooled, price], 1)))))
        for rows in sequences.values():
            logits = logits + torch.tanh(rows).sum() / MAX_SEEN
        if self.again is not None:
            logits = logits + self.again(ids["item"].values.reshape(-1, 1)).sum(1, keepdim=True)
        return logits.squeeze(1)


class Plain(nn.Module):
    """A model of torch alone, which `hb.auto` converts; ids of the host, and of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.schema = BAGS
        self.users = nn.Embedding(300, DIM, sparse=True)
        self.items = nn.Embedding(300, DIM, sparse=True)
        self.levels = nn.EmbeddingBag(10, DIM, mode="sum", sparse=True)
        self.out = nn.Linear(3 * DIM + 1, 1)

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        level = (4 * price.abs()).long().clamp(max=9).reshape(-1, 1)
        rows = [self.users(user), self.items(item), self.levels(level), price.reshape(-1, 1)]
        return self.out(torch.cat(rows, 1)).squeeze(1)


class Embedded(nn.Module):
    """Lookups of `hb.Embedding` alone, whose ids a step by grains records."""

    def __init__(self) -> None:
        super().__init__()
        self.schema = BAGS
        made = hb.make_tables(BAGS, dim=DIM, rule=RULES["adagrad"])
        self.users = hb.Embedding(made["user"])
        self.items = hb.Embedding(made["item"])
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(2 * DIM + 1, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        rows = [self.users(batch.ids["user"].values), self.items(batch.ids["item"].values)]
        columns = torch.cat([*rows, batch.dense["price"].reshape(-1, 1)], 1)
        return self.out(self.dropout(columns)).squeeze(1)


def tables_of(network: nn.Module) -> dict[str, list[bytes]]:
    """Return the bits of all rows by name of the table."""
    modules = [module for module in network.modules() if hasattr(module, "layout")]
    tables = {table.name: table for module in modules for table in module.tables}
    return {name: bits_of(table.export()) for name, table in sorted(tables.items())}


def fitted(
    network: nn.Module,
    steps: int,
    device: str,
    optimizer: Any = None,
    *,
    ahead: bool = False,
    clips: bool = False,
    **settings: Any,
) -> Any:
    """Return losses and each bit that training changes, after a fit, and scores."""
    network = network.to(device)
    schema = network.schema
    losses: list[float] = []

    class Losses:
        def on_step_end(self, run: Any) -> None:
            losses.append(run.loss.item())

        def barrier(self, step: int, now: int | None) -> bool:
            return False

    if optimizer is None:
        optimizer = torch.optim.Adagrad(hb.dense_parameters(network), lr=0.1)
    model = hb.RecModel(network, "bce", optimizer, **settings)
    batches = data(steps, schema)
    callbacks = [Losses(), hb.callbacks.ClipGradients(0.1)] if clips else [Losses()]
    model.fit(hb.Ahead(batches) if ahead else batches, callbacks=callbacks, progress=False)
    scores = model.predict(data(2, schema)).tolist()
    return losses, [w.tolist() for w in hb.dense_parameters(network)], tables_of(network), scores


def accumulated(steps: int, device: str) -> Any:
    """Return losses and bits of a loop of torch that clips the gradients of four batches."""
    network = Network(hb.Adagrad(lr=0.1), shares=True).to(device)
    optimizers = [
        torch.optim.Adagrad(hb.dense_parameters(network), lr=0.1),
        hb.SparseOptimizer(network),
    ]
    losses = []
    for number, batch in enumerate(data(steps).epoch(0), 1):
        tensors = batch.map_arrays(torch.from_numpy)
        price = {"price": tensors.dense["price"].to(device)}
        logits = network(hb.Batch(tensors.ids, price))
        label = tensors.labels["click"].to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        loss.backward()
        losses.append(loss.detach())
        if number % 4 == 0:
            for optimizer in optimizers:
                # alone, since torch adds the norms of one device before those of another
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(parameters, 0.1)
                optimizer.step()
                optimizer.zero_grad()
    dense = [weight.tolist() for weight in hb.dense_parameters(network)]
    return [loss.item() for loss in losses], dense, tables_of(network)


def converted(steps: int, device: str, **settings: Any) -> Any:
    plain = Plain().to(device)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    network, optimizer, _ = hb.auto(plain, optimizer)
    network.schema = plain.schema
    return fitted(network, steps, device, optimizer, **settings)


def on_disk(**settings: Any) -> Callable[[int, str], Any]:
    def train(steps: int, device: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            network = Network(hb.Adagrad(lr=0.1), tier=hb.Ssd(folder, ram_rows=200))
            return fitted(network, steps, device, **settings)

    return train


def case(
    rule: str = "adagrad", *, grains: int = 1, ahead: bool = False, clips: bool = False, **how: Any
) -> Any:
    def train(steps: int, device: str) -> Any:
        network = Network(RULES[rule], **how)
        return fitted(network, steps, device, grains=grains, ahead=ahead, clips=clips)

    return train


CASES: dict[str, Callable[[int, str], Any]] = {
    **{rule: case(rule) for rule in RULES},
    "ahead": case(ahead=True),
    "clipped": case(clips=True),
    "modules": case(shares=True),
    "sequences": case(schema=SEQUENCES),
    "weights": case(weighs=True),
    "disk": on_disk(),
    "disk ahead": on_disk(ahead=True),
    "accumulated": accumulated,
    "converted": converted,
    "grains": case("adam", grains=4),
    "grains ahead": case(grains=4, ahead=True),
    "grains clipped": case(grains=4, clips=True),
    "grains converted": functools.partial(converted, grains=4),
    "grains of lookups": lambda steps, device: fitted(Embedded(), steps, device, grains=4),
    "grains of sequences": case(grains=4, schema=SEQUENCES),
    "grains of weights": case(grains=4, weighs=True),
    "grains on disk": on_disk(grains=4),
}
QUICK = ("accumulated", "disk ahead", "grains ahead", "grains converted", "grains of lookups")
ORDERS = [str(schedule) for schedule in schedules(6)]


def schedule_of(order: str) -> Schedule:
    mode, _, seed = order.partition(" ")
    return Schedule(mode, int(seed or 0))


def bits(name: str, steps: int, device: str) -> Any:
    torch.manual_seed(0)
    return CASES[name](steps, device)


def differing(names: list[str], steps: int, orders: list[str]) -> list[str]:
    """Return the cases and orders whose bits differ from those of the CPU."""
    queues = devices.install()
    torch.set_num_threads(1)
    found = []
    for name in names:
        expected = bits(name, steps, "cpu")
        for order in orders:
            queues.reset(schedule_of(order))
            if bits(name, steps, "fake") != expected:
                found.append(f"{name}: {order}")
    return found


def test_cases_have_the_bits_of_a_cpu() -> None:
    assert SERVER.call(differing, list(QUICK), 3, ["copies"]) == []


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_cases_have_the_bits_of_a_cpu_over_300_steps(name: str, order: str) -> None:
    assert SERVER.call(differing, [name], 300, [order]) == []


@pytest.mark.soak
@pytest.mark.parametrize(("steps", "orders"), [(300, 200), (3, 1000)])
@pytest.mark.parametrize("name", CASES)
def test_cases_have_the_bits_of_a_cpu_in_drawn_orders(name: str, steps: int, orders: int) -> None:
    """Each case has its share of the orders."""
    shares = range(list(CASES).index(name), orders, len(CASES))
    assert SERVER.call(differing, [name], steps, [f"random {seed}" for seed in shares]) == []


def of_rank(device: str, steps: int, order: str) -> Any:
    torch.set_num_threads(1)
    if device == "fake":
        devices.install().reset(schedule_of(order))
    torch.manual_seed(0)
    network = Network(RULES["adagrad"])
    losses, dense, tables, scores = fitted(network, steps, device, grains=4, clips=True)
    return losses, dense, scores, tables


@pytest.mark.parametrize(
    ("steps", "order"),
    [(3, "lazy"), *[pytest.param(300, order, marks=pytest.mark.soak) for order in ORDERS]],
)
def test_two_ranks_with_a_device_each_have_the_bits_of_one_cpu(steps: int, order: str) -> None:
    ((losses, dense, scores, _),) = ranks_of(of_rank, 1, "cpu", steps, order)
    on_cpus = ranks_of(of_rank, 2, "cpu", steps, order)
    on_devices = ranks_of(of_rank, 2, "fake", steps, order)
    assert on_devices == on_cpus
    assert all(of[:3] == (losses, dense, scores) for of in on_devices)
