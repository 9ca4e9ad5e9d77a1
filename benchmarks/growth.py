# SPDX-License-Identifier: Apache-2.0
"""A table that only grows: new ids in every batch, row-wise Adagrad. Prints one JSON line.

ids_per_s: over the whole run · worst_over_median: slowest batch against the median batch ·
index_bytes_per_id (id included): mean and largest over the run after the first million ids ·
rss_bytes_per_id: what the process gained, against row_bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

import hotbed as hb


def resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return 0
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def new_ids(start: int, n: int) -> np.ndarray:
    """Ids `start` … `start + n` of a fixed permutation of int64 (multiplication by an odd number,
    xor-shift).
    """
    x = np.arange(start, start + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(29))).view(np.int64)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ids", type=int, default=50_000_000, help="ids at the end")
    p.add_argument("--start", type=int, default=1_000_000, help="ids before the measurement begins")
    p.add_argument("--batch", type=int, default=106_496)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--update", action="store_true", help="also update the rows of every batch")
    a = p.parse_args()
    hb.set_num_threads(a.threads)
    before = resident_bytes()
    table = hb.Table("grown", dim=a.dim, rule=hb.RowwiseAdagrad(lr=0.01))
    grad = np.ones((a.batch, a.dim), np.float32)
    seconds, per_id, at = [], [], 0
    while at < a.ids:
        ids = new_ids(at, a.batch)
        begin = time.perf_counter()
        slots = table.find_or_insert(ids)
        if a.update:
            table.update(slots, grad)
        spent = time.perf_counter() - begin
        at += len(ids)
        if at > a.start:
            seconds.append(spent)
            per_id.append(table.stats["index_bytes"] / at)
    stats, median = table.stats, float(np.median(seconds))
    assert stats["rows"] == at, (stats, at)
    line = {
        "peer": "hotbed_growth" + ("_update" if a.update else ""),
        "ids": at,
        "ids_per_s": round(len(seconds) * a.batch / sum(seconds)),
        "median_ms": round(median * 1e3, 3),
        "worst_ms": round(max(seconds) * 1e3, 3),
        "worst_over_median": round(max(seconds) / median, 2),
        "index_bytes_per_id": round(float(np.mean(per_id)), 2),
        "index_bytes_per_id_peak": round(max(per_id), 2),
        "row_bytes_per_id": round(stats["row_bytes"] / at, 2),
        "rss_bytes_per_id": round((resident_bytes() - before) / at, 2),
        "batch": a.batch,
        "dim": a.dim,
        "threads": a.threads,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
