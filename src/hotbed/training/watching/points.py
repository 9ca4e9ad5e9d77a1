# SPDX-License-Identifier: Apache-2.0
"""Point: where a training was at one moment, and points in the state of a history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotbed.training.columns import Tables, columns, counters, rows_of, tables_of


@dataclass
class Point:
    """The state of training at one moment.

    Attributes:
        step, epoch, samples: counters of the run.
        seconds: since training began, or since the last restart.
        time: the watermark in microseconds; None without event times.
        loss: mean training loss since the point before.
        window: progressive metrics since the window before; empty between windows.
        tables: statistics of each table; of several ranks, of the rows of all of them.
        disk: what disks below the tables did since the process began; of several ranks, of this
            one. Empty where all rows lie in memory.
    """

    step: int
    epoch: int
    samples: int
    seconds: float
    time: int | None
    loss: float
    window: dict[str, float] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)


def state_of_points(points: Sequence[Point]) -> dict[str, Any]:
    """Return points as JSON values and NumPy arrays."""
    numbers = []
    for point in points:
        timed = point.time is not None
        numbers.append([point.step, point.epoch, point.samples, timed, point.time or 0])
    return {
        "numbers": np.array(numbers, np.int64).reshape(-1, 5),
        "loss": np.array([point.loss for point in points], np.float64),
        "wall_seconds": np.array([point.seconds for point in points], np.float64),
        "windows": columns([point.window for point in points]),
        "tables": counters([point.tables for point in points]),
        "wall_disk": columns([point.disk for point in points]),
    }


def points_of(state: Mapping[str, Any]) -> list[Point]:
    """Return the points that `state_of_points` described."""
    parts = zip(
        np.asarray(state["numbers"]).tolist(),
        np.asarray(state["loss"]).tolist(),
        np.asarray(state["wall_seconds"]).tolist(),
        rows_of(state["windows"]),
        tables_of(state["tables"]),
        strict=True,
    )
    points = []
    for (step, epoch, samples, timed, when), loss, seconds, window, tables in parts:
        event_time = when if timed else None
        points.append(Point(step, epoch, samples, seconds, event_time, loss, window, tables))
    if "wall_disk" in state:  # absent from states of earlier builds
        for point, disk in zip(points, rows_of(state["wall_disk"]), strict=True):
            point.disk = disk
    return points
