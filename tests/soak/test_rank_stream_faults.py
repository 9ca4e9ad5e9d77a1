# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a stream, or around it, ends several processes as it ends one: with the same
error on each, or with the same dead letters and the same state. None of them hangs.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
import pyarrow.parquet as pq
from forked import ranks_of

from hotbed.errors import HotbedError
from hotbed.testing import Broker

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = 20261127
ROWS = 600
BATCH = 32
"""Rows of a batch; a stream without new rows does not end one that is not full."""
TIMEOUT = 5
"""Seconds that a rank waits for another one."""


def streamed(config: dict[str, Any]) -> dict[str, Any]:
    """One life of a stream on this rank; the error that ends it."""
    os.environ["HOTBED_RANKS_TIMEOUT"] = str(TIMEOUT)
    try:
        answer = driver.live(config)
        del answer["evicted"]  # each rank counts its own
        return answer
    except HotbedError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def torn(path: Path) -> int:
    """The file ends in its middle: return how many rows cannot be read."""
    rows = pq.read_metadata(path).num_rows
    path.write_bytes(path.read_bytes()[:700])
    return int(rows)


def without_column(path: Path) -> int:
    pq.write_table(pq.read_table(path).drop(["item"]), path)
    return 0


def bad_labels(path: Path) -> int:
    table = pq.read_table(path)
    labels = table["y"].to_numpy() * 7
    at = table.schema.get_field_index("y")
    pq.write_table(table.set_column(at, "y", [labels]), path)
    return int((labels > 1).sum())


def outcome(ranks: int, root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What a stream on so many ranks ends with, the same on each, without the names of places."""
    found = ranks_of(streamed, ranks, {"root": str(root), **config})
    assert found == found[:1] * ranks
    letters = root / "state" / "dead_letters.jsonl"
    lines = letters.read_text().replace(str(root), "ROOT") if letters.exists() else ""
    error = found[0].get("error", "").replace(str(root), "ROOT")
    return {**found[0], "error": error, "letters": lines}


CASES: list[tuple[Callable[[Path], int], str, str]] = [
    (torn, "raise", "DecodeError: "),
    (torn, "skip", ""),
    (without_column, "raise", "SchemaError: "),
    (without_column, "skip", "SchemaError: "),
    (bad_labels, "raise", "DecodeError: "),
    (bad_labels, "skip", ""),
]


@pytest.mark.parametrize(("spoil", "on_error", "error"), CASES)
def test_a_bad_file_ends_ranks_as_one_process(
    spoil: Callable[[Path], int], on_error: str, error: str, tmp_path: Path
) -> None:
    outcomes = []
    for ranks in (1, 2, 3):
        root = tmp_path / str(ranks)
        driver.write_events(root / "events", SEED, rows=ROWS)
        skipped = spoil(root / "events" / "events-002.parquet")
        config = {
            "source": "follow",
            "follow": {"pattern": "*.parquet"},
            "dataset": {"on_error": on_error},
            "rows": (ROWS - skipped) // BATCH * BATCH if on_error == "skip" else ROWS,
            "grains": 4,
        }
        outcomes.append(outcome(ranks, root, config))
    assert outcomes[0]["error"].startswith(error)
    assert bool(outcomes[0]["error"]) == bool(error)
    assert bool(outcomes[0]["letters"]) == (on_error == "skip" and not error)
    assert outcomes == outcomes[:1] * 3


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    size = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"]
    try:
        subprocess.run(["mount", *size, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounts absent")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    with open(folder / "other", "wb", 0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_full_disk_of_the_journal_ends_all_ranks_with_one_error_and_they_resume(
    ranks: int, small_disk: Path, tmp_path: Path
) -> None:
    """The clock's decisions cannot be journalled any longer."""
    root = small_disk
    driver.write_events(root / "events", SEED, rows=ROWS, files=2)
    config = {"source": "follow", "follow": {"pattern": "*.parquet"}, "grains": 4, **driver.CLOCK}
    answer = outcome(ranks, root, {**config, "rows": ROWS // 2})
    assert answer["error"] == ""
    fill(root)
    found = outcome(ranks, root, {**config, "rows": ROWS})
    assert found["error"].startswith("NotWritten: ROOT/state"), found
    assert "No space left on device" in found["error"]
    (root / "other").unlink()
    assert outcome(ranks, root, {**config, "rows": ROWS})["samples"] == ROWS


# --- a broker that dies ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_broker_that_dies_for_longer_than_ranks_wait_and_returns_costs_no_message(
    ranks: int, tmp_path: Path
) -> None:
    root, whole = tmp_path / "several", tmp_path / "one"
    with Broker() as broker:
        broker.create("events", 3)
        config = {
            "source": {"servers": broker.servers, "topic": "events", "block_rows": 100},
            "rows": ROWS,
            "grains": 4,
            **driver.CLOCK,
        }
        rows = driver.events(SEED, ROWS).to_pylist()
        driver.produce(broker, "events", rows[: ROWS // 2], SEED)
        found: list[dict[str, Any]] = []
        learning = threading.Thread(
            target=lambda: found.append(outcome(ranks, root, config)), daemon=True
        )
        learning.start()
        while not (root / "state" / "journal").exists():
            assert learning.is_alive()
            time.sleep(0.1)
        time.sleep(3)
        broker.kill()
        time.sleep(2 * TIMEOUT)
        assert learning.is_alive()
        broker.restart()
        driver.produce(broker, "events", rows[ROWS // 2 :], SEED)
        learning.join()
        assert found[0]["samples"] == ROWS
        (whole / "state").mkdir(parents=True)
        (whole / "state" / "journal").write_bytes((root / "state" / "journal").read_bytes())
        alone = outcome(1, whole, config)
        assert alone["digest"] == found[0]["digest"]
