# SPDX-License-Identifier: Apache-2.0
"""`hotbed serve NAME=grpc://HOST:PORT`: versions and rows of a parameter server, whatever happens
to it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import hotbed as hb

from .conftest import Held, Process, Trainer, Workers, paused, wait_for


def ask(server: Process, trainer: Trainer) -> tuple[int, float, int]:
    """The version that answered, how far its scores are from the trainer's, and the rows that came
    too late.
    """
    kinds = {
        "user": ("INT64", int),
        "item": ("BYTES", str),
        "genres": ("BYTES", str),
        "price": ("FP32", float),
    }
    inputs = [
        {
            "name": name,
            "shape": [30],
            "datatype": kind,
            "data": list(map(python, trainer.asked[name])),
        }
        for name, (kind, python) in kinds.items()
    ]
    connection = http.client.HTTPConnection(server.http, timeout=20)
    connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": inputs}))
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, found
    version, late = int(found["model_version"]), found.get("parameters", {}).get("late_rows", 0)
    return (
        version,
        float(np.abs(np.array(found["outputs"][0]["data"]) - trainer.scores[version]).max()),
        late,
    )


def right(server: Process, trainer: Trainer, times: int = 6) -> int:
    """The version that gave all of several answers, which are the trainer's scores; 0 where they
    are of several versions.
    """
    found = [ask(server, trainer) for _ in range(times)]
    assert [(apart < 1e-6, late) for _, apart, late in found] == [(True, 0)] * times
    return found[0][0] if len({version for version, *_ in found}) == 1 else 0


def status(server: Process, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(server.http, timeout=20)
    connection.request(method, path)
    found = connection.getresponse().status
    connection.close()
    return found


def served_by_a_new_worker(server: Workers, trainer: Trainer, token: Path) -> int:
    """Kill a worker while the file of the token is wrong; return the version of the next one."""
    content = token.read_text()
    token.write_text("# none\n")
    first, *others = server.children
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(set(server.children) - {first}) == 2, "it is started again")
    with paused(others):
        version = right(server, trainer)
    token.write_text(content)
    return version


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_server_of_a_parameter_server_follows_it_and_outlives_it(
    trainer: Trainer, tmp_path: Path, workers: int
) -> None:
    source = (f"ranker={trainer.folder / 'export'}", "--watch", trainer.folder / "published")
    token = tmp_path / "token"
    token.write_text("s3cret infer\n")
    source = (*source, "--token-file", token)
    rows = Held(tmp_path / "rows", *source)
    start = Workers if workers > 1 else Process
    server = start(
        f"m=grpc://127.0.0.1:{rows.port}/ranker",
        *("--set", "cache_deadline_seconds=5"),
        *("--set", f"store_token_file={token}"),
    )
    wait_for(lambda: right(server, trainer) in trainer.scores, "what was exported")
    for seed in range(3):
        version = trainer.publish(seed, full=seed == 2)
        wait_for(lambda version=version: right(server, trainer) == version, "it is served")

    if isinstance(server, Workers):
        assert served_by_a_new_worker(server, trainer, token) == version

    assert status(server, "POST", "/v2/repository/models/m/unload") == 200
    until = time.monotonic() + 3  # it is looked for each second
    while time.monotonic() < until:
        assert status(server, "GET", "/v2/models/m/ready") == 404
        time.sleep(0.05)
    assert status(server, "POST", "/v2/repository/models/m/load") == 200
    assert right(server, trainer) == version

    rows.stop(signal.SIGKILL)  # what is cached is served on, as it was
    assert right(server, trainer) == version
    wait_for(lambda: "UNAVAILABLE" in problem(server), "it says so")
    assert right(server, trainer) == version
    rows = Held(tmp_path / "rows", *source, port=rows.port)
    wait_for(lambda: problem(server) == "", "it finds it again")
    last = trainer.publish(3)
    wait_for(lambda: right(server, trainer) == last, "and follows on")
    assert server.stop() == 0
    assert rows.stop() == 0


@pytest.mark.slow
def test_a_server_starts_before_its_parameter_server_and_says_which_rows_are_late(
    trainer: Trainer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    options = ("--set", "cache_deadline_seconds=0.1", "--set", "cache_preload=0")
    server = Process(f"m=grpc://127.0.0.1:{port}", *options)
    assert "UNAVAILABLE" in problem(server)
    rows = Held(tmp_path / "rows", f"m={trainer.folder / 'export'}", port=port)
    wait_for(lambda: problem(server) == "", "it is found")

    rows.process.send_signal(signal.SIGSTOP)
    version, _, late = ask(server, trainer)
    assert late > 0
    assert version in trainer.scores
    rows.process.send_signal(signal.SIGCONT)
    wait_for(lambda: ask(server, trainer)[2] == 0, "no row is late")
    assert right(server, trainer) == version
    assert server.stop() == 0
    assert rows.stop() == 0


def problem(server: Process) -> str:
    with hb.Client(f"http://{server.http}") as client:
        return client.models()[0]["reason"]
