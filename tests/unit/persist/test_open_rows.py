# SPDX-License-Identifier: Apache-2.0
"""What a join of streams holds open is a part of its checkpoints: deltas, digests, restoring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch

import hotbed as hb
from hotbed.errors import FormatError
from hotbed.persist.chain import compact
from hotbed.persist.digest import content_digest
from hotbed.persist.format import open_checkpoint
from hotbed.persist.open_rows import read_open_rows
from hotbed.persist.resume import go_back
from hotbed.testing import FakeStream

COUNT = 900
RNG = np.random.default_rng(0)
CLICKED = RNG.random(COUNT) < 0.3
SHOWN = {
    "id": [f"i{number}" for number in range(COUNT)],
    "user": RNG.integers(0, 20, COUNT),
    "time": np.arange(COUNT),
    "tag": [None] * 300 + ["t"] * (COUNT - 300),
}
CLICKS = {
    "id": [f"i{number}" for number in np.flatnonzero(CLICKED)],
    "time": np.flatnonzero(CLICKED) + 40,
}


def learn(folder: Path, *stops: int | None, ahead: int = 0, **keywords: Any) -> str:
    """Learn a join of streams in several lives; return the digest of its last state."""
    for stop in stops:
        sources = (FakeStream(SHOWN, then=60, ends=True), FakeStream(CLICKS, then=11, ends=True))
        join = hb.sources.Join(*sources, on="id", within=100, unit="s", label="y")
        schema = hb.Schema([hb.Label("y"), hb.Time("time", unit="s"), hb.Id("user"), hb.Id("tag")])
        torch.manual_seed(0)
        network = hb.models.LR(schema, hb.make_tables(schema, 1))
        data: Any = hb.Dataset(join, schema, 32)
        if ahead:
            data = hb.Ahead(data, depth=ahead, torch_threads=1)
        arguments = {"every_steps": 3, "full_every": 3, "wait": True, **keywords}
        model = hb.RecModel(network, "bce", "adam", {"auc"})
        callbacks = [hb.callbacks.Checkpoint(folder, **arguments)]
        model.online_train(data, callbacks, max_steps=stop, progress=False)
    return content_digest(open_checkpoint(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return learn(tmp_path_factory.mktemp("whole"), None)


def test_a_run_that_is_resumed_with_ids_mapped_ahead_learns_as_one_that_is_not(
    whole: str, tmp_path: Path
) -> None:
    """Without ids mapped ahead: see the test of compacted states."""
    assert learn(tmp_path, 7, 8, 16, None, ahead=8) == whole


def numbers(folder: Path, log: str) -> list[list[int]]:
    """The numbers of the rows in the files of a state: of its full, and of each delta."""
    reader = open_checkpoint(folder)
    files = []
    for link in reader.links:
        entry = link.manifest.open_rows
        has_rows = entry is not None and log in entry.files
        batches = [*link.batches(entry.files[log])] if has_rows else []  # type: ignore[union-attr]
        files.append([n for batch in batches for n in batch["\0number"].to_pylist()])
    return files


def test_a_delta_holds_what_came_since_and_is_open(tmp_path: Path) -> None:
    learn(tmp_path, 14, keep=9, every_steps=4, full_every=9)
    full, *deltas = numbers(tmp_path, "impressions")
    assert full == []  # nothing was read yet
    assert len(deltas) > 2
    together = [number for delta in deltas for number in delta]
    assert together == sorted(set(together))
    rows = read_open_rows(open_checkpoint(tmp_path))
    assert rows is not None
    times = np.concatenate([batch["\0time"].to_numpy() for batch in rows.batches("impressions")])
    assert (times >= rows.oldest).all()
    assert 100 <= len(times) < 300
    assert sum(map(len, deltas[:-1])) > len(times)  # rows that closed are not written again
    found = [n for batch in rows.batches("outcomes") for n in batch["\0number"].to_pylist()]
    assert found == [n for delta in numbers(tmp_path, "outcomes") for n in delta][-len(found) :]


def test_a_compacted_state_and_an_earlier_one_lead_to_the_same_end(
    whole: str, tmp_path: Path
) -> None:
    digest = learn(tmp_path, 14, every_steps=4, full_every=9)
    assert compact(tmp_path) is not None
    assert content_digest(open_checkpoint(tmp_path)) == digest
    assert len(open_checkpoint(tmp_path).links) == 1
    assert learn(tmp_path, None, every_steps=4, full_every=9, keep=9) == whole
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    go_back(tmp_path, int(folders[1].rpartition("-")[2]))
    assert learn(tmp_path, None) == whole


def test_published_versions_hold_nothing_that_is_open_and_a_changed_file_is_refused(
    tmp_path: Path,
) -> None:
    states = tmp_path / "states"
    learn(states, 8, publish=hb.PublishDirectory(tmp_path / "published"))
    assert not list((tmp_path / "published").rglob("impressions.arrow"))
    for manifest in (tmp_path / "published").rglob("MANIFEST.json"):
        assert "open_rows" not in json.loads(manifest.read_text())
    file = max(states.glob("checkpoint-*/open_rows/impressions.arrow"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"open_rows/impressions.arrow: changed since"):
        learn(states, None)
