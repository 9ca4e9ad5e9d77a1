# SPDX-License-Identifier: Apache-2.0
"""Histories and counts that are filled from files, then from the topic that goes on behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
import kept_world

from hotbed.testing import Broker

pytestmark = pytest.mark.slow

SEED = 20261130
ROWS = 800
BATCH = 50
SEAM = 8
"""The step that learns the last rows of the files."""
BEFORE_SEAM = {"at": "mapping", "number": SEAM, "after": True}
"""The last rows of the files are scored."""
AFTER_SEAM = {"at": "mapping", "number": SEAM + 1, "after": True}
"""Rows of the topic are scored, or later ones."""
SAVED = {"at": "committed", "number": 1}
"""So the last life resumes."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kills",
    [[BEFORE_SEAM, SAVED], pytest.param([BEFORE_SEAM, AFTER_SEAM, SAVED], marks=pytest.mark.soak)],
    ids=["two kills", "three kills"],
)
def test_files_and_a_topic_fill_histories_without_a_gap_or_a_double(
    kills: list[dict[str, Any]], lives: Any, tmp_path: Path
) -> None:
    requests = kept_world.numbered(driver.events(SEED, ROWS + 500))
    events = kept_world.disordered(requests.slice(0, ROWS), SEED).slice(0, ROWS)
    events = events.set_column(events.schema.get_field_index("n"), "n", requests["n"][:ROWS])
    kept_world.write_world(tmp_path, events.slice(0, SEAM * BATCH), requests)
    with Broker() as broker:
        broker.create("events", 3)
        driver.produce(broker, "events", events.slice(SEAM * BATCH).to_pylist(), SEED)
        config = {
            "histories": True,
            "windows": list(kept_world.WINDOWS),
            "publish": str(tmp_path / "published"),
            "checkpoint": {"every_steps": 5},
            "dataset": {"batch_size": BATCH},
            "source": {"servers": broker.servers, "topic": "events", "block_rows": 100},
            "bootstrap": True,
            "rows": ROWS,
        }
        for kill in kills:
            assert lives(tmp_path, kill=kill, **config)["killed"] == 9, kill
        answer = lives(tmp_path, **config)
    assert answer["resumed"] > 0
    checked = kept_world.check(tmp_path, answer["steps"])
    assert checked.rows is not None
    numbers = [int(row["n"]) for row in checked.rows]
    assert numbers[: SEAM * BATCH] == list(range(SEAM * BATCH))
    assert sorted(numbers) == list(range(ROWS))
    assert checked.served > 0
