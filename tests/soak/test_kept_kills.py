# SPDX-License-Identifier: Apache-2.0
"""Models that keep a history and a count, killed 20 times each: what every row saw and what every
version served is that of a dict which replays the events.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
import kept_world

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SEED = 20261130
ROWS = 52_000
BATCH = 100
EVERY = 10  # steps of a checkpoint
KILLS = 20
GRAINS = 4  # of a batch, where several ranks learn
WITHIN, LATENESS = 1800, 600
# Where a life is killed, and how often at most it has passed there: within 25 steps of 520.
POINTS = {"mapping": 24, "update": 24, "eviction": 4, "capture": 2, "table": 14, "rename": 3}
# Where a rank is killed; the first rank alone commits.
RANK_POINTS = {
    "histories": 24,
    "owners": 48,
    "entries": 48,
    "asking": 24,
    "fetching": 24,
    "grain": 24,
    "exchange": 80,
    "update": 24,
    "eviction": 15,
    "capture": 4,
    "table": 90,
    "rename": 7,
}
FIRST_ALONE = {"rename"}
TIERS = pytest.mark.parametrize("tier", [{}, {"ram_rows": 500}], ids=["ram", "ssd"])


@pytest.fixture
def broker() -> Iterator[Any]:
    from hotbed.testing import Broker

    with Broker() as running:
        yield running


def config_of(root: Path, tier: dict[str, Any]) -> dict[str, Any]:
    return {
        "histories": True,
        "windows": list(kept_world.WINDOWS),
        "publish": str(root / "published"),
        "checkpoint": {"every_steps": EVERY},
        "dataset": {"batch_size": BATCH},
        **tier,
    }


def killed_often(
    lives: Any, root: Path, config: dict[str, Any], kills: int = KILLS
) -> dict[str, Any]:
    """Return what the last life answers, after lives that were killed."""
    choose = random.Random(SEED)
    ranks = config.get("ranks", 1)
    points = POINTS if ranks == 1 else RANK_POINTS
    for _ in range(kills):
        at = choose.choice(list(points))
        kill = {"at": at, "number": choose.randint(1, points[at]), "after": choose.random() < 0.5}
        who = {}
        if ranks > 1:
            rank = 0 if at in FIRST_ALONE else choose.randrange(ranks)
            who = {"kill_rank": rank, "kill_job": choose.random() < 0.5}
        life = lives(root, kill=kill, **who, **config)
        assert life["killed"] == 9, f"the life ended before its kill at {kill} of {who}"
    answer: dict[str, Any] = lives(root, **config)
    assert answer["resumed"] > 0
    return answer


def disorder(rows: int = ROWS) -> tuple[Any, Any]:
    """Return events in disorder, and requests."""
    requests = kept_world.numbered(driver.events(SEED, rows + 2 * EVERY * BATCH))
    return kept_world.disordered(requests.slice(0, rows), SEED).slice(0, rows), requests


def check_all(
    root: Path, answer: dict[str, Any], ranks: int = 1, rows: int = ROWS
) -> kept_world.Checked:
    """Check what all rows and all served requests saw."""
    checked = kept_world.check(root, answer["steps"], ranks)
    print(f"{checked.samples} samples, {checked.served} served")
    assert checked.served >= rows - 2 * EVERY * BATCH
    return checked


@TIERS
def test_rows_in_disorder_see_what_a_dict_says_after_kills(
    tier: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    kept_world.write_world(tmp_path, *disorder())
    answer = killed_often(lives, tmp_path, config_of(tmp_path, tier))
    assert check_all(tmp_path, answer).samples == ROWS


@pytest.fixture(scope="module")
def unbroken(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process that nobody kills has in the end: the digest of its state."""
    root = tmp_path_factory.mktemp("unbroken")
    kept_world.write_world(root, *disorder())
    return str(lives(root, **config_of(root, {}), grains=GRAINS)["digest"])


@TIERS
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_in_disorder_see_what_a_dict_says_after_kills_of_ranks(
    ranks: int, tier: dict[str, Any], unbroken: str, lives: Any, tmp_path: Path
) -> None:
    kept_world.write_world(tmp_path, *disorder())
    config = {**config_of(tmp_path, tier), "ranks": ranks, "grains": GRAINS}
    answer = killed_often(lives, tmp_path, config)
    assert answer["digest"] == unbroken
    assert check_all(tmp_path, answer, ranks).samples == ROWS


@pytest.mark.parametrize("source", ["topic", "follow"])
def test_rows_of_endless_sources_see_what_a_dict_says_after_kills_of_ranks(
    source: str, broker: Any, lives: Any, tmp_path: Path
) -> None:
    rows = 12_000
    events, requests = (kept_world.hastened(part) for part in disorder(rows))
    config = {**config_of(tmp_path, {}), "rows": rows, "ranks": 3, "grains": GRAINS}
    if source == "topic":
        broker.create("events", 3)
        config["source"] = {"servers": broker.servers, "topic": "events", "block_rows": 150}
        kept_world.write_requests(tmp_path, requests)
        produce = partial(driver.produce, broker, "events", events.to_pylist(), SEED)
    else:
        config["source"] = "follow"
        config["follow"] = {"pattern": "*.parquet"}
        (tmp_path / "events").mkdir()
        produce = partial(kept_world.write_world, tmp_path, events, requests, pause_seconds=1.0)
    arriving = threading.Thread(target=produce)
    arriving.start()
    answer = killed_often(lives, tmp_path, config, kills=5)
    arriving.join()
    assert check_all(tmp_path, answer, config["ranks"], rows).samples == rows


@pytest.mark.parametrize("tier", [{}, {"ram_rows": 500}], ids=["ram", "ssd"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", ["wait", "as_they_come"])
def test_joined_rows_see_what_a_dict_says_after_kills(
    rule: str, ranks: int, tier: dict[str, Any], broker: Any, lives: Any, tmp_path: Path
) -> None:
    for topic, partitions in (("shown", 3), ("clicks", 2)):
        broker.create(topic, partitions)
    shown = round(1.15 * ROWS)
    requests = kept_world.numbered(driver.events(SEED, shown))
    kept_world.write_requests(tmp_path, requests)
    driver.produce_two(broker, SEED, shown)
    join = {"within": WITHIN, "lateness_seconds": LATENESS, "idle_seconds": 1.5}
    config = {
        **config_of(tmp_path, tier),
        "join": {"servers": broker.servers, "rule": rule, **join},
        "rows": ROWS,
    }
    if ranks > 1:
        config |= {"ranks": ranks, "grains": GRAINS}
    answer = killed_often(lives, tmp_path, config)
    checked = check_all(tmp_path, answer, ranks)
    assert checked.samples >= ROWS
    rows = checked.rows or []
    assert len({row["n"] for row in rows}) == len(rows)
    clicks = clicks_of(broker)
    for row in rows:
        own = clicks.get(int(row["n"]), set())
        end = row["time"] + WITHIN
        in_window = {time for time in own if row["time"] <= time <= end}
        decided = {end + LATENESS}
        if row["y"] == 1 and rule == "as_they_come":
            decided = in_window
        assert row["known"] in decided
        assert row["y"] == 0 or in_window


def clicks_of(broker: Any) -> dict[int, set[int]]:
    """Return the times of the clicks of each impression."""
    times: dict[int, set[int]] = {}
    for partition in broker._topics["clicks"]:
        for _, value in partition:
            row = json.loads(value)
            times.setdefault(row["n"], set()).add(row["t"])
    return times
