# SPDX-License-Identifier: Apache-2.0
"""`hotbed verify`, `inspect`, `diff`, `rollback` and `publish` on states and published versions that
several processes wrote: they say what they say of those of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

import driver
from forked import ranks_of
from typer.testing import CliRunner

from hotbed.cli.commands import app
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.container.store import number_of, open_store
from hotbed.persist.upkeep.inspect import describe_checkpoint, diff, verify

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SEED = 20261128
RANKS = (1, 2, 3)


def life(root: str) -> Any:
    """One life of a fit by grains on this rank, which publishes each state."""
    checkpoint = {"every_steps": 4, "full_every": 3, "keep": 100}
    return driver.live(
        {
            "root": root,
            "epochs": 1,
            "grains": 4,
            "dataset": {"shuffle": 200},
            "checkpoint": checkpoint,
            "publish": f"{root}/published",
        }
    )


def fitted(root: Path, ranks: int) -> dict[str, Any]:
    found = ranks_of(life, ranks, str(root))
    assert found == found[:1] * ranks
    answer: dict[str, Any] = found[0]
    return answer


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of a fit by so many ranks, each with the states of the same steps."""
    folder = tmp_path_factory.mktemp("states")
    roots = {}
    for ranks in RANKS:
        roots[ranks] = folder / str(ranks)
        driver.write_events(roots[ranks] / "events", SEED, rows=600)
        fitted(roots[ranks], ranks)
    return roots


def hotbed(*arguments: object, code: int = 0) -> str:
    """What the command prints, with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def without_files(description: Any) -> Any:
    """What a description says of the content: files are cut by ranks, and digests follow."""
    cut = {"bytes", "digest", "files", "folder", "parent", "path", "place", "chain", "links"}
    if isinstance(description, dict):
        return {k: without_files(v) for k, v in description.items() if k not in cut}
    if isinstance(description, list):
        return [without_files(value) for value in description]
    return description


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("name", ["state", "published", "model"])
def test_commands_say_of_ranks_what_they_say_of_one_process(
    name: str, ranks: int, roots: dict[int, Path]
) -> None:
    several, one = roots[ranks] / name, roots[1] / name
    assert verify(several)["content_digest"] == verify(one)["content_digest"]
    assert without_files(describe_checkpoint(several)) == without_files(describe_checkpoint(one))
    assert diff(several, one)["same"]
    assert hotbed("diff", several, one) == "the same content\n"
    for command in ("verify", "inspect"):
        assert len(hotbed(command, several).splitlines()) == len(hotbed(command, one).splitlines())
    states = open_store(several).folders()
    of_one = open_store(one).folders()
    for folder, other in zip(states, of_one, strict=True):
        assert diff(several / folder, one / other)["same"]
    if len(states) > 1:
        differences = [
            hotbed("diff", root / folders[0], root / folders[-1], code=1)
            for root, folders in ((several, states), (one, of_one))
        ]
        assert differences[0] == differences[1]


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_flipped_bit_in_a_file_of_a_rank_is_named(
    ranks: int, roots: dict[int, Path], tmp_path: Path
) -> None:
    """In a part file of each rank."""
    newest = open_store(roots[ranks] / "state").newest_state()
    assert newest is not None
    folder = newest.folder
    parts = sorted((roots[ranks] / "state" / folder).rglob("rows-*.arrow"))
    assert len({part.name for part in parts}) >= ranks
    for part in parts:
        whole = part.read_bytes()
        part.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        result = CliRunner().invoke(app, ["verify", str(roots[ranks] / "state" / folder)])
        part.write_bytes(whole)
        assert str(part) in str(result.exception)
    hotbed("verify", roots[ranks] / "state" / folder)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_restore_goes_back_on_states_of_ranks_and_any_number_resumes_to_the_same_bits(
    by_torchrun: bool, ranks: int, tmp_path: Path
) -> None:
    driver.write_events(tmp_path / "events", SEED, rows=600)
    answer = fitted(tmp_path, ranks)
    states = tmp_path / "state"
    numbers = [number_of(folder) for folder in open_store(states).folders()]
    back = numbers[2]  # a delta
    step = describe_checkpoint(states / open_store(states).folders()[2])["counters"]["steps"]
    command = ["rollback", str(states), "--state", str(back)]
    if by_torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "hotbed.cli", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"checkpoint-{back:08d}") == 1, done.stdout
    else:
        hotbed(*command)
    assert describe_checkpoint(states)["counters"]["steps"] == step
    assert sorted(map(number_of, open_store(states / "aside").folders())) == numbers[3:]
    resumed = fitted(tmp_path, 4 - ranks)
    assert resumed["resumed"] == step
    assert {**resumed, "resumed": 0} == {**answer, "resumed": 0}
    assert min(set(map(number_of, open_store(states).folders())) - set(numbers)) > max(numbers)


def test_a_state_of_ranks_is_published_and_exported_by_the_command_as_of_one_process(
    roots: dict[int, Path], tmp_path: Path
) -> None:
    digests = set()
    for ranks, root in roots.items():
        number = number_of(open_store(root / "state").folders()[1])
        to = tmp_path / str(ranks)
        hotbed("publish", root / "state", "--to", to / "published", "--state", number)
        hotbed("export", root / "state", "--out", to / "export")
        found = [content_digest(open_checkpoint(to / name)) for name in ("published", "export")]
        digests.add(json.dumps(found))
    assert len(digests) == 1
