# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a trainer and a server in a planted outage of each kind, and its rules
fire: deploy/alerts.yaml, with seconds for minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
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
tables: {dim: 16}
model: {kind: fm}
fit: {stream_batch_size: 8, on_error: skip}
checkpoint: {every_seconds: 1, full_every: 1, keep: 1, publish: {kind: publish_directory, path: DISK/published}}
stream_callbacks: [{kind: prometheus, port: PORT, every_seconds: 0.2}]
output: DISK/run
"""
SHORTER = [  # seconds for minutes, and thresholds that a test reaches
    (r"(\d+)m\]", r"\1s]"),
    (r"> 1800", "> 10"),
    (r"> 3600", "> 20"),
    (r"> 100000", "> 1000"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts absent")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def prometheus() -> str:
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus absent")
    return program


def messages(begin: int, count: int) -> list[bytes]:
    now = int(time.time())
    rows = ({"user": row % 50_000, "y": row % 2, "t": now} for row in range(begin, begin + count))
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
    every = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
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
        deadline = time.monotonic() + 90
        while name not in self.firing():
            assert time.monotonic() < deadline, f"{name} does not fire: {self.firing()}"
            meanwhile()
            time.sleep(0.3)

    def wait_until_quiet(self, *names: str) -> None:
        deadline = time.monotonic() + 90
        while self.firing() & set(names):
            assert time.monotonic() < deadline, f"still firing: {self.firing()}"
            time.sleep(0.3)


def test_each_planted_outage_fires_its_rule(tmp_path: Path, disk: Path, prometheus: str) -> None:
    ports = {"online": free_port(), "serve": free_port()}
    alerts = Alerts(own := free_port())
    config = configure(tmp_path, ports)
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: object) -> subprocess.Popen[bytes]:
        words = [str(word) for word in command]
        with (tmp_path / f"{len(started)}.log").open("wb") as log:
            started.append(subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log))
        return started[-1]

    hotbed = (sys.executable, "-m", "hotbed.cli")
    try:
        with Broker() as broker:
            broker.create("clicks", 1)
            broker.produce("clicks", messages(0, 400))
            job = JOB.replace("SERVERS", broker.servers).replace("DISK", str(disk))
            (tmp_path / "job.yaml").write_text(job.replace("PORT", str(ports["online"])))
            trainer = start(*hotbed, "online", "job.yaml")
            published = disk / "published"
            wait_for(lambda: (published / "CURRENT").exists(), trainer)
            serve = (f"clicks={published}", f"--watch=clicks={published}", "--grpc-port=-1")
            start(*hotbed, "serve", *serve, f"--http-port={ports['serve']}")
            start(
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{own}",
            )
            sent = 400

            def produce(count: int = 40) -> None:
                nonlocal sent
                broker.produce("clicks", messages(sent, count))
                sent += count

            calm = time.monotonic() + 20
            while time.monotonic() < calm:
                produce()
                time.sleep(0.3)
            assert alerts.firing() == set()

            produce(60_000)
            alerts.wait_for("HotbedLagGrows", lambda: produce(3000))

            broker.produce("clicks", [b"{"])
            alerts.wait_for("HotbedDeadLetters")

            # the journal has room, a full of 50,000 rows has none
            (disk / "full").write_bytes(bytes(shutil.disk_usage(disk).free - (2 << 20)))
            for name in ("HotbedSavesFail", "HotbedUnsaved", "HotbedUnpublished", "HotbedModelOld"):
                alerts.wait_for(name, produce)
            (disk / "full").unlink()
            alerts.wait_until_quiet("HotbedSavesFail", "HotbedUnsaved", "HotbedModelOld")

            trainer.send_signal(signal.SIGSTOP)
            alerts.wait_for("HotbedDown")
            trainer.send_signal(signal.SIGCONT)
            alerts.wait_until_quiet("HotbedDown")

            broker.kill()
            alerts.wait_for("HotbedSourceAway")
            broker.restart()
            alerts.wait_until_quiet("HotbedSourceAway")
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
