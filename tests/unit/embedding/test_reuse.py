# SPDX-License-Identifier: Apache-2.0
"""Slots of rows that went are given to rows that come, also in a training loop, which always holds
its last graph.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb


@pytest.mark.parametrize("evict", [hb.Ttl(seconds=10), hb.Lru(max_rows=4096)])
def test_a_training_loop_reuses_the_slots_of_evicted_rows(evict: object) -> None:
    table = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1), evict=evict)
    bag = hb.EmbeddingBag(table)
    optimizer = hb.SparseOptimizer(bag)
    sizes = []
    for step in range(100):
        ids = torch.arange(step * 500, (step + 1) * 500)
        loss = (
            bag(ids.reshape(-1, 1), time=torch.full((500,), step * 60_000_000)).square().sum()
        )  # the last one lives on
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        table.evict(step * 60_000_000 + 30_000_000)
        sizes.append(table.native.num_slots)
    assert table.stats["evicted"] > 40_000
    assert sizes[-1] <= 2 * sizes[20]
