# SPDX-License-Identifier: Apache-2.0
"""Kills of the 16 combinations of Rec SDK's switches, at random wall times and at named points, and
of evictions by the wall clock. Everything random follows from SEED.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
import rec_sdk_loops as loops

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = 20261123
ROWS = 2400
# Where a life is killed, and how often at most it has passed there by then.
POINTS = {
    "ahead": 60,
    "lookup": 74,
    "rows": 74,
    "dense": 74,
    "capture": 15,
    "checkpoint": 30,
    "table": 30,
    "rename": 15,
    "replace": 30,
    "forget": 3,
    "reading": 3,
}
KILLS: list[str] = []


def killed(lives: Any, root: Path, seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """What a life answers after one to three kills."""
    answer, kills = driver.killed(lives, root, SEED * 1000 + seed, POINTS, config, seconds=1.5)
    KILLS.extend(kills)
    return answer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(16), ids=lambda n: "-".join(loops.EVERY[n]) or "none")
def test_a_combination(number: int, seed: int, lives: Any, tmp_path: Path) -> None:
    driver.write_events(tmp_path / "events", SEED, ROWS)
    switches = loops.EVERY[number]
    answer = killed(lives, tmp_path, 100 * number + seed, {"switches": switches})
    whole = lives(tmp_path, switches=switches, engine=True)
    assert answer["digest"] == whole["digest"]


@pytest.mark.parametrize("seed", range(6))
def test_evictions_by_the_wall_clock(seed: int, lives: Any, tmp_path: Path) -> None:
    """The engine's loop repeats the decisions that the killed lives have taken."""
    driver.write_events(tmp_path / "events", SEED, ROWS)
    switches = ["aging", *[[], ["automatic"], ["expansion"]][seed % 3]]
    hook = {"evict_step_interval": None, "evict_time_interval": 1}
    config = {"switches": switches, "loop": {"hook": hook, "pause": 0.03}, "remember": True}
    answer = killed(lives, tmp_path, 10_000 + seed, config)
    journal = tmp_path / "decided" / "journal"
    journal.parent.mkdir()
    shutil.copy(tmp_path / "state" / "journal", journal)
    assert '"evict"' in journal.read_text(), "the clock had nothing to decide"
    whole = lives(tmp_path, switches=switches, engine=True, loop={"journal": str(journal)})
    assert answer["digest"] == whole["digest"]


def test_that_were_more_than_forty_kills() -> None:
    assert len(KILLS) > 40, KILLS
