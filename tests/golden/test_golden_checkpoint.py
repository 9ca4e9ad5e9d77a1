# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of each format version, written once and kept: every later build that promises to
read them reads them so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from torch import nn

import hotbed as hb
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, save
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import restore

HERE = Path(__file__).parent


def test_a_checkpoint_of_version_1_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters())
    table = hb.Table(
        "item/colour",
        2,
        rule=hb.Adagrad(lr=0.5),
        admit=hb.MinCount(2),
        evict=hb.Ttl(seconds=100),
        seed=3,
    )
    state = State(network=network, tables={"item/colour": table}, optimizers={"dense": optimizer})
    reader = open_checkpoint(HERE / "checkpoint_1")
    assert reader.manifest.format_version == 1
    restore(reader, state)
    assert (len(table), table.step, reader.progress, reader.random) == (5, 2, {}, {})
    rows = table.lookup(np.array([0, 7], np.int64))
    np.testing.assert_array_equal(rows.view(np.uint32), ROWS)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert content_digest(reader) == DIGEST
    again = save(
        tmp_path,
        State(
            network=network,
            tables={"item/colour": table},
            optimizers={"dense": optimizer},
            positions={"train": {"row": 12}},
            counters={"steps": 2},
        ),
    )
    assert content_digest(open_checkpoint(again.folder)) == DIGEST


def test_a_full_and_deltas_of_version_2_are_read_as_they_were_written() -> None:
    network = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters())
    table = hb.Table(
        "item/colour",
        2,
        rule=hb.Adagrad(lr=0.5),
        admit=hb.MinCount(2),
        evict=hb.Ttl(seconds=100),
        seed=3,
    )
    reader = open_checkpoint(HERE / "checkpoint_2")
    assert reader.manifest.format_version == 2
    assert [link.manifest.kind for link in reader.links] == ["full", "delta", "delta"]
    restore(
        reader,
        State(network=network, tables={"item/colour": table}, optimizers={"dense": optimizer}),
    )
    assert content_digest(reader) == DIGEST_2
    assert (len(table), table.step, optimizer.state_dict()["state"][0]["step"]) == (3, 3, 3)
    rows = table.lookup(np.array([0, 7, -1], np.int64))
    np.testing.assert_array_equal(rows.view(np.uint32), ROWS_2)
    history = reader.progress["callbacks"]["history.0"]
    np.testing.assert_array_equal(history["auc"], [0.5, 0.75])
    assert str(history["best"]) == "(1, nan)"
    np.testing.assert_array_equal(reader.random["cpu"], np.arange(16))


# pinned: what the content digest is of must not drift between builds either
ROWS = np.array([[3204840542, 3203466230], [3210851088, 3210138186]], np.uint32)
DIGEST = "ce01fa087797f5c17bde1ffa553b8c34b5f40464b08a97d4bc2a536776235f9f"
ROWS_2 = np.array([[0, 0], [3214265558, 3213909108], [0, 0]], np.uint32)
DIGEST_2 = "9ae5dc4c5a9e8bf3efcb9fbdc3cf989d84d2d0a106fbc553de087480cbe4bc12"
