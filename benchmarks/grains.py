# SPDX-License-Identifier: Apache-2.0
"""CPU time of a training step by grains beside the step of the whole batch, in turn in one process.

A step is one of `RecModel.fit`: ids are mapped, rows are pooled, and the forward and backward
pass, the join of the grains and the update of rows and layers follow. All numbers of grains learn
the same batches. Prints a Markdown table: the medians of a step, and their ratio to that of one
grain with its spread over the rounds. With `--memory G` it prints instead what G grains add to the peak
memory.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import workload

import hotbed as hb

NUM_BATCHES = 4


@dataclass(frozen=True)
class Case:
    """A network, its batch and the numbers of grains to compare; `steps` in a round of each."""

    name: str
    kind: Any
    arguments: dict[str, Any]
    features: int
    batch: int
    grains: Sequence[int]
    steps: int


DCNV2 = {"num_cross_layers": 3, "hidden": (400, 400, 400)}
SMALL = {"hidden": (64, 32)}
CASES = [
    Case("DCNv2, 26 ids, 3 cross, 3x400", hb.models.DCNv2, DCNV2, 26, 4096, (1, 8), 8),
    Case("perceptron 64-32, 8 ids", hb.models.DNN, SMALL, 8, 1024, (1, 2, 4, 8), 200),
    Case("perceptron 64-32, 8 ids", hb.models.DNN, SMALL, 8, 256, (1, 2, 4, 8), 400),
]


def model_of(case: Case, grains: int) -> hb.RecModel:
    torch.manual_seed(0)
    schema = hb.Schema([hb.Label("y"), *(hb.Id(name) for name in names(case))])
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05), seed=0)
    network = case.kind(schema, tables, **case.arguments)
    return hb.RecModel(network, "bce", hb.Adam(lr=1e-3), grains=grains)


def names(case: Case) -> list[str]:
    return [f"f{number}" for number in range(case.features)]


def batches_of(case: Case, num_ids: int, alpha: float) -> list[hb.Batch]:
    drawn = argparse.Namespace(tables=case.features, ids=num_ids, batch=case.batch, alpha=alpha)
    random = np.random.default_rng(0)
    every = []
    for dense in workload.draw(drawn, NUM_BATCHES):
        ids = dict(zip(names(case), map(hb.Ids, workload.raw(dense)), strict=True))
        labels = random.integers(0, 2, case.batch).astype(np.float32)
        every.append(hb.Batch(ids, {}, {"y": labels}))
    return every


def measured(case: Case, a: argparse.Namespace) -> dict[int, list[float]]:
    """Return the CPU milliseconds of a step in each round, by the number of grains."""
    batches = batches_of(case, a.ids, a.alpha)
    models = {grains: model_of(case, grains) for grains in case.grains}
    times: dict[int, list[float]] = {grains: [] for grains in models}
    num_epochs = max(1, round(case.steps * a.scale / len(batches)))
    for number in range(a.rounds + 1):  # the first warms up
        for grains, model in models.items():
            start = time.process_time()
            model.fit(batches, epochs=num_epochs, progress=False)
            seconds = time.process_time() - start
            if number:
                times[grains].append(1e3 * seconds / (num_epochs * len(batches)))
    return times


def added_memory(case: Case, a: argparse.Namespace) -> float:
    """Return by how many MB steps of the whole batch raise the peak memory of this process."""
    batches = batches_of(case, a.ids, a.alpha)
    model = model_of(case, a.memory)
    pieces = [batch[at : at + 1024] for batch in batches for at in range(0, case.batch, 1024)]
    model.fit(pieces, progress=False)  # all rows are there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.fit(batches, progress=False)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--ids", type=int, default=100_000, help="distinct ids a table")
    p.add_argument("--alpha", type=float, default=1.05, help="exponent of the power law of ids")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=5, help="of all numbers of grains, in turn")
    p.add_argument("--scale", type=float, default=1.0, help="factor of the steps of a round")
    p.add_argument("--only", default="", help="part of a network's name")
    p.add_argument("--memory", type=int, help="measure the memory of DCNv2 with so many grains")
    p.add_argument("--batch", type=int, default=32_768, help="with --memory")
    a = p.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    if a.memory:
        print(f"{added_memory(replace(CASES[0], batch=a.batch), a):.0f} MB")
        return
    print("| network | batch | grains | CPU ms a step | beside one grain |")
    print("|---|---|---|---|---|")
    for case in CASES:
        if a.only not in case.name:
            continue
        times = measured(case, a)
        for grains, own in times.items():
            ratios = np.array(own) / np.array(times[1])
            beside = f"{np.median(ratios):.2f}x ({ratios.min():.2f} to {ratios.max():.2f})"
            cells = [case.name, case.batch, grains, f"{np.median(own):.2f}", beside]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
