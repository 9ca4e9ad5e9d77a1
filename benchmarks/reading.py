# SPDX-License-Identifier: Apache-2.0
"""How fast sources are read, and encoded to batches: the same rows in four formats, in turn.

    python benchmarks/reading.py [--rows 500000] [--repeats 5]
    python benchmarks/reading.py --ranks 1 2 4 8 [--grains 8]

A row has a label, 13 dense values and 26 slots of one key, as Criteo's have; Norm files have
checksums. The second column counts the schema's encoding, too, which makes what a model trains on.

With `--ranks`, it prints the CPU time in which the first of so many ranks reads a batch of 4,096
samples of a fit: all columns of its grains, and the labels of the others. The files are Parquet in
groups of 16,384 rows, with keys as integers and as text that is hashed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

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


def write_groups(folder: Path, count: int) -> dict[str, tuple[hb.sources.Parquet, hb.Schema]]:
    single = rows(count, dict.fromkeys(NUMBERS, 1))
    table = pa.Table.from_batches([batch for batch, _ in single.read()])
    found = {}
    for kind, transforms in {"integers": [], "text": [hb.transforms.Hash()]}.items():
        if transforms:
            for name in SLOTS:
                keys = pa.array([f"{key:x}" for key in table[name].to_pylist()])
                table = table.set_column(table.schema.get_field_index(name), name, keys)
        file = folder / f"{kind}.parquet"
        pq.write_table(table, file, row_group_size=16_384)
        slots = [hb.Id(name, transforms=transforms) for name in SLOTS]
        columns = [hb.Label("label"), *map(hb.Dense, NUMBERS), *slots]
        found[kind] = (hb.sources.Parquet(file), hb.Schema(columns))
    return found


def print_shares(settings: argparse.Namespace) -> None:
    """Print the CPU time to read a batch for each number of ranks: the least of all repeats."""
    print(f"| keys, {settings.grains} grains | {' | '.join(map(str, settings.ranks))} |")
    print("|---" * (len(settings.ranks) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for kind, (source, schema) in write_groups(Path(folder), settings.rows).items():
            data = hb.Dataset(source, schema, 4096, prefetch=0)
            data.divide(settings.grains)
            times: dict[int, list[float]] = {ranks: [] for ranks in settings.ranks}
            for _ in range(settings.repeats):
                for ranks, of_ranks in times.items():
                    begin = time.process_time()
                    num_batches = sum(1 for _ in data.epoch(0, range(settings.grains // ranks)))
                    of_ranks.append((time.process_time() - begin) / num_batches * 1e3)
            cells = " | ".join(f"{min(of_ranks):.1f}" for of_ranks in times.values())
            print(f"| {kind} | {cells} |", flush=True)


def seconds(work: Callable[[], int], count: int) -> float:
    begin = time.perf_counter()
    assert work() == count
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--grains", type=int, default=8)
    settings = parser.parse_args()
    if settings.ranks:
        print_shares(settings)
        return
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
