# SPDX-License-Identifier: Apache-2.0
"""Scores in process: DLRM or DCNv2 over 26 features of one model with many ids, against the same
network in plain torch.

Prints one JSON line: for each number of candidates, p50 and p99 milliseconds and CPU milliseconds
of a request in this process. `ours`: NumPy columns in, encode, rows, ONNX Runtime; `context`: with
every other column as context; `torch`: ids given as tensors, `nn.EmbeddingBag` tables of the same
rows, eval mode, no encoding. `parts_100`: CPU milliseconds of encoding and rows; the rest is the
network's. `cold_100`: the first requests after the rows left the page cache. `cache…_100`,
`remote…_100`: through an EmbeddingCache over rows of this process, and over a parameter server in
another; `cold`: its first requests, with nothing in it, `late` of whose rows missed the deadline.
`ready_seconds`: from the second start on, until the model can be asked.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hotbed as hb
from hotbed.embedding import modules
from hotbed.serving.request import RequestEncoder
from hotbed.serving.rows import FrozenLookup
from hotbed.serving.server.endpoints.rows_service import RowsServer
from hotbed.serving.server.options import RowsOptions

FEATURES, DENSE, DIM = 26, 13, 16


def make(kind: str, ids: int) -> hb.RecModel:
    """An untrained model with `ids` rows in all."""
    torch.manual_seed(0)
    schema = hb.Schema(
        [
            hb.Label("y"),
            *(hb.Id(f"c{i}") for i in range(FEATURES)),
            *(hb.Dense(f"d{i}") for i in range(DENSE)),
        ]
    )
    tables = hb.make_tables(schema, dim=DIM)
    for table in tables.values():
        for start in range(0, ids // FEATURES, 500_000):
            table.find_or_insert(np.arange(start, min(ids // FEATURES, start + 500_000)))
    hidden = {"bottom": (64,), "hidden": (256, 128)} if kind == "DLRM" else {"hidden": (256, 128)}
    model = hb.RecModel(getattr(hb.models, kind)(schema, tables, **hidden), "bce", "adam")
    model.schema = schema
    return model


class Prepared(modules.Flow):
    """Gives `flat` for any ids."""

    flat: torch.Tensor

    def pool(
        self, module: modules.TableModule, inputs: Any, time: Any, plan: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.flat, []


class Plain(nn.Module):
    """The same network over nn.EmbeddingBag tables; it is given the ids of each feature as one
    tensor.
    """

    def __init__(self, model: hb.RecModel, rows: int) -> None:
        super().__init__()
        self.network = model.network.eval()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for _ in range(FEATURES))
        self.offsets = {n: torch.arange(n) for n in (1, 100, 1000)}
        self.prepared = Prepared()
        for module in modules.table_modules(self.network):
            module.flow = self.prepared

    def forward(self, ids: torch.Tensor, dense: dict[str, torch.Tensor]) -> torch.Tensor:
        """Ids int64 [features, n], dense columns [n] -> probabilities [n]."""
        offsets = self.offsets[ids.shape[1]]
        flat = torch.cat(
            [bag(one, offsets) for bag, one in zip(self.bags, ids, strict=True)], dim=1
        )
        self.prepared.flat = flat
        nothing = hb.Ids(torch.zeros(0, dtype=torch.int64))
        batch = hb.Batch({f"c{i}": nothing for i in range(FEATURES)}, dense, num_samples=len(flat))
        scores: torch.Tensor = torch.sigmoid(self.network(batch))
        return scores


def measure(ask: Callable[[Any], Any], requests: list[Any], warm: float = 0.1) -> dict[str, float]:
    """p50, p99 and CPU milliseconds of a request, after a share of them to warm up."""
    for request in requests[: int(len(requests) * warm)]:
        ask(request)
    took, cpu = [], time.process_time()
    for request in requests:
        begin = time.perf_counter()
        ask(request)
        took.append(time.perf_counter() - begin)
    cpu = (time.process_time() - cpu) / len(requests)
    return {
        "p50": round(float(np.median(took)) * 1e3, 3),
        "p99": round(float(np.quantile(took, 0.99)) * 1e3, 3),
        "cpu": round(cpu * 1e3, 3),
    }


def draws(count: int, n: int, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Requests of `n` candidates: ids int64 [features, n], some far more often than others, and
    dense columns [columns, n].
    """
    draw = np.random.default_rng(n)
    return [
        (
            (draw.random((FEATURES, n)) ** 4 * rows).astype(np.int64),
            draw.random((DENSE, n), np.float32),
        )
        for _ in range(count)
    ]


def columns(request: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    ids, dense = request
    return {f"c{i}": ids[i] for i in range(FEATURES)} | {f"d{i}": dense[i] for i in range(DENSE)}


def halved(given: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Every other column as context, as its first candidate has it."""
    names = list(given)
    return {name: given[name] for name in names[::2]}, {
        name: given[name][0].item() for name in names[1::2]
    }


def parts(version: Any, requests: list[Any]) -> dict[str, float]:
    """CPU milliseconds of encoding and of rows; the rest of a request is the network's."""
    encode = RequestEncoder(version.schema)
    look = FrozenLookup(
        [tuple(one) for one in version.graph["lookups"][0]["features"]], version.tables
    )
    encoded = [encode(one) for one in requests]
    return {
        "encode": measure(encode, requests)["cpu"],
        "rows": measure(lambda one: look(one.ids, one.num_samples), encoded)["cpu"],
    }


def forget(folder: Path) -> None:
    """Take files that nobody has mapped out of the page cache."""
    gc.collect()
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(rows: Path, port: Any) -> None:
    """A parameter server in a process of its own, which reads what the other wrote; says its port."""
    running = RowsServer(hb.ParameterServer(rows), ["m"], RowsOptions(port=0))
    threading.Thread(
        target=lambda: running.started.wait() and port.put(running.port), daemon=True
    ).start()
    running.run()


def through_caches(root: Path, requests: list[Any], threads: int) -> dict[str, Any]:
    """Cold and warm, over rows here and elsewhere."""
    spawn = multiprocessing.get_context("spawn")
    port = spawn.Queue()
    process = spawn.Process(target=serve, args=(root / "rows", port))
    process.start()
    found: dict[str, Any] = {}
    try:
        here = hb.ParameterServer(root / "rows")
        here.load("m", root / "exported")
        stores = {
            "cache": here,
            "remote": hb.ParameterServer.connect(f"grpc://127.0.0.1:{port.get(timeout=60)}"),
        }
        for name, store in stores.items():
            cache = hb.EmbeddingCache(store, "m", preload=0.0)
            session = hb.InferenceSession(store.model("m"), cache, threads)
            found[f"{name}_cold_100"] = {
                **measure(session.predict, requests[:100], 0),
                "late": cache.late,
            }
            hits, misses = cache.hits, cache.misses
            found[f"{name}_100"] = measure(session.predict, requests, 1.0)
            hits, misses = cache.hits - hits, cache.misses - misses
            found[f"{name}_100"]["hit_rate"] = round(hits / (hits + misses), 3)
    finally:
        process.terminate()
        process.join()
    return found


def in_process(root: Path, model: hb.RecModel, rows: int, a: argparse.Namespace) -> dict[str, Any]:
    """Warm, as after a start, beside torch; then cold."""
    hb.ParameterServer(root / "rows").load("m", root / "exported")  # writes the rows once
    begin = time.perf_counter()
    session = hb.InferenceSession(
        hb.ParameterServer(root / "rows").load("m", root / "exported"), num_threads=a.threads
    )
    found: dict[str, Any] = {"ready_seconds": round(time.perf_counter() - begin, 2)}
    plain = Plain(model, rows)
    for n in (1, 100, 1000):
        drawn = draws(a.requests, n, rows)
        given = [columns(one) for one in drawn]
        found[f"ours_{n}"] = measure(session.predict, given)
        found[f"context_{n}"] = measure(
            lambda request: session.predict(*request), [halved(one) for one in given]
        )
        tensors = [
            (torch.from_numpy(ids), {f"d{i}": torch.from_numpy(dense[i]) for i in range(DENSE)})
            for ids, dense in drawn
        ]
        with torch.inference_mode():
            found[f"torch_{n}"] = measure(lambda request: plain(*request), tensors)
        if n == 100:
            found["parts_100"] = parts(session.model, given)
    del session
    forget(root / "rows")
    session = hb.InferenceSession(
        hb.ParameterServer(root / "rows").load("m", root / "exported"), num_threads=a.threads
    )
    found["cold_100"] = measure(session.predict, [columns(one) for one in draws(100, 100, rows)], 0)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", choices=("DLRM", "DCNv2"), default="DLRM")
    p.add_argument("--ids", type=int, default=10_000_000)
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--threads", type=int, default=1, help="of torch and ONNX Runtime in a request")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(1)
    root, rows = Path(tempfile.mkdtemp(prefix="hotbed-serving-")), a.ids // FEATURES
    try:
        model = make(a.model, a.ids)
        model.export(root / "exported")
        line = {"model": a.model, "ids": a.ids, **in_process(root, model, rows, a)}
        del model
        line |= through_caches(
            root, [columns(one) for one in draws(a.requests, 100, rows)], a.threads
        )
        print(json.dumps(line))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
