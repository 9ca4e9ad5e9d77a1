# SPDX-License-Identifier: Apache-2.0
"""What trains on a CPU trains on a device to the same bits: rules, tiers, modules, loops, ranks.

Four cases run in `make test`. `make soak` runs all of them for 300 steps, and 1,000 drawn orders.
"""

from __future__ import annotations

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
SCHEMA = hb.Schema(
    [
        hb.Label("click"),
        hb.Id("user"),
        hb.Id("item"),
        hb.Id("seen", table="item"),
        hb.Dense("price"),
    ]
)
RULES: dict[str, hb.Rule] = {
    "sgd": hb.Sgd(lr=0.1),
    "momentum": hb.Momentum(lr=0.1),
    "adagrad": hb.Adagrad(lr=0.1),
    "row-wise adagrad": hb.RowwiseAdagrad(lr=0.1),
    "adam": hb.Adam(lr=0.1),
    "adam of all rows": hb.Adam(lr=0.1, scope="all"),
    "ftrl": hb.Ftrl(lr=0.1),
}


def data(steps: int) -> hb.Dataset:
    draw = np.random.default_rng(0)
    num = BATCH * steps
    columns = {
        "user": draw.integers(0, 300, num),
        "item": draw.integers(0, 300, num),
        "seen": draw.integers(0, 300, num),
        "price": draw.normal(size=num).astype(np.float32),
        "click": (draw.random(num) < 0.4).astype(np.float32),
    }
    return hb.Dataset(hb.sources.Memory(columns), SCHEMA, batch_size=BATCH)


class Network(nn.Module):
    """Bags of two tables, a module that shares one of them, and weights of ids that learn.

    Args:
        rule: of the tables.
        shares: whether a second module looks up the items once more.
        weighs: whether the network computes weights of the items.
        tables: keywords of the tables.
    """

    looks_up_once = True

    def __init__(
        self, rule: hb.Rule, *, shares: bool = False, weighs: bool = False, **tables: Any
    ) -> None:
        super().__init__()
        made = hb.make_tables(SCHEMA, dim=DIM, rule=rule, **tables)
        self.rows = hb.EmbeddingCollection(SCHEMA, made)
        self.again = hb.EmbeddingBag(made["item"]) if shares else None
        self.weight = nn.Linear(1, 1) if weighs else None
        self.hidden = nn.Linear(3 * DIM + 1, 6)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(6, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        price = batch.dense["price"].reshape(-1, 1)
        ids = dict(batch.ids)
        if self.weight is not None:
            weights = torch.sigmoid(self.weight(price)).reshape(-1)
            ids["item"] = hb.Ids(ids["item"].values, ids["item"].offsets, weights)
            batch = replace(batch, ids=ids)
        logits = self.rows.flat(batch)
        logits = self.out(self.dropout(torch.relu(self.hidden(torch.cat([logits, price], 1)))))
        if self.again is not None:
            logits = logits + self.again(ids["item"].values.reshape(-1, 1)).sum(1, keepdim=True)
        return logits.squeeze(1)


class Plain(nn.Module):
    """A model of torch alone, which `hb.auto` converts."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(300, DIM, sparse=True)
        self.items = nn.Embedding(300, DIM, sparse=True)
        self.out = nn.Linear(2 * DIM + 1, 1)

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        rows = [self.users(user), self.items(item), price.reshape(-1, 1)]
        return self.out(torch.cat(rows, 1)).squeeze(1)


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
    **settings: Any,
) -> Any:
    """Return losses and each bit that training changes, after a fit."""
    network = network.to(device)
    losses: list[float] = []

    class Losses:
        def on_step_end(self, run: Any) -> None:
            losses.append(run.loss.item())

        def barrier(self, step: int, now: int | None) -> bool:
            return False

    if optimizer is None:
        optimizer = torch.optim.Adagrad(hb.dense_parameters(network), lr=0.1)
    model = hb.RecModel(network, "bce", optimizer, **settings)
    batches = data(steps)
    clip = hb.callbacks.ClipGradients(0.5)
    model.fit(hb.Ahead(batches) if ahead else batches, callbacks=[Losses(), clip], progress=False)
    scores = model.predict(data(2)).tolist()
    return losses, [w.tolist() for w in hb.dense_parameters(network)], tables_of(network), scores


def accumulated(steps: int, device: str) -> Any:
    """Return losses and bits of a loop of torch whose gradients are those of four batches."""
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
                optimizer.step()
                optimizer.zero_grad()
    dense = [weight.tolist() for weight in hb.dense_parameters(network)]
    return [loss.item() for loss in losses], dense, tables_of(network)


def converted(steps: int, device: str) -> Any:
    plain = Plain().to(device)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    network, optimizer, _ = hb.auto(plain, optimizer)
    return fitted(network, steps, device, optimizer)


def on_disk(**settings: Any) -> Callable[[int, str], Any]:
    def train(steps: int, device: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            network = Network(hb.Adagrad(lr=0.1), tier=hb.Ssd(folder, ram_rows=96))
            return fitted(network, steps, device, **settings)

    return train


def case(rule: str = "adagrad", *, grains: int = 1, ahead: bool = False, **how: Any) -> Any:
    def train(steps: int, device: str) -> Any:
        return fitted(Network(RULES[rule], **how), steps, device, grains=grains, ahead=ahead)

    return train


CASES: dict[str, Callable[[int, str], Any]] = {
    **{rule: case(rule) for rule in RULES},
    "ahead": case(ahead=True),
    "grains": case("adam", grains=4),
    "grains ahead": case(grains=4, ahead=True),
    "grains of weights": case(grains=4, weighs=True),
    "modules": case(shares=True),
    "weights": case(weighs=True),
    "disk": on_disk(),
    "disk ahead": on_disk(ahead=True),
    "disk by grains": on_disk(grains=4),
    "accumulated": accumulated,
    "converted": converted,
}
QUICK = ("adam", "grains ahead", "accumulated", "disk ahead")


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
            mode, _, seed = order.partition(" ")
            queues.reset(Schedule(mode, int(seed or 0)))
            if bits(name, steps, "fake") != expected:
                found.append(f"{name}: {order}")
    return found


def test_cases_have_the_bits_of_a_cpu() -> None:
    assert SERVER.call(differing, list(QUICK), 4, ["lazy", "copies"]) == []


@pytest.mark.soak
@pytest.mark.parametrize("order", [str(schedule) for schedule in schedules(6)])
@pytest.mark.parametrize("name", CASES)
def test_cases_have_the_bits_of_a_cpu_over_300_steps(name: str, order: str) -> None:
    assert SERVER.call(differing, [name], 300, [order]) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_cases_have_the_bits_of_a_cpu_in_1000_drawn_orders(name: str) -> None:
    """Each case has its share of the 1,000."""
    shares = range(list(CASES).index(name), 1000, len(CASES))
    assert SERVER.call(differing, [name], 3, [f"random {seed}" for seed in shares]) == []


def of_rank(device: str, steps: int) -> Any:
    torch.set_num_threads(1)
    if device == "fake":
        devices.install().reset(Schedule("lazy"))
    torch.manual_seed(0)
    losses, dense, tables, scores = fitted(Network(RULES["adagrad"]), steps, device, grains=4)
    return losses, dense, scores, tables


def test_two_ranks_with_a_device_each_have_the_bits_of_one_cpu() -> None:
    ((losses, dense, scores, _),) = ranks_of(of_rank, 1, "cpu", 3)
    on_cpus = ranks_of(of_rank, 2, "cpu", 3)
    on_devices = ranks_of(of_rank, 2, "fake", 3)
    assert on_devices == on_cpus
    assert all(of[:3] == (losses, dense, scores) for of in on_devices)
