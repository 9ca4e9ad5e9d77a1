# SPDX-License-Identifier: Apache-2.0
"""The four switches of Rec SDK's chapter in all 16 combinations, on one stream: each equals the
engine's own loop bit for bit, with base and delta checkpoints and a kill -9 on its way. Those of two
and three switches are in `make soak`, which has more kills, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
import rec_sdk_loops as loops

pytestmark = pytest.mark.slow

SEED = 20261123
ROWS = 640
KILLS = [
    {"at": "ahead", "number": 9, "after": True},
    {"at": "lookup", "number": 13, "after": True},
    {"at": "rows", "number": 12, "after": False},
    {"at": "rows", "number": 17, "after": True},  # rows have moved, dense parameters may not
    {"at": "dense", "number": 11, "after": True},
    {"at": "checkpoint", "number": 7, "after": False},  # in a delta
    {"at": "rename", "number": 4, "after": False},  # complete, but not visible
    {"at": "replace", "number": 5, "after": False},  # visible, but not current
]


@pytest.fixture(scope="module")
def engine(lives: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the engine's own loop learns; dynamic shape is nothing that it knows of."""
    root = tmp_path_factory.mktemp("engine")
    driver.write_events(root / "events", SEED, ROWS)
    learned: dict[frozenset[str], dict[str, Any]] = {}

    def of(switches: list[str]) -> dict[str, Any]:
        own = frozenset(switches) - {"dynamic"}
        if own not in learned:
            learned[own] = lives(root, switches=sorted(own), engine=True)
        return learned[own]

    return of


QUICK = [switches for switches in loops.EVERY if len(switches) in (0, 4)]


def combination(number: int) -> Any:
    switches = loops.EVERY[number]
    marks = [] if switches in QUICK else [pytest.mark.soak]
    return pytest.param(number, marks=marks, id="-".join(switches) or "none")


@pytest.mark.parametrize("number", [combination(n) for n in range(16)])
def test_a_killed_combination_ends_with_the_bits_of_the_engines_own_loop(
    number: int, engine: Any, lives: Any, tmp_path: Path
) -> None:
    switches = loops.EVERY[number]
    driver.write_events(tmp_path / "events", SEED, ROWS)
    kill = KILLS[number % len(KILLS)]
    assert lives(tmp_path, switches=switches, kill=kill)["killed"] == 9
    answer = lives(tmp_path, switches=switches)
    assert answer["resumed"] > 0
    assert answer["steps"] == ROWS // loops.BATCH
    assert answer["digest"] == engine(switches)["digest"]


@pytest.mark.parametrize(
    "combinations, num_different",  # dynamic shape changes no bits
    [
        pytest.param(QUICK, 2, id="quick"),
        pytest.param(loops.EVERY, 8, marks=pytest.mark.soak, id="all"),
    ],
)
def test_combinations_learn_different_things(
    combinations: list[Any], num_different: int, engine: Any
) -> None:
    """Else their equality would show little."""
    digests = {engine(switches)["digest"] for switches in combinations}
    assert len(digests) == num_different
