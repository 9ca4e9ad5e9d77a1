# SPDX-License-Identifier: Apache-2.0
"""One model on several processes: messages and bytes of a step, speed, and rows a process.

Prints in one run, as Markdown:

* messages: calls of torch.distributed a step, for 1, 26 and 100 tables.
* bytes: what a process sends the others in a step, beside distinct ids x (8 + 2 x row bytes) x
  (N - 1) / N + 2 (N - 1) / N x dense bytes, for N = 2, 4 and 8. Counts, times and scores add 4, 8
  and 8 bytes to the 8 of an id, where policies of tables want them.
* speed: samples/s of N = 1 and N = 2 with a thread each, and of N = 1 with two threads. The jobs
  stand by side by side and train in turn, A B C A B C; the ratios are those of a round.
* ahead, stream: a step of `fit` on two processes beside one with `hb.Ahead`; and beside one of
  `online_train`, whose batches the first process sends, on one process and on two; in turn.
* score: a batch of `evaluate` on one process and on two, and CPU time of the first one.
* tables: 100 tables of 10 features beside one table with the same rows.
* rows: of a large table on each of 4 processes.
* save: MiB/s of one process and of two that save such a table to one disk, in turn.
* plan: a step of `fit` as `hotbed plan` predicts it and as it is measured, on 1, 2 and 4 processes
  of this machine, and with tables on a disk in `--folder`; 4 minutes.
* TorchRec, with `--torchrec`: the peer's script in turn with ours.

All draws are those of `workload.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_BATCHES = 8
SECTIONS = (
    "messages",
    "bytes",
    "speed",
    "ahead",
    "stream",
    "score",
    "tables",
    "rows",
    "save",
    "plan",
    "torchrec",
)
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DCNv2, 3 cross, 3x400": ("DCNv2", {"num_cross_layers": 3, "hidden": [400, 400, 400]}),
    "WideDeep, 64-32": ("WideDeep", {"hidden": [64, 32]}),
    "perceptron 64-32": ("DNN", {"hidden": [64, 32]}),
    "perceptron 3x400": ("DNN", {"hidden": [400, 400, 400]}),
}

POLICIES: dict[str, tuple[tuple[str, ...], int]] = {
    "no policies": ((), 0),
    "MinCount: counts": (("count",), 4),
    "Lru: times": (("lru",), 8),
    "Lfu by score: counts, scores": (("lfu",), 4 + 8),
    "MinCount, Ttl, Lfu: all three": (("count", "ttl", "lfu"), 4 + 8 + 8),
}
"""Policies of tables, and the bytes an id that they add to what an owner is asked for."""


@dataclass(frozen=True)
class Job:
    """A network and its data; `features` of each of `tables`, all in one table where it is shared.

    Tables have the policies of a name of POLICIES. Its ids are drawn from `ids` a table, or are all new where that is 0.
    """

    network: str
    tables: int = 26
    features: int = 1
    shared: bool = False
    batch: int = 4096
    ids: int = 1_000_000
    grains: int = 8
    threads: int = 1
    policies: str = "no policies"


class Ranks:
    """The processes of a job, which stand by until they are asked."""

    def __init__(self, job: Job, size: int) -> None:
        port = free_port()
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps(asdict(job))],
                env=environment(rank, size, port, job.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def ask(self, task: str, number: int) -> list[Any]:
        """Let all ranks perform a task; return the answer of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([task, number]) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return answers

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


@contextmanager
def ranks_of(job: Job, size: int) -> Iterator[Ranks]:
    ranks = Ranks(job, size)
    try:
        yield ranks
    finally:
        ranks.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def environment(rank: int, size: int, port: int, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }


# --- what a process of a job does -----------------------------------------------------------------


def work(job: Job) -> None:
    """Answer the tasks that come by the standard input, each by a line."""
    import torch

    import hotbed as hb

    logging.disable(logging.INFO)
    torch.set_num_threads(job.threads)
    hb.set_num_threads(job.threads)
    torch.manual_seed(0)
    names = [[f"t{t}f{f}" for f in range(job.features)] for t in range(job.tables)]
    table_of = {name: f"t{0 if job.shared else t}" for t, of in enumerate(names) for name in of}
    columns = [hb.Id(name, table=table) for name, table in table_of.items()]
    policies = policies_of(job)
    times = [hb.Time("t")] if policies else []
    schema = hb.Schema([hb.Label("y"), *times, *columns])
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05), seed=0, **policies)
    kind, settings = NETWORKS[job.network]
    network = getattr(hb.models, kind)(schema, tables, **settings)
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), grains=job.grains)
    batches = list(batches_of(job, names))
    tasks: dict[str, Callable[[int], Any]] = {
        "train": lambda steps: trained(model, batches, steps),
        "fit": lambda steps: fitted(model, batches, steps, 0),
        "ahead": lambda steps: fitted(model, batches, steps, 2),
        "stream": lambda steps: streamed(model, batches, steps),
        "score": lambda steps: scored(model, batches, steps),
        "count": lambda steps: counted(model, batches, steps, POLICIES[job.policies][1]),
        "grow": lambda steps: grown(model, job, steps),
        "save": lambda steps: saved(model, steps),
    }
    for line in sys.stdin:
        task, number = json.loads(line)
        print(json.dumps(tasks[task](number)), flush=True)


def policies_of(job: Job) -> dict[str, Any]:
    """Return the policies of the tables, as arguments of `hb.make_tables`."""
    import hotbed as hb

    evictions = {
        "lru": hb.Lru(1 << 22),
        "lfu": hb.Lfu(1 << 22, half_life_seconds=3600.0),
        "ttl": hb.Ttl(days=1.0),
    }
    names = POLICIES[job.policies][0]
    policies: dict[str, Any] = {"evict": [evictions[name] for name in names if name != "count"]}
    if "count" in names:
        policies["admit"] = hb.MinCount(2)
    return {name: policy for name, policy in policies.items() if policy}


def batches_of(job: Job, names: Sequence[Sequence[str]]) -> Iterator[Any]:
    import workload

    import hotbed as hb

    if not job.ids:
        return
    wanted = argparse.Namespace(tables=job.tables, ids=job.ids, alpha=1.05)
    wanted.batch = job.batch * job.features
    random = np.random.default_rng(0)
    for dense in workload.draw(wanted, NUM_BATCHES):
        ids = {}
        for of_table, values in zip(names, workload.raw(dense), strict=True):
            for name, part in zip(of_table, np.split(values, job.features), strict=True):
                ids[name] = hb.Ids(np.ascontiguousarray(part))
        labels = random.integers(0, 2, job.batch).astype(np.float32)
        times = np.arange(job.batch) if POLICIES[job.policies][0] else None
        yield hb.Batch(ids, {}, {"y": labels}, time=times)


def trained(model: Any, batches: Sequence[Any], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step, and those of its calls of torch.distributed."""
    with counted_messages() as messages:
        start = time.perf_counter()
        for step in range(steps):
            model.step(batches[step % len(batches)])
        seconds = time.perf_counter() - start
    waited = sum(message["seconds"] for message in messages)
    return {"step": 1e3 * seconds / steps, "messages": 1e3 * waited / steps}


def fitted(model: Any, batches: Sequence[Any], steps: int, depth: int) -> float:
    """Return the milliseconds of a step of `fit`, whose batches are mapped ahead so far."""
    import hotbed as hb

    data = [batches[step % len(batches)] for step in range(steps)]
    start = time.perf_counter()
    model.fit(hb.Ahead(data, depth=depth), progress=False)
    return 1e3 * (time.perf_counter() - start) / steps


def streamed(model: Any, batches: Sequence[Any], steps: int) -> float:
    """Return the milliseconds of a step of `online_train`, which scores nothing."""
    data = [batches[step % len(batches)] for step in range(steps)]
    start = time.perf_counter()
    model.online_train(data, progressive=False, progress=False)
    return 1e3 * (time.perf_counter() - start) / steps


def scored(model: Any, batches: Sequence[Any], steps: int) -> list[float]:
    """Return the milliseconds of a batch of `evaluate`, and those of a processor."""
    data = [batches[step % len(batches)] for step in range(steps)]
    start = (time.perf_counter(), time.process_time())
    model.evaluate(data)
    end = (time.perf_counter(), time.process_time())
    return [1e3 * (last - first) / steps for first, last in zip(start, end, strict=True)]


def counted(model: Any, batches: Sequence[Any], steps: int, added: int) -> dict[str, float]:
    """Return the messages and bytes of a step, and the bytes that the formula gives.

    `added`: the bytes an id of counts, times and scores.
    """
    import torch.distributed as dist

    import hotbed as hb

    rank, size = dist.get_rank(), dist.get_world_size()
    dense = sum(4 * parameter.numel() for parameter in hb.dense_parameters(model.network))
    rows = 0
    with counted_messages() as messages:
        for step in range(steps):
            batch = batches[step % len(batches)]
            model.step(batch)
            first, last = (batch.num_samples * r // size for r in (rank, rank + 1))
            rows += sum(len(np.unique(ids.values[first:last])) for ids in batch.ids.values())
    others = (size - 1) / size
    return {
        "messages": len(messages) / steps,
        "bytes": sum(message["bytes"] for message in messages) / steps,
        "formula": rows / steps * (8 + added + 2 * 4 * 16) * others + 2 * others * dense,
    }


def grown(model: Any, job: Job, num_rows: int) -> int:
    """Learn so many new ids; return how many rows this process has then."""
    import hotbed as hb

    labels = np.zeros(job.batch, np.float32)
    random = np.random.default_rng(0)
    for _ in range(-(-num_rows // job.batch)):
        ids = random.integers(-(2**63), 2**63, job.batch)
        model.step(hb.Batch({"t0f0": hb.Ids(ids)}, {}, {"y": labels}))
    return sum(len(table) for table in model.tables.values())


def saved(model: Any, times: int) -> list[float]:
    """Save so many times, after a first one; return the MiB/s of each."""
    folder = f"build/saved-{os.environ['WORLD_SIZE']}"
    rates = []
    for _ in range(times + 1):
        start = time.perf_counter()
        state = Path(model.save(folder))
        seconds = time.perf_counter() - start
        rates.append(sum(file.stat().st_size for file in state.rglob("*.*")) / 2**20 / seconds)
    return rates[1:]


@contextmanager
def counted_messages() -> Iterator[list[dict[str, float]]]:
    """Yield the calls of torch.distributed within: the bytes for other ranks, and the seconds."""
    import torch.distributed as dist

    messages: list[dict[str, float]] = []
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])

    def to_others(name: str, arguments: Sequence[Any]) -> int:
        if name == "all_to_all_single":
            sizes = arguments[3]
            return int((sum(sizes) - sizes[rank]) * arguments[1].element_size())
        if name == "all_gather":
            return int(arguments[1].numel() * arguments[1].element_size() * (size - 1))
        return 0

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **keywords)
            seconds = time.perf_counter() - start
            messages.append({"bytes": to_others(name, arguments), "seconds": seconds})
            return result

        return watch

    calls = {n: getattr(dist, n) for n in ("all_to_all_single", "all_gather", "all_gather_object")}
    for name, call in calls.items():
        setattr(dist, name, watched(name, call))
    try:
        yield messages
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)


# --- the sections ---------------------------------------------------------------------------------


def print_row(*cells: Any) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_head(*cells: str) -> None:
    print()
    print_row(*cells)
    print_row(*["---"] * len(cells))


def measure_messages(a: argparse.Namespace) -> None:
    print_head("tables", "messages a step, N = 2, no metrics")
    for tables in (1, 26, 100):
        with ranks_of(Job("WideDeep, 64-32", tables, batch=512, ids=10_000), 2) as ranks:
            ranks.ask("train", 2)
            print_row(tables, f"{ranks.ask('count', 4)[0]['messages']:g}")


def measure_bytes(a: argparse.Namespace) -> None:
    head = ("network", "tables", "N", "bytes a process and step", "formula", "ratio", "messages")
    print_head(*head)
    jobs = [(Job("perceptron 3x400"), size) for size in (2, 4, 8)]
    for policies in POLICIES:
        jobs.extend((Job("perceptron 64-32", policies=policies), size) for size in (2, 4, 8))
    for job, size in jobs:
        if size not in a.ranks:
            continue
        with ranks_of(job, size) as ranks:
            ranks.ask("train", 1)
            answers = ranks.ask("count", 4)
        names = ("bytes", "formula", "messages")
        sent, formula, messages = (np.mean([x[name] for x in answers]) for name in names)
        cells = [f"{sent:,.0f}", f"{formula:,.0f}", f"{sent / formula:.3f}x", f"{messages:g}"]
        print_row(job.network, job.policies, size, *cells)


def in_turn(jobs: Sequence[tuple[Job, int]], steps: int, rounds: int) -> list[np.ndarray]:
    """Return the milliseconds of a step and of its messages, of each job [rounds, 2]."""
    every = [Ranks(job, size) for job, size in jobs]
    times: list[list[list[float]]] = [[] for _ in jobs]
    for ranks in every:
        ranks.ask("train", NUM_BATCHES)
    for _ in range(rounds):
        for own, ranks in zip(times, every, strict=True):
            answer = ranks.ask("train", steps)[0]
            own.append([answer["step"], answer["messages"]])
    for ranks in every:
        ranks.end()
    return [np.array(own) for own in times]


def spread(ratios: np.ndarray) -> str:
    return f"{np.median(ratios):.2f}x ({ratios.min():.2f} to {ratios.max():.2f})"


def measure_speed(a: argparse.Namespace) -> None:
    head = f"network, B 4,096, G {a.grains}"
    print_head(head, "processes x threads", "ms", "samples/s", "beside 1 x 1")
    for network in ("DCNv2, 3 cross, 3x400", "WideDeep, 64-32", "perceptron 64-32"):
        if a.only not in network:
            continue
        shapes = [(1, 1), (2, 1), (1, 2)]
        jobs = []
        for size, threads in shapes:
            jobs.append((Job(network, grains=a.grains, threads=threads), size))
        steps = a.steps if "64-32" in network else max(1, a.steps // 5)
        times = [own[:, 0] for own in in_turn(jobs, steps, a.rounds)]
        for (size, threads), own in zip(shapes, times, strict=True):
            step = float(np.median(own))
            cells = [network, f"{size} x {threads}", f"{step:.1f}", f"{4096e3 / step:,.0f}"]
            print_row(*cells, spread(times[0] / own))


def measure_ahead(a: argparse.Namespace) -> None:
    measure_beside_fit(a, "ahead", [2])


def measure_stream(a: argparse.Namespace) -> None:
    measure_beside_fit(a, "stream", [1, 2])


def measure_beside_fit(a: argparse.Namespace, task: str, sizes: Sequence[int]) -> None:
    print_head(f"network, B 4,096, G {a.grains}", "N", "ms of fit", f"of {task}", "beside fit")
    networks = [n for n in ("DCNv2, 3 cross, 3x400", "perceptron 64-32") if a.only in n]
    for network, size in itertools.product(networks, sizes):
        steps = a.steps if "64-32" in network else max(1, a.steps // 5)
        times: dict[str, list[float]] = {"fit": [], task: []}
        with ranks_of(Job(network, grains=a.grains), size) as ranks:
            ranks.ask("train", NUM_BATCHES)
            for _ in range(a.rounds):
                for name, own in times.items():
                    own.append(ranks.ask(name, steps)[0])
        fit, other = (np.array(own) for own in times.values())
        medians = [f"{np.median(own):.1f}" for own in (fit, other)]
        print_row(network, size, *medians, spread(fit / other))


def measure_score(a: argparse.Namespace) -> None:
    print_head(f"network, B 4,096, G {a.grains}", "N", "ms of evaluate", "CPU ms", "beside N = 1")
    networks = [n for n in ("DCNv2, 3 cross, 3x400", "perceptron 64-32") if a.only in n]
    for network in networks:
        steps = a.steps if "64-32" in network else max(1, a.steps // 5)
        every = [Ranks(Job(network, grains=a.grains), size) for size in (1, 2)]
        times: list[list[list[float]]] = [[], []]
        for ranks in every:
            ranks.ask("train", NUM_BATCHES)
        for _ in range(a.rounds):
            for own, ranks in zip(times, every, strict=True):
                own.append(ranks.ask("score", steps)[0])
        for size, ranks, own in zip((1, 2), every, map(np.array, times), strict=True):
            ranks.end()
            medians = [f"{median:.1f}" for median in np.median(own, axis=0)]
            print_row(network, size, *medians, spread(np.array(times[0])[:, 0] / own[:, 0]))


def measure_tables(a: argparse.Namespace) -> None:
    print_head("1,000 features, B 256, N = 2", "ms a step", "of these in messages")
    jobs = [
        Job("perceptron 64-32", 100, 10, shared, batch=256, ids=10_000) for shared in (False, True)
    ]
    times = in_turn([(job, 2) for job in jobs], 4, a.rounds)
    for name, own in zip(("100 tables of 10", "one table"), times, strict=True):
        step, messages = np.median(own, axis=0)
        print_row(name, f"{step:.1f}", f"{messages:.1f}")
    ratios = times[0] / times[1]
    print_row("100 beside one", spread(ratios[:, 0]), spread(ratios[:, 1]))


def measure_rows(a: argparse.Namespace) -> None:
    print_head("rows", "on each of 4 processes", "most beside a quarter")
    job = Job("perceptron 64-32", 1, batch=65_536, ids=0)
    with ranks_of(job, 4) as ranks:
        rows = ranks.ask("grow", a.rows)
    most = 4 * max(rows) / sum(rows)
    print_row(f"{sum(rows):,}", ", ".join(f"{n:,}" for n in rows), f"{most:.3f}x")


def measure_save(a: argparse.Namespace) -> None:
    print_head("rows", "one process, MiB/s", "two", "two beside one")
    job = Job("perceptron 64-32", 1, batch=65_536, ids=0)
    rates: list[list[float]] = [[], []]
    with ranks_of(job, 1) as one, ranks_of(job, 2) as two:
        num_rows = {sum(ranks.ask("grow", a.rows)) for ranks in (one, two)}
        assert len(num_rows) == 1
        for _ in range(a.rounds):
            for own, ranks in zip(rates, (one, two), strict=True):
                own.append(float(np.median(ranks.ask("save", 3)[0])))
    for size in (1, 2):
        shutil.rmtree(f"build/saved-{size}")
    ratio = spread(np.divide(rates[1], rates[0]))
    print_row(f"{num_rows.pop():,}", *(f"{np.median(own):,.0f}" for own in rates), ratio)


PLANNED = """
schema:
  columns:
    - {{kind: label, name: label}}
{columns}
train: {{kind: parquet, path: {rows}}}
model: {{kind: dcnv2, num_cross_layers: 2, hidden: [256, 256]}}
tables: {{dim: 16, rule: {{kind: rowwise_adagrad, lr: 0.05}}, tier: {tier}}}
fit: {{batch_size: 4096, epochs: 2}}
output: {folder}/planned
"""
SLOTS = [f"C{number}" for number in range(12)]


def measure_plan(a: argparse.Namespace) -> None:
    import hotbed as hb
    from hotbed.cli.planning import disks_of
    from hotbed.job.job import Job as PlannedJob
    from hotbed.job.planning import Wishes, plan
    from hotbed.parallel.forecast.ranks import planned

    print_head(
        "job, processes",
        "predicted, ms a step",
        "measured",
        "predicted / measured",
        "CPU of all processes, ms a step",
    )
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        rows = Path(folder) / "rows.parquet"
        slots = {name: hb.sources.Keys(400_000) for name in SLOTS}
        drawn = hb.sources.Generated(a.plan_rows, slots=slots)
        hb.sources.Parquet(rows).write(drawn)
        columns = "\n".join(f"    - {{kind: id, name: {name}}}" for name in SLOTS)
        tiers = {
            "in memory": ("{kind: ram}", (1, 2, 4)),
            "on a disk": (f"{{kind: ssd, path: {folder}, ram_rows: 12000}}", (1,)),
        }
        for kind, (tier, sizes) in tiers.items():
            path = Path(folder) / "job.yaml"
            path.write_text(PLANNED.format(columns=columns, rows=rows, tier=tier, folder=folder))
            job = PlannedJob.read(path)
            of_job = plan(job, Wishes(1, disks=disks_of(job, None)))
            for note in of_job.notes:
                print(f"({note})", file=sys.stderr)
            for size in sizes:
                of_ranks = planned(of_job.work, size)
                parts = {part: 1e3 * seconds for part, seconds in of_ranks.times.items()}
                print({part: round(ms, 1) for part, ms in parts.items()}, file=sys.stderr)
                took, cpu = fit_seconds(path, size)
                ratio = of_ranks.seconds / took
                print_row(
                    f"{kind}, {size}",
                    f"{1e3 * of_ranks.seconds:.1f}",
                    f"{1e3 * took:.1f}",
                    f"{ratio:.2f}",
                    f"{1e3 * cpu:.1f}",
                )


def fit_seconds(job: Path, size: int) -> tuple[float, float]:
    """Return the seconds of a step in the second epoch of a job on so many processes, and those of
    all their processors.
    """
    port = free_port()
    command = [sys.executable, __file__, "--fit", str(job)]
    processes = [
        subprocess.Popen(
            command, env=environment(rank, size, port, 1), stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    answers = [process.communicate()[0].splitlines()[-1].split() for process in processes]
    return max(float(wall) for wall, _ in answers), sum(float(cpu) for _, cpu in answers)


def fit_job(path: str) -> None:
    """Train a job, and print the seconds of a step in its second epoch, and of its processor."""
    from dataclasses import replace

    import torch

    from hotbed.job.job import Job as PlannedJob

    torch.set_num_threads(1)
    job = PlannedJob.read(path)
    job = replace(job, grains=job.num_grains(2))
    model = job.rec_model(job.fitted())
    assert job.train is not None
    data = job.dataset(job.train, model.schema)
    model.fit(data, progress=False)
    steps = model.counters["steps"]
    began = time.perf_counter()
    began_cpu = time.process_time()
    model.fit(data, progress=False)
    took = time.perf_counter() - began, time.process_time() - began_cpu
    steps = model.counters["steps"] - steps
    print(took[0] / steps, took[1] / steps)


def measure_torchrec(a: argparse.Namespace) -> None:
    if not a.torchrec:
        return
    head = f"network, B 4,096, N = 2, G {a.grains}"
    print_head(head, "TorchRec samples/s", "ours", "ours beside it")
    for network, hidden in (("perceptron 64-32", "64,32"), ("perceptron 3x400", "400,400,400")):
        theirs, ours = [], []
        if a.only not in network:
            continue
        with ranks_of(Job(network, grains=a.grains), 2) as ranks:
            ranks.ask("train", NUM_BATCHES)
            for _ in range(a.rounds):
                theirs.append(samples_of_torchrec(a, hidden))
                ours.append(4096e3 / ranks.ask("train", 32)[0]["step"])
        medians = [f"{np.median(rates):,.0f}" for rates in (theirs, ours)]
        print_row(network, *medians, spread(np.array(ours) / np.array(theirs)))


def samples_of_torchrec(a: argparse.Namespace, hidden: str) -> float:
    """Run the peer's script, table-wise; return its samples a second, of the median step."""
    port = free_port()
    command = [a.torchrec, str(a.peers / "ranks_torchrec.py"), "tw", hidden, "4096"]
    processes = [
        subprocess.Popen(
            command,
            env=environment(rank, 2, port, 1),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    found = re.search(r"([\d,]+) samples/s", outputs[0])
    assert found is not None, outputs
    return float(found.group(1).replace(",", ""))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    p.add_argument("--only", default="", help="part of a network's name, for the speed")
    p.add_argument("--grains", type=int, default=8, help="of the speed, and beside TorchRec")
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="N of the bytes")
    p.add_argument("--steps", type=int, default=20, help="in a round of a small network")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rows", type=int, default=2_000_000, help="of the large table")
    p.add_argument("--torchrec", help="the Python that has TorchRec")
    p.add_argument("--peers", type=Path, default=Path("../shared/peers"))
    p.add_argument("--folder", default=".", help="on the disk of the plan")
    p.add_argument("--plan-rows", type=int, default=300_000, help="samples of the plan's job")
    p.add_argument("--job", help=argparse.SUPPRESS)
    p.add_argument("--fit", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.fit:
        fit_job(a.fit)
        return
    if a.job:
        work(Job(**json.loads(a.job)))
        return
    for section in a.sections:
        globals()[f"measure_{section}"](a)


if __name__ == "__main__":
    main()
