# SPDX-License-Identifier: Apache-2.0
"""Several ranks without grains: training refuses them, since each would train a copy of its own;
predicting and evaluating stay.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.parallel import connections
from hotbed.parallel.log_lines import name_rank_in_logs

WORKER = """
import torch.distributed as dist
import hotbed as hb
from hotbed.errors import ConfigError
from hotbed.parallel import connections
from hotbed.parallel.log_lines import name_rank_in_logs

schema = hb.Schema([hb.Label("y"), hb.Id("user")])
data = hb.Dataset(hb.sources.Memory({"y": [0, 1] * 8, "user": list(range(16))}), schema, 8)
model = hb.RecModel(hb.models.LR(schema, hb.make_tables(schema, 1)), "bce", "adam", {"auc"})
dist.init_process_group("gloo")
model.evaluate(data)
assert len(model.predict(data)) == 16
try:
    model.fit(data, progress=False)
    print("trained")
except ConfigError as error:
    print(error)
"""


def sparse_step(model: hb.RecModel, data: hb.Dataset) -> None:
    hb.SparseOptimizer(model.network).step()


TRAIN: dict[str, Callable[..., Any]] = {
    "fit": lambda model, data: model.fit(data, progress=False),
    "online_train": lambda model, data: model.online_train(data, progress=False),
    "SparseOptimizer": sparse_step,
}


@pytest.mark.parametrize("train", TRAIN.values(), ids=TRAIN)
def test_training_of_several_ranks_is_rejected_unless_copies_are_meant(
    train: Callable[..., Any], dataset: Any, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    monkeypatch.setenv("WORLD_SIZE", "4")
    model.evaluate(dataset(64))
    assert len(model.predict(dataset(64))) == 64
    with pytest.raises(ConfigError, match=r"a world of 4 ranks.*HOTBED_INDEPENDENT_RANKS=1"):
        train(model, dataset(64))
    monkeypatch.setenv("HOTBED_INDEPENDENT_RANKS", "1")
    train(model, dataset(64))
    monkeypatch.delenv("HOTBED_INDEPENDENT_RANKS")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train(model, dataset(64))


def test_training_in_a_process_group_of_two_ranks_is_rejected(dataset: Any, network: Any) -> None:
    model = hb.RecModel(network(), "bce", "adam", {"auc"})
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model.evaluate(dataset(64))
        assert len(model.predict(dataset(64))) == 64
        with pytest.raises(ConfigError, match="got a world of 2 ranks"):
            model.fit(dataset(64), progress=False)
    finally:
        torch.distributed.destroy_process_group()


def test_more_ranks_than_grains_are_rejected(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="got 2 grains and a world of 4 ranks"):
        hb.RecModel(network(), "bce", "adam", {"auc"}, grains=2)


@pytest.mark.soak
def test_torchrun_with_two_processes_is_rejected_by_both(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(worker),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("got a world of 2 ranks") == 2
    assert "trained" not in result.stdout


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE: must be a whole number, got 'two'"),
        ("RANK", "first", "RANK: must be a whole number below 2, got 'first'"),
        ("RANK", "2", "RANK: must be a whole number below 2, got '2'"),
        ("RANK", "", "RANK: must be a whole number below 2, got ''"),
        ("MASTER_PORT", "65536", "MASTER_PORT: must be a whole number below 65536, got '65536'"),
        ("MASTER_PORT", "", "MASTER_PORT: must be a whole number below 65536, got ''"),
        ("MASTER_ADDR", "", "MASTER_ADDR: must name the host of rank 0, got ''"),
    ],
)
def test_an_environment_in_which_no_ranks_can_meet_is_refused_at_once(
    variable: str, value: str, message: str, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, text in {**right, variable: value}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(connections, "rendezvous", lambda *_, **__: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=f"ranks: {message}"):
        hb.RecModel(network(), "bce", "adam", {"auc"}, grains=2)


def test_log_lines_and_warnings_begin_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    make = logging.getLogRecordFactory()
    try:
        name_rank_in_logs.__wrapped__(3)
        logging.getLogger("hotbed.training").warning("it is %s", "slow")
        logging.getLogger("another").warning("as it is")
    finally:
        logging.setLogRecordFactory(make)
    assert caplog.messages == ["rank 3: it is slow", "as it is"]
    line = warnings.formatwarning("AUC is undefined", RuntimeWarning, "scorer.py", 238)
    assert line.startswith("rank 3: scorer.py:238: RuntimeWarning: AUC is undefined")
