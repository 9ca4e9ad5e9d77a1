# SPDX-License-Identifier: Apache-2.0
"""Calls that read and write states on ranks: each refuses a folder that one rank does not see, or
sees otherwise, by name on all of them; and waits for a rank that takes longer than a message may.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import ranks_of

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError, PersistError
from hotbed.job import run
from hotbed.job.job import Job
from hotbed.parallel import Ranks
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.state import checkpoint, restoring
from hotbed.training import load
from hotbed.training import model as rec_model
from hotbed.training.publishing import frozen

TIMEOUT = 3
LONG = TIMEOUT + 1.0
JOB: dict[str, Any] = {
    "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "user"}]},
    "train": {"kind": "csv", "path": "rows.csv"},
    "valid": {"kind": "csv", "path": "rows.csv"},
    "stream": {"kind": "csv", "path": "rows.csv"},
    "model": {"kind": "lr"},
    "fit": {"batch_size": 64},
    "grains": 4,
    "output": "model",
}


def model_of(seed: int = 0) -> hb.RecModel:
    torch.manual_seed(seed)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    network = hb.models.DCNv2(schema, hb.make_tables(schema, 2), hidden=(4,))
    return hb.RecModel(network, "bce", "adam", grains=4)


def fit() -> None:
    model = model_of()
    data = hb.Dataset(hb.sources.Csv("rows.csv"), model.schema, batch_size=64)
    keep = hb.callbacks.Checkpoint("fitted", every_steps=1)
    model.fit(data, callbacks=[keep], progress=False)


def learned(folder: str) -> None:
    """A state, those of a fit, and the model of a job with its stream."""
    os.chdir(folder)
    Path("rows.csv").write_text("y,user\n" + "1,1\n0,2\n" * 64)
    for seed in (0, 1):
        model_of(seed).save(f"saved-{seed}")
    fit()
    run.train(Job.from_json(JOB))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_by_all(folder: str) -> dict[str, str]:
    """What each call says that reads a state which the last rank does not see, or sees otherwise."""
    rank = os.environ["RANK"]
    os.chdir(f"{folder}/{rank}")
    job = Job.from_json(JOB)
    model = model_of()
    return {
        "load": error_of(lambda: hb.load("saved-0")),
        "restore": error_of(lambda: model.restore("saved-0")),
        "warm start": error_of(lambda: model.warm_start("saved-0")),
        "fit": error_of(fit),
        "evaluate": error_of(lambda: run.evaluate(job)),
        "predict": error_of(lambda: run.predict(job)),
        "online": error_of(lambda: run.online(job)),
        "export": error_of(lambda: run.export(job)),
        "export of states": error_of(lambda: run.export_state("saved-0", "exported")),
        "publish": error_of(lambda: run.publish(job, "published")),
        "publication of states": error_of(lambda: run.publish("saved-0", "published")),
        "other": error_of(lambda: hb.load(f"{folder}/other-{rank}")),
        "other warm start": error_of(lambda: model.warm_start(f"{folder}/other-{rank}")),
        "torn": error_of(lambda: hb.load(f"{folder}/torn-{rank}")),
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    ranks_of(learned, 1, str(folder))
    return folder


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_state_that_one_rank_does_not_see_or_sees_otherwise_is_refused_by_name_on_each(
    ranks: int, states: Path, tmp_path: Path
) -> None:
    last = ranks - 1
    for rank in range(last):
        shutil.copytree(states, tmp_path / str(rank))
    (tmp_path / str(last)).mkdir()
    for rank in range(ranks):
        shutil.copytree(states / f"saved-{int(rank == last)}", tmp_path / f"other-{rank}")
        shutil.copytree(states / "saved-0", tmp_path / f"torn-{rank}")
    torn = next((tmp_path / f"torn-{last}").rglob("dense.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1])
    every = ranks_of(read_by_all, ranks, str(tmp_path))
    others = [found.pop(name) for found in every for name in ("other", "other warm start")]
    for other in others:  # each names its own folder
        assert other.startswith("PersistError: ")
        assert "all ranks must read one state" in other
    assert every == every[:1] * ranks
    starts = {
        "load": f"FormatError: rank {last}: saved-0: there is no checkpoint",
        "restore": f"FormatError: rank {last}: saved-0: there is no checkpoint",
        "warm start": f"FormatError: rank {last}: saved-0: there is no checkpoint",
        "fit": f"FormatError: rank {last}: fitted: there is no checkpoint",
        "evaluate": f"ConfigError: rank {last}: job: not trained yet",
        "predict": f"ConfigError: rank {last}: job: not trained yet",
        "online": f"FormatError: rank {last}: model/checkpoint: there is no checkpoint",
        "export": f"ConfigError: rank {last}: job: not trained yet",
        "export of states": f"FormatError: rank {last}: saved-0: there is no checkpoint",
        "publish": f"ConfigError: rank {last}: job: not trained yet",
        "publication of states": f"FormatError: rank {last}: saved-0: there is no checkpoint",
        "torn": f"FormatError: rank {last}: {torn}",
    }
    for name, start in starts.items():
        assert every[0][name].startswith(start), every[0][name]


# --- ranks that work for long ---------------------------------------------------------------------


def last() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def first() -> bool:
    return int(os.environ["RANK"]) == 0


def slow(owner: Any, name: str, is_here: Callable[[], bool]) -> AbstractContextManager[Any]:
    """Let the calls of a function take long on one rank."""
    call = getattr(owner, name)

    def late(*arguments: Any, **named: Any) -> Any:
        if is_here():
            time.sleep(LONG)
        return call(*arguments, **named)

    return patch.object(owner, name, late)


def works() -> tuple[float, int]:
    """Work for long on the last rank in a block of all, and then on the first for all.

    Return the seconds of the block, and what the first made.
    """
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    ranks = Ranks.of_job()
    began = time.monotonic()
    with ranks.together():
        if last():
            time.sleep(LONG)
    seconds = time.monotonic() - began

    def make() -> int:
        time.sleep(LONG)
        return 10 + ranks.rank

    return seconds, ranks.from_first(make)


def test_ranks_wait_for_one_that_works_for_longer_than_the_timeout() -> None:
    for seconds, made in ranks_of(works, 2):
        assert seconds > TIMEOUT
        assert made == 10


def leaves(call: str) -> str:
    """Leave the others, on the last rank; raise an error of its own in a call, on the first."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    ranks = Ranks.of_job()
    if last():
        torch.distributed.destroy_process_group()
        return "left"

    def fail() -> None:
        raise ConfigError("its own")

    try:
        if call == "together":
            with ranks.together():
                fail()
        ranks.from_first(fail)
    except HotbedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("call", ["together", "from_first"])
def test_a_rank_that_fails_while_another_one_is_lost_says_why_it_failed(call: str) -> None:
    assert ranks_of(leaves, 2, call) == ["its own", "left"]


def fitted(trained: hb.RecModel, *callbacks: Any) -> None:
    data = hb.Dataset(hb.sources.Csv("rows.csv"), trained.schema, batch_size=64)
    trained.fit(data, data, callbacks=callbacks, epochs=2, progress=False)


def published(folder: str) -> int:
    """Fit with a graph, the last publication and a retention that take the first rank long."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    os.chdir(folder)
    trained = model_of()
    data = hb.Dataset(hb.sources.Csv("rows.csv"), trained.schema, batch_size=64)

    def no_graph(model: hb.RecModel) -> None:
        time.sleep(LONG)
        raise PersistError("none here")

    def publish(publisher: hb.PublishDirectory, saved: Any) -> None:
        if saved.folder.endswith("2"):
            time.sleep(LONG)

    keep = hb.callbacks.Checkpoint("states", publish=hb.PublishDirectory("published"))
    with (
        patch.object(hb.RecModel, "graph", no_graph),
        patch.object(hb.PublishDirectory, "publish", publish),
        slow(checkpoint, "_retain", first),
    ):
        trained.fit(data, callbacks=keep, progress=False)
    return trained.counters["steps"]


def test_ranks_wait_for_the_first_that_publishes_and_removes_what_is_old(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("y,user\n" + "1,1\n0,2\n" * 64)
    assert ranks_of(published, 2, str(tmp_path)) == [2, 2]


def streamed(folder: str) -> int:
    """Learn what an iterator yields, which waits for longer than the timeout; return the steps."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    os.chdir(folder)
    trained = model_of()
    data = list(hb.Dataset(hb.sources.Csv("rows.csv"), trained.schema, batch_size=64))

    def late() -> Iterator[Any]:
        for batch in data:
            time.sleep(LONG if first() else 0)
            yield batch

    trained.online_train(late(), progress=False)
    return trained.counters["steps"]


def everything(folder: str, is_slow: bool) -> str:
    """Call all that may take long; return the digest of what was written last."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    os.chdir(folder)
    where = f"{int(is_slow)}"
    here: Callable[[], bool] = last if is_slow else lambda: False
    at_first: Callable[[], bool] = first if is_slow else lambda: False
    trained = model_of()
    best = hb.callbacks.BestWeights(path=f"{where}/best")
    with slow(restoring, "load_table", here):
        fitted(trained, best)
    with (
        slow(checkpoint, "write_rows", here),
        slow(checkpoint.CheckpointWriter, "commit", at_first),
    ):
        trained.save(f"{where}/saved")
    with slow(load, "open_checkpoint", here), slow(restoring, "load_table", here):
        loaded = hb.load(f"{where}/saved")
    with slow(rec_model, "open_checkpoint", here):
        loaded.restore(f"{where}/saved")
    with slow(rec_model, "warm_start", here):
        model_of().warm_start(f"{where}/saved")
    with slow(frozen, "export", at_first):
        loaded.export(f"{where}/exported")
    job = Job.from_json({**JOB, "output": f"{where}/model"})
    with slow(Job, "fitted", here):
        run.train(job)
    with slow(run, "trained", here), slow(run, "new_file", at_first):
        run.predict(job)
    with slow(hb.PublishDirectory, "publish", at_first):
        run.publish(job, f"{where}/published")
    return content_digest(open_checkpoint(f"{where}/published"))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_that_reads_or_writes_may_take_longer_than_the_timeout(
    ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("y,user\n" + "1,1\n0,2\n" * 64)
    quick = ranks_of(everything, ranks, str(tmp_path), False)
    assert ranks_of(everything, ranks, str(tmp_path), True) == quick
    assert len(set(quick)) == 1


@pytest.mark.soak
def test_a_stream_may_be_silent_for_longer_than_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("y,user\n" + "1,1\n0,2\n" * 64)
    assert ranks_of(streamed, 2, str(tmp_path)) == [2, 2]
