# SPDX-License-Identifier: Apache-2.0
"""Ranks wait for one that reads, writes or computes for longer than a call of theirs may take."""

from __future__ import annotations

import os
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
from hotbed.job import run
from hotbed.job.job import Job
from hotbed.parallel import Ranks
from hotbed.persist import checkpoint, content_digest, open_checkpoint, restoring
from hotbed.training import load, model

TIMEOUT = 3
LONG = TIMEOUT + 1.0
JOB: dict[str, Any] = {
    "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "user"}]},
    "train": {"kind": "csv", "path": "rows.csv"},
    "valid": {"kind": "csv", "path": "rows.csv"},
    "model": {"kind": "lr"},
    "fit": {"batch_size": 64},
    "grains": 4,
    "output": "model",
}


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


def model_of() -> hb.RecModel:
    torch.manual_seed(0)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    network = hb.models.DCNv2(schema, hb.make_tables(schema, 2), hidden=(4,))
    return hb.RecModel(network, "bce", "adam", grains=4)


def fitted(trained: hb.RecModel, *callbacks: Any) -> None:
    data = hb.Dataset(hb.sources.Csv("rows.csv"), trained.schema, batch_size=64)
    trained.fit(data, data, callbacks=callbacks, epochs=2, progress=False)


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
    with slow(model, "open_checkpoint", here):
        loaded.restore(f"{where}/saved")
    with slow(model, "warm_start", here):
        model_of().warm_start(f"{where}/saved")
    with slow(model, "export", at_first):
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
