# SPDX-License-Identifier: Apache-2.0
"""How long training pauses for an eviction: a table of 10 M rows, of which a share has expired,
swept by the schedule that the callback Evict follows.

One JSON line a run: rows, steps that the sweep took, its longest and median pause of one step in
ms, the longest in CPU time (what a busy machine does not stretch), and for comparison the pause of
a sweep at once. The aim is 20 ms. A step here is nothing but the callback; run it on a quiet
machine:

    python benchmarks/evict.py --rows 10000000 --expired 0.5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

import hotbed as hb
from hotbed.training.decisions.eviction_schedule import EvictionSchedule

DAY = 86_400_000_000
BATCH = 100_000


def filled(rows: int, expired: float, dim: int) -> hb.Table:
    """A table whose rows were seen on day 0 (the expired share, mixed among all ids) or on day 2."""
    table = hb.Table("ids", dim=dim, rule=hb.RowwiseAdagrad(lr=0.05), evict=hb.Ttl(days=1))
    rng = np.random.default_rng(0)
    old = rng.random(rows) < expired
    for start in range(0, rows, BATCH):
        ids = rng.integers(-(2**63), 2**63 - 1, min(BATCH, rows - start))
        table.find_or_insert(
            ids, np.where(old[start : start + len(ids)], 0, 2 * DAY).astype(np.int64)
        )
    return table


def sweep(table: hb.Table) -> tuple[list[float], list[float]]:
    """Milliseconds, and those of CPU, that each step of one eviction takes, by the callback, at the
    end of day 2.
    """
    schedule = EvictionSchedule({table.name: table}, step_interval=1_000_000)
    step, pauses, cpu = 1_000_000, list[float](), list[float]()
    while schedule.sweeping or not pauses:
        began, cpu_began = time.perf_counter(), time.thread_time()
        schedule.step(step, 2 * DAY)
        cpu.append((time.thread_time() - cpu_began) * 1e3)
        pauses.append((time.perf_counter() - began) * 1e3)
        step += 1
    return pauses, cpu


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, default=10_000_000)
    p.add_argument("--expired", type=float, nargs="*", default=[0.0, 0.1, 0.5, 0.9])
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--threads", type=int, default=2)
    arguments = p.parse_args()
    hb.set_num_threads(arguments.threads)
    for share in arguments.expired:
        table = filled(arguments.rows, share, arguments.dim)
        rows = table.stats["rows"]
        pauses, cpu = sweep(table)
        again = filled(arguments.rows, share, arguments.dim)
        began = time.perf_counter()
        again.evict(2 * DAY)
        line = {
            "rows": rows,
            "expired": share,
            "removed": table.stats["evicted"],
            "steps": len(pauses),
            "longest_pause_ms": round(max(pauses), 2),
            "longest_cpu_ms": round(max(cpu), 2),
            "median_pause_ms": round(statistics.median(pauses), 2),
            "at_once_ms": round((time.perf_counter() - began) * 1e3, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
