# SPDX-License-Identifier: Apache-2.0
"""Ranks that would train different things are refused by name, on each of them, before the first
step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.job import run
from hotbed.job.job import Job
from hotbed.parallel import software

NETWORK = """
import hotbed as hb

class Network(hb.models.DCNv2):
    def forward(self, batch):
        return super().forward(batch) * {factor}
"""
JOB: dict[str, Any] = {
    "schema": {"columns": [{"kind": "label", "name": "y"}, {"kind": "id", "name": "user"}]},
    "train": {"kind": "csv", "path": "rows.csv"},
    "stream": {"kind": "kafka", "servers": "localhost:1", "topic": "t"},
    "model": {"kind": "lr"},
    "fit": {"batch_size": 64},
    "grains": 4,
    "output": "model",
}


def batch() -> hb.Batch:
    return hb.Batch({"user": hb.Ids(np.arange(16))}, {}, {"y": np.ones(16, np.float32)})


def model_of(network: type[hb.models.DCNv2] = hb.models.DCNv2, rate: float = 0.1) -> hb.RecModel:
    torch.manual_seed(0)
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, rule=hb.Adagrad(lr=rate))
    return hb.RecModel(network(schema, tables, hidden=(4,)), "bce", "adam", grains=4)


def fit(model: hb.RecModel, epochs: int = 1, callbacks: Any = ()) -> None:
    model.fit([batch()], epochs=epochs, callbacks=list(callbacks), progress=False)


def fit_network_of(folder: str, rank: int) -> None:
    """Fit a network of a file of this rank's own, whose forward differs, and nothing else."""
    path = Path(folder) / f"network-{rank}.py"
    path.write_text(NETWORK.format(factor=1 + rank))
    spec = importlib.util.spec_from_file_location("network_of_rank", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    fit(model_of(module.Network))


def job_of(**changes: Any) -> Job:
    return Job.from_json({**JOB, **changes})


def errors(folder: str) -> dict[str, str]:
    """What each kind of difference of the last rank ends with, and that nothing was learned."""
    os.chdir(folder)
    Path("rows.csv").write_text("y,user\n1,1\n")
    rank = int(os.environ["RANK"])
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    torch_capability = patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    cases: dict[str, tuple[Any, Callable[[], None]]] = {
        "version": (patch.object(hb, "__version__", "9.9"), lambda: fit(model_of())),
        "code": (
            patch.object(software, "_digest_of_hotbed", lambda: "other"),
            lambda: fit(model_of()),
        ),
        "instructions": (torch_capability, lambda: fit(model_of())),
    }
    calls: dict[str, Callable[[], None]] = {
        "network": lambda: fit_network_of(folder, int(is_last)),
        "rate": lambda: fit(model_of(rate=0.1 + is_last)),
        "epochs": lambda: fit(model_of(), epochs=1 + is_last),
        "callbacks": lambda: fit(
            model_of(), callbacks=[] if is_last else [hb.callbacks.Checkpoint(f"{folder}/state")]
        ),
        "job": lambda: run.train(job_of(fit={"batch_size": 64 + is_last})),
        "flag": lambda: run.online(job_of(), max_steps=5 + is_last),
        "command": lambda: (run.online if is_last else run.train)(job_of()),
    }
    found = {}
    for name, call in calls.items():
        cases[name] = (contextlib.nullcontext(), call)
    for name, (change, call) in cases.items():
        with change if is_last else contextlib.nullcontext():
            try:
                call()
            except HotbedError as error:
                found[name] = f"{type(error).__name__}: {error}"
    torch.set_num_threads(1 + is_last)
    try:
        fit(model_of())
    except HotbedError as error:
        found["threads"] = f"{type(error).__name__}: {error}"
    return found


DIFFER = {
    "version": r"the versions of hotbed and torch \[\('[^']*', '[^']*'\),.* \('9.9', '[^']*'\)\]",
    "code": r"code of hotbed with the digest \[.*'other'\]",
    "instructions": r"the instruction set, which ATEN_CPU_CAPABILITY can lower, \[.*'OTHER'\]",
    "threads": r"the threads of torch \[1,.* 2\]",
    "network": r"code of the network with the digest \[",
    "rate": r"table 'user' \[.*lr=0\.1.*lr=1\.1",
    "epochs": r"the numbers of the first and the last epoch \[\(0, 0\),.* \(0, 1\)\]",
    "callbacks": r"callbacks \[\['Checkpoint'\],.* \[\]\]",
    "job": r"job\.fit\.batch_size \[64,.* 65\]",
    "flag": r"--max-steps \[5,.* 6\]",
    "command": r"the command \['hotbed train',.* 'hotbed online'\]",
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_that_differ_are_refused_by_name_on_each(ranks: int, tmp_path: Path) -> None:
    found = ranks_of(errors, ranks, str(tmp_path))
    assert found == found[:1] * ranks
    start = "ConfigError: ranks: all ranks must train the same model with the same settings, got "
    for name, differ in DIFFER.items():
        text = found[0][name]
        assert text.startswith(start), text
        assert re.search(differ, text), text
    assert not (tmp_path / "state").exists()
