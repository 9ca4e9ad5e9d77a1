# SPDX-License-Identifier: Apache-2.0
"""What the page of `hotbed watch` costs beside a training at full speed, and how fast it opens.

    python benchmarks/watch.py [--turns 4] [--seconds 15]

A process learns a stream as fast as it can, and saves and publishes every five seconds. In turn,
the page is there with one reader, who loads it as often as its script does, and is not.
Prints one JSON line: events/s with and without the page; CPU seconds of the page by those of the
training; the same of the status file that the training writes; milliseconds until the page has
been received, on a new connection.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import hotbed as hb
from hotbed.connectors.read_plan import READ_ALL
from hotbed.watch.page import RELOAD_SECONDS

USERS = 200_000
ITEMS = 50_000
BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class Clicks(hb.sources.Source):
    """Drawn clicks of now, without end."""

    seed: int = 0

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        return self._block(0).schema

    def read(
        self,
        position: hb.sources.Position | None = None,
        batch_rows: int = 65_536,
        plan: hb.sources.ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, hb.sources.Position]]:
        number = 0 if position is None else int(position["block"])
        while True:
            block = self._block(number)
            number += 1
            yield (
                block.select(plan.wanted(block.schema.names)),
                hb.sources.Position({"block": number, "now": int(1e6 * time.time())}),
            )

    def _block(self, number: int) -> pa.RecordBatch:
        random = np.random.default_rng((self.seed, number))
        user = random.integers(0, USERS, BLOCK_ROWS)
        item = (ITEMS * random.random(BLOCK_ROWS) ** 3).astype(np.int64)
        rate = 1 / (1 + np.exp(1.5 - np.sin(user) - np.cos(item)))
        columns = {
            "user": user,
            "item": item,
            "country": user % 20,
            "price": random.random(BLOCK_ROWS).astype(np.float32),
            "clicked": (random.random(BLOCK_ROWS) < rate).astype(np.int64),
            "at": np.full(BLOCK_ROWS, int(1e6 * time.time())),
        }
        return pa.RecordBatch.from_pydict(columns)


class TimedStatusFile(hb.callbacks.StatusFile):
    """Writes the processor time that its writes took into `status_seconds`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / "status_seconds"
        self._seconds = 0.0

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_step_end(self, run: Any) -> None:
        began = time.thread_time()
        super().on_step_end(run)
        self._seconds += time.thread_time() - began
        if run.step % 20 == 0:
            self._file.write_text(str(self._seconds))


def train(folder: Path) -> None:
    """Learn drawn clicks until the process is ended."""
    torch.set_num_threads(1)
    ids = [hb.Id("user"), hb.Id("item"), hb.Id("country")]
    schema = hb.Schema([hb.Label("clicked"), hb.Time("at", unit="us"), *ids, hb.Dense("price")])
    tables = hb.make_tables(schema, 16, rule=hb.Adagrad(lr=0.05))
    network = hb.models.DCNv2(schema, tables, hidden=(256, 128))
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), ["auc"])
    callbacks = [
        hb.callbacks.Windows(seconds=10),
        hb.callbacks.Checkpoint(
            folder, every_seconds=5.0, publish=hb.PublishDirectory(folder / "published")
        ),
        TimedStatusFile(folder),
    ]
    model.online_train(hb.Dataset(Clicks(), schema, 1024), callbacks, progress=False)


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run this Python on arguments until the block ends."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the process of a page over a run, and its address."""
    arguments = ["-m", "hotbed.cli", "watch", str(folder), "--port", "0"]
    with started([*arguments, "--published", str(folder / "published")]) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split()[-1]


def cpu_seconds(process: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_seconds(folder: Path) -> float:
    """Return the processor time that a run has spent on its status."""
    return float((folder / "status_seconds").read_text() or 0)


def learned(folder: Path) -> tuple[float, int]:
    """Return the time of the newest status of a run, and the events that it had learned."""
    status = json.loads((folder / "status.json").read_text())
    return status["written"], status["samples"]


def speed(folder: Path, seconds: float, address: str = "") -> tuple[float, list[float]]:
    """Return events/s over some seconds, and how long each load of the page took."""
    begin, samples = learned(folder)
    until = time.monotonic() + seconds
    loads = []
    while time.monotonic() < until:
        if address:
            asked = time.perf_counter()
            with urllib.request.urlopen(address) as answer:
                answer.read()
            loads.append(1000 * (time.perf_counter() - asked))
        time.sleep(RELOAD_SECONDS)
    end, samples_at_end = learned(folder)
    return (samples_at_end - samples) / (end - begin), loads


def measure(turns: int, seconds: float) -> dict[str, Any]:
    """Return the figures of the page beside a training."""
    speeds: dict[str, list[float]] = {"with": [], "without": []}
    loads: list[float] = []
    page_seconds = training_seconds = 0.0
    status = 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with started([__file__, "--train", place]) as training:
            while not (folder / "status.json").exists() or not learned(folder)[1]:
                time.sleep(0.5)
            time.sleep(10)
            for _ in range(turns):
                speeds["without"].append(speed(folder, seconds)[0])
                with watching(folder) as (process, address):
                    time.sleep(RELOAD_SECONDS)  # the start of a process is no part of its cost
                    page = cpu_seconds(process)
                    own = cpu_seconds(training.pid)
                    written = status_seconds(folder)
                    rate, times = speed(folder, seconds, address)
                    page_seconds += cpu_seconds(process) - page
                    training_seconds += cpu_seconds(training.pid) - own
                    status += status_seconds(folder) - written
                speeds["with"].append(rate)
                loads += times
    ratios = [a / b for a, b in zip(speeds["with"], speeds["without"], strict=True)]
    return {
        "page_cpu_ms_a_second": round(1000 * page_seconds / (turns * seconds), 2),
        "events_a_second": {name: round(statistics.median(v)) for name, v in speeds.items()},
        "with_by_without": [round(ratio, 3) for ratio in ratios],
        "page_cpu_by_training_cpu": round(page_seconds / training_seconds, 5),
        "status_file_cpu_by_training_cpu": round(status / training_seconds, 5),
        "open_ms": {
            "median": round(statistics.median(loads), 1),
            "p95": round(sorted(loads)[int(0.95 * len(loads))], 1),
            "most": round(max(loads), 1),
            "loads": len(loads),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
    else:
        print(json.dumps(measure(options.turns, options.seconds)))


if __name__ == "__main__":
    main()
