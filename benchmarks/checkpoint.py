# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a large model while it trains. Prints one JSON line.

write_over_dd: bytes/s of a full save against `dd conv=fdatasync` of as many bytes on the same disk,
in turn · slowest_over_median: slowest step while a full is written against the median step before ·
throughput_while_saving: samples/s against before ·
deltas: rows changed, bytes, seconds from capture to disk · resume_seconds: open, verify and load,
of a full and its deltas.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hotbed as hb
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.state.checkpoint import State, capture
from hotbed.persist.state.restoring import restore
from hotbed.persist.state.saver import Saver

FEATURES, DIM = 8, 16


class Trainer:
    """DCNv2 over one large table, in a plain loop: a step draws, learns and returns its seconds."""

    def __init__(self, rows: int, batch: int) -> None:
        torch.manual_seed(0)
        self.draw, self.rows, self.batch = np.random.default_rng(0), rows, batch
        schema = hb.Schema([hb.Label("y"), *(hb.Id(f"f{i}", table="ids") for i in range(FEATURES))])
        self.tables = hb.make_tables(schema, dim=DIM, rule=hb.RowwiseAdagrad(lr=0.05))
        self.network = hb.models.DCNv2(schema, self.tables, hidden=(128, 64))
        self.dense = torch.optim.Adam(hb.dense_parameters(self.network))
        self.sparse = hb.SparseOptimizer(self.network)
        table = self.tables["ids"]
        for start in range(0, rows, 500_000):
            table.find_or_insert(np.arange(start, min(rows, start + 500_000)))
        table.track()
        self.step()

    def state(self) -> State:
        """What a checkpoint holds of this."""
        rows = [p for group in self.sparse.param_groups for p in group["params"]]
        return State(self.network, self.tables, {"dense": self.dense}, rows)

    def step(self) -> float:
        """Learn one batch; its seconds."""
        ids = (self.draw.random((FEATURES, self.batch)) ** 4 * self.rows).astype(np.int64)
        labels = torch.from_numpy(self.draw.integers(0, 2, self.batch).astype(np.float32))
        batch = hb.Batch({f"f{i}": hb.Ids(torch.from_numpy(ids[i])) for i in range(FEATURES)})
        begin = time.perf_counter()
        loss: Tensor = torch.nn.functional.binary_cross_entropy_with_logits(
            self.network(batch), labels
        )
        loss.backward()
        for optimizer in (self.dense, self.sparse):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    def steps(self, enough: Callable[[int, float], bool]) -> list[float]:
        """Seconds of each step until enough(steps, seconds)."""
        took: list[float] = []
        begin = time.perf_counter()
        while not enough(len(took), time.perf_counter() - begin):
            took.append(self.step())
        return took


def dd(folder: Path, num_bytes: int) -> float:
    """Bytes/s of dd with fdatasync at the end."""
    target, begin = folder / "dd", time.perf_counter()
    command = [
        "dd",
        "if=/dev/zero",
        f"of={target}",
        "bs=1M",
        f"count={num_bytes >> 20}",
        "conv=fdatasync",
    ]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    target.unlink()
    return (num_bytes >> 20 << 20) / seconds


def deltas(trainer: Trainer, saver: Saver) -> list[dict[str, float]]:
    """Saves after steps that touched few, more and most rows."""
    found = []
    saver.submit(capture(trainer.state(), changes=True))  # what the steps before have changed
    saver.wait()
    for fraction in (0.001, 0.01, 0.1):
        table, n = trainer.tables["ids"], int(trainer.rows * fraction)
        ids = trainer.draw.permutation(trainer.rows)[:n]
        table.update(table.find(ids), np.ones((n, DIM), np.float32))
        begin = time.perf_counter()
        saver.submit(capture(trainer.state(), changes=True))
        saved = saver.wait()
        assert saved is not None
        assert saved.kind == "delta"
        found.append(
            {
                "changed_rows": n,
                "bytes": saved.bytes,
                "seconds": round(time.perf_counter() - begin, 3),
            }
        )
    return found


def resume(root: Path, like: Trainer) -> float:
    """Seconds to open, verify and load the newest state."""
    begin = time.perf_counter()
    restore(open_checkpoint(root), like.state())
    return time.perf_counter() - begin


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rows", type=int, default=10_000_000)
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--seconds", type=float, default=8.0, help="of steps before, to compare with")
    p.add_argument("--repeats", type=int, default=3, help="of dd and full save in turn")
    p.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="on the disk to measure; default: the system's temporary folder",
    )
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    hb.set_num_threads(a.threads)
    torch.set_num_threads(a.threads)
    root = Path(tempfile.mkdtemp(prefix="hotbed-checkpoint-", dir=a.folder))
    try:
        trainer, ratios, speeds = Trainer(a.rows, a.batch), [], []
        saver = Saver(
            root / "model", keep=a.repeats + 2
        )  # removing a checkpoint takes time that dd does not take either
        for _ in range(a.repeats):
            begin = time.perf_counter()
            saver.submit(capture(trainer.state()))
            saved = saver.wait()
            assert saved is not None
            speeds.append(saved.bytes / (time.perf_counter() - begin))
            ratios.append(speeds[-1] / dd(root, saved.bytes))
        before = trainer.steps(lambda steps, seconds: seconds > a.seconds)
        saver.submit(capture(trainer.state()))
        began = time.perf_counter()
        during = trainer.steps(lambda steps, seconds: not saver.busy)
        while_saving = time.perf_counter() - began
        saver.wait()
        changed = deltas(trainer, saver)
        line = {
            "rows": a.rows,
            "full_bytes": saved.bytes,
            "write_mb_s": round(float(np.median(speeds)) / 1e6),
            "write_over_dd": round(float(np.median(ratios)), 2),
            "median_step_ms": round(float(np.median(before)) * 1e3, 2),
            "slowest_before_over_median": round(max(before) / float(np.median(before)), 2),
            "slowest_over_median": round(max(during) / float(np.median(before)), 2),
            "steps_while_saving": len(during),
            "throughput_while_saving": round(
                len(during) / while_saving * float(np.sum(before)) / len(before), 3
            ),
            "deltas": changed,
            "resume_seconds": round(resume(root / "model", trainer), 2),
        }
        print(json.dumps(line))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
