# SPDX-License-Identifier: Apache-2.0
"""Serve the exported model of a pipeline, ask it, and compare its scores with the trained model.

run.py calls this module.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import hotbed as hb


@contextmanager
def server(name: str, runs: Path) -> Iterator[hb.Client]:
    """Run `hotbed serve` in a process of its own; yield a client when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["serve", f"{name}={runs / 'export'}", "--http-port", str(port), "--grpc-port", "-1"]
    with open(runs / "serve.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "hotbed.cli", *command], stderr=log)
    try:
        with hb.Client(f"http://127.0.0.1:{port}") as client:
            yield ready(client, process)
    finally:
        process.terminate()
        process.wait()


def ready(client: hb.Client, process: subprocess.Popen[bytes]) -> hb.Client:
    """Return the client when its server answers."""
    while process.poll() is None:
        try:
            client.models()
            return client
        except hb.errors.ServingError:
            time.sleep(0.1)
    sys.exit("The server ended before it answered.")


def ask(name: str, runs: Path, asked: list[pl.DataFrame]) -> hb.report.Served:
    """Ask a server all requests; check its scores against those of the trained model."""
    model = hb.load(runs)
    schema = hb.prepare.Workflow(runs / "prepared").raw
    answers, differences = [], []
    with server(name, runs) as client:
        for rows in asked:
            columns: dict[str, Any] = rows.to_dict(as_series=False)
            began = time.perf_counter()
            answer = client.ask(name, columns)
            seconds = time.perf_counter() - began
            answers.append(hb.report.Answer(time.time(), seconds, answer.version))
            expected = model.predict(hb.Dataset(hb.sources.Memory(rows), schema))
            differences.append(np.abs(answer.outputs["prediction"] - expected).max())
    difference = max(differences)
    if difference > 1e-6:
        sys.exit(f"A served score differs from that of training by {difference:.1e}.")
    print(f"{len(answers)} requests; served scores are those of training to {difference:.1e}")
    return hb.report.Served(answers, [])
