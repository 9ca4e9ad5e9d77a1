# SPDX-License-Identifier: Apache-2.0
"""The workload of the embedding benchmarks: the same draws as the peers' `workload.py`, so that
figures compare.

Each of `num_tables` features draws one id a sample from a bounded power law over `num_ids` ranks
(alpha 0: uniform), ranks shuffled once so that popular ids are not neighbours. Peers with static
tables take the dense numbers; Hotbed takes the raw ids, a fixed bijection of (number, table) onto
all of int64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


def draw(a: argparse.Namespace, num_batches: int, seed: int = 0) -> Iterator[Int64s]:
    """`num_batches` arrays [tables, batch] of dense numbers in [0, ids)."""
    rng = np.random.default_rng(seed)
    if a.alpha == 0:
        for _ in range(num_batches):
            yield rng.integers(0, a.ids, (a.tables, a.batch))
        return
    mass = np.cumsum(np.arange(1, a.ids + 1, dtype=np.float64) ** -a.alpha)
    place = rng.permutation(a.ids)
    for _ in range(num_batches):
        yield place[np.searchsorted(mass / mass[-1], rng.random((a.tables, a.batch)))]


def raw(dense: Int64s, first_table: int = 0) -> Int64s:
    """Dense numbers [tables, n] of tables first_table, first_table + 1, … as full-range ids."""
    table = np.arange(first_table, first_table + dense.shape[0], dtype=np.uint64)[:, None]
    x = dense.astype(np.uint64) * np.uint64(64) + table
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x81DADEF4BC2DD44D)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(33))).view(np.int64)


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that all embedding benchmarks share."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--tables", type=int, default=26)
    p.add_argument("--ids", type=int, default=1_000_000, help="distinct ids a table")
    p.add_argument("--batch", type=int, default=4096)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument(
        "--alpha", type=float, default=1.05, help="exponent of the power law; 0 = uniform"
    )
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--threads", type=int, default=2)
    return p


def report(peer: str, seconds: Sequence[float], a: argparse.Namespace, **more: Any) -> None:
    """One JSON line, with the keys that the peers print."""
    median = float(np.median(seconds))
    line = {
        "peer": peer,
        "median_ms": round(median * 1e3, 3),
        "min_ms": round(min(seconds) * 1e3, 3),
    }
    line["mega_ids_per_s"] = round(a.tables * a.batch / median / 1e6, 2)
    line |= {
        name: getattr(a, name) for name in ("tables", "ids", "batch", "dim", "alpha", "threads")
    }
    print(json.dumps(line | more), flush=True)
