# SPDX-License-Identifier: Apache-2.0
"""Two streams joined: a training step's throughput beside the same stream with labels in its rows,
and what open impressions take.

    python benchmarks/join.py                          # DCNv2, 1,000,000 open impressions, 5 pairs
    python benchmarks/join.py --memory 10000000        # RSS, disk and bytes of a delta, no training

Prints one JSON line a measurement. Streams are generated, without a broker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

import hotbed as hb
from hotbed.connectors import Position, Source
from hotbed.connectors.live import Live
from hotbed.connectors.position import OPENED, PLACE
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, JoinWishes, ReadPlan
from hotbed.connectors.status import status_of
from hotbed.persist.container.format import CheckpointWriter
from hotbed.persist.state.open_rows import write_open_rows

SLOTS = 26
DENSE = 13
POOL = 1 << 17
RATE = 0.04
BATCH = 2048


@dataclass(frozen=True)
class Generated(Source):
    """An endless stream: event number i happens at i microseconds.

    `clicks`: it has the clicks on one of 25 impressions instead, a third of `window` later.
    """

    window: int
    clicks: bool = False
    block_rows: int = 8192

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        rows = self._rows(0, 1)
        return rows.drop_columns([PLACE]).schema

    @cached_property
    def _pool(self) -> dict[str, pa.Array]:
        rng = np.random.default_rng(0)
        ids = {f"c{slot}": pa.array(rng.zipf(1.2, POOL) % 100_000) for slot in range(SLOTS)}
        dense = {f"d{number}": pa.array(rng.random(POOL, np.float32)) for number in range(DENSE)}
        return {**ids, **dense, "label": pa.array(_clicked(np.arange(POOL)).astype(np.float64))}

    def _rows(self, begin: int, end: int) -> pa.RecordBatch:
        numbers = np.arange(begin, end)
        if self.clicks:
            shown = numbers - self.window // 3
            shown = shown[(shown >= 0) & _clicked(shown)]
            times = shown + self.window // 3
            return pa.record_batch({"id": shown, "time": times, PLACE: _places(shown)})
        columns: dict[str, Any] = {"id": numbers, "time": numbers}
        for name, values in self._pool.items():
            columns[name] = values.slice(begin % POOL, end - begin)
        return pa.record_batch({**columns, PLACE: _places(numbers)})

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        block = 0
        columns = plan.wanted(self.schema().names)
        while True:
            state = Position({"block": block, "now": 0})
            begin = block * self.block_rows
            rows = self._rows(begin, begin + self.block_rows)
            yield OPENED, state
            block += 1
            yield rows.select([*columns, PLACE]), Position({"block": block, "now": 0})


def _clicked(numbers: np.ndarray) -> np.ndarray:
    return numbers * 2654435761 % 1000 < 1000 * RATE


def _places(numbers: np.ndarray) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(numbers)], ["row"])


def joined(window: int, **keywords: Any) -> hb.sources.Join:
    shown, clicks = Generated(window), Generated(window, clicks=True)
    return hb.sources.Join(shown, clicks, on="id", within=window / 1e6, unit="us", **keywords)


class _Pace:
    """Times the steps after the first ones."""

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self.begin = 0.0

    def on_step_end(self, run: Any) -> None:
        if run.step == self._warm:
            self.begin = time.perf_counter()


def samples_a_second(source: Source, steps: int, warm: int = 5) -> float:
    """Learn a stream; return the samples of a second, after the first steps."""
    ids = [hb.Id(f"c{slot}") for slot in range(SLOTS)]
    dense = [hb.Dense(f"d{number}") for number in range(DENSE)]
    schema = hb.Schema([hb.Label("label"), hb.Time("time", unit="us"), *ids, *dense])
    tables = hb.make_tables(schema, dim=16, rule=hb.Adagrad(lr=0.05))
    model = hb.RecModel(hb.models.DCNv2(schema, tables, hidden=(400, 400, 400)), "bce", "adam")
    pace = _Pace(warm)
    dataset = hb.Dataset(source, schema, BATCH)
    model.online_train(dataset, [pace], max_steps=steps + warm, progress=False)
    return steps * BATCH / (time.perf_counter() - pace.begin)


def impressions_a_second(window: int, rows: int) -> float:
    """Read a join alone, once it holds a window."""
    begin = 0.0
    first = 0
    for _, position in joined(window).read(None, BATCH, ReadPlan(live=Live())):
        count = position["opened"]["impressions"]
        if not begin and position["watermark"] > window:
            begin = time.perf_counter()
            first = count
        if begin and count >= first + rows:
            return (count - first) / (time.perf_counter() - begin)
    raise AssertionError("the stream never ends")


def compare(window: int, pairs: int, steps: int) -> dict[str, Any]:
    """Alternate both streams; return their medians and the ratios of the pairs."""
    figures: list[tuple[float, float]] = []
    for _ in range(pairs):
        plain = samples_a_second(Generated(window), steps)
        figures.append((plain, samples_a_second(joined(window), steps)))
    ratios = sorted(join / plain for plain, join in figures)
    return {
        "open": window,
        "labels_in_rows": round(statistics.median(plain for plain, _ in figures)),
        "joined": round(statistics.median(join for _, join in figures)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "source_alone": round(impressions_a_second(window, 2_000_000)),
    }


def _memory(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) // 1024


def measure_memory(window: int, memory_bytes: int, directory: str) -> dict[str, Any]:
    """Hold so many impressions open; return megabytes."""
    spill = hb.sources.Spill(directory, memory_bytes)
    delta: dict[str, Any] = {}
    start_mb = _memory("VmRSS")
    before = None
    plan = ReadPlan(live=Live(), wishes=JoinWishes(keeps_open=True))
    reading = joined(window, spill=spill).read(None, BATCH, plan)
    rows: Any = status_of(reading).open_rows
    for _, position in reading:
        rows.release(position.state)
        if before is None and position["watermark"] > window * 1.05:
            before = position
        if before is not None and position["watermark"] > window * 1.05 + 500_000:
            resident = {"rss_mb": _memory("VmRSS"), "rss_anon_mb": _memory("RssAnon")}
            saved = rows.saved_at(position.state, before["opened"])
            with CheckpointWriter(directory) as writer:
                write_open_rows(writer, saved)
                num_bytes = sum(entry.bytes for entry in writer.entries().values())
            new = position["opened"]["impressions"] - before["opened"]["impressions"]
            delta = {**resident, "delta_rows": new, "delta_mb": num_bytes >> 20}
            break
    table = next(iter(rows.impressions)).table()
    arrow = len(rows.impressions) * table.nbytes // table.num_rows
    return {
        "open": len(rows.impressions),
        "arrow_mb": arrow >> 20,
        "budget_mb": memory_bytes >> 20,
        "counted_mb": rows.memory_bytes >> 20,
        "disk_mb": rows.disk_bytes >> 20,
        "disk_to_arrow": round(rows.disk_bytes / arrow, 3),
        "rss_start_mb": start_mb,
        **delta,
        "rss_peak_mb": _memory("VmHWM"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", type=int, default=1_000_000, help="open impressions")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", type=int, help="hold so many impressions open instead")
    parser.add_argument("--budget", type=int, default=500 << 20, help="bytes of memory for them")
    arguments = parser.parse_args()
    if arguments.memory is None:
        answer = compare(arguments.open, arguments.pairs, arguments.steps)
    else:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
            answer = measure_memory(arguments.memory, arguments.budget, directory)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
