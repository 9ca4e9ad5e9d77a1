# SPDX-License-Identifier: Apache-2.0
"""How fast sources are read, and encoded to batches: the same rows in four formats, in turn.

    python benchmarks/reading.py [--rows 500000] [--repeats 5]

A row has a label, 13 dense values and 26 slots of one key, as Criteo's have; Norm files have
checksums. The second column counts the schema's encoding, too, which makes what a model trains on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.csv as pacsv

import hotbed as hb

SLOTS = [f"C{number}" for number in range(26)]
NUMBERS = [f"I{number}" for number in range(13)]
Timed = Callable[[], float]


def rows(count: int, dense: dict[str, int]) -> hb.sources.Generated:
    keys = {name: hb.sources.Keys(1_000_000) for name in SLOTS}
    return hb.sources.Generated(count, dense=dense, slots=keys)


def write(folder: Path, count: int) -> dict[str, hb.sources.Source]:
    lists = rows(count, {"dense": 13})
    raw = hb.sources.Raw(
        folder / "rows.bin", num_dense=13, slots=dict.fromkeys(SLOTS, 1), dense_type="float32"
    )
    norm = hb.sources.Norm(folder / "rows.data", ["label"], SLOTS)
    for source in (raw, norm):
        source.write(lists)
    single = rows(count, dict.fromkeys(NUMBERS, 1))
    parquet = hb.sources.Parquet(folder / "rows.parquet")
    parquet.write(single)
    with pacsv.CSVWriter(folder / "rows.csv", single.schema()) as file:
        for batch, _ in single.read():
            file.write_batch(batch)
    csv = hb.sources.Csv(folder / "rows.csv")
    return {"Raw": raw, "Norm": norm, "Parquet": parquet, "Csv": csv}


def schema(source: hb.sources.Source) -> hb.Schema:
    dense = [hb.Dense(name) for name in NUMBERS]
    if "dense" in source.schema().names:
        dense = [hb.Dense("dense", width=13)]
    return hb.Schema([hb.Label("label"), *dense, *(hb.Id(name) for name in SLOTS)])


def seconds(work: Callable[[], int], count: int) -> float:
    begin = time.perf_counter()
    assert work() == count
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = write(Path(folder), settings.rows)
        datasets = {name: hb.Dataset(s, schema(s), 16_384) for name, s in sources.items()}
        works: dict[tuple[str, str], Callable[[], int]] = {}
        for name, source in sources.items():
            works[name, "read"] = lambda s=source: sum(b.num_rows for b, _ in s.read())
            works[name, "encoded"] = lambda d=datasets[name]: sum(b.num_samples for b in d)
        speeds: dict[tuple[str, str], list[float]] = {key: [] for key in works}
        for _ in range(settings.repeats):
            for key, work in works.items():
                speeds[key].append(settings.rows / seconds(work, settings.rows) / 1e6)
    print("| source | M rows/s read | and encoded |")
    print("|---|---|---|")
    for name in sources:
        cells = []
        for step in ("read", "encoded"):
            median = np.median(speeds[name, step])
            cells.append(
                f"{median:.2f} ({min(speeds[name, step]):.2f} to {max(speeds[name, step]):.2f})"
            )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
