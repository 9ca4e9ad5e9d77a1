# SPDX-License-Identifier: Apache-2.0
"""Automatic graph modification of Rec SDK's door: ids leave the forward pass, results stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hotbed as hb
from hotbed.compat import mx_rec as mx
from hotbed.compat.mx_rec import framework

pytestmark = pytest.mark.torch_core
NUM_ROWS = 1200
CONFIG = {"access_threshold": 2, "eviction_threshold": 3600}


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    framework.end()


def rows(seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "user": generator.integers(0, 60, NUM_ROWS),
        "movie": generator.integers(0, 40, NUM_ROWS),
        "like": generator.integers(0, 2, NUM_ROWS).astype(np.float32),
        "timestamp": np.arange(NUM_ROWS),
    }


def dataset(seed: int = 0) -> hb.Dataset:
    schema = hb.Schema([hb.Id("user"), hb.Id("movie"), hb.Label("like"), hb.Time("timestamp")])
    return hb.Dataset(hb.sources.Memory(rows(seed)), schema, batch_size=128)


def table(name: str = "cross", dim: int = 4) -> Any:
    return mx.create_table(
        key_dtype=torch.int64,
        dim=dim,
        name=name,
        emb_initializer=hb.Normal(std=0.01),
        device_vocabulary_size=10_000,
    )


def look_up(own: Any, ids: Tensor, **keywords: Any) -> Tensor:
    return mx.sparse_lookup(own, ids, modify_graph=True, **keywords)


class Plain(nn.Module):
    """The model of mx_rec_steps.py."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        ids = batch.ids["user"].values * 1_000_003 + batch.ids["movie"].values
        found = look_up(self.table, ids, access_and_evict_config=CONFIG)
        return self.out(found).squeeze(-1)


def begin(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Any]:
    """Run steps 1, 2 and 5 to 7; return the model and its optimizers."""
    mx.init(use_dynamic=True)
    sparse = mx.optimizers.lazy_adam.create_hash_optimizer(learning_rate=0.001)
    torch.manual_seed(7)
    model = make()
    dense, _ = mx.get_dense_and_sparse_variable(model)
    return model, sparse, torch.optim.Adam(dense, lr=1e-3)


def train_epoch(
    model: nn.Module,
    optimizers: tuple[Any, Any],
    call: Callable[[Any], tuple[Tensor, Tensor]],
) -> list[float]:
    losses = []
    sparse, dense = optimizers
    for batch in mx.get_initializer(True)():
        scores, likes = call(batch)
        loss = functional.binary_cross_entropy_with_logits(scores, likes)
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return losses


def contents(tables: dict[str, hb.Table]) -> dict[str, Any]:
    """Return every column of every row, and the statistics, of tables."""
    state: dict[str, Any] = {}
    for name, own in tables.items():
        columns = [batch.to_pydict() for batch in own.export()]
        state[name] = (columns, own.stats, own.scalars())
    return state


# --- equal to the engine's own face ---------------------------------------------------------------


def test_automatic_mode_has_the_bits_of_a_plain_loop() -> None:
    model, sparse, dense = begin(Plain)
    mx.modify_graph_and_start_emb_cache(model, train=dataset())
    losses = train_epoch(model, (sparse, dense), lambda own: (model(own), own.labels["like"]))

    own = hb.Table(
        "cross",
        4,
        rule=sparse.rule,
        init=hb.Normal(std=0.01),
        admit=hb.MinCount(2),
        evict=hb.Ttl(seconds=3600),
        capacity=10_000,
    )
    embedding = hb.Embedding(own)
    torch.manual_seed(7)
    out = nn.Linear(4, 1)
    rules = hb.SparseOptimizer(embedding)
    adam = torch.optim.Adam(out.parameters(), lr=1e-3)
    expected = []
    for raw in dataset():
        batch = raw.map_arrays(torch.from_numpy)
        ids = batch.ids["user"].values * 1_000_003 + batch.ids["movie"].values
        scores = out(embedding(ids, time=batch.time)).squeeze(-1)
        loss = functional.binary_cross_entropy_with_logits(scores, batch.labels["like"])
        rules.zero_grad()
        adam.zero_grad()
        loss.backward()
        rules.step()
        adam.step()
        expected.append(loss.item())
    assert losses == expected
    assert contents(framework.current().started("test").tables) == contents({"cross": own})
