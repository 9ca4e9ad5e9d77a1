# SPDX-License-Identifier: Apache-2.0
"""A collection does what reference tables do, whatever comes between lookups, backward passes and
steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.embedding.modules import Feature
from hotbed.testing import ReferenceTable

pytestmark = pytest.mark.torch_core

SECOND = 1_000_000
FEATURES = [
    Feature("user", "user"),
    Feature("item", "item"),
    Feature("seen", "item"),
    Feature("path", "genre", "none"),
]
IDS = [-1, -2, 0, -(2**63), 2**63 - 1, *range(1, 30)]
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"rule": hb.Sgd(lr=0.5)},
    "admitted": {
        "rule": hb.Momentum(lr=0.5, momentum=0.5, scope="catch_up"),
        "admit": hb.MinCount(3),
        "default": 0.5,
    },
    "expiring": {"rule": hb.Sgd(lr=0.5, l2=0.5, scope="all"), "evict": hb.Ttl(seconds=3)},
    "both": {
        "rule": hb.Adagrad(lr=0.5),
        "evict": hb.Ttl(seconds=2),
        "admit": hb.MinCount(2, coefficient=1),
    },
}


class Run:
    """Trains a collection and reference tables on the same batches; gradients are small integers,
    so sums are exact.
    """

    def __init__(self, keywords: dict[str, Any], seed: int) -> None:
        self.random, self.now = np.random.default_rng(seed), 0
        self.tables = {
            name: hb.Table(name, dim=2 + (name == "item"), **keywords)
            for name in ("user", "item", "genre")
        }
        self.references = {
            name: ReferenceTable(name, table.dim, **keywords) for name, table in self.tables.items()
        }
        self.collection = hb.EmbeddingCollection(FEATURES, self.tables)
        self.optimizer = hb.SparseOptimizer(self.collection)
        self.waiting: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
            name: [] for name in self.tables
        }

    def batch(self) -> hb.Batch:
        n = int(self.random.integers(0, 6))
        self.now += SECOND // 2
        ids = {}
        for feature in FEATURES:
            offsets = np.concatenate([[0], np.cumsum(self.random.integers(0, 4, n))]).astype(
                np.int64
            )
            ids[feature.name] = hb.Ids(self.random.choice(IDS, int(offsets[-1])), offsets)
        return hb.Batch(ids=ids, time=np.full(n, self.now), num_samples=n)

    def learn(self, backward: bool) -> None:
        batch = self.batch()
        out = self.collection.train()(batch)
        slots = {}
        for name, table in self.references.items():
            mine = [batch.ids[f.name] for f in FEATURES if f.table == name]
            values = np.concatenate([ids.values for ids in mine])
            slots[name] = table.find_or_insert(values, self.now)
        self.compare(out, batch)
        if not backward:
            return
        grads = {
            f.name: torch.from_numpy(
                self.random.integers(-3, 4, out[f.name].shape).astype(np.float32)
            )
            for f in FEATURES
        }
        if len(batch):
            torch.autograd.backward(
                [out[f.name] for f in FEATURES], [grads[f.name] for f in FEATURES]
            )
            for name in self.references:
                self.waiting[name].append((slots[name], self.positions(name, batch, grads)))

    def positions(self, table: str, batch: hb.Batch, grads: dict[str, Any]) -> np.ndarray:
        """The gradient of each position of a table's features, in order."""
        parts = []
        for feature in FEATURES:
            if feature.table == table:
                grad = grads[feature.name].numpy()
                parts.append(
                    grad
                    if feature.pooling == "none"
                    else np.repeat(grad, batch.ids[feature.name].lengths(), axis=0)
                )
        return np.concatenate(parts)

    def compare(self, out: dict[str, Any], batch: hb.Batch) -> None:
        for feature in FEATURES:
            ids, table = batch.ids[feature.name], self.references[feature.table]
            rows = table.lookup(ids.values)
            if feature.pooling == "sum":
                pooled = np.zeros((len(batch), table.dim), np.float32)
                np.add.at(pooled, np.repeat(np.arange(len(batch)), ids.lengths()), rows)
                rows = pooled
            np.testing.assert_allclose(
                out[feature.name].detach().numpy(), rows, rtol=1e-5, atol=1e-6
            )

    def read(self) -> None:
        batch = self.batch()
        with torch.no_grad():
            self.compare(self.collection.eval()(batch), batch)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if any(self.waiting.values()):
            for name, table in self.references.items():
                slots, grads = zip(*self.waiting[name], strict=True)
                table.update(np.concatenate(slots), np.concatenate(grads))
                self.waiting[name] = []

    def forget(self) -> None:
        self.optimizer.zero_grad()
        self.waiting = {name: [] for name in self.tables}

    def evict(self) -> None:
        """Between steps: an id that goes and comes back within one accumulation may take either
        row's gradient.
        """
        self.step()
        for name, table in self.tables.items():
            assert table.evict(self.now - SECOND) == self.references[name].evict(self.now - SECOND)

    def check(self) -> None:
        for name, table in self.tables.items():
            assert len(table) == len(self.references[name])
            for got, expected in zip(table.export(), self.references[name].export(), strict=True):
                assert set(got.schema.names) == set(expected.schema.names)
                for column in expected.schema.names:
                    assert got[column].equals(expected[column]), (name, column)


ACTIONS = st.lists(
    st.sampled_from(
        ["learn", "learn", "learn", "look", "read", "step", "step", "forget", "evict", "check"]
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_collection_does_what_reference_tables_do(policy: str) -> None:
    @settings(
        max_examples=settings.default.max_examples // 2,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(actions=ACTIONS, seed=st.integers(0, 2**16))
    def run(actions: list[str], seed: int) -> None:
        training = Run(POLICIES[policy], seed)
        for action in actions:
            if action in ("learn", "look"):
                training.learn(backward=action == "learn")
            else:
                getattr(training, action)()
        training.step()
        training.check()

    run()
