# SPDX-License-Identifier: Apache-2.0
"""Small worlds that the training tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.embedding.modules.state import dense_state

USERS, ITEMS = 50, 80
torch.set_num_threads(1)  # the networks here are tiny: threads would only wait for each other


def columns(rows: int, seed: int = 0) -> dict[str, Any]:
    """Events whose label follows a hidden taste of the user and quality of the item."""
    rng, hidden = np.random.default_rng(seed), np.random.default_rng(99)
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    x = rng.normal(size=rows).astype(np.float32)
    score = hidden.normal(size=USERS)[user] + hidden.normal(size=ITEMS)[item] + 0.5 * x
    return {
        "user": user,
        "item": item,
        "x": x,
        "y": (score > 0).astype(np.int64),
        "t": np.arange(rows) + seed * rows,
    }


SCHEMA = hb.Schema([hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("item"), hb.Dense("x")])


@pytest.fixture
def dataset() -> Callable[..., hb.Dataset]:
    """dataset(rows, seed, batch_size=64): deterministic events with a Time column."""

    def make(rows: int = 1024, seed: int = 0, batch_size: int = 64) -> hb.Dataset:
        return hb.Dataset(hb.sources.Memory(columns(rows, seed)), SCHEMA, batch_size, prefetch=0)

    return make


@pytest.fixture
def network() -> Callable[..., nn.Module]:
    """network(): a small DCNv2 with batch norm over fresh tables; the same weights each time."""

    def make(**table: Any) -> nn.Module:
        torch.manual_seed(3)
        tables = hb.make_tables(SCHEMA, 4, **({"rule": hb.Adagrad(lr=0.1)} | table))
        return hb.models.DCNv2(SCHEMA, tables, hidden=(16,), num_cross_layers=1, batch_norm=True)

    return make


def snapshot(model: hb.RecModel) -> dict[str, Any]:
    """Every bit that training may change: dense state, rows with their state, dense optimizer
    state.
    """
    state: dict[str, Any] = {
        name: tensor.clone() for name, tensor in dense_state(model.network).items()
    }
    for name, table in model.tables.items():
        for number, batch in enumerate(table.export()):
            for column in ("id", "value", "state"):
                values = batch.column(column)
                flat = values.flatten() if column != "id" else values
                state[f"{name}/{number}/{column}"] = torch.from_numpy(flat.to_numpy().copy())
        state[f"{name}/step"] = torch.tensor(table.step)
    if model.learner.dense is not None:
        for number, entries in model.learner.dense.state_dict()["state"].items():
            state |= {
                f"adam/{number}/{key}": torch.as_tensor(value).clone()
                for key, value in entries.items()
            }
    return state


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two snapshots are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def world() -> Any:
    """The functions above, for tests."""

    class World:
        pass

    world = World()
    world.columns, world.snapshot, world.same, world.schema = columns, snapshot, same, SCHEMA
    return world
