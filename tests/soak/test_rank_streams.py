# SPDX-License-Identifier: Apache-2.0
"""Streams on several processes that are killed: each goes on, with another number of processes, to
the bits of a run that nobody killed. Everything random follows from SEED.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
from test_kills import SEED, checkpoints

import hotbed as hb
from hotbed.persist.publish import Follower, TopicFeed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

# Where a rank is killed, and how often at most it has passed there by then.
POINTS = {
    "deciding": 60,
    "asking": 40,
    "fetching": 40,
    "grain": 100,
    "backward": 60,
    "exchange": 60,
    "dense": 40,
    "update": 40,
    "eviction": 25,
    "capture": 3,
    "table": 9,
    "checkpoint": 4,
    "rename": 3,
    "replace": 4,
}


@pytest.fixture(scope="module")
def broker() -> Iterator[Any]:
    from hotbed.testing import Broker

    with Broker() as running:
        yield running


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("unbroken")
    driver.write_events(root / "events", SEED)
    return str(lives(root, grains=8)["digest"])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_each_phase(
    ranks: int, rank: int, unbroken: str, lives: Any, tmp_path: Path
) -> None:
    """One kill in each phase, each in a life that resumes after the one before."""
    driver.write_events(tmp_path / "events", SEED)
    config = {"grains": 8, "ranks": ranks, "kill_rank": rank}
    points = dict(POINTS)
    if rank:  # the first rank alone commits
        for at in ("checkpoint", "rename", "replace"):
            del points[at]
    for number, (at, most) in enumerate(points.items()):
        kill = {"at": at, "number": max(1, most // 6), "after": number % 2 == 0}
        assert lives(tmp_path, kill=kill, **config)["killed"] == 9, kill
    assert lives(tmp_path, **config)["digest"] == unbroken


@pytest.mark.parametrize("seed", range(600, 606))
def test_files(seed: int, unbroken: str, lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED)
    config = {**checkpoints(seed), "grains": 8, "ranks": 2 + seed % 3}
    answer, _ = driver.killed(lives, tmp_path, SEED * 1000 + seed, POINTS, config, seconds=4.0)
    assert answer["digest"] == unbroken


def test_a_stream_of_every_rule_goes_on_with_any_number_of_processes(
    lives: Any, tmp_path: Path
) -> None:
    """Eight processes, three, one, four, of which one is killed each time."""
    for name in ("whole", "killed"):
        driver.write_events(tmp_path / name / "events", SEED, change=driver.spread)
    config = {"grains": 8, "every_rule": True}
    whole = lives(tmp_path / "whole", **config)
    kills = [(8, 5, "exchange", 150), (3, 0, "update", 18), (1, 0, "grain", 80)]
    kills += [(4, 0, "replace", 2), (4, 3, "fetching", 9)]
    for ranks, rank, at, number in kills:
        kill = {"kill": {"at": at, "number": number}, "kill_rank": rank, "ranks": ranks}
        assert lives(tmp_path / "killed", **kill, **config)["killed"] == 9, kill
    answer = lives(tmp_path / "killed", ranks=2, **config)
    assert answer["resumed"] > 0
    assert answer["digest"] == whole["digest"]
    assert answer["rows"] == whole["rows"]


# --- endless sources ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(610, 613))
def test_a_followed_directory(seed: int, lives: Any, tmp_path: Path) -> None:
    config = {
        "source": "follow",
        "follow": {"pattern": "*.parquet"},
        "rows": driver.ROWS,
        "grains": 8,
        **driver.CLOCK,
    }
    root, whole = tmp_path / "killed", tmp_path / "whole"
    (root / "events").mkdir(parents=True)
    arriving = threading.Thread(
        target=driver.write_events, args=(root / "events", SEED, driver.ROWS, 8, 1.0)
    )
    arriving.start()
    several = {**config, "ranks": 2 + seed % 2}
    answer, _ = driver.killed(lives, root, SEED * 1000 + seed, POINTS, several, seconds=4.0)
    arriving.join()
    assert answer["samples"] == driver.ROWS
    shutil.copytree(root / "events", whole / "events")
    assert driver.decided_alike(lives, root, whole, config)["digest"] == answer["digest"]


@pytest.mark.parametrize("seed", range(620, 624))
def test_a_topic_by_three_ranks_is_its_journal_replayed_by_one_two_and_four(
    seed: int, lives: Any, broker: Any, tmp_path: Path
) -> None:
    topic = f"events-{seed}"
    broker.create(topic, 3)
    config = {
        "source": {"servers": broker.servers, "topic": topic, "block_rows": 150},
        "rows": driver.ROWS,
        "grains": 4,
        **driver.CLOCK,
    }
    arriving = threading.Thread(
        target=driver.produce, args=(broker, topic, driver.events(SEED).to_pylist(), seed)
    )
    arriving.start()
    root = tmp_path / "killed"
    answer, _ = driver.killed(
        lives, root, SEED * 1000 + seed, POINTS, {**config, "ranks": 3}, seconds=4.0
    )
    arriving.join()
    assert answer["samples"] == driver.ROWS
    for ranks in (1, 2, 4):
        again = {**config, "ranks": ranks}
        repeated = driver.decided_alike(lives, root, tmp_path / f"by {ranks}", again)
        assert repeated["digest"] == answer["digest"], ranks


def test_each_message_of_a_topic_is_counted_once(lives: Any, broker: Any, tmp_path: Path) -> None:
    """200,000 messages in 12 partitions, three ranks, three kills: a table has all rows, and the one
    of those that were counted twice has none.
    """
    rows = 200_000
    broker.create("once", 12)
    choose = random.Random(SEED)
    parts: list[list[bytes]] = [[] for _ in range(12)]
    for row in range(rows):
        message = {"row": row, "x": row % 7, "y": row % 2, "t": row}
        parts[choose.randrange(12)].append(json.dumps(message).encode())
    for partition, messages in enumerate(parts):
        broker.produce("once", messages, partition)
    config = {
        "source": {"servers": broker.servers, "topic": "once"},
        "dataset": {"batch_size": 1024},
        "evict": {"step_interval": 10_000},
        "rows": rows,
        "grains": 4,
        "ranks": 3,
        "once": True,
    }
    for rank, at, number in ((1, "exchange", 70), (0, "update", 60), (2, "fetching", 40)):
        kill = {"kill": {"at": at, "number": number}, "kill_rank": rank}
        assert lives(tmp_path, **kill, **config)["killed"] == 9
    answer = lives(tmp_path, **config)
    assert answer["resumed"] > 0
    assert answer["samples"] == rows
    assert answer["rows"] == {"row.linear": rows, "again.linear": 0}


# --- servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["folder", "topic"])
def test_a_server_follows_three_ranks_through_two_kills(
    by: str, lives: Any, broker: Any, tmp_path: Path
) -> None:
    """What is served is what the trainer scored at the same step, version by version."""
    driver.write_events(tmp_path / "events", SEED)
    config: dict[str, Any] = {"grains": 8, "ranks": 3, "publish": str(tmp_path / "published")}
    config["checkpoint"] = {"every_steps": 20, "full_every": 3}
    if by == "topic":
        broker.create("versions")
        config["publish"] = {"servers": broker.servers, "topic": "versions"}
    served: dict[int, list[np.ndarray]] = {}
    done = threading.Event()

    def serve() -> None:
        server = hb.ParameterServer(tmp_path / "rows")
        source: Any = tmp_path / "published"
        if by == "topic":
            source = TopicFeed(broker.servers, "versions", tmp_path / "cache")
        follower = Follower(source)
        asked = driver.events(99, 200).drop(["y", "t"])
        is_last = False
        while not is_last:
            is_last = done.wait(0.02)  # and once more, for the last version
            for reader in follower.poll():
                session = hb.InferenceSession(server.load("m", reader))
                version = reader.manifest.version
                served.setdefault(version, []).append(session.predict(asked))

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        for rank, at, number in ((1, "exchange", 60), (0, "replace", 3)):
            kill = {"kill": {"at": at, "number": number}, "kill_rank": rank}
            assert lives(tmp_path, **kill, **config)["killed"] == 9
        answer = lives(tmp_path, **config)
    finally:
        done.set()
        serving.join()
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    scored: dict[int, Any] = {}
    for step, scores in map(json.loads, lines):
        assert scored.setdefault(step, scores) == scores, "a step that is repeated scores the same"
    assert answer["resumed"] > 0
    assert len(served) > 3
    assert max(served) == answer["steps"]  # the last version arrives, too
    for version, versions in served.items():
        for found in versions:
            if version in scored:
                assert np.abs(found - scored[version]).max() < 1e-6, version
