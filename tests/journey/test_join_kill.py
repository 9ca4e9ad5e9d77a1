# SPDX-License-Identifier: Apache-2.0
"""Two topics joined, killed at any moment: the bits of a run that was not, and each impression
learned exactly as its rule says.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("rule", "ahead"), [("wait", 0), ("as_they_come", 8)], ids=["wait", "as_they_come"]
)
def test_two_topics_that_are_joined_go_on_where_they_were(
    rule: str, ahead: int, broker: Any, lives: Any, tmp_path: Path
) -> None:
    for topic, partitions in (("shown", 3), ("clicks", 2)):
        if topic in broker._topics:
            broker.delete(topic)
        broker.create(topic, partitions)
    config = {
        "join": {"servers": broker.servers, "rule": rule, **JOIN},
        "rows": LEARNED,
        "checkpoint": {"every_steps": 3},
        **driver.CLOCK,
    }
    if ahead:
        config["ahead"] = ahead
    arriving = threading.Thread(target=driver.produce_two, args=(broker, 7, ROWS))
    arriving.start()
    root = tmp_path / "killed"
    for kill in ({"at": "mapping", "number": 6, "after": True}, {"at": "committed", "number": 2}):
        assert lives(root, kill=kill, **config)["killed"] == 9
    answer = lives(root, **config)
    arriving.join()
    topics = Topics.of(broker, root / "state" / "journal")
    oracle = Oracle({"y": 1800}, 600, rule == "as_they_come")
    assert len(answer["learned"]) >= LEARNED
    assert topics.explain(answer["learned"], oracle)
    whole = driver.decided_alike(lives, root, tmp_path / "whole", config)
    assert whole["digest"] == answer["digest"]
    assert whole["learned"] == answer["learned"]
