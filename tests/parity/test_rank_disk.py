# SPDX-License-Identifier: Apache-2.0
"""Ranks whose rows lie on disks have the bits of one process with its rows in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import ranks_of
from on_disk import on_disk

import hotbed as hb
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest

ROWS = 3_200
SCHEMA = hb.Schema([hb.Label("y"), hb.Time("t"), hb.Id("user"), hb.Id("item")])


def learn(folder: str, loop: str, tier: Any) -> int:
    """Save a model that learned; return how many rows were read for it."""
    torch.manual_seed(3)
    random = np.random.default_rng(0)
    user = random.integers(0, 1_500, ROWS)
    rows = {"y": user % 2, "t": np.arange(ROWS), "user": user, "item": random.zipf(1.3, ROWS)}
    tables = hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.1), tier=tier, evict=hb.Lru(1_024))
    network = hb.models.DNN(SCHEMA, tables, hidden=[4])
    model = hb.RecModel(network, "bce", "adam", {"auc"}, grains=4)
    data = hb.Dataset(hb.sources.Memory(rows), SCHEMA, 64)
    if loop == "fit":
        model.fit(data, epochs=2, progress=False)
    else:
        model.online_train(hb.Ahead(data, depth=2), progress=False)
    model.save(folder)
    return sum(table.tier_stats.get("misses", 0) for table in model.tables.values())


def learn_each(folder: str, tier: Any) -> dict[str, int]:
    return {loop: learn(f"{folder}/{loop}", loop, tier) for loop in ("fit", "stream")}


def test_two_ranks_on_a_disk_learn_what_one_process_learns_in_memory(tmp_path: Path) -> None:
    learn_each(str(tmp_path / "memory"), hb.Ram())
    for misses in ranks_of(learn_each, 2, str(tmp_path / "disk"), on_disk(250, fetch=8)):
        assert min(misses.values()) > 100
    for loop in ("fit", "stream"):
        memory, disk = (
            content_digest(open_checkpoint(tmp_path / name / loop)) for name in ("memory", "disk")
        )
        assert disk == memory
