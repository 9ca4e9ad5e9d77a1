# SPDX-License-Identifier: Apache-2.0
"""Online training with and without `hb.Ahead`, in turn, from files in the order of time.

    python benchmarks/ahead.py [--avazu CSV] [--passes 12] [--pairs 7] [--batch 256] [--cores 2]
        [--busy 0] [--learn-only]

Prints a table: events/s as a user has them without `hb.Ahead`, which is with a thread of torch a
core, and with it; the median of the ratios of the pairs, with the least and the greatest one. The
last column is the ratio to one thread of torch, the best that a user can choose by hand for small
networks. Each figure is end to end: encoding, scoring each batch before it is learned, learning,
and choosing the threads. The events come `--passes` times, as one stream from memory, so that the
choice of threads is a small part.

`--learn-only` scores nothing: then `hb.Ahead` only maps ids and chooses threads. `--bound` prints
instead how much faster the steps are if all ids were mapped before the clock starts, with a thread
of torch a core and with one; give it `--learn-only`, too: then no mapping ahead can win more than
that. `--busy` starts processes that compute without an end on the same cores, as a server or a
broker beside the training would.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import torch
from stream import avazu, movielens

import hotbed as hb
from hotbed.connectors.source import Source
from hotbed.training.ahead.data import example_of
from hotbed.training.step.planner import Planner

Given = Callable[[hb.Dataset, hb.RecModel], Any]
"""What is learned of a Dataset."""


def alone(dataset: hb.Dataset, model: hb.RecModel) -> Any:
    return dataset


def ahead(dataset: hb.Dataset, model: hb.RecModel) -> Any:
    return hb.Ahead(dataset)


def encoded(dataset: hb.Dataset, model: hb.RecModel) -> Any:
    return list(dataset)


def mapped(dataset: hb.Dataset, model: hb.RecModel) -> Any:
    planner = Planner.of(model.network)
    return [planner.plan(example_of(batch)).batch for batch in dataset]


def events_a_second(
    source: Source, schema: hb.Schema, a: argparse.Namespace, given: Given, torch_threads: int
) -> float:
    """Learn the events once."""
    torch.set_num_threads(torch_threads)
    hb.set_num_threads(a.cores)
    torch.manual_seed(0)
    tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.02))
    network = hb.models.DCNv2(schema, tables, hidden=(64, 32))
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), {"auc"})
    data = given(hb.Dataset(source, schema, a.batch), model)
    begin = time.perf_counter()
    model.online_train(data, progressive=not a.learn_only, progress=False)
    return model.counters["samples"] / (time.perf_counter() - begin)


def repeated(source: Source, passes: int) -> Source:
    """Return the events of a source several times, in memory."""
    events = pa.Table.from_batches([batch for batch, _ in source.read()])
    return hb.sources.Memory(pa.concat_tables([events] * passes).combine_chunks())


def measure(
    name: str, source: Source, schema: hb.Schema, passes: int, a: argparse.Namespace
) -> str:
    """Return a row of the table."""
    source = repeated(source, passes)
    ways: list[tuple[Given, int]] = [(ahead, a.cores), (alone, a.cores), (alone, 1)]
    pairs = [(0, 1), (0, 2)]
    if a.bound:
        ways = [(encoded, a.cores), (mapped, a.cores), (encoded, 1), (mapped, 1)]
        pairs = [(1, 0), (3, 2)]
    rounds = []
    for _ in range(a.pairs + 1):
        rounds.append([events_a_second(source, schema, a, *way) for way in ways])
    del rounds[0]  # it loads code
    cells = [name]
    cells += [f"{statistics.median(speeds):,.0f}" for speeds in zip(*rounds, strict=True)]
    for mine, other in pairs:
        ratios = [speeds[mine] / speeds[other] for speeds in rounds]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Let other processes compute meanwhile, on the cores of this one."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--avazu", default=None, help="a csv of Avazu's events, in the order of time")
    p.add_argument("--passes", type=int, default=12, help="Avazu's are four times as many")
    p.add_argument("--pairs", type=int, default=7)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--cores", type=int, default=2)
    p.add_argument("--busy", type=int, default=0, help="processes that compute beside it")
    p.add_argument("--bound", action="store_true", help="steps whose ids are mapped before")
    p.add_argument("--learn-only", action="store_true", help="score no batch before it is learned")
    a = p.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.cores])
    columns = "events/s with Ahead | alone | alone, one torch thread | Ahead / alone | Ahead / one"
    if a.bound:
        columns = (
            "events/s | mapped | one torch thread | mapped, one | mapped / not | the same, one"
        )
    print(f"| stream | {columns} |")
    print("|---" * (columns.count("|") + 2) + "|", flush=True)
    with busy(a.busy):
        print(measure("MovieLens", *movielens(), a.passes, a), flush=True)
        if a.avazu:
            print(measure("Avazu", *avazu(a.avazu), 4 * a.passes, a), flush=True)


if __name__ == "__main__":
    main()
