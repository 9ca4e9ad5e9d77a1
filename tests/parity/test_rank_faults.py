# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed, late or failed in any phase of a step ends the others, which say where they
were; the same call then goes on to the bits of one process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import ranks_of

import hotbed as hb
from hotbed.errors import ConfigError, HotbedError
from hotbed.parallel import RankShard
from hotbed.parallel.connections import call_timeout
from hotbed.persist import content_digest, open_checkpoint

STEP = 5
TIMEOUT = 3
TORCHRUN_TIMEOUT = 20
"""Of processes that import torch each for itself: on a busy machine, some are seconds later."""
GRACE = 30
"""Seconds after which torchrun kills a process that SIGTERM does not end."""
START = 240
"""Seconds for two starts and the steps of both, on a machine with other work beside it."""
PROGRAM = """
import importlib.util, os, sys
sys.path.append({tests!r})
spec = importlib.util.spec_from_file_location("faults", {file!r})
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)
folder, rank, phase = sys.argv[1:]
is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
phase = phase if is_first_start else ""
print("digest", faults.fitted(folder, "stop", int(rank), phase, faults.TORCHRUN_TIMEOUT))
"""
PHASES = ("map", "forward", "backward", "exchange", "update", "save", "commit")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(TIMEOUT + 3)


def stop() -> None:
    """Stand still, until somebody kills this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {"kill": kill, "sleep": sleep, "stop": stop}


def fitted(
    folder: str, fault: str = "", rank: int = 0, phase: str = "", timeout: int = TIMEOUT
) -> str:
    """Fit with a fault of one rank where it enters a phase; return the digest of the last state."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(timeout)
    torch.manual_seed(1)
    draw = np.random.default_rng(0)
    columns = {"y": draw.integers(0, 2, 900), "user": draw.zipf(1.2, 900) % 300}
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, admit=hb.MinCount(2))
    network = hb.models.DCNv2(schema, tables, hidden=(4,), dropout=0.2)
    model = hb.RecModel(network, "bce", "adam", grains=4)
    data = hb.Dataset(hb.sources.Memory(columns), schema, batch_size=100, shuffle=300)
    enter = RankShard.enter

    def entered(shard: RankShard, now: str, step: int | None = None) -> None:
        enter(shard, now, step)
        if now == phase and shard._ranks.place.step >= STEP and shard.rank == rank:
            FAULTS[fault]()

    with patch.object(RankShard, "enter", entered):
        keep = hb.callbacks.Checkpoint(folder, every_steps=STEP)
        model.fit(data, callbacks=[keep], progress=False)
    return content_digest(open_checkpoint(folder))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    (digest,) = ranks_of(fitted, 1, str(tmp_path_factory.mktemp("unbroken") / "state"))
    assert isinstance(digest, str)
    return digest


def check_kill(phase: str, rank: int, ranks: int, folder: Path, unbroken: str) -> None:
    lost = r"ranks: rank \d in step [56], [A-Za-z._]+: the connection to rank"
    with pytest.raises(AssertionError, match=lost):
        ranks_of(fitted, ranks, str(folder), "kill", rank, phase)
    assert set(ranks_of(fitted, ranks, str(folder))) == {unbroken}


def test_a_rank_that_is_killed_ends_the_others_and_costs_no_bit(
    unbroken: str, tmp_path: Path
) -> None:
    check_kill("backward", 1, 2, tmp_path, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_in_any_phase_costs_no_bit(
    phase: str, rank: int, ranks: int, unbroken: str, tmp_path: Path
) -> None:
    check_kill(phase, rank, ranks, tmp_path, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_ends_the_others_after_the_timeout(
    rank: int, ranks: int, unbroken: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"was lost, got .* Timed out waiting 3000ms"):
        ranks_of(fitted, ranks, str(tmp_path), "sleep", rank, "backward")
    assert set(ranks_of(fitted, ranks, str(tmp_path))) == {unbroken}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "rank", "phase"),
    [
        (2, 0, "save"),
        (2, 1, "commit"),
        (3, 0, "backward"),
        (3, 2, "backward"),
        (3, 0, "save"),
        (3, 2, "save"),
    ],
)
def test_a_rank_that_stands_still_is_started_again_with_the_others_and_costs_no_bit(
    ranks: int, rank: int, phase: str, unbroken: str, tmp_path: Path
) -> None:
    """By torchrun, within the timeout and what torchrun needs, in a step and in a save."""
    program = tmp_path / "program.py"
    tests = str(Path(__file__).parents[1])
    program.write_text(PROGRAM.format(tests=tests, file=__file__))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    launcher.append(f"--nproc-per-node={ranks}")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, program, tmp_path / "state", str(rank), phase],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TORCHRUN_TIMEOUT + GRACE + START,
        check=False,
    )
    print(f"ended and resumed in {time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"digest {unbroken}") == ranks
    lost = r"ranks: rank \d in step \d+, [A-Za-z._]+: the connection to"
    assert re.search(lost, done.stderr), done.stderr


# --- data that end unevenly, or are bad on one rank ------------------------------------------------


def read(folder: str, bad_rank: int = -1) -> dict[str, str]:
    """Fit 1,001 rows, and then learn them as a stream; on `bad_rank` the last row is bad.

    Return the error of the fit, or the digest of the state after both.
    """
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    draw = np.random.default_rng(0)
    lines = [f"{y},{user}" for y, user in draw.integers(0, 2, (1001, 2)) * [1, 7]]
    if rank == bad_rank:
        lines[-1] = "5,no number"
    file = Path(folder) / f"rows-{rank}.csv"
    file.write_text("\n".join(["y,user", *lines, ""]))
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, admit=hb.MinCount(2))
    network = hb.models.DCNv2(schema, tables, hidden=(4,), dropout=0.2)
    model = hb.RecModel(network, "bce", "adam", grains=4)
    data = hb.Dataset(hb.sources.Csv(str(file)), schema, batch_size=100)
    try:
        model.fit(data, progress=False)
        model.online_train(data, progress=False)
    except HotbedError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assert model.counters["steps"] == 22  # the last batch of each has one row
    model.save(f"{folder}/state")
    return {"digest": content_digest(open_checkpoint(f"{folder}/state"))}


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_without_a_sample_of_the_last_batch_end_with_the_others(
    ranks: int, tmp_path: Path
) -> None:
    """1,001 rows in batches of 100, whose last has one: no other rank has data then."""
    found = []
    for number in (1, ranks):
        (tmp_path / str(number)).mkdir()
        found += ranks_of(read, number, str(tmp_path / str(number)))
    assert "digest" in found[0]
    assert found == found[:1] * (1 + ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bad_row_that_one_rank_reads_ends_the_others_too(ranks: int, tmp_path: Path) -> None:
    """In a fit, whose rows each rank reads; the first rank reads a stream for all."""
    found = ranks_of(read, ranks, str(tmp_path), ranks - 1)
    assert found[-1]["error"].startswith("DecodeError: ")
    for of_rank in found[:-1]:
        assert of_rank["error"].startswith("RankLost: ")


@pytest.mark.parametrize("seconds", ["", "0", "-1", "1.5", "a minute", "604801", "9" * 30])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(
    seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBED_RANKS_TIMEOUT", seconds)
    with pytest.raises(
        ConfigError, match="HOTBED_RANKS_TIMEOUT: expected whole seconds from 1 to 604800"
    ):
        call_timeout()
