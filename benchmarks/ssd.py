# SPDX-License-Identifier: Apache-2.0
"""Tables on a disk beside tables in memory, the limits of the disk, and RocksDB.

    python benchmarks/ssd.py --folder /fast/disk [--sections step rocksdb train stream evaluate resume]

`step`: lookup, backward and update of 26 tables of 1 M ids, all of them inserted first, a tenth in
memory, rows fetched 8 batches ahead. Beside it the least that it can take, with everything measured
in the same run: max(R + c * M / T, M / f), where R is the step in memory, c the CPU time of a bare
read, M the rows that a step misses, T the threads, and f the reads a second of the bare engine.

`rocksdb`: the reads and writes of the same step by the peers' script, which runs 4 of 26 tables.
`--site` is a folder that has rocksdict (`pip install --target FOLDER rocksdict`).

`train`: DCNv2 with those tables by `RecModel.fit`, samples/s on the disk and in memory, in turn.
`stream`: the same by `online_train`, where 5 of 100 ids are new.

`evaluate`: the same model by `RecModel.evaluate` of new batches, and of the same ones again, ms a batch on
the disk and in memory, and beside its bound: the time in memory, or that of its reads by the bare
engine. `--hidden 16 --tables 8` is a model of one small layer.

`resume`: a model that starts again, in seconds: its state read, loaded, and resumed by `fit` until the
first step is done; then its first save.

All reads pass by the page cache. Prints a JSON line for each measurement, and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import workload
from numpy.typing import NDArray

import hotbed as hb
from hotbed import _core
from hotbed.persist.container.format import open_checkpoint
from hotbed.training.run import Run

AHEAD = 8
DEPTHS = {"io_uring": 128, "threads": 32}
"""Reads at once, as the store has them."""
LEAD = 12
"""Steps before those that are measured, until rows are read ahead again."""
NEW_IDS = 0.05
Int64s = NDArray[np.int64]


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def tell(section: str, **figures: Any) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"section": section} | rounded), flush=True)


def spread(values: list[float], digits: int = 1) -> str:
    """Return the median with the least and the greatest."""
    least, most = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def tier_of(kind: str, a: argparse.Namespace) -> hb.Ram | hb.Ssd:
    if kind == "ram":
        return hb.Ram()
    return hb.Ssd(a.folder, int(a.ids * a.share), fetch=AHEAD, engine=a.engine)


def make_tables(
    kind: str, a: argparse.Namespace, schema: hb.Schema, *, filled: bool = True
) -> dict[str, hb.Table]:
    """Return tables that hold all ids, or none."""
    tables = hb.make_tables(
        schema,
        dim=a.dim,
        rule=hb.RowwiseAdagrad(lr=0.01),
        init=hb.Uniform(0.05),
        tier=tier_of(kind, a),
    )
    start = time.perf_counter()
    piece = 1 << 16
    values = np.random.default_rng(0).uniform(-0.05, 0.05, (piece, a.dim)).astype(np.float32)
    for number, table in enumerate(tables.values() if filled else ()):
        for first in range(0, a.ids, piece):
            ids = workload.raw(np.arange(first, min(first + piece, a.ids))[None], number)[0]
            state = np.full(len(ids), 0.1, np.float32)
            rows = {"id": ids, "value": values[: len(ids)].ravel(), "state": state}
            table.native.load_rows(rows)
        if number % 5 == 4:
            note(f"{kind}: {number + 1} tables filled, {time.perf_counter() - start:.1f} s")
    return tables


def schema_of(a: argparse.Namespace) -> hb.Schema:
    return hb.Schema([hb.Label("y"), *(hb.Id(f"t{number}") for number in range(a.tables))])


def popular(a: argparse.Namespace, share: float) -> Iterator[Int64s]:
    """Yield batches of the most popular ids of each table, each id once."""
    order = np.random.default_rng(0).permutation(a.ids)  # as `workload.draw` begins
    for first in range(0, int(a.ids * share), a.batch):
        ranks = np.arange(first, first + a.batch) % int(a.ids * share)
        yield np.tile(order[ranks], (a.tables, 1))


def total(tables: dict[str, hb.Table], name: str) -> float:
    return float(sum(table.tier_stats[name] for table in tables.values()))


class Steps:
    """Trains the collection alone, batch after batch."""

    def __init__(self, kind: str, a: argparse.Namespace) -> None:
        self.schema = schema_of(a)
        self.tables = make_tables(kind, a, self.schema)
        self.names = list(self.tables)
        self.collection = hb.EmbeddingCollection(self.schema, self.tables)
        self.optimizer = hb.SparseOptimizer(self.collection)
        self.grad = torch.randn(a.batch, a.tables * a.dim) * 1e-3
        self.draws = workload.draw(a, 1 << 40)
        self.fetcher = ThreadPoolExecutor(1) if kind == "ssd" else None
        self.coming: deque[tuple[hb.Batch, Future[None] | None]] = deque()

    def add(self, dense: Int64s) -> None:
        """Let a batch come."""
        ids = workload.raw(dense)
        batch = hb.Batch(ids={n: hb.Ids(i) for n, i in zip(self.names, ids, strict=True)})
        fetched = None
        if self.fetcher:
            fetched = self.fetcher.submit(self.collection.fetch, self.collection.inputs_of(batch))
        self.coming.append((batch, fetched))

    def step(self) -> float:
        """Train the next batch; return the seconds."""
        batch, fetched = self.coming.popleft()
        if fetched and fetched.done():
            fetched.result()
        start = time.perf_counter()
        self.collection.flat(batch).backward(self.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def run(self, num_steps: int) -> list[float]:
        """Train so many drawn batches, whose draws are not timed."""
        drawn = [next(self.draws) for _ in range(num_steps)]
        while len(self.coming) <= AHEAD:
            self.add(next(self.draws))
        seconds = []
        for dense in drawn:
            seconds.append(self.step())
            start = time.perf_counter()
            self.add(dense)
            seconds[-1] += time.perf_counter() - start
        return seconds

    def warm_up(self, a: argparse.Namespace) -> None:
        """Bring the popular rows into memory, then train some batches."""
        for number, dense in enumerate(popular(a, 0.95 * a.share)):
            self.add(dense)
            if len(self.coming) > 2:
                self.step()
            if number % 8 == 7:
                note(f"{number + 1} batches of popular ids")
        while self.coming:
            self.step()
        for _ in range(a.warm_up // 10):
            seconds = self.run(10)
            note(f"warm-up: {1e3 * statistics.mean(seconds):.0f} ms a step")


@dataclass
class Disk:
    """Reads of the bare engine."""

    reads_a_second: float
    cpu_us: float

    @staticmethod
    def measure(disk: _core.Disk, engine: str, seconds: float) -> Disk:
        cpu, start = time.process_time(), time.perf_counter()
        count = disk.read(engine, DEPTHS[engine], seconds)
        took = time.perf_counter() - start
        return Disk(count / took, 1e6 * (time.process_time() - cpu) / count)


def measure_step(a: argparse.Namespace) -> list[list[str]]:
    on_disk, in_memory = Steps("ssd", a), Steps("ram", a)
    on_disk.warm_up(a)
    in_memory.run(LEAD)
    engine = next(iter(on_disk.tables.values())).tier_stats["engine"]
    disk = _core.Disk(a.folder)
    disk.fill(a.disk_gib << 30)
    ratios, steps, rams, reads, misses, cpus, bounds = [], [], [], [], [], [], []
    blocks, stricter = [], []
    for round_number in range(a.rounds):
        ram = statistics.mean(in_memory.run(a.steps))
        time.sleep(1)  # until rows have come that were read ahead
        bare = Disk.measure(disk, engine, a.disk_seconds)
        on_disk.run(LEAD)
        before = {name: total(on_disk.tables, name) for name in ("misses", "fetched", "hits")}
        waited = total(on_disk.tables, "waited_seconds")
        stats = next(iter(on_disk.tables.values())).tier_stats
        cpu = time.process_time()
        step = statistics.mean(on_disk.run(a.steps))
        cpu = (time.process_time() - cpu) / a.steps
        after = next(iter(on_disk.tables.values())).tier_stats
        counts = {n: (total(on_disk.tables, n) - v) / a.steps for n, v in before.items()}
        time.sleep(1)  # until rows have come that were read ahead
        bare_after = Disk.measure(disk, engine, a.disk_seconds)
        f = (bare.reads_a_second + bare_after.reads_a_second) / 2
        c = (bare.cpu_us + bare_after.cpu_us) / 2
        miss = counts["misses"]
        by_cpu, by_disk = ram + 1e-6 * c * miss / a.threads, miss / f
        bound = max(by_cpu, by_disk)
        written = {n: after[n] - stats[n] for n in ("put_bytes", "written_bytes", "num_reads")}
        tell(
            "step",
            round=round_number,
            step_ms=1e3 * step,
            ratio=step / bound,
            ram_ms=1e3 * ram,
            by_cpu_ms=1e3 * by_cpu,
            by_disk_ms=1e3 * by_disk,
            misses=miss,
            fetched=counts["fetched"],
            hits=counts["hits"],
            reads_a_second=f,
            spread_of_reads=[bare.reads_a_second, bare_after.reads_a_second],
            cpu_us_a_read=c,
            cpu_ms_a_step=1e3 * cpu,
            waited_ms=1e3 * (total(on_disk.tables, "waited_seconds") - waited) / a.steps,
            reads_a_step=written["num_reads"] / a.steps,
            write_amplification=written["written_bytes"] / max(1, written["put_bytes"]),
            space=after["file_bytes"] / after["live_bytes"],
            engine=engine,
        )
        ratios.append(step / bound), bounds.append(1e3 * bound), steps.append(1e3 * step)
        blocks.append(written["num_reads"] / a.steps)
        stricter.append(step / max(ram + 1e-6 * c * blocks[-1] / a.threads, blocks[-1] / f))
        rams.append(1e3 * ram), reads.append(f), misses.append(miss), cpus.append(c)
    return [
        ["step on the disk, ms", spread(steps)],
        ["step in memory R, ms", spread(rams)],
        ["rows missed a step M", spread(misses, 0)],
        [f"reads/s of the bare engine f ({engine}, depth {DEPTHS[engine]})", spread(reads, 0)],
        ["CPU of a bare read c, us", spread(cpus, 2)],
        ["bound max(R + cM/T, M/f), ms", spread(bounds)],
        ["step / bound", spread(ratios, 2)],
        ["blocks read a step B, without rows that still wait to be written", spread(blocks, 0)],
        ["step / bound with B for M", spread(stricter, 2)],
    ]


FILL_ROCKSDB = """
import sys
sys.path.insert(0, {site!r})
import numpy as np
from rocksdict import Rdict, Options, WriteBatch, WriteOptions
import rocksdict
options = Options(raw_mode=True)
options.set_compression_type(rocksdict.DBCompressionType.none())
options.set_write_buffer_size(64 << 20)
options.increase_parallelism(2)
unlogged = WriteOptions()
unlogged.disable_wal = True
rows = Rdict("./rdb", options=options)
rows.set_write_options(unlogged)
value = np.random.default_rng(0).bytes(72)
for first in range(0, 4 * {ids}, 20000):
    batch = WriteBatch(raw_mode=True)
    for key in range(first, first + 20000):
        batch.put(key.to_bytes(8, "big"), value)
    rows.write(batch)
rows.flush()
rows.compact_range(None, None)
rows.close()
"""


def measure_rocksdb(a: argparse.Namespace) -> list[list[str]]:
    """The script runs 4 tables and prints the time of 26. Each run has rows that nothing rewrote."""
    rows = []
    site, peers = a.site.resolve(), a.peers.resolve()
    script = peers / "disk_rocksdb.py"
    environment = os.environ | {"PYTHONPATH": f"{site}:{peers}"}
    cache_mb = 4 * a.ids * 80 * a.share / 2**20
    for threads in (1, 16):
        took = []
        for number in range(a.rounds):
            with tempfile.TemporaryDirectory(dir=a.folder) as folder:
                fill = FILL_ROCKSDB.format(site=str(site), ids=a.ids)
                subprocess.run([sys.executable, "-c", fill], cwd=folder, check=True)
                command = [sys.executable, str(script)]
                command += [str(a.rocksdb_batches), str(threads), str(number), str(cache_mb)]
                done = subprocess.run(
                    command, cwd=folder, env=environment, check=True, capture_output=True, text=True
                )
            took.append(float(done.stdout.split("for 26 tables: ")[1].split(" ms")[0]))
            note(done.stdout.strip())
        tell("rocksdb", threads=threads, ms=took)
        rows.append([f"RocksDB, {threads} threads, ms", spread(took, 0)])
    return rows


class Training:
    """DCNv2 over the tables; a round is a Dataset of drawn batches."""

    def __init__(self, kind: str, a: argparse.Namespace, *, filled: bool = True) -> None:
        self.schema = schema_of(a)
        self.tables = make_tables(kind, a, self.schema, filled=filled)
        torch.manual_seed(0)
        network = hb.models.DCNv2(self.schema, self.tables, hidden=tuple(a.hidden))
        self.model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3))
        self.labels = np.random.default_rng(1)

    @property
    def num_reads(self) -> int:
        """Of the disk, so far."""
        return int(next(iter(self.tables.values())).tier_stats.get("num_reads", 0))

    @property
    def engine(self) -> str:
        return str(next(iter(self.tables.values())).tier_stats["engine"])

    def dataset(self, batches: list[Int64s], a: argparse.Namespace) -> hb.Dataset:
        columns = {
            name: np.concatenate([workload.raw(dense)[number] for dense in batches])
            for number, name in enumerate(self.tables)
        }
        label = (self.labels.random(len(batches) * a.batch) < 0.2).astype(np.float32)
        source = hb.sources.Memory(pa.table({"y": label} | columns))
        return hb.Dataset(source, self.schema, a.batch)

    def samples_a_second(
        self, batches: list[Int64s], a: argparse.Namespace, streams: bool
    ) -> float:
        dataset = self.dataset(batches, a)
        start = time.perf_counter()
        if streams:
            self.model.online_train(dataset, progress=False)
        else:
            self.model.fit(dataset, progress=False)
        return len(batches) * a.batch / (time.perf_counter() - start)

    def ms_a_batch(self, dataset: hb.Dataset, num_batches: int) -> float:
        """Evaluate the batches; return how long each took."""
        start = time.perf_counter()
        self.model.evaluate(dataset)
        return 1e3 * (time.perf_counter() - start) / num_batches


def with_new(dense: Int64s, share: float, first: int, draws: np.random.Generator) -> Int64s:
    """Return the batch with a share of its ids replaced by new ones, from `first` on."""
    is_new = draws.random(dense.shape) < share
    dense = dense.copy()
    dense[is_new] = first + np.arange(is_new.sum())
    return dense


def bring_popular(side: Training, a: argparse.Namespace) -> None:
    collection = hb.EmbeddingCollection(side.schema, side.tables)
    optimizer = hb.SparseOptimizer(collection)
    for dense in popular(a, 0.95 * a.share):
        ids = zip(side.tables, workload.raw(dense), strict=True)
        collection.flat(hb.Batch(ids={n: hb.Ids(i) for n, i in ids})).sum().backward()
        optimizer.zero_grad()


def measure_evaluation(a: argparse.Namespace) -> list[list[str]]:
    sides = {kind: Training(kind, a) for kind in ("ssd", "ram")}
    bring_popular(sides["ssd"], a)
    draws = workload.draw(a, 1 << 40)
    disk = _core.Disk(a.folder)
    disk.fill(a.disk_gib << 30)
    for side in sides.values():
        side.samples_a_second([next(draws) for _ in range(LEAD)], a, streams=False)
    figures: dict[str, list[float]] = {}
    for round_number in range(a.rounds):
        batches = [next(draws) for _ in range(a.steps)]
        of_round = {}
        bare = Disk.measure(disk, sides["ssd"].engine, a.disk_seconds)
        for kind, side in sides.items():
            dataset = side.dataset(batches, a)
            for turn in ("new", "again"):
                before = side.num_reads
                of_round[f"{kind} {turn}, ms"] = side.ms_a_batch(dataset, len(batches))
                reads = (side.num_reads - before) / len(batches)
                of_round[f"{kind} {turn}, reads"] = reads
        for turn in ("new", "again"):
            on_disk, in_memory = of_round[f"ssd {turn}, ms"], of_round[f"ram {turn}, ms"]
            by_disk = 1e3 * of_round[f"ssd {turn}, reads"] / bare.reads_a_second
            of_round[f"disk / memory, {turn}"] = on_disk / in_memory
            of_round[f"disk / bound, {turn}"] = on_disk / max(in_memory, by_disk)
        of_round["reads/s of the bare engine"] = bare.reads_a_second
        tell("evaluate", round=round_number, **of_round)
        for name, value in of_round.items():
            figures.setdefault(name, []).append(value)
    return [[f"evaluate: {name}", spread(values, 2)] for name, values in figures.items()]


class Stopwatch:
    """Seconds since it was made, by the clock and of the processor."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> dict[str, float]:
        wall, cpu = self._start
        return {
            f"{name}, s": time.perf_counter() - wall,
            f"{name}, CPU s": time.process_time() - cpu,
        }


def measure_resumption(a: argparse.Namespace) -> list[list[str]]:
    figures: dict[str, list[float]] = {}
    draws = workload.draw(a, 1 << 40)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:

        def learn(side: Training, steps: int) -> dict[str, float]:
            """Return how long it took until the first step was done."""
            laps: dict[str, float] = {}

            def on_step_end(run: Run) -> None:
                if not laps:
                    laps.update(clock.lap("first step"))

            batches = [next(draws) for _ in range(steps)]
            dataset = side.dataset(batches, a)
            saves = hb.callbacks.Checkpoint(folder, wait=True)
            watch = SimpleNamespace(on_step_end=on_step_end)
            clock = Stopwatch()
            side.model.online_train(dataset, [watch, saves], progress=False)
            return laps

        learn(Training("ssd", a), 3)
        for round_number in range(a.rounds):
            clock = Stopwatch()
            reader = open_checkpoint(folder)
            reader.verify()
            for name in reader.table_names:
                for _ in reader.rows(name):
                    pass
            of_round = clock.lap("state read")
            side = Training("ssd", a, filled=False)
            clock = Stopwatch()
            side.model.restore(folder)
            of_round |= clock.lap("state loaded")
            of_round |= learn(Training("ssd", a, filled=False), 3 * (round_number + 2))
            for kind in ("s", "CPU s"):
                ratio = of_round[f"first step, {kind}"] / of_round[f"state loaded, {kind}"]
                of_round[f"first step / loaded, {kind}"] = ratio
            newest = open_checkpoint(folder)
            tell("resume", round=round_number, kind=newest.manifest.kind, **of_round)
            for name, value in of_round.items():
                figures.setdefault(name, []).append(value)
    return [[f"resume: {name}", spread(values, 2)] for name, values in figures.items()]


def measure_training(a: argparse.Namespace, streams: bool) -> list[list[str]]:
    section = "stream" if streams else "train"
    sides = {kind: Training(kind, a) for kind in ("ssd", "ram")}
    on_disk = sides["ssd"].tables
    draws, new = workload.draw(a, 1 << 40), np.random.default_rng(2)
    first_new = a.ids
    share = NEW_IDS if streams else 0.0

    def batches(count: int) -> list[Int64s]:
        nonlocal first_new
        drawn = []
        for _ in range(count):
            drawn.append(with_new(next(draws), share, first_new, new))
            first_new += drawn[-1].size
        return drawn

    note(f"{section}: bringing the popular rows into memory")
    bring_popular(sides["ssd"], a)
    engine = next(iter(on_disk.values())).tier_stats["engine"]
    disk = _core.Disk(a.folder)
    disk.fill(a.disk_gib << 30)
    warm = batches(a.warm_up)
    for kind, side in sides.items():
        speed = side.samples_a_second(warm if kind == "ssd" else warm[:10], a, streams)
        note(f"{section}: warm-up on {kind}, {speed:,.0f} samples/s")
    speeds: dict[str, list[float]] = {"ssd": [], "ram": []}
    ratios, of_bounds, bound_ratios = [], [], []
    for round_number in range(a.rounds):
        drawn = batches(a.steps)
        speeds["ram"].append(sides["ram"].samples_a_second(drawn, a, streams))
        bare = Disk.measure(disk, engine, a.disk_seconds)
        before = {name: total(on_disk, name) for name in ("misses", "fetched", "waited_seconds")}
        speeds["ssd"].append(sides["ssd"].samples_a_second(drawn, a, streams))
        after = {name: (total(on_disk, name) - v) / a.steps for name, v in before.items()}
        step = a.batch / speeds["ram"][-1]
        by_cpu = step + 1e-6 * bare.cpu_us * after["misses"] / a.threads
        bound = max(by_cpu, after["misses"] / bare.reads_a_second)
        ratios.append(speeds["ssd"][-1] / speeds["ram"][-1])
        bound_ratios.append(step / bound)
        of_bounds.append(ratios[-1] / bound_ratios[-1])
        tell(
            section,
            round=round_number,
            samples_a_second=speeds["ssd"][-1],
            in_memory=speeds["ram"][-1],
            ratio=ratios[-1],
            bound=bound_ratios[-1],
            of_bound=of_bounds[-1],
            reads_a_second=bare.reads_a_second,
            cpu_us_a_read=bare.cpu_us,
            engine=engine,
            **after,
        )
    return [
        [f"{section}: samples/s on the disk", spread(speeds["ssd"], 0)],
        [f"{section}: samples/s in memory", spread(speeds["ram"], 0)],
        [f"{section}: disk / memory", spread(ratios, 2)],
        [f"{section}: bound of disk / memory", spread(bound_ratios, 2)],
        [f"{section}: of the bound", spread(of_bounds, 2)],
    ]


def main() -> None:
    p = workload.arguments(__doc__ or "")
    sections = ("step", "rocksdb", "train", "stream", "evaluate", "resume")
    p.add_argument("--folder", default=".", help="on the disk")
    p.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    p.add_argument("--share", type=float, default=0.1, help="of the rows in memory")
    p.add_argument("--engine", default="best", choices=("best", "io_uring", "threads"))
    p.add_argument("--hidden", type=int, nargs="+", default=[400, 400, 400], help="of DCNv2")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--warm-up", type=int, default=50, help="steps after the popular ids")
    p.add_argument("--disk-gib", type=int, default=2, help="of the file of the bare reads")
    p.add_argument("--disk-seconds", type=float, default=2.0)
    p.add_argument("--peers", type=Path, default=Path("../shared/peers"))
    p.add_argument("--site", type=Path, default=Path("site"), help="has rocksdict")
    p.add_argument("--rocksdb-batches", type=int, default=40)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    rows: list[list[str]] = []
    for section in a.sections:
        if section == "step":
            rows += measure_step(a)
        elif section == "rocksdb":
            rows += measure_rocksdb(a)
        elif section == "evaluate":
            rows += measure_evaluation(a)
        elif section == "resume":
            rows += measure_resumption(a)
        else:
            rows += measure_training(a, streams=section == "stream")
    print("\n| | median (least to greatest) |\n|---|---|")
    for row in rows:
        print(f"| {row[0]} | {row[1]} |")


if __name__ == "__main__":
    main()
