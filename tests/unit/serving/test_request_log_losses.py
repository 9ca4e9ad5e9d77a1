# SPDX-License-Identifier: Apache-2.0
"""No answered request leaves the log uncounted: not under overload, on a full disk, or by kills;
and the log joins with outcomes as a dict of all events does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import threading
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import SERVER, kill_at

import hotbed as hb
from hotbed.errors import HotbedError, ServingError
from hotbed.files import new_file
from hotbed.serving.request_log.folder import LogFolder, PartLimits

CLIENTS = 8
ITEMS = 3  # of a request
WITHIN = 600
QUEUE_BYTES = 400  # about two requests
LIMITS = PartLimits(1 << 30, 1e9, 1 << 40)
Click = tuple[str, int, datetime]
"""The request, the place in it, and the time."""


class Asking:
    """Clients of a server with a log.

    Attributes:
        sent: the names of the requests.
        answered: the items of each answered request, by its name.
        wrong: errors that are not of a lost connection.
    """

    def __init__(self, exported: Path, folder: Path, **settings: Any) -> None:
        from .conftest import Workers  # processes that import this file have no package

        settings = {"log": folder, "log_flush_seconds": 0.02, "log_part_seconds": 1} | settings
        words = [["--set", f"{name}={value}"] for name, value in settings.items()]
        self.server = Workers(f"m={exported}", *itertools.chain.from_iterable(words))
        self.log = folder / "m"
        self.sent = set[str]()
        self.answered = dict[str, list[str]]()
        self.wrong = list[str]()
        self._numbers = itertools.count()

    def ask(self, num_requests: int) -> None:
        """Send requests from several clients, each with connections of its own."""
        from .conftest import at_once

        at_once(lambda _: self._ask(num_requests // CLIENTS), CLIENTS)

    def _ask(self, num_requests: int) -> None:
        from .test_load_soak import LOST

        numbers = itertools.islice(self._numbers, num_requests)
        for first in numbers:
            with hb.Client(f"http://{self.server.http}") as client:
                try:
                    for number in itertools.chain([first], numbers):
                        self._ask_once(client, number)
                except ServingError as error:
                    if not any(word in str(error).lower() for word in LOST):
                        self.wrong.append(str(error))

    def _ask_once(self, client: hb.Client, number: int) -> None:
        from .conftest import draw

        name, columns = f"request-{number}", draw(ITEMS, number % 40)
        self.sent.add(name)
        client.ask("m", columns, headers={"x-request-id": name})
        self.answered[name] = columns["item"]

    def ask_again(self, number: int) -> None:
        """Send a request that was sent before."""
        with hb.Client(f"http://{self.server.http}") as client:
            self._ask_once(client, number)

    def counts(self) -> dict[str, int]:
        """Return how many requests the workers that live have logged and dropped."""
        with hb.Client(f"http://{self.server.http}") as client:
            counts: dict[str, int] = client.status()["models"][0]["log"]
        return counts

    def is_up(self) -> bool:
        """Whether both workers answer."""
        with suppress(HotbedError), hb.Client(f"http://{self.server.http}") as client:
            return all(worker["up"] for worker in client.status()["workers"])
        return False

    def rows(self) -> list[dict[str, Any]]:
        """Return the requests of closed parts, and of open ones up to the last flush."""
        from .conftest import flushed_requests

        rows = list(flushed_requests(self.log))
        for part in self.log.glob("*.parquet"):
            rows += pq.read_table(part).to_pylist()
        return rows

    def names(self) -> set[str]:
        """Return the names of the requests that are in the log."""
        return {row["request_id"] for row in self.rows()}


def limit_files(processes: list[int], num_bytes: int) -> None:
    """Let processes write files up to so many bytes; further ones fail as on a full disk."""
    for process in processes:
        _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (num_bytes, most))


@pytest.mark.parametrize("num_requests", [720, pytest.param(100_008, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_every_answer_is_in_the_log_or_counted_there(
    exported: Path, tmp_path: Path, num_requests: int
) -> None:
    """First the queue is too short for batches, then the disk is full, and then it is not."""
    from .conftest import wait_for

    asking = Asking(exported, tmp_path / "log", log_queue_bytes=QUEUE_BYTES, batch_seconds=0.01)
    children = asking.server.children
    asking.ask(num_requests // 3)
    assert asking.counts()["dropped"] > 0
    limit_files(children, 1)
    before = asking.counts()["logged"]
    asking.ask(num_requests // 3)
    wait_for(lambda: sum(asking.counts().values()) == len(asking.answered), "all are counted")
    assert asking.counts()["logged"] - before < num_requests // 30  # those that waited
    limit_files(children, resource.RLIM_INFINITY)
    asking.ask(num_requests // 3)

    def is_told() -> bool:
        """Whether records count all that were dropped; the next record of each worker does."""
        asking.ask(CLIENTS)
        dropped = asking.counts()["dropped"]
        return sum(row["dropped"] for row in asking.rows()) >= dropped > 0

    wait_for(is_told, "the log counts what was dropped", 300)
    assert asking.server.stop() == 0
    assert not asking.wrong, asking.wrong[:5]
    rows = [pq.read_table(part).to_pylist() for part in asking.log.glob("*.parquet")]
    logged = [row["request_id"] for part in rows for row in part]
    dropped = sum(row["dropped"] for part in rows for row in part)
    assert len(set(logged)) == len(logged)
    assert asking.answered.keys() >= set(logged)
    assert len(logged) + dropped == len(asking.answered) >= num_requests
    assert not list(asking.log.glob(".*"))


def consume(log: Path, outcomes: Path, sink: Path, passage: int) -> None:
    """Join a log with outcomes into files, each with the position after it, from the last one on.

    The process is killed at a passage of `os.fsync` or `os.replace`; 0: it is not.
    """
    kill_at(passage, "fsync", "replace")
    done = sorted(sink.glob("*.json"))
    position = None
    if done:
        position = hb.sources.Position.from_json(json.loads(done[-1].read_text())["position"])
    join = hb.sources.Join(
        hb.sources.RequestLog(log, follow=False),
        hb.sources.Parquet(outcomes),
        on=["request_id", "position"],
        within=WITHIN,
        time="served_at",
        unit="us",
    )
    for number, (rows, after) in enumerate(join.read(position, 16), len(done)):
        keys = ["request_id", "position", "label"]
        samples = [[row[key] for key in keys] for row in rows.to_pylist()]
        with new_file(sink / f"{number:06}.json") as file:
            content = {"samples": samples, "position": after.to_json()}
            file.write(json.dumps(content).encode())


def is_clicked(name: str, position: int, served_at: datetime, clicks: list[Click]) -> bool:
    """Whether a click counts for what was shown at a time."""
    until = served_at + timedelta(seconds=WITHIN)
    return any((name, position) == click[:2] and served_at <= click[2] <= until for click in clicks)


def write_clicks(path: Path, clicks: list[Click]) -> None:
    """Write clicks at these times, and a last one after which all windows are closed."""
    clicks = sorted(clicks, key=lambda click: click[2])
    clicks.append(("end", 0, clicks[-1][2] + timedelta(seconds=3 * WITHIN)))
    columns = zip(*clicks, strict=True)
    table = dict(zip(["request_id", "position", "served_at"], columns, strict=True))
    pq.write_table(pa.table(table), path)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_a_join_of_the_log_is_that_of_a_dict_over_kills(
    exported: Path, tmp_path: Path, kills: int
) -> None:
    """Workers are killed while they log, and the reader while it joins.

    A killed worker loses only requests that it had not flushed. A request is there twice only if
    its client asked twice, as it does when a connection that it used before breaks.
    """
    from .conftest import at_it, wait_for

    asking = Asking(exported, tmp_path / "log")
    choose = random.Random(0)
    under_way = set[str]()  # while a worker was killed
    for _ in range(kills):
        asking.ask(40)
        expected = asking.answered.keys() - under_way
        wait_for(lambda expected=expected: expected <= asking.names(), "all are flushed")
        before = set(asking.sent)
        died = threading.Event()

        def kill(died: threading.Event = died, before: set[str] = before) -> None:
            wait_for(lambda: len(asking.sent) > len(before) + 16, "requests are under way")
            os.kill(choose.choice(asking.server.children), signal.SIGKILL)
            died.set()

        with at_it(kill):
            while not died.is_set():
                asking.ask(16)
        under_way |= asking.sent - before
        wait_for(lambda: len(asking.server.children) == 2, "the worker is started again", 120)
        wait_for(asking.is_up, "and answers", 120)
    asking.ask_again(0)
    assert asking.server.stop() == 0
    assert not asking.wrong, asking.wrong[:5]
    LogFolder(tmp_path / "log", "m", LIMITS)  # as the next start does
    rows = [row for part in asking.log.glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    logged = Counter(row["request_id"] for row in rows)
    assert asking.answered.keys() - logged.keys() <= under_way
    twice = {name for name, num_rows in logged.items() if num_rows > 1}
    assert {"request-0"} <= twice <= {"request-0"} | under_way
    for row in rows:
        assert row["item"] == asking.answered.get(row["request_id"], row["item"])

    sink, clicks = tmp_path / "sink", tmp_path / "clicks.parquet"
    sink.mkdir()
    shown = [
        (row["request_id"], position, row["served_at"]) for row in rows for position in range(ITEMS)
    ]
    clicked = [each for each in shown if choose.random() < 0.3]
    write_clicks(clicks, clicked)
    num_killed = 0
    for life in range(kills + 1):
        try:
            SERVER.call(consume, asking.log, clicks, sink, 3 + life % 8)
        except AssertionError:
            num_killed += 1
    assert num_killed >= 2
    SERVER.call(consume, asking.log, clicks, sink, 0)
    samples = [
        (name, position, label)
        for file in sorted(sink.glob("*.json"))
        for name, position, label in json.loads(file.read_text())["samples"]
    ]
    assert sorted(samples) == sorted(
        (name, position, is_clicked(name, position, served_at, clicked))
        for name, position, served_at in shown
    )
