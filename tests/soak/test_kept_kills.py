# SPDX-License-Identifier: Apache-2.0
"""Models that keep a history and a count, killed 20 times each: what every row saw and what every
version served is that of a dict which replays the events.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
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
WITHIN, LATENESS = 1800, 600
# Where a life is killed, and how often at most it has passed there: within 25 steps of 520.
POINTS = {"mapping": 24, "update": 24, "eviction": 4, "capture": 2, "table": 14, "rename": 3}
TIERS = pytest.mark.parametrize("tier", [{}, {"ram_rows": 500}], ids=["ram", "ssd"])


@pytest.fixture(scope="module")
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


def killed_often(lives: Any, root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return what the last life answers, after 20 lives that were killed."""
    choose = random.Random(SEED)
    kills = 0
    while kills < KILLS:
        at = choose.choice(list(POINTS))
        kill = {"at": at, "number": choose.randint(1, POINTS[at]), "after": choose.random() < 0.5}
        life = lives(root, kill=kill, **config)
        assert life["killed"] == 9, "the life ended before its kill"
        kills += 1
    answer: dict[str, Any] = lives(root, **config)
    assert answer["resumed"] > 0
    return answer


@TIERS
def test_rows_in_disorder_see_what_a_dict_says_after_kills(
    tier: dict[str, Any], lives: Any, tmp_path: Path
) -> None:
    requests = kept_world.numbered(driver.events(SEED, ROWS + 2 * EVERY * BATCH))
    world = kept_world.disordered(requests.slice(0, ROWS), SEED).slice(0, ROWS)
    kept_world.write_world(tmp_path, world, requests)
    answer = killed_often(lives, tmp_path, config_of(tmp_path, tier))
    checked = kept_world.check(tmp_path, answer["steps"])
    print(f"disorder {tier}: {checked.samples} samples, {checked.served} served")
    assert checked.samples == ROWS
    assert checked.served >= ROWS - 2 * EVERY * BATCH


def test_joined_rows_see_what_a_dict_says_after_kills(
    broker: Any, lives: Any, tmp_path: Path
) -> None:
    for topic, partitions in (("shown", 3), ("clicks", 2)):
        broker.create(topic, partitions)
    shown = round(1.15 * ROWS)
    requests = kept_world.numbered(driver.events(SEED, shown))
    kept_world.write_requests(tmp_path, requests)
    driver.produce_two(broker, SEED, shown)
    join = {"within": WITHIN, "lateness_seconds": LATENESS, "idle_seconds": 1.5}
    config = {
        **config_of(tmp_path, {}),
        "join": {"servers": broker.servers, "rule": "wait", **join},
        "rows": ROWS,
    }
    answer = killed_often(lives, tmp_path, config)
    checked = kept_world.check(tmp_path, answer["steps"])
    print(f"join: {checked.samples} samples, {checked.served} served")
    assert checked.samples >= ROWS
    assert checked.served >= ROWS - 2 * EVERY * BATCH
    clicks = clicks_of(broker)
    for row in checked.rows or []:
        own = clicks.get(int(row["n"]), set())
        assert row["known"] == row["time"] + WITHIN + LATENESS
        assert row["y"] == 0 or own


def clicks_of(broker: Any) -> dict[int, set[int]]:
    """Return the times of the clicks of each impression."""
    times: dict[int, set[int]] = {}
    for partition in broker._topics["clicks"]:
        for _, value in partition:
            row = json.loads(value)
            times.setdefault(row["n"], set()).add(row["t"])
    return times
