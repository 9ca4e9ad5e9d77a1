# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: the state of one moment, errors that surface, the last good state
kept.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from on_disk import on_disk
from torch import nn

import hotbed as hb
from hotbed.errors import PersistError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.container.store import MANIFEST_FILE
from hotbed.persist.state import saver as saver_module
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import continues, restore
from hotbed.persist.state.saver import Saver


def tracked(**keywords: Any) -> hb.Table:
    table = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1), **keywords)
    table.track()
    return table


def learn(table: hb.Table, ids: Any, time: int | None = None) -> None:
    slots = table.find_or_insert(np.asarray(ids, np.int64), time)
    table.update(slots, np.full((len(slots), 2), 0.5, np.float32))


def test_progress_and_generators_come_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    progress = {
        "callbacks": {"history.0": {"auc": np.arange(3.0), "best": (1, None)}},
        "run": {"step": 7},
    }
    save(tmp_path, State(progress=progress, random=hb.checkpoints.random_state()))
    drawn = torch.rand(4)
    reader = open_checkpoint(tmp_path)
    assert reader.progress["run"] == {"step": 7}
    assert reader.progress["callbacks"]["history.0"]["best"] == (1, None)
    np.testing.assert_array_equal(reader.progress["callbacks"]["history.0"]["auc"], np.arange(3.0))
    hb.checkpoints.set_random_state(reader.random)
    assert torch.equal(torch.rand(4), drawn)


def test_a_capture_is_the_state_of_its_moment_whatever_training_does_meanwhile(
    tmp_path: Path,
) -> None:
    network, table = nn.Linear(2, 1), tracked()
    learn(table, range(100))
    counters = {"steps": 1}
    state = State(
        network=network, tables={"t": table}, counters=counters, progress={"a": np.ones(2)}
    )
    before = save(tmp_path / "before", state)
    captured = capture(state)
    learn(table, range(50, 200))
    state.progress["a"][:] = 9
    counters["steps"] = 2
    with torch.no_grad():
        network.weight.zero_()
    after = write(tmp_path / "after", captured)
    assert content_digest(open_checkpoint(before.folder)) == content_digest(
        open_checkpoint(after.folder)
    )


def test_a_full_then_deltas_are_each_the_state_of_its_moment(tmp_path: Path) -> None:
    table, saver = tracked(), Saver(tmp_path / "run")
    state = State(network=nn.Linear(2, 1), tables={"t": table})
    assert saver.needs_full
    for step in range(4):
        learn(table, range(step * 10, step * 10 + 30))
        table.remove(np.array([step * 10], np.int64))
        saver.submit(capture(state, changes=step > 0))
        assert not saver.needs_full
        saved = saver.wait()
        assert saved is not None
        assert (saved.kind, len(saved.chain)) == ("delta" if step else "full", step + 1)
        reader = open_checkpoint(tmp_path / "run")
        assert reader.folder == str(saved.folder)
        whole = save(tmp_path / "whole", state)
        assert content_digest(reader) == content_digest(open_checkpoint(whole.folder))
        other = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1))
        restore(reader, State(network=nn.Linear(2, 1), tables={"t": other}))
        assert content_digest({"t": other}) == content_digest({"t": table})


def test_a_saver_that_begins_from_the_restored_state_saves_changes_at_once(tmp_path: Path) -> None:
    table, saver = tracked(), Saver(tmp_path)
    learn(table, range(100))
    saver.submit(capture(State(tables={"t": table})))
    saver.wait()
    for step in range(2):
        table = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1))
        reader = open_checkpoint(tmp_path)
        restore(reader, State(tables={"t": table}))
        assert continues(reader, {"t": table})
        table.track(saved=True)
        saver = Saver(tmp_path, last=reader.saved)
        learn(table, [step, 200 + step])
        table.remove(np.array([50 + step]))
        saver.submit(capture(State(tables={"t": table}), changes=not saver.needs_full))
        saver.wait()
        newest = open_checkpoint(tmp_path).newest_link
        assert (newest.manifest.kind, len(newest.chain)) == ("delta", step + 2)
        assert sum(part.rows for part in newest.entry("t").parts) == 2
        whole = save(tmp_path / "whole", State(tables={"t": table}))
        assert content_digest(open_checkpoint(tmp_path)) == content_digest(
            open_checkpoint(whole.folder)
        )
    other = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1), evict=hb.Lru(2000))
    assert not continues(open_checkpoint(tmp_path), {"t": other})
    disk = hb.Table("t", 2, rule=hb.Adagrad(lr=0.1), tier=on_disk(ram_rows=10))
    assert continues(open_checkpoint(tmp_path), {"t": disk})


def test_a_state_is_opened_by_its_version(tmp_path: Path) -> None:
    table, saver = tracked(), Saver(tmp_path, keep=2)
    digests = {}
    for step, changes in ((5, False), (10, True), (15, True), (20, False), (15, True)):
        learn(table, range(step, step + 9))
        saver.submit(capture(State(tables={"t": table}, version=step), changes=changes))
        saver.wait()
        digests[step] = content_digest(open_checkpoint(tmp_path))
    for step, digest in digests.items():
        assert content_digest(open_checkpoint(tmp_path, step)) == digest  # the newest 15 counts
    with pytest.raises(PersistError, match=r"got 12\. Choose one of: 5, 10, 15, 20"):
        open_checkpoint(tmp_path, 12)
    (tmp_path / "checkpoint-00000002" / MANIFEST_FILE).write_bytes(b"torn")
    assert open_checkpoint(tmp_path, 5).manifest.version == 5
    with pytest.raises(PersistError, match="got 10"):
        open_checkpoint(tmp_path, 10)


def test_a_failed_save_keeps_the_last_good_state_and_its_changes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    table, saver = tracked(), Saver(tmp_path)
    state = State(tables={"t": table})
    learn(table, range(10))
    saver.submit(capture(state))
    good = saver.wait()
    learn(table, range(5, 15))
    monkeypatch.setattr(
        saver_module, "write", lambda where, captured, *rest: (captured.close(saved=False), 1 / 0)
    )
    saver.submit(capture(state, changes=True))
    monkeypatch.undo()
    with pytest.raises(PersistError, match="not saved, got ZeroDivisionError"):
        saver.wait()
    assert saver.needs_full
    assert good is not None
    assert open_checkpoint(tmp_path).folder == str(good.folder)
    with pytest.raises(PersistError, match="a full is needed first"):
        saver.submit(capture(state, changes=True))
    with table.snapshot(changes=True) as changes:  # returned by both failures, not lost
        assert changes.num_rows >= 10
    saver.submit(capture(state))
    assert saver.wait() != good
    assert content_digest(open_checkpoint(tmp_path)) == content_digest(
        open_checkpoint(save(tmp_path / "b", state).folder)
    )


def test_a_failure_surfaces_at_the_next_submit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver, state = Saver(tmp_path / "file" / "model"), State(tables={"t": tracked()})
    saver.submit(capture(state))
    with pytest.raises(PersistError, match="cannot be written"):
        saver.submit(capture(State()))
    capture(state).close(saved=True)  # the failed one was closed


def test_submit_hands_over_and_returns_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: Any
) -> None:
    go, real = threading.Event(), saver_module.write

    def slow(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(saver_module, "write", slow)
    saver = Saver(tmp_path)
    saver.submit(capture(State(version=1)))
    assert saver.busy
    go.set()
    saver.submit(capture(State(version=2)))
    saved = saver.wait()
    assert saved is not None
    assert (saved.version, saver.busy) == (2, False)
    assert open_checkpoint(tmp_path).manifest.version == 2
    assert open_checkpoint(tmp_path).manifest.parent is not None


def test_a_delta_without_its_parent_is_refused(tmp_path: Path) -> None:
    table = tracked()
    state = State(tables={"t": table})
    learn(table, range(10))
    first = write(tmp_path, capture(state))
    learn(table, range(10))
    with pytest.raises(PersistError, match="needs the checkpoint before them"):
        write(tmp_path, capture(state, changes=True))
    with pytest.raises(PersistError, match=r"checkpoint-00000001.*missing"):
        write(tmp_path / "elsewhere", capture(state, changes=True), parent=first)
    assert not list((tmp_path / "elsewhere").iterdir())
    # what was refused gave its changes back
    write(tmp_path, capture(state, changes=True), parent=first)
    assert content_digest(open_checkpoint(tmp_path)) == content_digest(
        open_checkpoint(save(tmp_path / "b", state).folder)
    )


def test_two_captures_of_a_table_at_once_are_refused_and_nothing_is_left_open() -> None:
    a, b = tracked(), hb.Table("b", 2)
    first = capture(State(tables={"b": b}))
    with pytest.raises(PersistError, match="one snapshot at a time"):
        capture(State(tables={"a": a, "b": b}))
    first.close(saved=False)
    capture(State(tables={"a": a, "b": b})).close(saved=False)


def test_the_same_bits_saved_again_have_the_same_digest(tmp_path: Path) -> None:
    table = tracked()
    learn(table, range(10))
    state = State(network=nn.Linear(2, 1), tables={"t": table}, progress={"x": np.ones(2)})
    assert save(tmp_path / "a", state).digest == save(tmp_path / "b", state).digest


def test_a_network_starts_with_parameters_of_another(tmp_path: Path) -> None:
    """Some take what is there under another name; others, and all after an error, stay."""
    there, here = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(2, 3)
    save(tmp_path, State(network=there))
    before = here.bias.clone()
    reader = open_checkpoint(tmp_path)
    for names, text in (
        ({"weight": "0.weight", "bias": "1.bias"}, r"'bias'.* \[3\], got '1\.bias' of \[1\]"),
        ({"weight": "2.weight"}, "'weight'.* got '2.weight' of nothing"),
        ({"other": "0.weight"}, "'other'.* nothing, got '0.weight'"),
    ):
        with pytest.raises(PersistError, match=text):
            hb.checkpoints.warm_start_network(here, reader, names)
    assert not torch.equal(here.weight, there[0].weight)
    hb.checkpoints.warm_start_network(here, reader, {"weight": "0.weight"})
    assert torch.equal(here.weight, there[0].weight)
    assert torch.equal(here.bias, before)
