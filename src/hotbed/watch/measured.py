# SPDX-License-Identifier: Apache-2.0
"""What `hotbed measure` found, and which columns drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError
from hotbed.metrics.stability import stability
from hotbed.quality.results import WINDOWS, Quality

MOST = 96
"""Windows that are shown, the newest ones."""
VERSION = "version"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Drift:
    """How a column of the newest window differs from the windows before it.

    Attributes:
        column: a segment of the measurement.
        index: the population stability index, less what chance adds.
        samples, before: numbers of samples in the newest window and in those before.
        values: the values whose share changed most: value, share now, share before.
    """

    column: str
    index: float
    samples: int
    before: int
    values: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class MeasuredQuality:
    """What `hotbed measure` wrote into a folder.

    Attributes:
        folder: the folder.
        windows: rows of `Quality.windows`.
        differences: rows of `Quality.differences`.
        drift: of each segment; empty before there are two windows.
    """

    folder: str
    windows: Sequence[Row]
    differences: Sequence[Row]
    drift: Sequence[Drift]


class MeasuredFolder:
    """Reads the folder of a measurement again and again; windows that did not change, once.

    Args:
        folder: the output of `hotbed measure`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[tuple[str, int], ...] = ()
        self._measured = MeasuredQuality(str(folder), (), (), ())

    def read(self) -> MeasuredQuality:
        """Return what is there now.

        Raises:
            ConfigError: there is no window.
        """
        paths = sorted((self._folder / WINDOWS).glob("*.parquet"))[-MOST:]
        files = tuple((path.name, path.stat().st_mtime_ns) for path in paths)
        if files != self._files:
            quality = Quality.read(self._folder, most=MOST)
            windows = quality.windows.to_pylist()
            differences = quality.differences.to_pylist()
            self._measured = MeasuredQuality(
                str(self._folder), windows, differences, drift_of(windows)
            )
            self._files = files
        if not self._measured.windows:
            raise ConfigError(
                f"{self._folder}: nothing is measured yet, got no window. Give the output folder "
                "of `hotbed measure`; a window is measured once its outcomes are known."
            )
        return self._measured


def drift_of(windows: Iterable[Row]) -> list[Drift]:
    """Return the drift of each segment, those that moved most first.

    The samples of all answered requests of the newest window are compared with those of all windows
    before it. Values that were too rare to be measured apart count as one value.
    """
    rows = [row for row in windows if row["route"] is None and row["column"] not in (None, VERSION)]
    if not rows:
        return []
    newest = max(row["begin"] for row in rows)
    now: dict[str, Counter[str]] = {}
    before: dict[str, Counter[str]] = {}
    for row in rows:
        counts = now if row["begin"] == newest else before
        value = "others" if row["value"] is None else str(row["value"])
        counts.setdefault(row["column"], Counter())[value] += row["samples"]
    drifts = [
        _drift(column, counts, before[column]) for column, counts in now.items() if column in before
    ]
    return sorted(drifts, key=lambda drift: -drift.index)


def _drift(column: str, now: Counter[str], before: Counter[str]) -> Drift:
    values = list(dict.fromkeys([*now, *before]))
    total = max(1, now.total())
    total_before = max(1, before.total())
    shares = [(value, now[value] / total, before[value] / total_before) for value in values]
    shares.sort(key=lambda share: -abs(share[1] - share[2]))
    index = stability([now[value] for value in values], [before[value] for value in values])
    return Drift(column, index, now.total(), before.total(), shares[:3])
