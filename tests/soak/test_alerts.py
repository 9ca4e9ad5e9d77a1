# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a trainer and a server in a planted outage of each kind, and its rules
fire: deploy/alerts.yaml, with seconds for minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch", reason="torch absent")

from hotbed.testing import Broker

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]
JOB = """
stream: {kind: kafka, servers: "SERVERS", topic: clicks, decoder: {kind: json, columns: {user: int64, y: int64, t: int64}}}
schema: {columns: [{kind: label, name: y}, {kind: time, name: t, unit: s}, {kind: id, name: user}]}
tables: {dim: 256}
model: {kind: fm}
fit: {stream_batch_size: 8, on_error: skip}
checkpoint: {every_seconds: 1, full_every: 1, keep: 1, publish: {kind: publish_directory, path: SHELF/published}}
stream_callbacks: [{kind: prometheus, port: PORT, every_seconds: 0.2}]
output: DISK/run
"""
SHORTER = [  # seconds for minutes, and thresholds that a test reaches
    (r"(\d+)m\]", r"\1s]"),
    (r"> 1800", "> 10"),
    (r"> 3600", "> 20"),
    (r"> 100000", "> 100"),
]
NUM_USERS = 4000
HOTBED = (sys.executable, "-m", "hotbed.cli")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def mounted(folder: Path) -> Iterator[Path]:
    """A file system of 96 MB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts absent")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where the states of the trainer lie."""
    yield from mounted(tmp_path / "disk")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Path]:
    """Where the published versions and the request log lie."""
    yield from mounted(tmp_path / "shelf")


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    line = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        None,
    )
    root = Path("/sys/fs/cgroup")
    if line is not None:  # the first version of cgroups
        root = root / "memory" / line.split(":")[2].lstrip("/")
    folder = root / f"hotbed-alerts-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.stat").read_text()
    except OSError:
        pytest.skip("cgroups absent")
    yield Cgroup(folder, is_first=line is not None)
    folder.rmdir()


class Cgroup:
    """A cgroup in which a process is near its limit of memory, on request."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self.folder = folder
        self._limit = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        self._used = folder / ("memory.usage_in_bytes" if is_first else "memory.current")
        self._file_pages = "total_inactive_file" if is_first else "inactive_file"
        self._unlimited = "-1" if is_first else "max"

    def command(self, *words: object) -> list[str]:
        """Return a command that runs another one within."""
        enter = f'echo $$ > {self.folder / "cgroup.procs"}; exec "$@"'
        return ["sh", "-c", enter, "sh", *map(str, words)]

    def fill(self, share: float) -> None:
        """Set the limit so that its processes use a share of it."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        used = int(self._used.read_text()) - int(stat[self._file_pages])
        self._limit.write_text(str(int(used / share)))

    def release(self) -> None:
        self._limit.write_text(self._unlimited)


@pytest.fixture
def prometheus() -> str:
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus absent")
    return program


def messages(begin: int, count: int) -> list[bytes]:
    now = int(time.time())
    rows = (
        {"user": row % NUM_USERS, "y": row % 2, "t": now} for row in range(begin, begin + count)
    )
    return [json.dumps(row).encode() for row in rows]


def configure(folder: Path, ports: dict[str, int]) -> Path:
    rules = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            for pattern, shorter in SHORTER:
                rule["expr"] = re.sub(pattern, shorter, rule["expr"])
            rule["for"] = rule.get("for", "0m").replace("m", "s")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    scraped = [
        {"job_name": f"hotbed-{name}", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        for name, port in ports.items()
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": scraped}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yaml"


class Alerts:
    """The alerts of a Prometheus at a port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/alerts"

    def firing(self) -> set[str]:
        try:
            with urllib.request.urlopen(self._url, timeout=5) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except OSError:  # it starts
            return set()
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def wait_for(self, name: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
        wait_until(lambda: name in self.firing(), f"{name} fires", meanwhile)

    def wait_until_quiet(self, *names: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
        wait_until(lambda: not self.firing() & set(names), f"{names} are quiet", meanwhile)


def wait_until(
    happened: Callable[[], bool], what: str, meanwhile: Callable[[], Any] = lambda: None
) -> None:
    deadline = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < deadline, f"not yet: {what}"
        meanwhile()
        time.sleep(0.3)


class Outage:
    """A trainer, a server that follows it, and a Prometheus that scrapes both."""

    def __init__(self, folder: Path, disk: Path, shelf: Path, prometheus: str) -> None:
        self._folder = folder
        self._disk = disk
        self._shelf = shelf
        self._prometheus = prometheus
        self._ports = {"online": free_port(), "serve": free_port()}
        self._started: list[subprocess.Popen[bytes]] = []
        self._num_sent = 0
        self.broker = Broker()
        self._own_port = free_port()
        self.alerts = Alerts(self._own_port)

    def __enter__(self) -> Outage:
        self.broker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        self.broker.__exit__(*error)

    def start(self, *options: object, within: Callable[..., Any] = lambda *words: words) -> None:
        """Start all; `options` of the server, which runs `within` a cgroup, say."""
        self.broker.create("clicks", 1)
        self.produce(400)
        job = JOB.replace("SERVERS", self.broker.servers).replace("DISK", str(self._disk))
        job = job.replace("SHELF", str(self._shelf)).replace("PORT", str(self._ports["online"]))
        (self._folder / "job.yaml").write_text(job)
        self.trainer = self._run(*HOTBED, "online", "job.yaml")
        published = self._shelf / "published"
        wait_until((published / "CURRENT").exists, "a version is published")
        serve = (f"clicks={published}", f"--watch=clicks={published}", "--grpc-port=-1")
        port = f"--http-port={self._ports['serve']}"
        self.server = self._run(*within(*HOTBED, "serve", *serve, port, *options))
        for port_number in self._ports.values():
            wait_until(lambda port=port_number: answers(port), "scrapes are answered")
        self._run(
            self._prometheus,
            f"--config.file={configure(self._folder, self._ports)}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._own_port}",
        )

    def _run(self, *command: object) -> subprocess.Popen[bytes]:
        words = [str(word) for word in command]
        with (self._folder / f"{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=self._folder, stdout=log, stderr=log)
        self._started.append(process)
        return process

    def produce(self, count: int = 40) -> None:
        self.broker.produce("clicks", messages(self._num_sent, count))
        self._num_sent += count

    def ask(self, path: str = "models/clicks/infer", model_input: str = "user") -> int:
        """Send a request to the server, and return its status."""
        tensor = {"name": model_input, "datatype": "INT64", "shape": [1], "data": [1]}
        data = json.dumps({"inputs": [tensor]}).encode()
        url = f"http://127.0.0.1:{self._ports['serve']}/v2/{path}"
        try:
            with urllib.request.urlopen(url, data, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5):
            return True
    except OSError:
        return False


def fill(disk: Path) -> Path:
    """Leave 2 MB of a disk: a journal has room, a full of all users has none."""
    full = disk / "full"
    full.write_bytes(bytes(shutil.disk_usage(disk).free - (2 << 20)))
    return full


@pytest.fixture
def outage(tmp_path: Path, disk: Path, shelf: Path, prometheus: str) -> Iterator[Outage]:
    with Outage(tmp_path, disk, shelf, prometheus) as planted:
        yield planted


def test_each_planted_outage_of_training_fires_its_rule(outage: Outage, disk: Path) -> None:
    alerts = outage.alerts
    outage.start()
    outage.produce(NUM_USERS)
    calm = time.monotonic() + 20
    while time.monotonic() < calm:
        outage.produce()
        time.sleep(0.3)
    assert alerts.firing() == set()

    outage.broker.produce("clicks", [b"{"])
    alerts.wait_for("HotbedDeadLetters", outage.produce)

    counts = (
        int(100 * 1.2**power) for power in itertools.count()
    )  # faster than any machine learns
    alerts.wait_for("HotbedLagGrows", lambda: outage.produce(next(counts)))

    full = fill(disk)
    for name in ("HotbedSavesFail", "HotbedUnsaved", "HotbedUnpublished", "HotbedModelOld"):
        alerts.wait_for(name, outage.produce)
    full.unlink()
    alerts.wait_until_quiet("HotbedSavesFail", "HotbedUnsaved", "HotbedModelOld")

    outage.trainer.send_signal(signal.SIGSTOP)
    alerts.wait_for("HotbedDown")
    outage.trainer.send_signal(signal.SIGCONT)
    alerts.wait_until_quiet("HotbedDown")

    outage.broker.kill()
    alerts.wait_for("HotbedSourceAway")
    outage.broker.restart()
    alerts.wait_until_quiet("HotbedSourceAway")


def test_each_planted_outage_of_serving_fires_its_rule(
    cgroup: Cgroup, outage: Outage, disk: Path, shelf: Path
) -> None:
    alerts = outage.alerts
    waits = ("--set", "batch_seconds=0.2")  # each request waits so long for others
    outage.start("--set", f"log={shelf / 'log'}", *waits, within=cgroup.command)

    outage.produce(NUM_USERS)
    alerts.wait_for("HotbedSlow", outage.ask)

    def ask_wrongly() -> None:
        assert outage.ask() == 200
        assert outage.ask(model_input="colour") == 400

    alerts.wait_for("HotbedRequestsFail", ask_wrongly)
    alerts.wait_until_quiet("HotbedRequestsFail", meanwhile=outage.ask)

    full = fill(shelf)

    def use() -> None:
        outage.produce()
        outage.ask()

    alerts.wait_for("HotbedPublicationsFail", use)
    (shelf / "rest").write_bytes(bytes(shutil.disk_usage(shelf).free))
    alerts.wait_for("HotbedLogDrops", use)
    assert "HotbedSavesFail" not in alerts.firing()
    full.unlink()
    (shelf / "rest").unlink()
    alerts.wait_until_quiet("HotbedPublicationsFail", "HotbedLogDrops", meanwhile=use)

    assert outage.ask("repository/models/clicks/unload") == 200
    alerts.wait_for("HotbedModelNotReady")
    assert outage.ask("repository/models/clicks/load") == 200
    alerts.wait_until_quiet("HotbedModelNotReady")

    cgroup.fill(0.95)
    alerts.wait_for("HotbedMemory")
    cgroup.release()
    alerts.wait_until_quiet("HotbedMemory")

    # the next dead letter waits for a reader, as for a disk that hangs
    os.mkfifo(next(disk.rglob("checkpoint")) / "dead_letters.jsonl")
    outage.broker.produce("clicks", [b"["])
    outage.produce(2000)
    alerts.wait_for("HotbedStands")
