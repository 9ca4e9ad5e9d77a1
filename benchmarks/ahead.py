# SPDX-License-Identifier: Apache-2.0
"""Online training with and without `hb.Ahead`, in turn, from files in the order of time.

    python benchmarks/ahead.py [--avazu CSV] [--passes 6] [--pairs 7] [--batch 256] [--cores 2]

Prints a table: events/s as a user has them without `hb.Ahead`, which is with a thread of torch a
core, and with it; the median of the ratios of the pairs, with the least and the greatest one. The
last column is the ratio to one thread of torch, the best that a user can choose by hand for small
networks. Each figure is end to end: encoding, learning, and choosing the threads. The events come
`--passes` times, as one stream from memory, so that the choice of threads is a small part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import torch
from stream import avazu, movielens

import hotbed as hb
from hotbed.connectors.source import Source


def events_a_second(
    source: Source,
    schema: hb.Schema,
    a: argparse.Namespace,
    given: Callable[[hb.Dataset], Any],
    torch_threads: int,
) -> float:
    """Learn the events once."""
    torch.set_num_threads(torch_threads)
    hb.set_num_threads(a.cores)
    torch.manual_seed(0)
    tables = hb.make_tables(schema, dim=8, rule=hb.Adagrad(lr=0.02))
    network = hb.models.DCNv2(schema, tables, hidden=(64, 32))
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), {"auc"})
    dataset = hb.Dataset(source, schema, a.batch)
    begin = time.perf_counter()
    model.online_train(given(dataset), progressive=a.progressive, progress=False)
    return model.counters["samples"] / (time.perf_counter() - begin)


def repeated(source: Source, passes: int) -> Source:
    """Return the events of a source several times, in memory."""
    events = pa.Table.from_batches([batch for batch, _ in source.read()])
    return hb.sources.Memory(pa.concat_tables([events] * passes).combine_chunks())


def measure(
    name: str,
    source: Source,
    schema: hb.Schema,
    passes: int,
    a: argparse.Namespace,
) -> str:
    """Return a row of the table."""
    source = repeated(source, passes)
    ahead = []
    plain = []
    one_thread = []
    for _ in range(a.pairs + 1):
        plain.append(events_a_second(source, schema, a, lambda data: data, a.cores))
        ahead.append(events_a_second(source, schema, a, hb.Ahead, a.cores))
        one_thread.append(events_a_second(source, schema, a, lambda data: data, 1))
    cells = [name]  # the first round loads code
    cells += [f"{statistics.median(speeds[1:]):,.0f}" for speeds in (plain, ahead, one_thread)]
    for others in (plain, one_thread):
        ratios = [mine / other for mine, other in zip(ahead[1:], others[1:], strict=True)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--avazu", default=None, help="a csv of Avazu's events, in the order of time")
    p.add_argument("--passes", type=int, default=6, help="Avazu's are four times as many")
    p.add_argument("--pairs", type=int, default=7)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--cores", type=int, default=2)
    p.add_argument("--progressive", action="store_true", help="predict each batch before learning")
    a = p.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.cores])
    speeds = "events/s alone | with Ahead | alone, one torch thread"
    print(f"| stream | {speeds} | Ahead / alone | Ahead / one thread |")
    print("|---|---|---|---|---|---|", flush=True)
    print(measure("MovieLens", *movielens(), a.passes, a), flush=True)
    if a.avazu:
        print(measure("Avazu", *avazu(a.avazu), 4 * a.passes, a), flush=True)


if __name__ == "__main__":
    main()
