# SPDX-License-Identifier: Apache-2.0
"""A disk that refuses or loses rows is one error of its own kind; a folder that cannot be used is
named, and one that is no disk is logged.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed import files
from hotbed.config import build, describe
from hotbed.embedding.tier import Tier
from hotbed.errors import RecordLost, StorageError, StorageFailed, StorageFull

IDS = np.arange(30_000)


def table_in(folder: Path) -> hb.Table:
    """A table of which the first of IDS lie on the disk alone."""
    table = hb.Table("user", 16, tier=hb.Ssd(folder, ram_rows=1000))
    insert(table, IDS)
    return table


def insert(table: hb.Table, ids: np.ndarray) -> None:
    for first in range(0, len(ids), 1000):
        table.find_or_insert(ids[first : first + 1000])


def descriptor_in(folder: Path) -> int:
    """The open file of a store in a folder, which has no name."""
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / name
        if path.is_symlink() and os.readlink(path).startswith(f"{folder}/"):
            return os.open(path, os.O_RDWR)
    raise AssertionError(os.listdir("/proc/self/fd"))


def test_a_row_whose_bytes_have_changed_is_lost_by_name_and_others_are_read(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    assert table.lookup(IDS[:1]).any()
    while not table.tier_stats["written_bytes"] or table.tier_stats["waiting_extents"]:
        pass
    file = descriptor_in(tmp_path)
    os.pwrite(file, os.urandom(4096), 0)
    os.close(file)
    with pytest.raises(RecordLost) as lost:
        table.lookup(IDS)
    found = re.search(
        rf"table 'user', id (\d+): store: '{tmp_path}/\S+', extent 0, block 0, slot \d+: ",
        str(lost.value),
    )
    assert found, lost.value
    whole = []
    for id in range(1000):
        try:
            table.lookup(IDS[id : id + 1])
        except RecordLost:
            continue
        whole.append(id)
    assert len(whole) > 900
    assert int(found[1]) not in whole


def test_a_disk_that_takes_no_more_is_an_error_and_the_rows_stay_readable(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    before = table.lookup(IDS).tobytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # as a quota
    try:
        with pytest.raises(StorageError) as refused:  # a write, or what reserves room for it
            insert(table, np.arange(len(IDS), 10**6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert isinstance(refused.value, (StorageFailed, StorageFull))
    assert f"store: '{tmp_path}/" in str(refused.value)
    assert table.lookup(IDS).tobytes() == before


def test_the_room_of_rows_that_went_goes_back_to_the_disk(tmp_path: Path) -> None:
    table = hb.Table("user", 64, evict=hb.Ttl(seconds=10), tier=hb.Ssd(tmp_path, ram_rows=1000))
    for first in range(0, len(IDS), 1000):
        table.find_or_insert(IDS[first : first + 1000], 10**6)
    before = table.tier_stats["file_bytes"]
    assert table.evict(10**8) == len(IDS)
    until = time.monotonic() + 30
    while table.tier_stats["file_bytes"] > before / 3 and time.monotonic() < until:
        time.sleep(0.01)
    file = descriptor_in(tmp_path)
    taken = os.fstat(file).st_blocks * 512
    os.close(file)
    assert taken <= table.tier_stats["file_bytes"] + (1 << 18) < before / 2
    for _ in range(2):
        for first in range(0, len(IDS), 1000):
            table.find_or_insert(IDS[first : first + 1000], 10**9)
    fresh = hb.Table("user", 64)
    fresh.find_or_insert(IDS)
    assert np.array_equal(table.lookup(IDS), fresh.lookup(IDS))


@pytest.mark.parametrize("read", ["snapshot", "export"])
def test_a_whole_table_is_read_block_by_block_once(tmp_path: Path, read: str) -> None:
    table = table_in(tmp_path)
    before = table.tier_stats
    if read == "snapshot":
        with table.snapshot() as rows:
            ids = np.concatenate([batch["id"].to_numpy() for batch in rows.rows()])
        assert rows.read_bytes < 1.3 * before["live_bytes"]
    else:
        ids = np.concatenate([batch["id"].to_numpy() for batch in table.export()])
    assert np.array_equal(np.sort(ids), IDS)
    num_reads = table.tier_stats["num_reads"] - before["num_reads"]
    assert num_reads < before["live_bytes"] / 2**15  # of at most 2**16 bytes each


def test_a_tier_is_what_its_description_says(tmp_path: Path) -> None:
    for tier in (hb.Ram(), hb.Ssd(tmp_path, 5), hb.Ssd("x", 7, fetch=0, engine="threads")):
        assert build(describe(tier), Tier, "tier") == tier
    assert describe(hb.Ssd(tmp_path, 5)) == {"kind": "ssd", "path": str(tmp_path), "ram_rows": 5}


def test_a_folder_in_memory_or_on_another_machine_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"plain": "ext4", "in memory": "tmpfs", "remote": "nfs4"}
    for name in kinds:
        (tmp_path / name).mkdir()

    def mounts() -> str:
        lines = ["21 1 8:1 / / rw - ext4 /dev/vda rw", "22 1 0:5 / /proc rw - proc proc rw"]
        for name, kind in kinds.items():
            place = str(tmp_path / name).replace(" ", "\\040")
            lines.append(f"30 21 0:9 / {place} rw,nosuid shared:4 - {kind} source rw")
        return "\n".join(lines)

    (tmp_path / "mounts").write_text(mounts())
    monkeypatch.setattr(files, "mounts", lambda: (tmp_path / "mounts").read_text())
    for name in kinds:
        for number in range(2):
            hb.Table(f"{name} {number}", 2, tier=hb.Ssd(tmp_path / name, 5))
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(logged) == 2
    assert f"{tmp_path}/in memory is on tmpfs, which is memory" in logged[0]
    assert f"{tmp_path}/remote is on nfs4, the disk of another machine" in logged[1]


@pytest.mark.parametrize("columns", [(), ("state",), ("missed",), ("state", "missed")])
@pytest.mark.parametrize(
    "rule",
    [
        hb.Momentum(lr=0.1, scope="catch_up"),
        hb.Adam(lr=0.1, scope="catch_up"),
        hb.Adagrad(lr=0.1, l2=0.1, scope="catch_up"),
        hb.Ftrl(lr=0.1),
    ],
)
def test_ids_that_come_twice_in_a_load_end_as_rows_that_are_loaded_one_by_one(
    rule: hb.Rule, columns: tuple[str, ...], tmp_path: Path
) -> None:
    """Their state and the steps that they missed, too, wherever their rows lie."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        steps = [rng.integers(0, 60, 8) for _ in range(10)]
        ids = rng.integers(0, 60, 40)
        last = dict(zip(ids.tolist(), rng.normal(size=(40, 2)).astype(np.float32), strict=False))
        every = []
        for ram_rows in (None, None, 12):
            tier = None if ram_rows is None else hb.Ssd(tmp_path, ram_rows=ram_rows)
            table = hb.Table("user", 2, rule=rule, tier=tier)
            for batch in steps:
                table.update(table.find_or_insert(batch), np.ones((8, 2), np.float32))
            rows = rows_to_load(ids, last, columns, table.state_width, seed)
            parts = [rows] if every else [rows.slice(number, 1) for number in range(40)]
            table.load(parts)
            if "missed" not in columns:  # else they catch up
                assert np.array_equal(table.lookup(np.array([*last])), [*last.values()])
            for batch in steps[:2]:
                table.update(table.find_or_insert(batch), np.ones((8, 2), np.float32))
            exported = pa.Table.from_batches(table.export()).sort_by("id")
            every.append(exported.to_pydict())
        assert every[0] == every[1] == every[2]


def rows_to_load(
    ids: np.ndarray, last: dict[int, np.ndarray], columns: tuple[str, ...], width: int, seed: int
) -> pa.RecordBatch:
    """Rows that end with the values of `last`; earlier ones of an id have others."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(ids), 2)).astype(np.float32)
    values[[len(ids) - 1 - ids[::-1].tolist().index(id) for id in last]] = list(last.values())
    rows = {"id": ids, "value": pa.FixedSizeListArray.from_arrays(values.ravel(), 2)}
    if "state" in columns:
        state = rng.random(len(ids) * width).astype(np.float32)
        rows["state"] = pa.FixedSizeListArray.from_arrays(state, width)
    if "missed" in columns:
        rows["missed"] = rng.integers(0, 4, len(ids)).astype(np.uint32)
    return pa.RecordBatch.from_pydict(rows)
