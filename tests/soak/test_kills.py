# SPDX-License-Identifier: Apache-2.0
"""More than fifty kills, at random wall times and at named points, of streams of files, of a
followed directory and of a topic of three skewed partitions. Everything random follows from SEED.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = 20261121
# Where a life is killed, and how often at most it has passed there by then.
POINTS = {
    "reading": 3,
    "mapping": 70,
    "dense": 70,
    "update": 70,
    "eviction": 25,
    "capture": 3,
    "checkpoint": 6,
    "table": 9,
    "rename": 3,
    "replace": 6,
    "committed": 3,
    "forget": 2,
}
KILLS: list[str] = []


@pytest.fixture(scope="module")
def unbroken(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("unbroken")
    driver.write_events(root / "events", SEED)
    return str(lives(root)["digest"])


@pytest.fixture(scope="module")
def broker() -> Iterator[Any]:
    from hotbed.testing import Broker

    with Broker() as running:
        yield running


def killed(lives: Any, root: Path, seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """What a life answers after one to three kills."""
    points = POINTS | ({"journal": 8} if "source" in config else {})
    answer, kills = driver.killed(lives, root, SEED * 1000 + seed, points, config)
    KILLS.extend(kills)
    return answer


@pytest.fixture(scope="module")
def unbroken_by_grains(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `unbroken`, by four grains."""
    root = tmp_path_factory.mktemp("unbroken_by_grains")
    driver.write_events(root / "events", SEED)
    return str(lives(root, grains=4)["digest"])


def checkpoints(seed: int) -> dict[str, Any]:
    return {
        "checkpoint": {
            "every_steps": 1 + seed % 9,
            "wait": seed % 2 == 0,
            "full_every": 1 + seed % 4,
        }
    }


@pytest.mark.parametrize("seed", range(20))
def test_files(seed: int, unbroken: str, lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED)
    assert killed(lives, tmp_path, seed, checkpoints(seed))["digest"] == unbroken


@pytest.mark.parametrize("seed", range(500, 520))
def test_files_by_grains(
    seed: int, unbroken: str, unbroken_by_grains: str, lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    answer = killed(lives, tmp_path, seed, {**checkpoints(seed), "grains": 4})
    assert answer["digest"] == unbroken_by_grains != unbroken


@pytest.mark.parametrize("at", POINTS)
def test_files_at_each_point_twice(at: str, unbroken: str, lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED)
    for number in (min(5, POINTS[at]), 1):
        KILLS.extend([at] if lives(tmp_path, kill={"at": at, "number": number})["killed"] else [])
    assert lives(tmp_path)["digest"] == unbroken


@pytest.mark.parametrize("seed", range(600, 620))
def test_files_with_tables_on_a_disk(seed: int, unbroken: str, lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED)
    config = {**checkpoints(seed), "ram_rows": 64}
    assert killed(lives, tmp_path, seed, config)["digest"] == unbroken
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("at", POINTS)
def test_files_with_tables_on_a_disk_at_each_point(
    at: str, unbroken: str, lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED)
    for number in (min(5, POINTS[at]), 1):
        kill = {"at": at, "number": number}
        KILLS.extend([at] if lives(tmp_path, kill=kill, ram_rows=64)["killed"] else [])
    assert lives(tmp_path, ram_rows=64)["digest"] == unbroken
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("seed", range(100, 110))
def test_a_followed_directory(seed: int, lives: Any, tmp_path: Path) -> None:
    """Files arrive while it trains; idle times end batches and the wall clock evicts. The unbroken
    run that it is compared with finds the same decisions on record.
    """
    config = {
        "source": "follow",
        "follow": {"pattern": "*.parquet"},
        "rows": driver.ROWS,
        **driver.CLOCK,
    }
    root, whole = tmp_path / "killed", tmp_path / "whole"
    arriving = threading.Thread(
        target=driver.write_events, args=(root / "events", SEED, driver.ROWS, 8, 0.4)
    )
    (root / "events").mkdir(parents=True)
    arriving.start()
    answer = killed(lives, root, seed, config)
    arriving.join()
    assert answer["samples"] == driver.ROWS
    shutil.copytree(root / "events", whole / "events")
    assert driver.decided_alike(lives, root, whole, config)["digest"] == answer["digest"]


FIT = {"epochs": 3, "dataset": {"shuffle": 500}, "grains": 4}


@pytest.fixture(scope="module")
def unbroken_fit(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A fit by four grains that nobody kills."""
    root = tmp_path_factory.mktemp("unbroken_fit")
    driver.write_events(root / "events", SEED, rows=1000)
    answer: dict[str, Any] = lives(root, **FIT)
    return answer


@pytest.mark.parametrize("seed", range(300, 320))
def test_a_fit_by_grains(
    seed: int, unbroken_fit: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED, rows=1000)
    config = {**FIT, "checkpoint": {"every_steps": 1 + seed % 9, "full_every": 1 + seed % 4}}
    answer = killed(lives, tmp_path, seed, config)
    assert {**answer, "resumed": 0} == {**unbroken_fit, "resumed": 0}


@pytest.mark.parametrize("seed", range(400, 420))
def test_a_topic_by_grains(seed: int, lives: Any, broker: Any, tmp_path: Path) -> None:
    kill_and_repeat(seed, lives, broker, tmp_path, {"grains": 4})


@pytest.mark.parametrize("seed", range(200, 212))
def test_a_topic_of_three_skewed_partitions(
    seed: int, lives: Any, broker: Any, tmp_path: Path
) -> None:
    kill_and_repeat(seed, lives, broker, tmp_path, {})


def kill_and_repeat(
    seed: int, lives: Any, broker: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Kill a run over a topic, and compare it with an unbroken one with the same decisions."""
    topic = f"events-{seed}"
    broker.create(topic, 3)
    config = {
        "source": {"servers": broker.servers, "topic": topic, "block_rows": 150},
        "rows": driver.ROWS,
        **driver.CLOCK,
        **settings,
    }
    arriving = threading.Thread(
        target=driver.produce, args=(broker, topic, driver.events(SEED).to_pylist(), seed)
    )
    arriving.start()
    answer = killed(lives, tmp_path / "killed", seed, config)
    arriving.join()
    assert answer["samples"] == driver.ROWS
    assert (
        driver.decided_alike(lives, tmp_path / "killed", tmp_path / "whole", config)["digest"]
        == answer["digest"]
    )


def test_that_were_more_than_fifty_kills() -> None:
    assert len(KILLS) > 50, KILLS
