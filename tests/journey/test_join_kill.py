# SPDX-License-Identifier: Apache-2.0
"""Two topics joined, killed at any moment: the bits of a run that was not, and each impression
learned exactly as its rule says.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
from join_oracle import Oracle, Topics

pytestmark = pytest.mark.slow

ROWS = 900
LEARNED = 600
JOIN = {"within": 1800, "lateness_seconds": 600, "idle_seconds": 1.5}


@pytest.fixture(scope="module")
def broker() -> Iterator[Any]:
    from hotbed.testing import Broker

    with Broker() as running:
        yield running


def kills_of(seed: int) -> list[dict[str, Any]]:
    """Two kills in the suite; in the soak other ones at random points, 63 in all."""
    if seed == 0:
        return [
            {"kill": {"at": "mapping", "number": 6, "after": True}},
            {"kill": {"at": "committed", "number": 2}},
        ]
    choose = random.Random(seed)
    kills: list[dict[str, Any]] = []
    for _ in range(3):
        at = choose.choice([*POINTS])
        number = choose.randint(1, POINTS[at])
        kill = {"at": at, "number": number, "after": choose.random() < 0.5}
        outside = {"kill_after": choose.uniform(0.2, 1.0)}
        kills.append(outside if choose.random() < 0.4 else {"kill": kill})
    return kills


POINTS = {
    "reading": 4, "mapping": 5, "update": 5, "journal": 9, "capture": 2, "table": 5,
    "rename": 2, "replace": 2, "committed": 2,
}  # fmt: skip
"""Where a life is killed, and how often at most it has passed there by then."""
SOAK = [
    pytest.param(*case, seed, marks=pytest.mark.soak)
    for seed in range(1, 11)
    for case in (("wait", 0), ("as_they_come", 8))
]


RANKS = 100
"""The seed of a run of two ranks: the first one reads for both."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("rule", "ahead", "seed"),
    [("wait", 8, 0), *SOAK, pytest.param("wait", 0, RANKS, marks=pytest.mark.soak)],
)
def test_two_topics_that_are_joined_go_on_where_they_were(
    rule: str, ahead: int, seed: int, broker: Any, lives: Any, tmp_path: Path
) -> None:
    """The log before the newest state is gone in each life. In the soak the broker dies, too:
    between two lives, or within each.
    """
    for topic, partitions in (("shown", 3), ("clicks", 2)):
        if topic in broker._topics:
            broker.delete(topic)
        broker.create(topic, partitions)
    config = {
        "join": {"servers": broker.servers, "rule": rule, **JOIN},
        "rows": LEARNED,
        "checkpoint": {"every_steps": 3},
        "cut_log": True,
        **driver.CLOCK,
    }
    if ahead:
        config["ahead"] = ahead
    if seed == RANKS:
        config |= {"ranks": 2, "grains": 2}
    arriving = threading.Thread(target=driver.produce_two, args=(broker, seed, ROWS))
    arriving.start()
    root = tmp_path / "killed"
    for number, kill in enumerate([*kills_of(seed), {}]):
        restarting = threading.Timer(0.5, broker.restart)
        if seed % 3 == 2 and number:
            restarting.start()
        answer = lives(root, **kill, **config)
        print(f"seed {seed}: {kill}: killed {answer['killed']}")
        assert answer["killed"] or "kill" not in kill, "the life has passed no such point"
        if restarting.ident:
            restarting.join()
        if number == 0:
            arriving.join()
        if seed % 3 == 1 and kill:
            broker.restart()
    topics = Topics.of(broker, root / "state" / "journal")
    oracle = Oracle({"y": 1800}, 600, rule == "as_they_come")
    assert len(answer["learned"]) >= LEARNED
    assert topics.explain(answer["learned"], oracle)
    whole = driver.decided_alike(lives, root, tmp_path / "whole", {**config, "cut_log": False})
    assert whole["digest"] == answer["digest"]
    assert whole["learned"] == answer["learned"]
