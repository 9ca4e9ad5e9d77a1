# SPDX-License-Identifier: Apache-2.0
"""Scores in process: DLRM or DCNv2 over 26 features of one model with many ids, against the same network in plain torch.

Prints one JSON line: for each number of candidates, p50 and p99 milliseconds and CPU milliseconds of a request, ours
(columns in, encode, rows, ONNX Runtime) and torch's (ids given as tensors: `nn.EmbeddingBag` tables of the same rows, eval
mode, no encoding); `ready_seconds`: from the second start on, until the model can be asked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hotbed as hb

FEATURES, DENSE, DIM = 26, 13, 16


def make(kind: str, ids: int) -> hb.RecModel:
    """An untrained model with `ids` rows in all."""
    torch.manual_seed(0)
    schema = hb.Schema(
        [hb.Label("y"), *(hb.Id(f"c{i}") for i in range(FEATURES)), *(hb.Dense(f"d{i}") for i in range(DENSE))]
    )
    tables = hb.make_tables(schema, dim=DIM)
    for table in tables.values():
        for start in range(0, ids // FEATURES, 500_000):
            table.find_or_insert(np.arange(start, min(ids // FEATURES, start + 500_000)))
    hidden = {"bottom": (64,), "hidden": (256, 128)} if kind == "DLRM" else {"hidden": (256, 128)}
    model = hb.RecModel(getattr(hb.models, kind)(schema, tables, **hidden), "bce", "adam")
    model.schema = schema
    return model


class Plain(nn.Module):
    """The same network over nn.EmbeddingBag tables; it is given the ids of each feature as one tensor."""

    def __init__(self, model: hb.RecModel, rows: int) -> None:
        super().__init__()
        self.network = model.network.eval()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for _ in range(FEATURES))
        self.offsets = {n: torch.arange(n) for n in (1, 100, 1000)}

    def forward(self, ids: torch.Tensor, dense: dict[str, torch.Tensor]) -> torch.Tensor:
        """Ids int64 [features, n], dense columns [n] -> probabilities [n]."""
        offsets = self.offsets[ids.shape[1]]
        flat = torch.cat([bag(one, offsets) for bag, one in zip(self.bags, ids, strict=True)], dim=1)
        collection: Any = self.network.inputs.collection
        collection.pool = lambda inputs, time: (flat, [])
        nothing = hb.Ids(torch.zeros(0, dtype=torch.int64))
        batch = hb.Batch({f"c{i}": nothing for i in range(FEATURES)}, dense, num_samples=len(flat))
        scores: torch.Tensor = torch.sigmoid(self.network(batch))
        return scores


def measure(ask: Callable[[Any], Any], requests: list[Any]) -> dict[str, float]:
    """p50, p99 and CPU milliseconds of a request, after a tenth to warm up."""
    for request in requests[: len(requests) // 10]:
        ask(request)
    took, cpu = [], time.process_time()
    for request in requests:
        begin = time.perf_counter()
        ask(request)
        took.append(time.perf_counter() - begin)
    cpu = (time.process_time() - cpu) / len(requests)
    return {"p50": round(float(np.median(took)) * 1e3, 3), "p99": round(float(np.quantile(took, 0.99)) * 1e3, 3),
            "cpu": round(cpu * 1e3, 3)}  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", choices=("DLRM", "DCNv2"), default="DLRM")
    p.add_argument("--ids", type=int, default=10_000_000)
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--threads", type=int, default=1, help="of torch and ONNX Runtime in a request")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    hb.set_num_threads(1)
    root, draw, rows = Path(tempfile.mkdtemp(prefix="hotbed-serving-")), np.random.default_rng(0), a.ids // FEATURES
    try:
        model = make(a.model, a.ids)
        model.export(root / "exported")
        hb.ParameterServer(root / "rows").load("m", root / "exported")  # writes the rows once
        begin = time.perf_counter()
        session = hb.InferenceSession(hb.ParameterServer(root / "rows").load("m", root / "exported"), num_threads=a.threads)
        line: dict[str, Any] = {"model": a.model, "ids": a.ids, "ready_seconds": round(time.perf_counter() - begin, 2)}
        plain = Plain(model, rows)
        for n in (1, 100, 1000):
            requests = []
            for _ in range(a.requests):
                ids = (draw.random((FEATURES, n)) ** 4 * rows).astype(np.int64)
                requests.append((ids, draw.random((DENSE, n), np.float32)))
            ours = [
                {f"c{i}": ids[i] for i in range(FEATURES)} | {f"d{i}": dense[i] for i in range(DENSE)}
                for ids, dense in requests
            ]
            theirs = [
                (torch.from_numpy(ids), {f"d{i}": torch.from_numpy(dense[i]) for i in range(DENSE)})
                for ids, dense in requests
            ]
            line[f"ours_{n}"] = measure(session.predict, ours)
            with torch.inference_mode():
                line[f"torch_{n}"] = measure(lambda request: plain(*request), theirs)
        print(json.dumps(line))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
