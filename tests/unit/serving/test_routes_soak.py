# SPDX-License-Identifier: Apache-2.0
"""Minutes of load on workers that are killed, while versions arrive, a share of the users moves
between two versions, and a shadow scores. HOTBED_SOAK_SECONDS sets the length, ten minutes by
default.

A third of the time is that of the comparison, in turn with the rule: the same server, kills and
versions, where the newest version answers all, without log and shadow.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.grpc as triton
import xxhash
import yaml
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import HotbedError, ServingError
from hotbed.files import new_file
from hotbed.persist.publish import PublishDirectory

from .conftest import Process, Trainer, Workers, at_it, draw, wait_for
from .test_grpc import tensors
from .test_load_soak import LOST

Ask: TypeAlias = Callable[[int], tuple[int, str, Any]]
"""Asks for a user; returns version, route and scores."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]
SECONDS = float(os.environ.get("HOTBED_SOAK_SECONDS", "600"))
USERS, CANDIDATES = 40, 10
MOVE_SECONDS, KILL_SECONDS = 20, 15
QUIET = "quiet"
PHASES = {"half": 0.5, "none": 0.0, QUIET: 0.0}
"""The share of the canary in each phase; the phases take turns."""


class UserTrainer(Trainer):
    """Knows what each version scores for each user: [USERS, CANDIDATES]."""

    def predict(self) -> Any:
        candidates = draw(CANDIDATES, 7)
        columns = {name: list(values) * USERS for name, values in candidates.items()}
        columns["user"] = np.repeat(np.arange(USERS), CANDIDATES)
        data = hb.sources.Memory({**columns, "label": np.zeros(USERS * CANDIDATES)})
        scores = self.model.predict(hb.Dataset(data, self.model.schema, 400))
        return np.asarray(scores).reshape(USERS, CANDIDATES)


class Asking:
    """Clients of a server; `share`: the share that is in force in all processes, None while moved.

    Attributes:
        counts: of answers, by protocol and route, and of lost connections.
        wrong: errors of the server, scores of no version, and users on the wrong side.
        waits: seconds of the answers of the open loop, from when each was due, by phase.
        phase: the phase that the times count for.
    """

    def __init__(self, server: Process, trainer: UserTrainer) -> None:
        self.counts = Counter[str]()
        self.wrong = list[str]()
        self.waits = defaultdict[str, list[float]](list)
        self.phase = ""
        self.share: float | None = None
        self.stop = threading.Event()
        self._server = server
        self._trainer = trainer
        self._columns = draw(CANDIDATES, 7)
        self._columns.pop("user")

    def over_http(self) -> None:
        draws = random.Random(threading.get_ident())
        while not self.stop.is_set():
            with hb.Client(f"http://{self._server.http}") as client:
                self._ask_often("http", draws, self._by_http(client))

    def over_grpc(self) -> None:
        draws = random.Random(threading.get_ident())
        while not self.stop.is_set():
            with triton.InferenceServerClient(self._server.grpc) as client:
                self._ask_often("grpc", draws, self._by_grpc(client))

    def _ask_often(self, kind: str, draws: random.Random, ask: Ask) -> None:
        """Ask with a connection until it is lost, 50 times at most."""
        for _ in range(50):
            if self.stop.is_set() or not self._ask(kind, draws.randrange(USERS), ask):
                return

    def open_loop(self, rate: float) -> None:
        """Ask at times that do not depend on the answers."""
        draws = random.Random(0)
        client = hb.Client(f"http://{self._server.http}")

        def ask(due: float, user: int, phase: str) -> None:
            self._ask("open", user, self._by_http(client))
            self.waits[phase].append(time.monotonic() - due)

        with client, ThreadPoolExecutor(16) as pool:
            due = time.monotonic()
            while not self.stop.is_set():
                due += draws.expovariate(rate)
                time.sleep(max(0.0, due - time.monotonic()))
                pool.submit(ask, due, draws.randrange(USERS), self.phase)

    def report(self, phase: str) -> str:
        """Return the latency of the open loop in a phase."""
        waits = self.waits[phase]
        times = ", ".join(f"p{at} {1e3 * quantile(waits, at / 100):.1f} ms" for at in (50, 95, 99))
        return f"{phase}: {len(waits)} requests, {times}"

    def _by_http(self, client: hb.Client) -> Ask:
        def ask(user: int) -> tuple[int, str, Any]:
            scores = client.ask("m", self._columns, {"user": user})
            return scores.version, scores.route, scores.outputs["prediction"]

        return ask

    def _by_grpc(self, client: Any) -> Ask:
        def ask(user: int) -> tuple[int, str, Any]:
            answer = client.infer("m", tensors({**self._columns, "user": np.array([user])}))
            response = answer.get_response()
            route = response.parameters["route"].string_param
            return int(response.model_version), route, answer.as_numpy("prediction")

        return ask

    def _ask(self, kind: str, user: int, ask: Ask) -> bool:
        """Ask for a user, check the answer, and return whether there was one."""
        share = self.share
        try:
            version, route, scores = ask(user)
        except (ServingError, InferenceServerException) as error:
            is_lost = any(word in str(error).lower() for word in LOST)
            self.counts[f"{kind} lost"] += is_lost
            if not is_lost:
                self.wrong.append(f"{kind}: {error}")
            return False
        self.counts[f"{kind} {route}"] += 1
        apart = np.abs(scores - self._trainer.scores[version][user]).max()
        if not apart < 1e-6:
            self.wrong.append(f"{kind}: version {version}, user {user}, {apart} apart")
        if share is not None and share == self.share:
            text = f"s\0m\0{user}".encode()
            side = "canary" if xxhash.xxh64_intdigest(text) < share * 2**64 else "stable"
            if route != side:
                self.wrong.append(f"{kind}: user {user} at {share} got {route}")
        return True


@contextmanager
def clients(server: Process, trainer: UserTrainer, rate: float) -> Iterator[Asking]:
    asking = Asking(server, trainer)
    loops = [asking.over_http, asking.over_http, asking.over_grpc, asking.over_grpc]
    with at_it(*loops, lambda: asking.open_loop(rate)):
        try:
            yield asking
        finally:
            asking.stop.set()


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quantile(waits: list[float], share: float) -> float:
    return float(np.quantile(waits, share)) if waits else float("nan")


def wait_for_revision(server: Process, revision: int) -> None:
    def is_there() -> bool:
        with suppress(HotbedError, OSError), hb.Client(f"http://{server.http}") as client:
            return client.status()["models"][0]["routes"]["revision"] == revision
        return False

    wait_for(is_there, f"revision {revision} in all processes")


def rate_of(server: Process) -> float:
    """Return 70 % of the requests that one client can send in a second."""
    with hb.Client(f"http://{server.http}") as client:
        began = time.monotonic()
        for _ in range(300):
            client.ask("m", draw(CANDIDATES, 7))
        return 0.7 * 300 / (time.monotonic() - began)


class Moves:
    """Writes the rules of the phases, in turn."""

    def __init__(self, file: Path, version: int, rules: Mapping[str, Any] | None = None) -> None:
        canary = {"version": version, "by": "user", "salt": "s"}
        shadow = {"version": version, "sample": 0.1, "rows_per_second": 500}
        self._file = file
        self.rules = rules or {
            phase: {"log": {"sample": 0}}
            if phase == QUIET
            else {"canary": {**canary, "share": share}, "shadow": shadow}
            for phase, share in PHASES.items()
        }
        self.revision = 0

    def write(self) -> str:
        """Write the rule of the next phase, and return its name."""
        phase = list(self.rules)[self.revision % len(self.rules)]
        self.revision += 1
        spec = {"revision": self.revision, "models": {"m": self.rules[phase]}}
        with new_file(self._file) as text:
            text.write(yaml.safe_dump(spec).encode())
        return phase

    def next(self, server: Process, asking: Asking) -> None:
        """Move to the next phase. The move counts for the rule that is not the comparison's."""
        asking.share = None
        phase = self.write()
        if asking.phase == QUIET:
            asking.phase = phase
        wait_for_revision(server, self.revision)
        asking.phase = phase
        asking.share = PHASES.get(phase, 0.0)


def test_a_split_that_moves_under_load_and_kills_gives_no_error_and_no_mixed_answer(
    tmp_path: Path, exported: Path
) -> None:
    trainer = UserTrainer(tmp_path, exported)
    # nothing leases the version of the canary while the phase of the comparison lasts
    trainer.publisher = PublishDirectory(trainer.folder / "published", keep=10_000)
    moves = Moves(tmp_path / "routes.yaml", trainer.publish(0, full=True))
    moves.write()
    server = Workers(
        f"m={trainer.folder / 'export'}",
        *("--watch", trainer.folder / "published"),
        *("--routes", tmp_path / "routes.yaml"),
        *("--set", f"log={tmp_path / 'log'}"),
        *("--set", f"rows={tmp_path / 'rows'}"),
    )
    wait_for_revision(server, 1)
    rate = rate_of(server)
    sizes = list[int]()
    draws = random.Random(1)
    kills, seed = 0, 1
    with clients(server, trainer, rate) as asking:
        asking.phase, asking.share = "half", PHASES["half"]
        began = moved = killed = time.monotonic()
        pause = KILL_SECONDS
        while time.monotonic() - began < 1.5 * SECONDS:
            until = time.monotonic() + 1
            trainer.publish(seed, full=seed % 20 == 19)
            seed += 1
            if time.monotonic() - moved > MOVE_SECONDS:
                moves.next(server, asking)
                moved = time.monotonic()
            if time.monotonic() - killed > pause and len(server.children) == 2:
                os.kill(draws.choice(server.children), signal.SIGKILL)
                kills, killed = kills + 1, time.monotonic()
                pause = draws.uniform(0.5, 1.5) * KILL_SECONDS  # not in step with the moves
            sizes.append(resident_bytes(server.process.pid))
            time.sleep(max(0.0, until - time.monotonic()))
    with hb.Client(f"http://{server.http}") as client:
        routes = client.status()["models"][0]["routes"]
    print(
        dict(asking.counts),
        f"versions {seed}, moves {moves.revision - 1}, kills {kills}, shadow {routes['shadow']}",
        *map(asking.report, PHASES),
        f"rate {rate:.0f}/s, parent {sizes[len(sizes) // 5] >> 20} to {sizes[-1] >> 20} MiB",
        sep="\n",
    )
    assert not asking.wrong, asking.wrong[:5]
    assert asking.counts["http canary"] > SECONDS / 4
    assert asking.counts["grpc canary"] > SECONDS / 4
    assert routes["shadow"]["requests"] > SECONDS / 4
    lost = sum(count for kind, count in asking.counts.items() if "lost" in kind)
    assert lost <= 100 * (kills + 1)
    fifth = len(sizes) // 5
    assert np.mean(sizes[-fifth:]) < np.mean(sizes[fifth : 2 * fifth]) + (48 << 20)
    assert server.stop() == 0
