# SPDX-License-Identifier: Apache-2.0
"""Windows of a stream: where it is cut, and a log of windows in bounded memory."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hotbed import config
from hotbed.errors import ConfigError, DataError
from hotbed.metrics.classification import AUC
from hotbed.metrics.metric import Array, Metric, Samples, StoredMetric, at_least_one

Tables = dict[str, dict[str, int]]


@dataclass
class Window:
    """Metrics and counters of a part of a stream.

    `begin`, `end`: event time in microseconds: the bounds of a window of seconds, the first and the
    latest sample of a window of samples (None without times). `rows`: its samples; `samples`: those
    of the stream up to its end. `values`: metrics. `tables`: each table's counters at its end.
    `observed`: values that depend on the wall clock and the machine: freshness, lag, bytes, rows
    left out. `windows`: the number of windows joined into this one.
    """

    begin: int | None
    end: int | None
    rows: int
    samples: int
    values: dict[str, float] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)
    observed: dict[str, float] = field(default_factory=dict)
    windows: int = 1

    def joined(self, later: Window) -> Window:
        """Return this window and the `later` one as one window.

        Values are means weighted by rows, and undefined values are ignored; counters are the later
        ones.
        """
        return Window(
            self.begin,
            later.end,
            self.rows + later.rows,
            later.samples,
            _mean(self.values, self.rows, later.values, later.rows),
            later.tables,
            _mean(self.observed, self.rows, later.observed, later.rows),
            self.windows + later.windows,
        )


class Cuts:
    """Where a stream is cut: at whole multiples of `seconds` of event time, or every `samples`.

    A sample belongs to the window of the newest event time up to and with itself, so that late ones
    fall into the window that is open and windows never go back. It depends on the sequence of
    samples alone: not on batches, not on the clock.
    """

    def __init__(self, seconds: float | None = None, samples: int | None = None) -> None:
        if (seconds is None) == (samples is None):
            raise ConfigError(
                f"Windows: expected either seconds or samples, got seconds={seconds!r}, "
                f"samples={samples!r}. Give for example seconds=3600."
            )
        if not (seconds or samples or 0) > 0:
            raise ConfigError(
                f"Windows: expected a number above 0, got seconds={seconds!r}, "
                f"samples={samples!r}. Give a positive number."
            )
        self._width = None if seconds is None else max(1, round(seconds * 1e6))
        self._rows = samples
        self.watermark: int | None = None
        self.seen = 0

    def pieces(self, times: Array | None, num_samples: int) -> Iterator[tuple[int, slice]]:
        """The next samples as (number of their window, rows), by rising number; `times`: int64
        microseconds [n].

        Raises DataError for windows of seconds without times.
        """
        if self._width is not None and times is None and num_samples:
            raise DataError(
                "Windows: seconds are event time, got data without a Time column. Give samples=…."
            )
        if times is not None and num_samples:
            before = np.int64(-(2**63)) if self.watermark is None else np.int64(self.watermark)
            times = np.maximum(np.maximum.accumulate(np.asarray(times, np.int64)), before)
            self.watermark = int(times[-1])
        if self._width is not None:
            numbers = np.empty(0, np.int64) if times is None else times // self._width
        else:
            numbers = (self.seen + np.arange(num_samples)) // (self._rows or 1)
        self.seen += num_samples
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), num_samples]
        for start, stop in pairwise(bounds):
            if stop > start:
                yield int(numbers[start]), slice(start, stop)

    def bounds(self, number: int) -> tuple[int, int] | None:
        """Return begin and end of window `number` in event time; None for windows of samples."""
        if self._width is None:
            return None
        return number * self._width, (number + 1) * self._width

    def is_full(self, number: int) -> bool:
        """Return whether window `number` has all its samples."""
        return self._rows is not None and self.seen >= (number + 1) * self._rows


class WindowLog:
    """Closed windows in order, at most `most`; beyond that, neighbours are joined in pairs.

    All windows of the log have about the same length, and an endless stream needs bounded memory.
    """

    def __init__(self, most: int = 512) -> None:
        if most < 2:
            raise ConfigError(f"Windows.most: expected at least 2, got {most}. Give at least 2.")
        self.windows: list[Window] = []
        self._most = most
        self._stride = 1

    def append(self, window: Window) -> None:
        """Add the window that closed last."""
        if self.windows and self.windows[-1].windows < self._stride:
            self.windows[-1] = self.windows[-1].joined(window)
        else:
            self.windows.append(window)
        if len(self.windows) > self._most:
            windows = []
            for first in range(0, len(self.windows), 2):
                pair = self.windows[first : first + 2]
                windows.append(pair[0].joined(pair[1]) if len(pair) == 2 else pair[0])
            self.windows = windows
            self._stride *= 2

    def state(self) -> dict[str, Any]:
        """Return the windows as columns.

        Observed values are in `wall_observed`; content digests do not cover `wall_…` keys.
        """
        numbers = [
            [w.begin is not None, w.begin or 0, w.end or 0, w.rows, w.samples, w.windows]
            for w in self.windows
        ]
        return {
            "stride": self._stride,
            "numbers": np.array(numbers, np.int64).reshape(-1, 6),
            "values": columns([w.values for w in self.windows]),
            "tables": counters([w.tables for w in self.windows]),
            "wall_observed": columns([w.observed for w in self.windows]),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self._stride = int(state["stride"])
        numbers = np.asarray(state["numbers"]).tolist()
        parts = (
            rows_of(state["values"]),
            tables_of(state["tables"]),
            rows_of(state["wall_observed"]),
        )
        self.windows = [
            Window(
                begin if timed else None,
                end if timed else None,
                rows,
                samples,
                values,
                tables,
                observed,
                windows,
            )
            for (timed, begin, end, rows, samples, windows), values, tables, observed in zip(
                numbers, *parts, strict=True
            )
        ]


# --- metrics of bounded memory --------------------------------------------------------------------


@config.described
class Windowed(Metric):
    """A metric of the last `samples` samples only, such as progressive AUC over event time.

    Within groups where `metric` is: its `group` counts.

    Example: `Windowed(AUC(), samples=100_000)`.
    """

    def __init__(self, metric: Metric, samples: int) -> None:
        self.metric = metric
        self.samples = at_least_one("Windowed.samples", samples)
        self.group = getattr(metric, "group", None)
        self.needs_group = metric.needs_group
        super().__init__()

    def clear(self) -> None:
        """Remove all samples."""
        self._parts: deque[Samples] = deque()
        self._held = 0

    def add(self, samples: Samples) -> None:
        """Add checked samples and drop the oldest beyond the window."""
        self._parts.append(samples)
        self._held += len(samples.label)
        while self._held > self.samples:
            oldest = self._parts.popleft()
            spare = self._held - self.samples
            if len(oldest.label) > spare:
                self._parts.appendleft(oldest[spare:])
            self._held -= min(spare, len(oldest.label))

    def eval(self) -> float:
        """Return the inner metric of the samples in the window."""
        self.metric.clear()
        for part in self._parts:
            self.metric.add(part)
        return self.metric.eval()

    def state(self) -> dict[str, Any]:
        """Return the samples in the window."""
        return Samples.concat(self._parts).state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.clear()
        self.add(Samples.from_state(state))


def bounded(metric: Any, samples: int = 100_000) -> Any:
    """Return a fresh form of `metric` whose memory does not grow with the number of samples.

    The AUC of more than 10,000 samples is counted in 8,192 bins of equal mass (memory grows with
    the logarithm); other metrics that keep their samples keep the last `samples`. Metrics that keep
    none and metrics from outside this package are copied and cleared.

    Example: `bounded(GAUC("user"))` is `Windowed(GAUC("user"), samples=100_000)`.
    """
    made = copy.deepcopy(metric)
    if isinstance(metric, AUC) and metric.bins is None:
        made = AUC(bins=8192, exact=10_000)
    elif isinstance(metric, StoredMetric):
        made.set_indexes(None)
        made = Windowed(made, samples)
    if isinstance(metric, Metric):
        made.set_indexes(metric.indexes)
    made.clear()
    return made


# --- many small dicts as a few arrays -------------------------------------------------------------


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return dicts of floats as names and float64 [n, names].

    A missing name is nan in `values` and 0 in `held`.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = np.array([[row.get(name, math.nan) for name in names] for row in rows], np.float64)
    held = np.array([[name in row for name in names] for row in rows], np.bool_)
    shape = (len(rows), len(names))
    return {
        "names": names,
        "values": values.reshape(shape),
        "held": held.reshape(shape).astype(np.uint8),
    }


def rows_of(state: Mapping[str, Any]) -> list[dict[str, float]]:
    """Inverse of `columns`."""
    values = np.asarray(state["values"]).tolist()
    held = np.asarray(state["held"]).tolist()
    return [
        {name: value for name, value, there in zip(state["names"], row, mask, strict=True) if there}
        for row, mask in zip(values, held, strict=True)
    ]


def counters(rows: Sequence[Tables]) -> dict[str, Any]:
    """Return counters of tables as pairs of names and int64 [n, pairs]; -1 where one is missing.

    Bytes are left out, because they depend on the machine.
    """
    pairs = list(
        dict.fromkeys(
            (t, key) for row in rows for t, stats in row.items() for key in stats if is_counter(key)
        )
    )
    values = [[row.get(table, {}).get(key, -1) for table, key in pairs] for row in rows]
    return {
        "names": [list(pair) for pair in pairs],
        "values": np.array(values, np.int64).reshape(len(rows), len(pairs)),
    }


def tables_of(state: Mapping[str, Any]) -> list[Tables]:
    """Inverse of `counters`."""
    counters_by_row: list[Tables] = []
    for row in np.asarray(state["values"]).tolist():
        tables: Tables = {}
        for (table, key), value in zip(state["names"], row, strict=True):
            if value >= 0:
                tables.setdefault(table, {})[key] = value
        counters_by_row.append(tables)
    return counters_by_row


def is_counter(key: str) -> bool:
    """Return whether a statistic of a table follows from the stream alone.

    Rows and admissions do; bytes do not.
    """
    return "bytes" not in key


def _mean(
    a: Mapping[str, float], weight_a: int, b: Mapping[str, float], weight_b: int
) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys([*a, *b]):
        known = [
            (row[name], w)
            for row, w in ((a, weight_a), (b, weight_b))
            if not math.isnan(row.get(name, math.nan))
        ]
        total = sum(w for _, w in known)
        found[name] = sum(value * w for value, w in known) / total if total else math.nan
    return found
