# SPDX-License-Identifier: Apache-2.0
"""A day of a stream whose ids come and go: once the TTL is reached, the process' memory stays where
it is.

The day passes in a process of its own, in event time: `python tests/soak/test_day_of_churn.py
FOLDER [HOURS]` prints one JSON line an hour. It learns online with admission, eviction in slices,
checkpoints with deltas, and windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotbed as hb
from hotbed.connectors import Position
from hotbed.connectors.live import Live
from hotbed.connectors.position import OPENED
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, ReadPlan
from hotbed.connectors.source import Source

HOURS, TTL_HOURS = 24, 2
EVENTS_AN_HOUR, BLOCK = 600_000, 6_000
USERS = 150_000  # alive at a time; an hour replaces them all
TOLERANCE = 0.05


@dataclass(frozen=True, eq=False)
class Churn(Source):
    """An endless source that ends after `hours`: block n is a pure function of n. A user's ids live
    for an hour.
    """

    hours: int = HOURS

    @property
    def endless(self) -> bool:
        return True

    def schema(self) -> pa.Schema:
        return pa.schema(
            {
                "y": pa.int64(),
                "t": pa.int64(),
                "user": pa.int64(),
                "item": pa.int64(),
                "x": pa.float32(),
            }
        )

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Iterator[tuple[pa.RecordBatch, Position]]:
        live = plan.live or Live()
        state: dict[str, Any] = {"block": 0, "row": 0, "now": 0}
        state |= position.state if position else {}
        while state["block"] * BLOCK < self.hours * EVENTS_AN_HOUR:
            if live.journal.get("block", state["block"]) is None:
                live.journal.append("block", state["block"], {"now": live.now()})
            state |= live.journal.get("block", state["block"]) or {}
            yield OPENED, Position(dict(state))
            rows = self.block(state["block"])
            while state["row"] < BLOCK:
                part = rows.slice(state["row"], batch_rows)
                state["row"] += part.num_rows
                if state["row"] == BLOCK:
                    state |= {"block": state["block"] + 1, "row": 0}
                    yield part, Position(dict(state))
                    break
                yield part, Position(dict(state))

    def block(self, number: int) -> pa.RecordBatch:
        rng = np.random.default_rng(number)
        hour = (number * BLOCK + np.arange(BLOCK)) / EVENTS_AN_HOUR
        # wanders on with time
        user = ((hour + rng.random(BLOCK)) * USERS).astype(np.int64) * 2_654_435_761
        item = (rng.zipf(1.3, BLOCK) % 20_000 + (hour * 2_000).astype(np.int64)) * 40_503
        x = rng.normal(size=BLOCK).astype(np.float32)
        y = (x + rng.normal(size=BLOCK) > 0.5).astype(np.int64)
        t = (hour * 3600).astype(np.int64)
        return pa.record_batch({"y": y, "t": t, "user": user, "item": item, "x": x})


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Hours:
    """Prints one line an hour of event time, with the mean memory of that hour."""

    def __init__(self) -> None:
        self._next, self._sizes = 1, list[int]()

    def on_step_end(self, run: Any) -> None:
        self._sizes.append(resident_bytes())
        if run.now >= self._next * 3_600_000_000:
            stats = {name: dict(table.stats) for name, table in run.tables.items()}
            mean = sum(self._sizes) // len(self._sizes)
            print(
                json.dumps({"hour": self._next, "resident_bytes": mean, "tables": stats}),
                flush=True,
            )
            self._next, self._sizes = self._next + 1, []


def day(folder: Path, hours: int) -> None:
    import torch

    torch.set_num_threads(1)
    hb.set_num_threads(1)
    schema = hb.Schema(
        [hb.Label("y"), hb.Time("t", unit="s"), hb.Id("user"), hb.Id("item"), hb.Dense("x")]
    )
    policies = {"admit": hb.MinCount(2, expire_seconds=3600), "evict": hb.Ttl(hours=TTL_HOURS)}
    tables = hb.make_tables(schema, dim=32, rule=hb.Adagrad(lr=0.05), **policies)
    network = hb.models.DCNv2(schema, tables, hidden=(16,), num_cross_layers=1)
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), {"auc"})
    model.online_train(
        hb.Dataset(Churn(hours), schema, 4096),
        [
            hb.callbacks.Windows(seconds=3600),
            hb.callbacks.Evict(seconds_interval=600),
            hb.callbacks.Checkpoint(folder / "checkpoint", every_steps=60, full_every=5),
            Hours(),
        ],
        progress=False,
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_is_flat_once_the_ttl_is_reached(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hours = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(hours) >= HOURS - 1
    # the TTL, and an hour for what it leaves
    settled = [hour["resident_bytes"] for hour in hours[TTL_HOURS + 1 :]]
    assert max(settled) <= settled[0] * (1 + TOLERANCE), [round(size / 2**20) for size in settled]
    for name in ("user", "item"):
        stats = [hour["tables"][name] for hour in hours]
        rows = [one["rows"] for one in stats[TTL_HOURS + 1 :]]
        assert max(rows) <= min(rows) * 1.2, rows
        assert stats[-1]["evicted"] > 2 * max(rows), stats[-1]  # the day turned the table over
    # what the table would hold without eviction is many times the tolerance: the test can see a
    # leak
    assert hours[-1]["tables"]["user"]["evicted"] * 32 * 8 > 4 * TOLERANCE * settled[0]


if __name__ == "__main__":
    day(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else HOURS)
