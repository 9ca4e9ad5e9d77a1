# SPDX-License-Identifier: Apache-2.0
"""What long histories cost: a training step, and a request of 100 candidates, by kind of attention.

The step has 1,024 samples with 200 entries each and dim 16, one table for target and history. The
request has 100 candidates and one history of 1,000 entries for all of them, and is answered by a
session in this process. "lookup" takes the mean of the rows, as a column of pooling "mean".
Medians and 99th percentiles in milliseconds, of the time that passes and of the processor's (cpu).
Kinds take turns in one process; one JSON line for the steps of a kind, one for its requests:

    python benchmarks/attention.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hotbed as hb

DIM = 16
NUM_ITEMS = 50_000
KINDS = ("lookup", "decay", "dot", "perceptron")


def recmodel(kind: str, length: int) -> hb.RecModel:
    """Return a model whose history is pooled as `kind` says."""
    pooling = "mean" if kind == "lookup" else "none"
    history = hb.Id("history", table="item", pooling=pooling, max_length=length)  # type: ignore[arg-type]
    schema = hb.Schema([hb.Label("clicked"), hb.Id("item"), history])
    tables = hb.make_tables(schema, dim=DIM, rule=hb.Adagrad(lr=0.05))
    if kind == "lookup":
        network: Any = hb.models.DNN(schema, tables, hidden=[64, 32])
    else:
        network = hb.models.DIN(
            schema,
            tables,
            histories={"history": "item"},
            attention=kind,  # type: ignore[arg-type]
            hidden=[64, 32],
            activation="relu",
        )
    return hb.RecModel(network, "bce", hb.Adam(lr=1e-3))


def rows(num_rows: int, length: int, seed: int) -> dict[str, Any]:
    """Return samples with `length` entries each; ids by a power law."""
    draw = np.random.default_rng(seed)
    return {
        "item": draw.zipf(1.2, num_rows) % NUM_ITEMS,
        "history": list(draw.zipf(1.2, (num_rows, length)) % NUM_ITEMS),
        "clicked": draw.integers(0, 2, num_rows),
    }


def milliseconds(
    calls: dict[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, float]]:
    """Return median and 99th percentile of the time of each call, and of its processor time.

    The calls take turns, so that other work on the machine slows down all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    processor_times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            processor_began = time.process_time()
            call()
            processor_times[name].append((time.process_time() - processor_began) * 1e3)
            times[name].append((time.perf_counter() - began) * 1e3)
    return {
        name: {
            "median_ms": round(float(np.median(times[name])), 2),
            "p99_ms": round(float(np.quantile(times[name], 0.99)), 2),
            "cpu_median_ms": round(float(np.median(processor_times[name])), 2),
            "cpu_p99_ms": round(float(np.quantile(processor_times[name], 0.99)), 2),
        }
        for name in calls
    }


def step(kind: str) -> Callable[[], object]:
    """Return a training step of one batch."""
    torch.manual_seed(0)
    model = recmodel(kind, 200)
    (batch,) = hb.Dataset(hb.sources.Memory(rows(1024, 200, 0)), model.schema, 1024)
    model.step(batch)
    return lambda: model.step(batch)


def request(kind: str, folder: str) -> Callable[[], object]:
    """Return a request of 100 candidates with one history of 1,000 entries."""
    model = recmodel(kind, 1000)
    data = hb.Dataset(hb.sources.Memory(rows(512, 1000, 1)), model.schema, 64)
    model.fit(data, progress=False)
    candidates = {"item": rows(100, 1, 2)["item"]}
    context = {"history": rows(1, 1000, 3)["history"][0].tolist()}
    session = hb.InferenceSession(model.export(f"{folder}/{kind}"))
    session.predict(candidates, context=context)
    return lambda: session.predict(candidates, context=context)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--requests", type=int, default=300)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(a.threads)
    if a.steps:
        steps = milliseconds({kind: step(kind) for kind in a.kinds}, a.steps)
        for kind, figures in steps.items():
            print(json.dumps({"kind": kind, "step": figures}), flush=True)
    if a.requests:
        with tempfile.TemporaryDirectory() as folder:
            calls = {kind: request(kind, folder) for kind in a.kinds}
            for kind, figures in milliseconds(calls, a.requests).items():
                print(json.dumps({"kind": kind, "request": figures}), flush=True)


if __name__ == "__main__":
    main()
