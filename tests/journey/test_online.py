# SPDX-License-Identifier: Apache-2.0
"""`hotbed online JOB.yaml`: follows a directory, is killed, is started again, is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from started import start_process

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.cli.commands import app
from hotbed.persist.state.digest import content_digest

pytestmark = pytest.mark.slow

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "trainjob.yaml"
ROWS = 2400
JOB = """
schema:
  columns:
    - {kind: label, name: clicked}
    - {kind: time, name: at, unit: s}
    - {kind: id, name: user}
    - {kind: dense, name: price, transforms: [normalize]}
train: {kind: parquet, path: past.parquet}
stream: {kind: follow, directory: incoming}
model: {kind: dcnv2, hidden: [4], num_cross_layers: 1, dropout: 0.2}
tables: {dim: 4, admit: {kind: min_count, count: 2}, evict: {kind: ttl, hours: 12}}
stream_callbacks: [{kind: evict, seconds_interval: 3600}, {kind: windows, samples: 500}]
checkpoint: {every_steps: 5}
fit: {batch_size: 32, torch_threads: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job, its past, and files that have arrived."""
    rng = np.random.default_rng(5)
    events = pa.table(
        {
            "clicked": rng.integers(0, 2, ROWS),
            "at": np.arange(ROWS) * 60,
            "user": rng.integers(0, 50, ROWS) + np.arange(ROWS) // 50,
            "price": rng.normal(size=ROWS),
        }
    )
    (tmp_path / "incoming").mkdir()
    pq.write_table(events[:480], tmp_path / "past.parquet")
    for number in range(4):
        pq.write_table(
            events[480 + number * 480 :][:480], tmp_path / "incoming" / f"{number}.parquet"
        )
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(folder: Path, output: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the command of deploy/trainjob.yaml, on one rank."""
    _, job = yaml.safe_load_all(MANIFEST.read_text())
    *_, module, verb, _ = job["spec"]["trainer"]["command"]
    command = [sys.executable, "-m", module, verb, "job.yaml", "--set", f"output={output}"]
    command += arguments
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return start_process(command, cwd=folder, env=environment, **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; it must have ended well."""
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    return printed


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_killed_and_started_again_it_learns_each_event_once_and_waits_until_it_is_asked_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = folder / "killed" / "checkpoint"
    killed = start(folder, "killed")
    wait_for(states / "checkpoint-00000003", killed)
    killed.kill()
    killed.communicate()
    again = start(folder, "killed")
    table: Any = pq.read_table(folder / "past.parquet")
    pq.write_table(table, folder / "incoming" / ".late.parquet")
    (folder / "incoming" / ".late.parquet").rename(folder / "incoming" / "9.parquet")
    deadline = time.monotonic() + 300
    while hb.load(states).counters["samples"] < ROWS + 480 and time.monotonic() < deadline:
        time.sleep(0.3)
    assert again.poll() is None  # it waits for more
    again.send_signal(signal.SIGTERM)
    printed = ended(again)
    assert "state: killed/checkpoint" in printed
    assert "training dcnv2" not in printed  # the past is learned once
    monkeypatch.chdir(folder)
    command = ["online", "job.yaml", "--set", "output=whole", "--max-steps", "75"]
    app(command, standalone_mode=False)
    whole = capsys.readouterr().out
    assert "training dcnv2" in whole
    assert "progressive auc" in whole  # the killed one may have had nothing left to learn
    models = [hb.load(folder / output / "checkpoint") for output in ("killed", "whole")]
    assert [model.counters["samples"] for model in models] == [ROWS + 480] * 2
    assert content_digest(models[0].tables) == content_digest(models[1].tables)
