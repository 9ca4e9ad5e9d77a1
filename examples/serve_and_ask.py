# SPDX-License-Identifier: Apache-2.0
"""Serve a model while it is trained, and send requests with Triton's own gRPC client.

`demo.py` calls this module. `hotbed serve` follows the versions that the trainer publishes: each
version replaces the one before, and no request is lost.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tritonclient import grpc as triton

import hotbed as hb

DATA = Path(__file__).resolve().parent.parent / "data/ml_latest_small"
Answers = list[hb.report.Answer]
Scores = dict[str, dict[str, list[tuple[float, float]]]]

# Runs a module as `python -m` does. It ends with the process that started it, also after a kill.
WATCHED = """
import os, runpy, signal, sys, threading
def watch():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
runpy.run_module("hotbed.cli", run_name="__main__", alter_sys=True)
"""


def hotbed(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command of `hotbed`, which ends when this process does."""
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED, *arguments], stdin=subprocess.PIPE, **options
    )


@contextmanager
def server(published: Path, log: Path) -> Iterator[str]:
    """Run `hotbed serve` in a process of its own; yield the address for gRPC clients."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["serve", f"movielens={published}", "--watch", str(published)]
    command += ["--http-port", "0", "--grpc-port", str(port), "--set", "drain_seconds=0"]
    with log.open("w") as file, hotbed(command, stderr=file) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.stdin.close()  # the server answers the requests that it has begun, then ends
    assert process.returncode == 0, log.read_text()


def requests() -> dict[str, dict[str, np.ndarray]]:
    """Return the raw columns of a request by user: the hundred films rated most in the stream.

    One user rates most in the stream. The other rates most before it and seldom in it: a fixed
    point of reference.
    """
    ratings = pl.read_csv(DATA / "ratings.csv").sort("timestamp")
    recent = ratings.tail(len(ratings) // 5)
    past = ratings.head(len(ratings) - len(recent))
    films = recent["movieId"].value_counts(sort=True).head(100)
    films = films.join(pl.read_csv(DATA / "movies.csv"), on="movieId", maintain_order="left")
    columns = {name: films[name].to_numpy() for name in ("movieId", "genres", "title")}
    now = recent["timestamp"][-1:].to_numpy()
    users = {
        "the stream's busiest user": recent["userId"].value_counts(sort=True)["userId"][0],
        "a reference user": past["userId"].value_counts(sort=True)["userId"][0],
    }
    return {
        name: {"userId": np.array([user]), "timestamp": now, **columns}
        for name, user in users.items()
    }


def ask(address: str, until: Callable[[], bool]) -> tuple[Answers, Scores]:
    """Send the requests in turn until `until()` is true.

    Returns every answer, and the scores that each version gives to four films.
    """
    columns = requests()
    answers: Answers = []
    scores: Scores = {
        user: {str(title): [] for title in sent["title"][:4]} for user, sent in columns.items()
    }
    asked: dict[str, int] = {}
    with triton.InferenceServerClient(address) as client:
        while not ready(client):
            time.sleep(0.05)
        metadata = client.get_model_metadata("movielens").inputs
        inputs = {user: tensors(sent, metadata) for user, sent in columns.items()}
        for user in itertools.cycle(inputs):
            if until() and len(answers) >= 100:
                break
            started = time.perf_counter()
            result = client.infer("movielens", inputs[user])
            seconds = time.perf_counter() - started
            version = int(result.get_response().model_version)
            if asked.get(user) != version:
                asked[user] = version
                predictions = result.as_numpy("prediction")
                for points, score in zip(scores[user].values(), predictions, strict=False):
                    points.append((time.time(), float(score)))
            answers.append(hb.report.Answer(time.time(), seconds, version))
            time.sleep(0.008)  # leaves the processors to the trainer
    return answers, scores


def tensors(columns: dict[str, np.ndarray], metadata: Any) -> list[triton.InferInput]:
    """Return the columns as tensors of the types that the model was trained with: BYTES or INT64.

    A tensor with one value, shape [1], holds for all candidates.
    """
    types = {"BYTES": object, "INT64": np.int64}
    inputs = []
    for feature in metadata:
        values = columns[feature.name].astype(types[feature.datatype])
        tensor = triton.InferInput(feature.name, values.shape, feature.datatype)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs


def ready(client: triton.InferenceServerClient) -> bool:
    """Return whether the server answers."""
    with suppress(triton.InferenceServerException):
        return bool(client.is_server_ready())
    return False
