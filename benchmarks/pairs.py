# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of two source trees, for a change that must not cost any.

    python benchmarks/pairs.py OLD NEW [--pairs 20] [--threads 1] [--rows step growth]

OLD and NEW are folders that hold the package `hotbed` with its native core, such as the `src` of
two worktrees. For each pair two new processes, one of each tree, run five rounds in turn, so that
both meet the same noise: A B A B, and in every second pair B A B A. The fastest round of each
counts. Prints a table: the geometric mean of (time of OLD / time of NEW) with its 95 % interval, of
wall time and of the CPU time of all threads. Above 1, NEW is faster. CPU time says more on a busy
machine.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import workload
from intervals import half_width

ROOT = Path(__file__).resolve().parent.parent
FEATURES = 26
DIM = 16
IDS = 100_000
ROUNDS = 5
# Otherwise glibc returns memory after some steps and not after others, which costs up to 40 %.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
Round = Callable[[], None]


def embedding_step(
    rule: str, batch: int, steps: int, parts: int = 1, forward_only: bool = False
) -> Round:
    """Lookup, and backward and update, of 26 tables whose ids are all known.

    `parts`: batches whose gradients are added before an update.
    """
    import torch

    import hotbed as hb

    names = [f"t{number}" for number in range(FEATURES)]
    schema = hb.Schema([hb.Id(name) for name in names])
    tables = hb.make_tables(schema, dim=DIM, rule=getattr(hb, rule)(lr=0.01))
    for number, name in enumerate(names):
        tables[name].find_or_insert(workload.raw(np.arange(IDS)[None], number)[0])
    collection = hb.EmbeddingCollection(schema, tables)
    collection.train(not forward_only)
    optimizer = hb.SparseOptimizer(collection)
    settings = argparse.Namespace(alpha=1.05, ids=IDS, tables=FEATURES, batch=batch)
    batches = []
    for dense in workload.draw(settings, 8):
        ids = {name: hb.Ids(part) for name, part in zip(names, workload.raw(dense), strict=True)}
        batches.append(hb.Batch(ids=ids))
    grad = torch.randn(batch, FEATURES * DIM)

    def run() -> None:
        for number in range(steps):
            with torch.set_grad_enabled(not forward_only):
                out = collection.flat(batches[number % len(batches)])
            if forward_only:
                continue
            out.backward(grad)
            if number % parts == parts - 1:
                optimizer.step()
                optimizer.zero_grad()

    return run


def growth() -> Round:
    """A new table takes 600,000 new ids, batch by batch."""
    import hotbed as hb

    ids = workload.raw(np.arange(600_000)[None])[0]

    def run() -> None:
        table = hb.Table("t", DIM, rule=hb.Adagrad(lr=0.01))
        for start in range(0, len(ids), 100_000):
            table.find_or_insert(ids[start : start + 100_000])

    return run


def session() -> Round:
    """300 requests of 100 candidates to DLRM in process."""
    import torch

    import hotbed as hb

    torch.manual_seed(0)
    names = [f"c{number}" for number in range(FEATURES)]
    numbers = [f"d{number}" for number in range(13)]
    columns = [*(hb.Id(name) for name in names), *(hb.Dense(name) for name in numbers)]
    schema = hb.Schema([hb.Label("y"), *columns])
    tables = hb.make_tables(schema, dim=DIM)
    for table in tables.values():
        table.find_or_insert(np.arange(IDS))
    network = hb.models.DLRM(schema, tables, bottom=(64,), hidden=(256, 128))
    model = hb.RecModel(network, "bce", "adam")
    model.schema = schema
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder)
        scores = hb.InferenceSession(folder)
    draw = np.random.default_rng(0)
    requests = []
    for _ in range(100):
        request: dict[str, Any] = {}
        for name in names:
            request[name] = (draw.random(100) ** 4 * IDS).astype(np.int64)
        for name in numbers:
            request[name] = draw.random(100, np.float32)
        requests.append(request)

    def run() -> None:
        for request in requests * 3:
            scores.predict(request)

    return run


def stream() -> Round:
    """Predict, then learn 20,000 shipped MovieLens ratings, 256 at a time."""
    import torch

    import hotbed as hb

    data = ROOT / "data" / "ml_latest_small"
    ids = [hb.Id("user", column="userId"), hb.Id("movie", column="movieId")]
    label = hb.Label("liked", column="rating", threshold=4)
    schema = hb.Schema([label, hb.Time("timestamp", unit="s"), *ids])
    events = hb.sources.Csv(data / "ratings.csv").slice(0.0, 0.2)

    def run() -> None:
        torch.manual_seed(0)
        tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.02))
        network = hb.models.DCNv2(schema, tables, hidden=(64, 32))
        model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), {"auc"})
        model.online_train(hb.Dataset(events, schema, 256), progress=False)

    return run


def prepared() -> Round:
    """Read 500,000 prepared rows with 26 ids and 13 numbers, and encode them to batches."""
    import hotbed as hb
    from hotbed.prepare import Preparation, prepare

    ids = {f"c{number}": hb.sources.Keys(100_000) for number in range(FEATURES)}
    dense = {f"d{number}": 1 for number in range(13)}
    source = hb.sources.Generated(500_000, dense=dense, slots=ids)
    columns = [*(hb.Id(name) for name in ids), *(hb.Dense(name) for name in dense)]
    schema = hb.Schema([hb.Label("label"), *columns])
    scratch = tempfile.TemporaryDirectory()
    folder = f"{scratch.name}/prepared"
    workflow = prepare(Preparation(source, schema, output=folder))

    def run() -> None:
        assert scratch  # lives as long as the rounds
        for _ in hb.Dataset(hb.sources.Prepared(folder), workflow.schema, 4096):
            pass

    return run


def kafka() -> Round:
    """Read 131,072 JSON messages of three partitions from a broker, and encode them to batches."""
    import json

    import hotbed as hb
    from hotbed.testing import Broker

    broker = Broker()
    broker.start()
    broker.create("events", 3)
    draw = np.random.default_rng(0)
    for partition in range(3):
        clicks = draw.integers(0, IDS, (60_000, 3)).tolist()
        events = [
            json.dumps({"y": user % 2, "user": user, "item": item, "shop": shop})
            for user, item, shop in clicks
        ]
        broker.produce("events", [event.encode() for event in events], partition)
    schema = hb.Schema([hb.Label("y"), hb.Id("user"), hb.Id("item"), hb.Id("shop")])

    def run() -> None:
        events = hb.Dataset(hb.sources.Kafka(broker.servers, "events"), schema, 4096)
        for number, _ in enumerate(events, start=1):
            if number == 32:
                break

    return run


ROWS: dict[str, Callable[[], Round]] = {
    "step": lambda: embedding_step("Adagrad", batch=4096, steps=20),
    "row-wise step": lambda: embedding_step("RowwiseAdagrad", batch=4096, steps=20),
    "forward": lambda: embedding_step("RowwiseAdagrad", 4096, 40, forward_only=True),
    "accumulation": lambda: embedding_step("Adagrad", 16384, 8, parts=4),
    "step of Adam": lambda: embedding_step("Adam", batch=4096, steps=20),
    "step of 8 samples": lambda: embedding_step("Adagrad", batch=8, steps=1000),
    "growth": growth,
    "session": session,
    "stream": stream,
    "prepared": prepared,
    "kafka": kafka,
}


class Tree:
    """One process that runs the rounds of a row with the package of one tree."""

    def __init__(self, folder: str, row: str, threads: int) -> None:
        command = [sys.executable, __file__, folder, folder, "--work", row]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            env={**os.environ, **MALLOC, "PYTHONPATH": folder, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self) -> tuple[float, float]:
        """Run one round and return its seconds of wall and of CPU time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, cpu = self._process.stdout.readline().split()
        return float(wall), float(cpu)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(row: str, threads: int) -> None:
    """Run a round for each line of stdin, and print its seconds."""
    import torch

    import hotbed as hb

    torch.set_num_threads(threads)
    hb.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints
    run = ROWS[row]()
    run()
    for _ in sys.stdin:
        begin = time.perf_counter()
        cpu = time.process_time()
        run()
        cpu = time.process_time() - cpu
        print(time.perf_counter() - begin, cpu, file=answers, flush=True)


def compare(row: str, a: argparse.Namespace) -> str:
    """Return a row of the table."""
    old_seconds: list[tuple[float, float]] = []
    new_seconds: list[tuple[float, float]] = []
    for number in range(a.pairs):
        folders = [a.old, a.new]
        seconds = [old_seconds, new_seconds]
        if number % 2:  # the tree that is started first has an advantage of up to 2 %
            folders.reverse()
            seconds.reverse()
        trees = [Tree(folder, row, a.threads) for folder in folders]
        rounds = [[tree.seconds() for tree in trees] for _ in range(ROUNDS)]
        for place, tree in enumerate(trees):
            fastest = np.min([clocks[place] for clocks in rounds], axis=0)
            seconds[place].append((float(fastest[0]), float(fastest[1])))
            tree.close()
    before = 1e3 * np.median(old_seconds, axis=0)
    after = 1e3 * np.median(new_seconds, axis=0)
    cells = [row]
    for clock in (0, 1):
        logs = np.log(np.divide(old_seconds, new_seconds))[:, clock]
        half = half_width(logs.tolist())
        mean = float(np.mean(logs))
        cells.append(f"{before[clock]:.0f}, {after[clock]:.0f}")
        cells.append(f"{math.exp(mean):.3f}")
        cells.append(f"{math.exp(mean - half):.3f} to {math.exp(mean + half):.3f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("old")
    p.add_argument("new")
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    p.add_argument("--work", help=argparse.SUPPRESS)
    a: Any = p.parse_args()
    if a.work:
        work(a.work, a.threads)
        return
    columns = "old, new, ms | old / new | 95 %"
    print(f"| row | wall: {columns} | CPU: {columns} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in a.rows:
        print(compare(row, a), flush=True)


if __name__ == "__main__":
    main()
