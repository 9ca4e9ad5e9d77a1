# SPDX-License-Identifier: Apache-2.0
"""Versions that come and go under load, over both protocols: every answer is of one version, and
none stays behind.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

import hotbed as hb
from hotbed.persist.publish import Follower

from .conftest import Process, Running, Trainer, at_it, wait_for
from .test_grpc import tensors

Answers = list[tuple[int, Any]]


@contextmanager
def load(http: str, grpc: str, asked: Any) -> Iterator[tuple[Answers, list[Exception]]]:
    """Two clients over HTTP and one over gRPC that ask again after a moment; what they are told,
    and what goes wrong.
    """
    answers, wrong, stop = Answers(), list[Exception](), threading.Event()

    def over_http() -> None:
        with hb.Client(f"http://{http}") as client:
            ask(lambda: answer_of(client.ask("m", asked)))

    def over_grpc() -> None:
        with triton.InferenceServerClient(grpc) as client:
            ask(lambda: told_by(client.infer("m", tensors(asked))))

    def ask(once: Callable[[], tuple[int, Any]]) -> None:
        while not stop.wait(0.02):
            try:
                answers.append(once())
            except Exception as error:
                wrong.append(error)

    with at_it(over_http, over_http, over_grpc):
        try:
            yield answers, wrong
        finally:
            stop.set()


def answer_of(found: Any) -> tuple[int, Any]:
    return found.version, found.outputs["prediction"]


def told_by(found: Any) -> tuple[int, Any]:
    return int(found.get_response().model_version), found.as_numpy("prediction")


def of_one_version(answers: Answers, trainer: Trainer) -> bool:
    return all(np.abs(scores - trainer.scores[version]).max() < 1e-6 for version, scores in answers)


def held(pid: int) -> tuple[int, int, int]:
    """Mapped files of rows, open files and threads of a process."""
    maps = set(re.findall(r"/\S+\.rows", Path(f"/proc/{pid}/maps").read_text()))
    return len(maps), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.slow
def test_ten_versions_under_load_fail_no_request_mix_in_none_and_leave_nothing(
    trainer: Trainer,
) -> None:
    running = Running(trainer.folder / "export")
    running.models.follow("m", lambda: Follower(trainer.folder / "published"), poll_seconds=0.05)
    model, seen = running.models.named("m"), list[tuple[int, int, int]]()
    sessions, versions = list[Any](), list[Any]()  # each that another took the place of
    with load(running.http, f"127.0.0.1:{running.server.grpc_port}", trainer.asked) as (
        answers,
        wrong,
    ):
        for seed in range(10):
            sessions.append(weakref.ref(model.current.session))
            versions.append(weakref.ref(model.current.version))
            version = trainer.publish(seed, full=seed == 6)
            wait_for(
                lambda version=version: model.current.version.version == version,
                "the version is served",
            )
            wait_for(
                lambda version=version: version in {one for one, _ in answers[-5:]}, "it answers"
            )
            seen.append(held(os.getpid()))
    assert not wrong
    assert {version for version, _ in answers} >= set(list(trainer.scores)[1:])
    assert of_one_version(answers, trainer)
    gc.collect()
    assert not [number for number, one in enumerate(sessions) if one() is not None]
    # the parameter server answers for the newest version and the one before
    assert [number for number, one in enumerate(versions) if one() is not None] == [9]
    assert seen[9][0] <= seen[3][0] + 2  # a full and its deltas: two files a table at most
    assert seen[9][1] <= seen[3][1] + 2
    assert seen[9][2] <= seen[3][2] + 2
    running.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_memory_stays_flat_over_a_hundred_versions(trainer: Trainer) -> None:
    server, sizes = (
        Process(f"m={trainer.folder / 'export'}", "--watch", trainer.folder / "published"),
        list[int](),
    )
    with load(server.http, server.grpc, trainer.asked) as (answers, wrong):
        for seed in range(100):
            version = trainer.publish(seed, full=seed % 25 == 24)
            wait_for(
                lambda version=version: version in {one for one, _ in answers[-5:]}, "it answers"
            )
            pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
            sizes.append(pages * resource.getpagesize())
    assert not wrong
    assert of_one_version(answers, trainer)
    assert np.mean(sizes[-10:]) < np.mean(sizes[15:25]) + (16 << 20), [size >> 20 for size in sizes]
    assert server.stop() == 0
