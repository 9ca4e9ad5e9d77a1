# SPDX-License-Identifier: Apache-2.0
"""Serve a model while its trainer goes on, and ask it all the while with Triton's own gRPC client: `demo.py` calls it.

`hotbed serve` follows what the trainer publishes: each version takes the place of the one before, no request is lost.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import polars as pl
from tritonclient import grpc as triton

from hotbed.metrics.served import Answer

DATA = Path(__file__).resolve().parent.parent / "data/ml_latest_small"


@contextmanager
def server(published: Path, log: Path) -> Iterator[str]:
    """`hotbed serve` on free ports in a process of its own, until it is left; gives the address for gRPC clients."""
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        ports = [str(free.getsockname()[1]) for free in (one, two)]
    command = [sys.executable, "-m", "hotbed.cli", "serve", f"movielens={published}", "--watch", str(published),
               "--http-port", ports[0], "--grpc-port", ports[1], "--set", "drain_seconds=0"]  # fmt: skip
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            yield f"127.0.0.1:{ports[1]}"
        finally:
            process.terminate()  # it answers what it has begun, then ends
    assert process.returncode == 0, log.read_text()


def request() -> dict[str, np.ndarray]:
    """Raw columns: the user who rates most in the stream, and the hundred films that are rated most there."""
    ratings = pl.read_csv(DATA / "ratings.csv").sort("timestamp")
    recent = ratings.tail(len(ratings) // 5)
    events = recent.filter(userId=recent["userId"].value_counts(sort=True)["userId"][0])[-1]
    films = recent["movieId"].value_counts(sort=True).head(100)
    films = films.join(pl.read_csv(DATA / "movies.csv"), on="movieId", maintain_order="left")
    return {name: films[name].to_numpy() if name in films.columns else events[name].to_numpy()
            for name in ("userId", "timestamp", "movieId", "genres", "title")}  # fmt: skip


def ask(address: str, until: Callable[[], bool]) -> tuple[list[Answer], dict[str, list[tuple[float, float]]]]:
    """Send the request again and again until told: every answer, and the scores that each version gives to four films."""
    columns, answers = request(), list[Answer]()
    scores = {str(title): list[tuple[float, float]]() for title in columns["title"][:4]}
    with triton.InferenceServerClient(address) as client:
        while not ready(client):
            time.sleep(0.05)
        inputs = []
        for told in client.get_model_metadata("movielens").inputs:  # BYTES or INT64, as the column was in training
            values = columns[told.name].astype(object if told.datatype == "BYTES" else np.int64)
            inputs.append(triton.InferInput(told.name, values.shape, told.datatype))  # [1] holds for all candidates
            inputs[-1].set_data_from_numpy(values)
        while not until() or len(answers) < 100:
            started = time.perf_counter()
            result = client.infer("movielens", inputs)
            seconds, version = time.perf_counter() - started, int(result.get_response().model_version)
            if not answers or version != answers[-1].version:
                for shown, score in zip(scores.values(), result.as_numpy("prediction"), strict=False):
                    shown.append((time.time(), float(score)))
            answers.append(Answer(time.time(), seconds, version))
            time.sleep(0.008)  # leaves the processors to the trainer
    return answers, scores


def ready(client: triton.InferenceServerClient) -> bool:
    """Whether the server answers."""
    with suppress(triton.InferenceServerException):
        return bool(client.is_server_ready())
    return False
