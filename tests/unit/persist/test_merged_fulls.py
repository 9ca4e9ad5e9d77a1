# SPDX-License-Identifier: Apache-2.0
"""A full of tables on a disk is made of the files before it: the tables are not read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from on_disk import on_disk

import hotbed as hb
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.digest import content_digest

ROWS = 2_560
SCHEMA = hb.Schema([hb.Label("y"), hb.Id("user")])


def learn(folder: Path, tier: Any, max_steps: int | None = None, **save: Any) -> hb.RecModel:
    users = np.random.default_rng(0).integers(0, 2_000, ROWS)
    rows = {"y": users % 2, "user": users}
    torch.manual_seed(3)
    tables = hb.make_tables(SCHEMA, 4, rule=hb.Adagrad(lr=0.1), tier=tier)
    model = hb.RecModel(hb.models.DNN(SCHEMA, tables, hidden=[4]), "bce", "adam")
    keywords = {"every_steps": 4, "full_every": 3, "wait": True, "keep": 1} | save
    data = hb.Dataset(hb.sources.Memory(rows), SCHEMA, 64, prefetch=0)
    saves = hb.callbacks.Checkpoint(folder, **keywords)
    model.fit(data, callbacks=saves, max_steps=max_steps, progress=False)
    return model


def test_fulls_are_those_of_memory_and_old_files_go(tmp_path: Path) -> None:
    for name, tier in (("memory", hb.Ram()), ("disk", on_disk(150))):
        learn(tmp_path / name, tier, keep=99)
    digests = {}
    for name in ("memory", "disk"):
        states = [open_checkpoint(f) for f in sorted((tmp_path / name).glob("checkpoint-*"))]
        digests[name] = list(dict.fromkeys(content_digest(state) for state in states))
        kinds = [state.manifest.kind for state in states]
        assert kinds[:2] == ["full", "delta"]
        assert kinds.count("full") == 4
        assert [state.manifest.compacted for state in states].count(True) == 3 * (name == "disk")
    assert digests["disk"] == digests["memory"]

    learn(tmp_path / "kept", on_disk(150))
    kept = sorted((tmp_path / "kept").glob("checkpoint-*"))
    assert [open_checkpoint(folder).manifest.kind for folder in kept] == ["full", "delta", "delta"]


def test_a_run_that_is_started_again_reads_its_tables_for_no_full(tmp_path: Path) -> None:
    learn(tmp_path / "memory", hb.Ram(), keep=99)
    for max_steps in (2, 11, 27, None):
        learn(tmp_path / "disk", on_disk(150), keep=99, max_steps=max_steps)
    states = [open_checkpoint(f) for f in sorted((tmp_path / "disk").glob("checkpoint-*"))]
    fulls = [state.manifest for state in states if state.manifest.kind == "full"]
    assert [bool(full.compacted) for full in fulls] == [False, *[True] * (len(fulls) - 1)]
    assert len(fulls) > 3
    digests = [
        {content_digest(open_checkpoint(f)) for f in (tmp_path / name).glob("checkpoint-*")}
        for name in ("memory", "disk")
    ]
    assert len(digests[0] & digests[1]) > 5
    assert content_digest(states[-1]) in digests[0]


def test_a_merge_that_fails_leaves_the_delta_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(where: Any) -> None:
        raise OSError("no space left on device")

    learn(tmp_path / "memory", hb.Ram())
    monkeypatch.setattr("hotbed.persist.state.checkpoint.compact", refuse)
    learn(tmp_path / "disk", on_disk(150))
    assert "stays a delta: no space left" in caplog.text
    states = [open_checkpoint(tmp_path / name) for name in ("memory", "disk")]
    assert states[1].manifest.kind == "delta"
    assert content_digest(states[0]) == content_digest(states[1])


def test_rows_are_merged_some_ten_thousand_at_a_time(tmp_path: Path) -> None:
    table = hb.Table("user", 4)
    table.find_or_insert(np.arange(150_000))
    table.track()
    state = hb.checkpoints.State(tables={"user": table})
    saver = hb.checkpoints.Saver(tmp_path)
    saver.submit(hb.checkpoints.capture(state))
    saver.wait()
    table.find_or_insert(np.arange(-100, 0))
    saver.submit(hb.checkpoints.capture(state, changes=True), merges=True)
    saver.wait()
    reader = open_checkpoint(tmp_path)
    assert reader.manifest.compacted
    sizes = [batch.num_rows for batch in reader.newest_link.parts("user")]
    assert sum(sizes) == 150_100
    assert max(sizes) < 1 << 16
