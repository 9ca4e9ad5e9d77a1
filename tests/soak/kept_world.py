# SPDX-License-Identifier: Apache-2.0
"""Worlds of events for models that keep a history and a count, and a dict that replays them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.testing import ReplayedCount, ReplayedHistory

REQUESTS = "requests.parquet"
"""The file of a life with the rows that its versions serve: user, item, time, and number."""
LENGTH = 20
WINDOWS = (600, 21600)
"""Of counts, in seconds."""
EVERY = 60


def numbered(events: pa.Table) -> pa.Table:
    """Return events with their numbers."""
    return events.append_column("n", pa.array(np.arange(events.num_rows)))


def disordered(events: pa.Table, seed: int) -> pa.Table:
    """Return events as they arrive: a fifth up to 50 minutes late, some twice, many at one time."""
    rng = np.random.default_rng(seed)
    times = events["t"].to_numpy() // 30 * 30
    delays = np.where(rng.random(len(times)) < 0.2, rng.integers(0, 3000, len(times)), 0)
    copies = np.where(rng.random(len(times)) < 0.02, 2, 1)
    order = np.repeat(np.argsort(times + delays, kind="stable"), copies)
    place = events.schema.get_field_index("t")
    return events.set_column(place, "t", pa.array(times)).take(pa.array(order))


def write_world(
    root: Path, events: pa.Table, requests: pa.Table, pause_seconds: float = 0.0
) -> None:
    """Write requests, and events as files of 1,000 rows.

    Each file appears whole, `pause_seconds` after the one before.
    """
    write_requests(root, requests)
    (root / "events").mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, events.num_rows, 1000)):
        path = root / "events" / f"events-{number:03d}.parquet"
        pq.write_table(events.slice(first, 1000), path.with_suffix(".tmp"), row_group_size=200)
        path.with_suffix(".tmp").rename(path)
        sleep(pause_seconds)


def hastened(events: pa.Table) -> pa.Table:
    """Return events a second apart: where partitions are read one after another, rows come late."""
    times = pa.array(events["t"].to_numpy() // 60)
    return events.set_column(events.schema.get_field_index("t"), "t", times)


def write_requests(root: Path, requests: pa.Table) -> None:
    root.mkdir(parents=True, exist_ok=True)
    requests = requests.drop_columns(["y"]).sort_by("t")
    pq.write_table(requests, root / REQUESTS)


@dataclass
class Checked:
    """How many rows were compared with the dict, each once."""

    samples: int = 0
    served: int = 0
    rows: list[dict[str, float]] | None = None


class Replay:
    """What was learned, as dicts keep it."""

    def __init__(self) -> None:
        self._history = ReplayedHistory(LENGTH)
        self._count = ReplayedCount(EVERY, max(WINDOWS))

    def check(
        self, user: int, item: int, time: int, before: list[int], likes: Sequence[float]
    ) -> None:
        """Check what a row sees."""
        assert before == [entry for _, entry in self._history.see(user, time)]
        expected: list[float] = []
        for window in WINDOWS:
            matches, rows = self._count.see(item, time, window)
            expected += [np.log1p(matches), np.log1p(rows), matches / (rows + 10)]
        assert likes == pytest.approx(expected, rel=1e-6)

    def leave(self, user: int, item: int, time: int, known: int, y: float) -> None:
        """Learn a row."""
        if y == 1:
            self._history.leave(user, time, known, item)
        self._count.leave(item, time, known, int(y == 1))


def check(root: Path, steps: int, ranks: int = 1) -> Checked:
    """Check what all lives wrote: what rows saw at each step, and what each version served.

    A step that several lives or ranks took must have had the same rows each time.

    Args:
        root: of the lives.
        steps: that were learned.
        ranks: that learned together. Each of them has all rows of a step.
    """
    learned, served = _lines(root, ranks)
    requests = {row["n"]: row for row in pq.read_table(root / REQUESTS).to_pylist()}
    replay = Replay()
    checked = Checked(rows=[])
    assert checked.rows is not None
    for step in range(steps):
        for line in served.get(step, []):
            for place, number in enumerate(line["served"]):
                row = requests[number]
                seen = line["before"][place], line["likes"][place]
                replay.check(row["user"], row["item"], row["t"], *seen)
        checked.served += len(served[step][0]["served"]) if step in served else 0
        for rank, lines in enumerate(learned[step]):
            assert lines, f"rank {rank} never learned step {step}"
            assert all(line == learned[step][0][0] for line in lines), f"rank {rank}, step {step}"
        for row in _rows(learned[step][0][0]):
            replay.check(row["user"], row["item"], row["time"], row["before"], row["likes"])
            replay.leave(row["user"], row["item"], row["time"], row["known"], row["y"])
            checked.rows.append(row)
    checked.samples = len(checked.rows)
    return checked


def _lines(root: Path, ranks: int) -> tuple[dict[int, list[list[Any]]], dict[int, list[Any]]]:
    """Return, by step, what each rank learned in each life, and what was served."""
    learned: dict[int, list[list[Any]]] = {}
    served: dict[int, list[Any]] = {}
    for rank in range(ranks):
        for text in (root / f"seen-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            if "served" in line:
                served.setdefault(line["step"], []).append(line)
            else:
                of_step = learned.setdefault(line["step"], [[] for _ in range(ranks)])
                of_step[rank].append(line)
    return learned, served


def _rows(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a step."""
    names = [name for name in line if name != "step"]
    for values in zip(*(line[name] for name in names), strict=True):
        yield dict(zip(names, values, strict=True))
