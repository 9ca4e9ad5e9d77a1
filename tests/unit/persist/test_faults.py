# SPDX-License-Identifier: Apache-2.0
"""G2: whatever happens to the files of a full or of a delta, loading refuses with the file's name,
and saving keeps the last good state.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch absent")

import torch
from forked import SERVER
from torch import nn

import hotbed as hb
from hotbed.errors import FormatError, PersistError
from hotbed.persist.container.format import Link, Saved, open_checkpoint
from hotbed.persist.state.chain import Replica, compact
from hotbed.persist.state.checkpoint import State, capture, save, write
from hotbed.persist.state.digest import content_digest
from hotbed.persist.state.restoring import restore
from hotbed.persist.state.saver import Saver
from hotbed.persist.upkeep.inspect import verify
from hotbed.persist.upkeep.warm_starts import warm_start

RULE, POLICY = hb.Adagrad(lr=0.1), {"admit": hb.MinCount(2)}


def learn(table: hb.Table, ids: Any) -> None:
    slots = table.find_or_insert(np.repeat(np.asarray(ids, np.int64), 2))
    table.update(slots, np.full((len(slots), table.dim), 0.5, np.float32))
    table.find_or_insert(np.arange(10_000, 10_005) + 5 * table.step)  # these wait for admission


def state_of(table: hb.Table, step: int = 0) -> State:
    return State(
        nn.Linear(2, 1),
        {"t": table},
        version=step,
        progress={"x": np.arange(9) + step},
        positions={"s": {"row": step}},
    )


def chain(where: Any, steps: int = 3, dim: int = 2, num_rows: int = 30) -> list[Saved]:
    """A full and deltas with every kind of file."""
    torch.manual_seed(0)
    table = hb.Table("t", dim, rule=RULE, **POLICY)
    table.track()
    saves: list[Saved] = []
    for step in range(steps):
        learn(table, range(step * 10, step * 10 + num_rows))
        table.remove(np.array([step * 10 + 5], np.int64))
        saves.append(
            write(where, capture(state_of(table, step), step > 0), 9, saves[-1] if saves else None)
        )
    return saves


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "model"
    chain(root)
    for read in READS:
        read(root)
    return root


KINDS = ["CURRENT"] + [
    f"checkpoint-{number:08d}/{name}"
    for number in (1, 2, 3)
    for name in (
        "MANIFEST.json",
        "dense.safetensors",
        "progress.safetensors",
        "tables/000-t/rows-000-255.arrow",
        "tables/000-t/removed-000-255.arrow",
        "tables/000-t/candidates.arrow",
    )
    if (number, name) != (1, "tables/000-t/removed-000-255.arrow")
]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.Random(path.name).randrange(path.stat().st_size)])


def flipped(path: Path) -> None:
    data, draw = bytearray(path.read_bytes()), random.Random(str(path.name))
    for _ in range(3):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 this is another program's file" * 40)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")


def load(root: Path) -> None:
    restore(open_checkpoint(root), state_of(hb.Table("t", 2, rule=RULE, **POLICY)))


def replicate(root: Path) -> None:
    Replica().apply(open_checkpoint(root))


def warm(root: Path) -> None:
    warm_start({"t": hb.Table("t", 2)}, open_checkpoint(root))


READS: list[Callable[[Path], object]] = [load, verify, replicate, warm]


def test_the_list_below_is_every_file(good: Path) -> None:
    assert sorted(KINDS) == sorted(
        path.relative_to(good).as_posix() for path in good.rglob("*") if path.is_file()
    )


HARMS = [truncated, flipped, longer, missing, empty, foreign, a_folder, unreadable]


def harms_in_soak(name: str) -> list[Any]:
    """Return what only the soak does to a file: the second delta stands for both and for the full."""
    if name.startswith("checkpoint-00000002"):
        return [harm for harm in HARMS if harm is not flipped]
    if name.startswith("checkpoint-00000001") and not name.endswith("MANIFEST.json"):
        return [harm for harm in HARMS if harm not in (flipped, missing)]
    return []


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        pytest.param(name, harm, marks=[pytest.mark.soak] if harm in harms_in_soak(name) else [])
        for name in KINDS
        for harm in HARMS
    ],
)
def test_a_harmed_file_is_refused_by_its_name(
    good: Path, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    root = tmp_path / "model"
    shutil.copytree(good, root)
    harm(root / name)
    for read in READS:
        with pytest.raises(PersistError) as caught:
            read(root)
        # without CURRENT the path holds no pointer to any checkpoint: the message names the path
        assert (name.rpartition("/")[2] in str(caught.value)) or (
            name == "CURRENT" and str(root) in str(caught.value)
        )
    assert isinstance(caught.value, PersistError)


def test_files_of_other_checkpoints_are_foreign(good: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    for name in KINDS:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(good, root)
        swapped = (
            name.replace("00000002", "00000003")
            if "00000002" in name
            else name.replace("00000003", "00000002")
        )
        if swapped == name or not (good / swapped).exists():
            continue
        shutil.copy(good / swapped, root / name)
        with pytest.raises(PersistError, match=name.rpartition("/")[2]):
            load(root)


def test_a_chain_whose_base_was_taken_away_is_refused(good: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    for number in (1, 2):
        shutil.copytree(good, root)
        shutil.rmtree(root / f"checkpoint-{number:08d}")
        with pytest.raises(PersistError, match=f"checkpoint-{number:08d}"):
            load(root)
        shutil.rmtree(root)


def test_files_that_nobody_knows_do_no_harm(good: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    shutil.copytree(good, root)
    for place in (
        "notes.txt",
        "checkpoint-00000003/core.1",
        "checkpoint-x",
        ".checkpoint-00000009.1.partial/file",
    ):
        (root / place).parent.mkdir(exist_ok=True)
        (root / place).write_text("?")
    load(root)
    save(root, State())


# --- writing --------------------------------------------------------------------------------------


def before_and_after(root: Path, fails: Callable[[Saver, hb.Table], None]) -> None:
    """A save that fails leaves the state before it as it was, and the run's next full and deltas
    are whole.
    """
    table = hb.Table("t", 2, rule=RULE)
    table.track()
    learn(table, range(20_000))
    saver = Saver(root)
    saver.submit(capture(state_of(table, 1)))
    first = saver.wait()
    learn(table, range(500))
    digest, files = content_digest(open_checkpoint(root)), {path for path in root.rglob("*")}
    fails(saver, table)
    assert {path for path in root.rglob("*")} == files
    assert content_digest(open_checkpoint(root)) == digest
    assert saver.needs_full
    for changes in (False, True):
        learn(table, range(100, 700))
        saver.submit(capture(state_of(table, 2), changes))
        saved = saver.wait()
        assert saved != first
        other = hb.Table("t", 2, rule=RULE)
        restore(open_checkpoint(root), state_of(other))
        assert content_digest({"t": other}) == content_digest({"t": table})


@pytest.mark.parametrize("changes", [False, True])
def test_a_full_disk_leaves_the_last_good_state(tmp_path: Path, changes: bool) -> None:
    def fails(saver: Saver, table: hb.Table) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            saver.submit(capture(state_of(table), changes))
            with pytest.raises(PersistError, match=r"cannot be written, got .*File too large"):
                saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    before_and_after(tmp_path / "model", fails)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *(
            (call, errno.ENOSPC)
            for call in ("writev", "fsync", "rename", "replace", "open", "mkdir")
        ),
        ("writev", errno.EIO),
        ("writev", errno.EDQUOT),
    ],
)
def test_an_error_of_the_disk_at_any_call_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: Any, number: int, call: str
) -> None:
    real = getattr(os, call)

    def refuses(*arguments: Any, **keywords: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **keywords)
        raise OSError(number, os.strerror(number))

    def fails(saver: Saver, table: hb.Table) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(os, call, refuses)
            saver.submit(capture(state_of(table), changes=True))
            with pytest.raises(PersistError):
                saver.wait()

    before_and_after(tmp_path / "model", fails)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EIO, "cannot be written, got .*Input/output error"),
        (errno.EROFS, "cannot be written, got .*Read-only"),
        (errno.ENOSPC, "cannot be written, got .*No space"),
        (errno.ENOTEMPTY, "another process wrote it meanwhile"),
        (errno.EEXIST, "another process wrote it meanwhile"),
    ],
)
def test_rename_that_fails_is_reported_as_what_it_is(
    number: int, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("hotbed.persist.container.store.os.rename", refuse)
    with pytest.raises(PersistError, match=message):
        chain(tmp_path / "model", 1)


def test_permission_denied_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    def denied(path: Any, *rest: Any, **keywords: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def fails(saver: Saver, table: hb.Table) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(Path, "mkdir", denied)
            saver.submit(capture(state_of(table)))
            with pytest.raises(PersistError, match=r"cannot be written.*Permission denied"):
                saver.wait()

    before_and_after(tmp_path / "model", fails)


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(2_000_000_000, 0, -86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    saves = chain(tmp_path / "a")
    monkeypatch.undo()
    assert next(iter(chain(tmp_path / "b"))).digest == saves[0].digest  # the manifest holds no time
    verify(tmp_path / "a")
    for number, saved in enumerate(saves):  # nor do file times matter
        for path in Path(saved.folder).rglob("*"):
            os.utime(path, (1e9 - 1e6 * number,) * 2)
    load(tmp_path / "a")


def test_every_file_and_folder_is_on_disk_before_current_moves(
    tmp_path: Path, monkeypatch: Any
) -> None:
    synced: list[str] = []
    fsync, replace = os.fsync, os.replace

    def remember(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def moves(source: Any, target: Any) -> None:
        if Path(target).name == "CURRENT":
            (folder,) = (path for path in tmp_path.glob("checkpoint-*") if path.name not in seen)
            seen.add(folder.name)
            names = {path.name for path in folder.rglob("*")}
            assert names <= set(synced), names - set(synced)
            assert synced[-1].startswith(".CURRENT")
            assert tmp_path.name in synced
        replace(source, target)
        synced.clear()

    seen: set[str] = set()
    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(os, "replace", moves)
    chain(tmp_path)
    assert len(seen) == 3


NUM_CALLS = 80  # about as many as write, sync or rename while a full and a delta are saved


def die(root: str, last: int, before: int) -> None:
    """Save a full and a delta after `before` saves; this process ends at the call number `last`."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                os._exit(9)  # what kill -9 does, at this very call
            return real(*arguments, **keywords)

        return call

    chain(root, before)
    for name in ("writev", "fsync", "rename", "replace", "mkdir", "open"):
        setattr(os, name, counted(getattr(os, name)))
    chain(root, 2)


def statuses(deaths: list[tuple[str, int, int]]) -> list[int]:
    """Return how the process of each of `deaths` ended."""
    ends = []
    for death in deaths:
        if not os.fork():
            die(*death)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.wait()[1]))
    return ends


def died(deaths: Sequence[tuple[Path, int, int]]) -> list[bool]:
    """Save a full and a delta in a process of each of `deaths`: its folder, the call at which it
    dies, and the saves that go well before. Return which died.
    """
    codes = SERVER.call(statuses, [(str(root), last, before) for root, last, before in deaths])
    assert set(codes) <= {0, 9}
    for root, _, before in deaths:
        if before or (root / "CURRENT").exists():
            verify(root)
            load(root)
        else:  # the very first save: there is nothing, or all of it
            with pytest.raises(FormatError, match="no checkpoint"):
                load(root)
    return [code == 9 for code in codes]


@pytest.mark.slow
def test_a_process_that_dies_at_any_call_leaves_a_whole_state(tmp_path: Path) -> None:
    draw = random.Random(0)
    deaths = [(tmp_path / str(n), draw.randrange(1, NUM_CALLS), n % 2) for n in range(3)]
    assert died(deaths) == [True] * 3
    for root, _, _ in deaths:
        chain(root, 2)
        verify(root)
        assert not list(root.glob(".checkpoint*"))


@pytest.mark.soak
@pytest.mark.parametrize("before", [0, 1])
def test_a_process_that_dies_at_each_call_leaves_a_whole_state(tmp_path: Path, before: int) -> None:
    deaths = [(tmp_path / str(at), at, before) for at in range(1, 2 * NUM_CALLS)]
    outcomes = died(deaths)
    assert outcomes == sorted(outcomes, reverse=True)
    assert NUM_CALLS < sum(outcomes) < len(outcomes)


def test_a_replica_whose_file_was_lost_while_it_was_loaded_takes_a_whole_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(tmp_path)
    before = open_checkpoint(tmp_path)
    replica = Replica()
    replica.apply(before)
    digest = content_digest(replica.tables)
    compact(tmp_path)
    full = open_checkpoint(tmp_path)
    rows = Path(full.folder) / full.entry("t").parts[0].file
    verify_link = Link.verify

    def verify_and_lose(link: Link) -> None:
        verify_link(link)
        rows.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(Link, "verify", verify_and_lose)
        with pytest.raises(FormatError, match=rows.name):
            replica.apply(full)
    assert replica.apply(before)
    assert content_digest(replica.tables) == digest


def applied(folder: str) -> object:
    replica = Replica()
    replica.apply(open_checkpoint(folder))
    return content_digest(replica.tables)


def copied(folder: str) -> None:
    for link in open_checkpoint(folder).links:
        for name in link.manifest.files:
            link.read(name)


def read_all(folder: str) -> list[object]:
    """Return what each way to read a folder gives, or the error that refuses it."""
    results = list[object]()
    reads = [verify, lambda folder: content_digest(open_checkpoint(folder)), applied, copied]
    for read in reads:
        try:
            results.append(read(folder))
        except PersistError as error:
            results.append(error)
    return results


def test_files_that_others_cut_are_whole_or_refused_and_end_no_reader(tmp_path: Path) -> None:
    chain(tmp_path, dim=64, num_rows=5000)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert max(map(len, files.values())) > 2 << 20  # more than a block, and more than a pointer
    expected = SERVER.call(read_all, str(tmp_path))
    refused = 0
    while refused < 8:
        with cut_and_restored(files):
            results = SERVER.call(read_all, str(tmp_path))  # in a process that a fault would end
        for result, right in zip(results, expected, strict=True):
            is_refused = isinstance(result, PersistError)
            assert str(tmp_path) in str(result) if is_refused else result == right
            refused += is_refused
    assert SERVER.call(read_all, str(tmp_path)) == expected  # all is as before


@contextlib.contextmanager
def cut_and_restored(files: Mapping[Path, bytes]) -> Iterator[None]:
    """Change files in place, as a copy over them does, until the block ends; then they are whole."""
    ended = threading.Event()
    turns = random.Random(0)

    def change() -> None:
        while not ended.is_set():
            path, data = turns.choice(list(files.items()))
            with open(path, "r+b", buffering=0) as file:
                place = turns.randrange(len(data))
                if turns.random() < 0.5:
                    file.truncate(place)
                else:
                    os.pwrite(file.fileno(), bytes(len(data) - place), place)
                os.pwrite(file.fileno(), data, 0)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
