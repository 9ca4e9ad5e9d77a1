# SPDX-License-Identifier: Apache-2.0
"""`hotbed prepare` beside a Polars script that does the same work by hand, in turns.

    python benchmarks/prepare.py [--rows 10_000_000] [--pairs 3] [--data FOLDER]

The rows are like Criteo's: a label, 13 counts and 26 columns of words, 40 in all, drawn from power
laws, in Parquet. Both fill missing counts, take logarithms and normalize them, number the words
that occur at least five times, encode the click rate of a column with millions of words out of five
folds, and draw a tenth of the rows for validation. `--data` keeps the generated files for the next
run. Prints one JSON line: medians of the seconds of wall and of CPU time, peak memory, and the
ratios of the pairs; CPU time says more on a busy machine. `--check` compares what both write for a
few rows, with the same draws, instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import prepare_polars
import pyarrow as pa
import pyarrow.parquet as pq
from prepare_polars import FOLDS, KEY, MIN_COUNT, NUMBERS, SMOOTH, VALID_PERCENT, WORDS

from hotbed.prepare.places import Purpose, folds_of, hash_places, shares_of

FILE_ROWS = 500_000
# The numbers of words in the columns of Criteo's Kaggle data.
WORD_COUNTS = [
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
]
DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def words(ranks: np.ndarray, column: int, missing: np.ndarray) -> pa.Array:
    """Return eight hexadecimal digits for each rank."""
    mixed = (ranks * 32 + column + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    shifts = np.arange(28, -4, -4, dtype=np.uint64)
    digits = DIGITS[(mixed[:, None] >> shifts) & np.uint64(15)]
    offsets = np.arange(0, 8 * len(ranks) + 8, 8, dtype=np.int32)
    valid = np.packbits(~missing, bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(ranks), buffers)


def rows_of_file(number: int, rows: int) -> pa.Table:
    """Return the rows of one file, the same for the same `number`."""
    draw = np.random.default_rng([7, number])
    columns: dict[str, Any] = {}
    chance = np.full(rows, -1.1, np.float32)
    for place, name in enumerate(NUMBERS):
        counts = np.floor(draw.lognormal(1.0 + place % 4, 1.2, rows)).astype(np.float32)
        missing = draw.random(rows, np.float32) < (place % 5) * 0.1
        columns[name] = pa.array(counts, mask=missing)
    for place, (name, total) in enumerate(zip(WORDS, WORD_COUNTS, strict=True)):
        ranks = np.floor(np.exp(draw.random(rows) * np.log(total + 1))) - 1  # Zipf's law
        missing = draw.random(rows, np.float32) < max(0, place % 7 - 3) * 0.1
        columns[name] = words(ranks.astype(np.int64), place, missing)
        chance += np.sin(ranks * 12.9898, dtype=np.float32) * 0.2
    clicked = draw.random(rows, np.float32) < 1 / (1 + np.exp(-chance))
    return pa.table({"label": pa.array(clicked.astype(np.int8)), **columns})


def generate(folder: Path, rows: int, file_rows: int = FILE_ROWS) -> None:
    """Write `rows` rows into files of `file_rows`; files that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, rows, file_rows)):
        path = folder / f"{number:04d}.parquet"
        if path.exists():
            continue
        partial = path.with_suffix(".partial")
        table = rows_of_file(number, min(file_rows, rows - begin))
        pq.write_table(table, partial, row_group_size=file_rows // 4)
        partial.rename(path)


def job(data: Path, output: Path, memory: str) -> dict[str, Any]:
    """Return the job of `hotbed prepare`."""
    fill = {"kind": "fill_missing", "value": 0.0}
    number = [fill, {"kind": "log"}, {"kind": "normalize"}]
    encode = {"kind": "target_encode", "label": "label", "folds": FOLDS, "smooth": SMOOTH}
    word = [{"kind": "map", "min_count": MIN_COUNT}]
    columns: list[dict[str, Any]] = [{"kind": "label", "name": "label"}]
    columns += [{"kind": "dense", "name": name, "transforms": number} for name in NUMBERS]
    columns += [{"kind": "id", "name": name, "transforms": word} for name in WORDS]
    columns.append({"kind": "dense", "name": "rate", "column": KEY, "transforms": [encode]})
    return {
        "source": {"kind": "parquet", "path": str(data / "*.parquet")},
        "schema": {"columns": columns},
        "split": {"kind": "by_fold", "valid": VALID_PERCENT / 100},
        "memory": memory,
        "output": str(output),
    }


@dataclass(frozen=True)
class Run:
    """What one system took: seconds of wall and of CPU time, and its peak memory in GB."""

    wall: float
    cpu: float
    peak: float


def work(system: str, a: argparse.Namespace, output: Path) -> Run:
    """Run one system in a new process."""
    if system == "polars":
        command = [sys.executable, __file__, "--work", str(output), "--data", str(a.data)]
    else:
        path = output.with_suffix(".json")
        path.write_text(json.dumps(job(a.data, output, a.memory)))
        command = [sys.executable, "-m", "hotbed.cli", "prepare", str(path)]
        command += ["--workers", str(a.threads)]
    threads = {"POLARS_MAX_THREADS": str(a.threads), "OMP_NUM_THREADS": str(a.threads)}
    begin = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **threads}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{system}: the process failed, exit code {process.returncode}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {"hotbed": [], "polars": []}
    for number in range(a.pairs):
        systems = ["hotbed", "polars"]
        if number % 2:
            systems.reverse()
        for system in systems:
            output = folder / system
            shutil.rmtree(output, ignore_errors=True)
            run = work(system, a, output)
            runs[system].append(run)
            print(
                f"{system}: {run.wall:.1f} s, CPU {run.cpu:.1f} s, {run.peak:.2f} GB",
                file=sys.stderr,
                flush=True,
            )
    figures: dict[str, Any] = {"rows": a.rows}
    for system, taken in runs.items():
        figures[f"{system}_s"] = round(statistics.median(run.wall for run in taken), 1)
        figures[f"{system}_cpu_s"] = round(statistics.median(run.cpu for run in taken), 1)
        figures[f"{system}_peak_gb"] = round(max(run.peak for run in taken), 2)
    pairs = list(zip(runs["hotbed"], runs["polars"], strict=True))
    walls = [ours.wall / theirs.wall for ours, theirs in pairs]
    cpus = [ours.cpu / theirs.cpu for ours, theirs in pairs]
    figures["wall_ratio"] = round(statistics.median(walls), 2)
    figures["wall_ratios"] = [round(ratio, 2) for ratio in walls]
    figures["cpu_ratio"] = round(statistics.median(cpus), 2)
    figures["cpu_ratios"] = [round(ratio, 2) for ratio in cpus]
    return figures


def check(folder: Path) -> None:
    """Compare what both write for a few rows, with the parts and folds that Hotbed draws."""
    data = folder / "data"
    generate(data, 30_000, 10_000)
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job(data, folder / "hotbed", "1GB")))
    subprocess.run([sys.executable, "-m", "hotbed.cli", "prepare", str(job_file)], check=True)
    frames = []
    for file, path in enumerate(sorted(data.glob("*.parquet"))):
        frame = pl.read_parquet(path)
        numbers = np.arange(len(frame))
        shares = shares_of(hash_places(file, numbers, 0, Purpose.SPLIT))
        folds = folds_of(hash_places(file, numbers, 0, Purpose.FOLDS), FOLDS)
        valid = pl.Series("valid", shares < VALID_PERCENT / 100)
        frames.append(frame.with_columns(valid, pl.Series("fold", folds, pl.Int8)))
    prepare_polars.prepare(pl.concat(frames).lazy(), folder / "polars")
    order = [*WORDS, *NUMBERS]
    for part in ("train", "valid"):
        ours = pl.read_parquet(folder / "hotbed" / part / "*.parquet").sort(order)
        theirs = pl.read_parquet(folder / "polars" / part / "*.parquet").sort(order)
        assert ours.select(WORDS).equals(theirs.select(WORDS)), part
        numbers = ["label", *NUMBERS, "rate"]
        np.testing.assert_allclose(
            ours.select(numbers), theirs.select(numbers), rtol=1e-4, atol=1e-6
        )
        print(f"{part}: {len(ours)} rows, equal")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rows", type=int, default=10_000_000)
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--memory", default="4GB", help="the budget of `hotbed prepare`")
    p.add_argument("--data", type=Path, help="a folder for the generated files, kept")
    p.add_argument("--check", action="store_true", help="compare the outputs of a few rows")
    p.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.work:
        prepare_polars.main(a.data, a.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        if a.check:
            check(Path(folder))
            return
        a.data = a.data or Path(folder) / "data"
        generate(a.data, a.rows)
        print(json.dumps(measure(a, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
