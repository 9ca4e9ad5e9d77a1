# SPDX-License-Identifier: Apache-2.0
"""A folder of states whose CURRENT is gone, and going back to an earlier state."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.connectors import Journal
from hotbed.errors import ConfigError, FormatError, NotWritten, PersistError
from hotbed.files import Lock
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.publish import TopicFeed
from hotbed.persist.state.chain import Replica
from hotbed.persist.state.digest import content_digest
from hotbed.persist.upkeep.rollback import roll_back
from hotbed.testing import FakeStream
from hotbed.training.callbacks import Checkpoint, Evict


@pytest.fixture
def learn(dataset: Any, network: Any, tmp_path: Path) -> Any:
    """learn(): a new model follows 640 events in 10 steps and saves every second step."""

    def run(
        data: Any = None, path: Any = tmp_path / "state", save: Any = None, **keywords: Any
    ) -> Any:
        model = hb.RecModel(network(evict=hb.Ttl(seconds=200)), "bce", "adam", {"auc"})
        saves = {"every_steps": 2, "full_every": 3, "keep": 9, "wait": True} | (save or {})
        callbacks = [Evict(step_interval=4), Checkpoint(path, **saves)]
        data = dataset(640) if data is None else data
        torch.manual_seed(1)
        model.online_train(data, callbacks, progress=False, **keywords)
        return model

    return run


def digest(path: Path) -> str:
    return content_digest(open_checkpoint(path))


def states(path: Path) -> list[int]:
    return sorted(int(folder.name[-8:]) for folder in path.glob("checkpoint-*"))


def test_missing_current_beside_states_is_refused_with_their_names(
    learn: Any, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    model = learn(max_steps=4)
    (path / "CURRENT").unlink()
    for use in (learn, lambda: hb.load(path), lambda: model.save(path)):
        with pytest.raises(FormatError, match="CURRENT: missing beside states") as error:
            use()
        assert "checkpoint-00000001, checkpoint-00000002, checkpoint-00000003" in str(error.value)
        assert f"hotbed rollback {path} --state N" in str(error.value)
    assert states(path) == [1, 2, 3]
    assert roll_back(path, 3)["aside"] == []
    assert learn().counters["samples"] == 640
    (path / "CURRENT").write_text("torn")
    with pytest.raises(FormatError, match=r"CURRENT: torn.*hotbed rollback"):
        learn()


def test_first_checkpoint_whose_writer_was_killed_is_verified_and_resumed(
    learn: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    learn(path=tmp_path / "whole")
    learn(max_steps=0)
    assert states(path) == [1]
    (path / "CURRENT").unlink()
    dense = path / "checkpoint-00000001" / "dense.safetensors"
    content = dense.read_bytes()
    dense.write_bytes(content[:-1])
    with pytest.raises(FormatError, match=r"dense\.safetensors"):
        learn()
    assert not (path / "CURRENT").exists()
    dense.write_bytes(content)
    (path / "CURRENT").mkdir()
    with pytest.raises(NotWritten, match="state: cannot be written"):
        learn()
    (path / "CURRENT").rmdir()
    learn()
    assert "verified and made current" in caplog.text
    assert digest(path) == digest(tmp_path / "whole")


def test_going_back_resumes_from_the_state_to_the_bits_of_an_unbroken_run(
    learn: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotbed")
    path = tmp_path / "state"
    learn()
    whole = digest(path)
    assert states(path) == [1, 2, 3, 4, 5, 6]
    done = roll_back(path, 3)
    assert (done["folder"], done["version"]) == ("checkpoint-00000003", 4)
    assert states(path) == [1, 2, 3]
    assert states(path / "aside") == [4, 5, 6]
    learn()
    assert "step 4" in caplog.text
    assert digest(path) == whole
    assert states(path) == [1, 2, 3, 7, 8, 9]  # above every number used before


def test_going_back_cuts_journal_and_dead_letters(learn: Any, world: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    columns = world.columns(640)
    for row in (7, 500):
        columns["t"][row] = 10**12

    def stream() -> hb.Dataset:
        source = FakeStream(columns, takes=[100] * 7, ends=True)
        return hb.Dataset(source, world.schema, 64, max_ahead_seconds=3600.0, prefetch=0)

    def letters() -> list[int]:
        lines = (path / "dead_letters.jsonl").read_text().splitlines()
        return [json.loads(line)["place"]["row"] for line in lines]

    learn(data=stream())
    assert letters() == [7, 500]
    roll_back(path, 3)
    assert letters() == [7]
    journal = Journal(path / "journal")
    assert (
        journal.last("block")
        < open_checkpoint(path).manifest.positions["stream"]["source"]["block"]
    )
    journal.close()
    model = learn(data=stream())
    assert model.counters["samples"] == 638
    assert letters() == [7, 500]


def test_version_published_after_going_back_is_a_full(learn: Any, tmp_path: Path) -> None:
    path, published = tmp_path / "state", tmp_path / "published"
    learn(save={"publish": hb.PublishDirectory(published, keep=9)}, max_steps=8)
    follower = hb.Follower(published)
    replica = Replica()
    for version in follower.poll():
        replica.apply(version)
    roll_back(path, 2)
    learn(save={"publish": hb.PublishDirectory(published, keep=9)}, max_steps=4)
    versions = list(follower.poll())
    assert versions[0].manifest.kind == "full"  # the state that the stream went back to
    assert all(version.manifest.version > 8 for version in versions)
    for version in versions:
        replica.apply(version)
    values = [
        [batch.column("value") for batch in table.export()] for table in replica.tables.values()
    ]
    model = hb.load(path)
    assert values == [
        [batch.column("value") for batch in model.tables[name].export()] for name in replica.tables
    ]


def test_state_that_a_stream_went_back_to_is_published_without_a_step(
    learn: Any, tmp_path: Path
) -> None:
    """It is served at once; a run of no steps is enough, and a second one publishes nothing."""
    path, published = tmp_path / "state", tmp_path / "published"
    learn(save={"publish": hb.PublishDirectory(published, keep=9)}, max_steps=8)
    roll_back(path, 3)
    earlier = open_checkpoint(path)
    for _ in range(2):
        learn(save={"publish": hb.PublishDirectory(published, keep=9)}, max_steps=0)
        newest = open_checkpoint(published)
        assert newest.manifest.source == earlier.manifest.digest
        assert newest.manifest.version == 9


def test_going_back_is_refused_without_a_change(learn: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    learn()
    before = digest(path)
    with Lock(path / "journal"), pytest.raises(PersistError, match="another run"):
        roll_back(path, 3)
    with pytest.raises(
        ConfigError, match=r"--state: rollback needs the number .* got none\..*: 1, 2"
    ):
        roll_back(path, None)
    with pytest.raises(ConfigError, match=r"--state: not in .* got 9.*: 1, 2, 3, 4, 5, 6"):
        roll_back(path, 9)
    with pytest.raises(ConfigError, match="rollback: works on local folders"):
        roll_back("memory://states", 1)
    rows = next((path / "checkpoint-00000002").rglob("rows-*.arrow"))
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(FormatError, match=rf"checkpoint-00000002/.*{rows.name}"):
        roll_back(path, 3)  # which rests on it
    assert states(path) == [1, 2, 3, 4, 5, 6]
    assert digest(path) == before


def test_nothing_else_is_written_over_the_states_of_a_stream(learn: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    model = learn()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(PersistError, match="it holds states of a stream"):
        model.save(path)
    with pytest.raises(PersistError, match="it holds checkpoints, not published versions"):
        model.export(path)
    newest = max(path.glob("checkpoint-*")) / "MANIFEST.json"
    newest.write_bytes(before[newest][:-1])  # those before it can still be restored
    with pytest.raises(PersistError, match="it holds states of a stream"):
        model.save(path)
    newest.write_bytes(before[newest])
    exported = tmp_path / "exported"
    model.export(exported)
    with pytest.raises(PersistError, match="it holds published versions"):
        model.save(exported)
    with pytest.raises(ConfigError, match="holds checkpoints, got a model to serve"):
        hb.ParameterServer(tmp_path).load("state", exported)
    with pytest.raises(PersistError, match=r"TopicFeed\.cache: holds states"):
        TopicFeed("localhost:1", "clicks", cache=path)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
