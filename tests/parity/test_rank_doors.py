# SPDX-License-Identifier: Apache-2.0
"""A folder of states that one rank does not see, or sees otherwise, is refused by name on each of
them, by every call that reads a state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import ranks_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.job import run
from hotbed.job.job import Job

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
    for other in [found.pop("other") for found in every]:  # each names its own folder
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
