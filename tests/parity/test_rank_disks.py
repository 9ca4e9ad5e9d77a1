# SPDX-License-Identifier: Apache-2.0
"""A disk refuses one rank, or all of them, while they train with `Checkpoint`: the training goes on
with the state before as the newest, or ends with one error that names the rank and the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch absent")

import numpy as np
import torch
from forked import LogLines, ranks_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.files import is_partial
from hotbed.persist import content_digest, open_checkpoint
from hotbed.persist.container.sink import LocalFile
from hotbed.persist.upkeep.inspect import describe_checkpoint, verify

BAD = 6
"""The step from which on the disk refuses."""
GOOD = 16
"""The step from which on it does not refuse any longer."""
CLONE_NEWNS = 0x20000


class Disk:
    """A disk of this rank's own view of a folder; `break_` and `mend` change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def break_(self) -> None: ...
    def mend(self) -> None: ...


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullHere(Disk):
    """A disk that is full for this rank alone, as by a quota."""

    def break_(self) -> None:
        self._patch = patch.object(LocalFile, "write", _refuse)
        self._patch.start()

    def mend(self) -> None:
        self._patch.stop()


class ReadOnlyHere(Disk):
    """A folder that this rank alone may not write, by a mount in a namespace of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        self._mount("--make-rprivate", "/")

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words], check=True)

    def break_(self) -> None:
        self._mount("--bind", str(self.folder), str(self.folder))
        remount = ["mount", "-o", "remount,bind,ro", str(self.folder)]
        while subprocess.run(remount, check=False).returncode:
            time.sleep(0.05)  # a file of the save before is still open for writing

    def mend(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Filled(Disk):
    """A small disk that somebody else fills."""

    def break_(self) -> None:
        with contextlib.suppress(OSError), open(self.folder / "other", "wb", 0) as file:
            while True:
                file.write(bytes(4096))

    def mend(self) -> None:
        (self.folder / "other").unlink()


KINDS = {kind.__name__: kind for kind in (Disk, FullHere, ReadOnlyHere, Filled)}


class Breaks:
    """Breaks a disk after one step, and mends it after another."""

    def __init__(self, disk: Disk, *, mends: bool) -> None:
        self._disk = disk
        self._mends = mends

    def on_step_end(self, run: Any) -> None:
        if run.step == BAD:
            self._disk.break_()
        if run.step == GOOD and self._mends:
            self._disk.mend()


def fitted(folder: str, kind: str = "Disk", rank: int = -1, mends: bool = True) -> dict[str, Any]:
    """Fit with a disk that refuses one rank; return what happened on this one."""
    here = int(os.environ["RANK"]) == rank
    log = LogLines()
    logging.getLogger("hotbed").addHandler(log)
    torch.manual_seed(1)
    draw = np.random.default_rng(0)
    columns = {"y": draw.integers(0, 2, 2400), "user": draw.zipf(1.2, 2400) % 300}
    schema = hb.Schema([hb.Label("y"), hb.Id("user")])
    tables = hb.make_tables(schema, 2, admit=hb.MinCount(2))
    network = hb.models.DCNv2(schema, tables, hidden=(4,), dropout=0.2)
    model = hb.RecModel(network, "bce", "adam", grains=4)
    data = hb.Dataset(hb.sources.Memory(columns), schema, batch_size=100, shuffle=300)
    breaks = Breaks((KINDS[kind] if here else Disk)(Path(folder)), mends=mends)
    keep = hb.callbacks.Checkpoint(folder, every_steps=2, full_every=3, wait=True)
    error = ""
    try:
        model.fit(data, callbacks=[breaks, keep], progress=False)
    except HotbedError as raised:
        error = f"{type(raised).__name__}: {raised}"
    lines = [line for line in log.lines if "not saved" in line]
    return {"error": error, "lines": lines, "steps": model.counters["steps"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("unbroken")
    (found,) = ranks_of(fitted, 1, str(folder))
    assert found == {"error": "", "lines": [], "steps": 24}
    return content_digest(open_checkpoint(folder))


@pytest.fixture
def states(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Any], Path]]:
    """The folder of states for a kind of disk; a small one is mounted for `Filled`."""
    mounted = []

    def make(kind: type[Disk]) -> Path:
        folder = tmp_path / "states"
        folder.mkdir()
        if kind is Disk or kind is FullHere:
            return folder
        size = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"] if kind is Filled else ["--bind", folder]
        try:
            subprocess.run(["mount", *size, folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounts absent")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


REASON = {
    FullHere: "No space left on device",
    Filled: "No space left on device",
    ReadOnlyHere: "Read-only file system",
}


def check_goes_on(folder: Path, kind: type[Disk], rank: int, ranks: int, unbroken: str) -> None:
    found = ranks_of(fitted, ranks, str(folder), kind.__name__, rank)
    for number, of_rank in enumerate(found):
        assert of_rank["error"] == ""
        assert of_rank["steps"] == 24
        lines = of_rank["lines"]
        # steps 6 to 14; that of 4 or 14 may be written after the disk changed
        assert len(lines) in (4, 5, 6), lines
        for line in lines:
            assert line.startswith(f"rank {number}: not saved at step ")
            assert REASON[kind] in line
            assert str(folder) in line
            if kind is not Filled and number != rank:
                assert f"rank {rank}" in line.partition("not saved")[2]
    assert verify(folder)["content_digest"] == unbroken
    check_nothing_is_left(folder)


def check_ends(folder: Path, kind: type[Disk], rank: int, ranks: int, unbroken: str) -> None:
    found = ranks_of(fitted, ranks, str(folder), kind.__name__, rank, False)
    for of_rank in found:
        assert of_rank["error"] == found[0]["error"]
        assert of_rank["error"].startswith(("NotWritten: ", f"NotWritten: rank {rank}: "))
        assert REASON[kind] in of_rank["error"]
        assert str(folder) in of_rank["error"]
        if kind is not Filled:
            assert f"rank {rank}" in of_rank["error"]
    verify(folder)
    assert describe_checkpoint(folder)["counters"]["steps"] in (2, 4)
    if kind is Filled:
        (folder / "other").unlink()
    for of_rank in ranks_of(fitted, ranks, str(folder)):
        assert of_rank["error"] == ""
    assert verify(folder)["content_digest"] == unbroken
    check_nothing_is_left(folder)


def check_nothing_is_left(folder: Path) -> None:
    assert not [path for path in folder.iterdir() if is_partial(path.name)]


def test_a_disk_that_is_full_for_one_rank_is_logged_by_its_name_and_training_goes_on(
    unbroken: str, states: Callable[[Any], Path]
) -> None:
    check_goes_on(states(FullHere), FullHere, 1, 2, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("check", [check_goes_on, check_ends])
@pytest.mark.parametrize("kind", [FullHere, ReadOnlyHere, Filled])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 1)])
def test_a_disk_that_refuses_costs_no_state_and_no_bit(
    check: Callable[..., None],
    kind: type[Disk],
    rank: int,
    ranks: int,
    unbroken: str,
    states: Callable[[Any], Path],
) -> None:
    check(states(kind), kind, rank, ranks, unbroken)
