# SPDX-License-Identifier: Apache-2.0
"""Forty million ids on a disk: growth, eviction and two saves in the memory that docs/tiers.md
predicts; and ten fulls, each made of the files before it, in a cgroup of 600 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

NUM_IDS = 40_000_000
RAM_ROWS = 2_000_000
CHILD = """
import json, os, sys
from pathlib import Path

import numpy as np
import torch
import hotbed as hb
from hotbed.embedding.footprint import predicted
from hotbed.memory import peak_bytes

folder, num_ids, ram_rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
batch = 40_000
steps = num_ids // batch
schema = hb.Schema([hb.Label("y"), hb.Time("t", unit="us"), hb.Id("user")])
tier = hb.Ssd(folder, ram_rows)
table = hb.Table("user", 32, rule=hb.Adagrad(lr=0.1), evict=hb.Ttl(seconds=steps / 1e6), tier=tier)
model = hb.RecModel(hb.models.DNN(schema, {"user": table}, hidden=[4]), "bce", hb.Adam(lr=0.1))

def learn(first, last):
    for step in range(first, last):
        ids = np.arange(step * batch, (step + 1) * batch)
        first_old = max(0, step - steps // 2) * batch
        old = np.random.default_rng(step).integers(first_old, ids[0] + 1, 4000)
        slots = table.find_or_insert(np.concatenate([ids, old]), time=step)
        table.update(slots, np.full((len(slots), 32), 0.01, np.float32))
        table.evict(step, range(step % 8 * 32, step % 8 * 32 + 32))

def taken():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

learn(0, 1)
model.save(folder / "saved")
start = taken()
learn(1, steps)
grown = taken() - start
model.save(folder / "saved")
learn(steps, steps + steps // 8)  # as many go as come
model.save(folder / "saved")
most = max(peak_bytes() - start, grown)
rows = table.stats["rows"]
print(json.dumps({
    "grown": grown,
    "most": most,
    "rows": rows,
    "predicted": predicted(table.config, rows).memory_bytes,
    "counted": sum(value for key, value in table.stats.items() if "bytes" in key),
    "evicted": table.stats["evicted"],
    "states": len(list((folder / "saved").glob("checkpoint-*"))),
    "misses": table.tier_stats["misses"],
    "disk": table.tier_stats["file_bytes"] / table.tier_stats["live_bytes"],
}))
"""


def test_forty_million_ids_take_the_memory_that_the_page_predicts(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 50 << 30:
        pytest.skip("disk space absent: 50 GB are needed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(NUM_IDS), str(RAM_ROWS)]
    child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    answer = json.loads(child.stdout.splitlines()[-1])
    print(answer)
    parts = 128 * (512 << 10)  # of 2^18 to 2^19 rows
    predicted = answer["predicted"] + parts + (14 << 20)
    assert answer["rows"] >= NUM_IDS
    assert answer["evicted"] > NUM_IDS // 10
    assert answer["misses"] > 100_000
    assert answer["states"] == 1
    assert answer["grown"] == pytest.approx(predicted, rel=0.1)
    assert answer["counted"] == pytest.approx(answer["predicted"], rel=0.1)
    assert answer["most"] <= 3 << 30
    assert answer["disk"] <= 1.6


FULLS = """
import sys
from pathlib import Path

import numpy as np
import hotbed as hb

folder = Path(sys.argv[1])

def table():
    tier = hb.Ssd(folder, ram_rows=50_000)
    return hb.Table("user", 16, rule=hb.RowwiseAdagrad(), tier=tier)

def learn(user, first, last):
    for lowest in range(first, last, 20_000):
        ids = np.arange(lowest, lowest + 20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        slots = user.find_or_insert(ids.view(np.int64))
        user.update(slots, np.ones((20_000, 16), np.float32))

user = table()
learn(user, 0, 1_000_000)
user.track()
saver = hb.checkpoints.Saver(folder / "states", keep=2)
saver.submit(hb.checkpoints.capture(hb.checkpoints.State(tables={"user": user})))
saver.wait()
for number in range(10):
    if number == 5:  # started again
        del user
        user = table()
        reader = hb.checkpoints.open_checkpoint(folder / "states")
        hb.checkpoints.restore(reader, hb.checkpoints.State(tables={"user": user}))
        assert hb.checkpoints.continues(reader, {"user": user})
        user.track(saved=True)
        saver = hb.checkpoints.Saver(folder / "states", keep=2, last=reader.saved)
    learn(user, 0, 100_000)
    state = hb.checkpoints.State(tables={"user": user}, version=number + 1)
    saver.submit(hb.checkpoints.capture(state, changes=True), merges=True)
    saved = saver.wait()
    assert (saved.kind, saved.version) == ("full", number + 1)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """The processes of a cgroup with 600 MB of memory."""
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        None,
    )
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if line is not None:  # the first version of cgroups
        root = root / "memory" / line.split(":")[2].lstrip("/")
        limit = "memory.limit_in_bytes"
    folder = root / f"hotbed-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(600 << 20))
    except OSError:
        pytest.skip("cgroups absent")
    yield folder / "cgroup.procs"
    folder.rmdir()


def test_ten_fulls_of_a_million_ids_fit_in_600_mb(cgroup: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"open({str(cgroup)!r}, 'w').write('0')\n{FULLS}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
