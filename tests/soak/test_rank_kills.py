# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at each point of a save of several ranks: the newest state is the one before or
the new one, and the same command goes on from there to the bits of one process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
from forked import ranks_of

from hotbed.files import is_partial
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.container.store import CURRENT_FILE, open_store
from hotbed.persist.upkeep.inspect import describe_checkpoint, verify

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = 20261126
# Where a rank is killed, and at which passage: in one of the first saves of a checkpoint.
POINTS = {
    "opened": 3,  # a draft, or joins that of the first rank
    "table": 20,  # its rows are written
    "gathered": 2,  # names of files are sent to the first rank
    "collected": 5,  # ids that wait are sent there
    "agreed": 9,  # the first rank tells the others what it did
}
FIRST_ALONE = {
    "commit": 3,
    "rename": 3,  # the state has its manifest, and appears under its name
    "replace": 5,  # CURRENT points to it
}
CASES = [
    (at, number, rank, after)
    for points, ranks in ((POINTS, (0, 1)), (FIRST_ALONE, (0,)))
    for at, number in points.items()
    for rank in ranks
    for after in (False, True)
]


def life(root: str, killed: int | None = None, kill: dict[str, Any] | None = None) -> Any:
    """One life of a fit by grains on this rank; `kill`: where `killed` dies."""
    if kill is not None and int(os.environ["RANK"]) == killed:
        driver.arm(**kill)
    checkpoint = {"every_steps": 4, "full_every": 2, "keep": 100}
    dataset = {"shuffle": 200}
    return driver.live(
        {"root": root, "epochs": 1, "grains": 4, "dataset": dataset, "checkpoint": checkpoint}
    )


def states(folder: Path) -> dict[int, str]:
    """The digest of each state of a folder, by its step."""
    found = {}
    for name in open_store(folder).folders():
        state = folder / name
        step = describe_checkpoint(state)["counters"]["steps"]
        found[step] = content_digest(open_checkpoint(state))
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, str]]:
    """What one process answers that nobody kills, and its states."""
    root = tmp_path_factory.mktemp("unbroken")
    driver.write_events(root / "events", SEED, rows=600)
    (answer,) = ranks_of(life, 1, str(root))
    found = states(root / "state")
    assert len(found) == 6
    return answer, found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("at", "number", "rank", "after"), CASES)
def test_a_kill_in_a_save_leaves_a_whole_state_and_costs_no_bit(
    at: str,
    number: int,
    rank: int,
    after: bool,
    ranks: int,
    unbroken: tuple[dict[str, Any], dict[int, str]],
    tmp_path: Path,
) -> None:
    driver.write_events(tmp_path / "events", SEED, rows=600)
    point = {"at": at, "number": number, "after": after}
    with pytest.raises(AssertionError):
        ranks_of(life, ranks, str(tmp_path), rank, point)
    answer, of_one = unbroken
    folder = tmp_path / "state"
    if (folder / CURRENT_FILE).exists():
        step = describe_checkpoint(folder)["counters"]["steps"]
        assert of_one[step] == verify(folder)["content_digest"]
    for found in ranks_of(life, ranks, str(tmp_path)):
        assert {**found, "resumed": 0} == {**answer, "resumed": 0}
    assert states(folder).items() <= of_one.items()
    # a new CURRENT that was not renamed is a file, which has no lock: it is swept after a day
    left = [path for path in tmp_path.rglob("*") if is_partial(path.name)]
    assert not [path for path in left if path.is_dir()]
