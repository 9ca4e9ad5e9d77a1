# SPDX-License-Identifier: Apache-2.0
"""Minutes of load on workers that are killed, while a version arrives each second: an answer is
whole, of one version, and never an error of the server, over REST and over gRPC.

HOTBED_SOAK_SECONDS sets the length, ten minutes by default.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import ServingError

from .conftest import NEVER_TAKEN, Process, Trainer, Workers, at_it, wait_for
from .test_grpc import tensors
from .test_swaps import answer_of, told_by

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SECONDS = float(os.environ.get("HOTBED_SOAK_SECONDS", "600"))
# of a connection that a killed worker had, or of one that is not there yet
LOST = (*NEVER_TAKEN, "closed", "eof", "connect", "socket", "goaway", "disconnected")


class Clients:
    """Clients that ask all the time, each with a connection for some requests.

    Attributes:
        counts: of answers and of lost connections, by protocol.
        wrong: errors that are not of a lost connection, and answers with scores of no version.
    """

    def __init__(self, server: Process, trainer: Trainer) -> None:
        self.counts = Counter[str]()
        self.wrong = list[str]()
        self.versions = set[int]()
        self.stop = threading.Event()
        self._server = server
        self._trainer = trainer

    def over_http(self) -> None:
        while not self.stop.is_set():
            with hb.Client(f"http://{self._server.http}") as client:
                self._ask("http", lambda client=client: answer_of(client.ask("m", self.asked)))

    def over_grpc(self) -> None:
        while not self.stop.is_set():
            with triton.InferenceServerClient(self._server.grpc) as client:
                self._ask(
                    "grpc", lambda client=client: told_by(client.infer("m", tensors(self.asked)))
                )

    @property
    def asked(self) -> Any:
        return self._trainer.asked

    def _ask(self, protocol: str, once: Callable[[], tuple[int, Any]]) -> None:
        for _ in range(50):
            if self.stop.is_set():
                return
            try:
                version, scores = once()
            except (ServingError, InferenceServerException) as error:
                is_lost = any(word in str(error).lower() for word in LOST)
                self.counts[f"{protocol} lost"] += is_lost
                if not is_lost:
                    self.wrong.append(f"{protocol}: {error}")
                return
            self.counts[protocol] += 1
            self.versions.add(version)
            apart = np.abs(scores - self._trainer.scores[version]).max()
            if not apart < 1e-6:
                self.wrong.append(f"{protocol}: version {version}, {apart} apart")


def test_load_with_versions_and_killed_workers_gives_no_error_and_no_mixed_answer(
    trainer: Trainer,
) -> None:
    published = trainer.folder / "published"
    server = Workers(f"m={trainer.folder / 'export'}", "--watch", published)
    clients = Clients(server, trainer)
    begun = time.monotonic()
    kills = 0
    with at_it(*[clients.over_http] * 2, *[clients.over_grpc] * 2):
        try:
            seed = 0
            while time.monotonic() - begun < SECONDS:
                until = time.monotonic() + 1
                trainer.publish(seed, full=seed % 20 == 19)
                seed += 1
                if seed % 12 == 0 and len(server.children) == 2:
                    os.kill(random.Random(seed).choice(server.children), signal.SIGKILL)
                    kills += 1
                time.sleep(max(0.0, until - time.monotonic()))
            newest = max(trainer.scores)
            wait_for(lambda: newest in clients.versions, "the newest version answers")
        finally:
            clients.stop.set()
    print(dict(clients.counts), "versions", seed, "answered", len(clients.versions), "kills", kills)
    assert not clients.wrong, clients.wrong[:5]
    assert clients.counts["http"] > SECONDS
    assert clients.counts["grpc"] > SECONDS
    lost = clients.counts["http lost"] + clients.counts["grpc lost"]
    assert lost <= 50 * (kills + 1)
    assert len(clients.versions) > seed / 4
    assert server.stop() == 0
