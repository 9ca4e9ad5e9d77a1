# SPDX-License-Identifier: Apache-2.0
"""Serve a model while its trainer goes on, and ask it all the while with Triton's own gRPC client:
`demo.py` calls it.

`hotbed serve` follows what the trainer publishes: each version takes the place of the one before,
no request is lost.
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

from hotbed.training.watching.served import Answer

DATA = Path(__file__).resolve().parent.parent / "data/ml_latest_small"


# Run a module as `python -m` does, and end with the process that started it, however that ends.
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
    """`hotbed serve` on free ports in a process of its own, until it is left; gives the address for
    gRPC clients.
    """
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        ports = [str(free.getsockname()[1]) for free in (one, two)]
    command = ["serve", f"movielens={published}", "--watch", str(published)]
    command += ["--http-port", ports[0], "--grpc-port", ports[1], "--set", "drain_seconds=0"]
    with log.open("w") as file, hotbed(command, stderr=file) as process:
        try:
            yield f"127.0.0.1:{ports[1]}"
        finally:
            process.stdin.close()  # it answers what it has begun, then ends
    assert process.returncode == 0, log.read_text()


def requests() -> dict[str, dict[str, np.ndarray]]:
    """Raw columns by user: the hundred films that are rated most in the stream, for two users.

    One rates most in the stream. The other rates most before it and seldom in it: a fixed point of
    reference.
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


Scores = dict[str, dict[str, list[tuple[float, float]]]]


def ask(address: str, until: Callable[[], bool]) -> tuple[list[Answer], Scores]:
    """Send the requests in turn until `until()`: every answer, and the scores that each version
    gives to four films.
    """
    columns = requests()
    answers: list[Answer] = []
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
                for points, score in zip(
                    scores[user].values(), result.as_numpy("prediction"), strict=False
                ):
                    points.append((time.time(), float(score)))
            answers.append(Answer(time.time(), seconds, version))
            time.sleep(0.008)  # leaves the processors to the trainer
    return answers, scores


def tensors(columns: dict[str, np.ndarray], metadata: Any) -> list[triton.InferInput]:
    """The columns as the model takes them: BYTES or INT64, as in training; one value, [1], holds
    for all candidates.
    """
    inputs = []
    for described in metadata:
        values = columns[described.name].astype(
            object if described.datatype == "BYTES" else np.int64
        )
        inputs.append(triton.InferInput(described.name, values.shape, described.datatype))
        inputs[-1].set_data_from_numpy(values)
    return inputs


def ready(client: triton.InferenceServerClient) -> bool:
    """Whether the server answers."""
    with suppress(triton.InferenceServerException):
        return bool(client.is_server_ready())
    return False
