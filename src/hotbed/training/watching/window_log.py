# SPDX-License-Identifier: Apache-2.0
"""Where a stream is cut into windows, and a log of windows in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from hotbed import checks
from hotbed.errors import ConfigError, DataError
from hotbed.metrics.metric import Array
from hotbed.training.columns import Tables, columns, counters, rows_of, tables_of


@dataclass
class Window:
    """Metrics and counters of a part of a stream.

    Attributes:
        begin, end: event time in microseconds; None without times. They are the bounds of a window
            of seconds, and the first and the latest sample of a window of samples.
        rows: number of samples in the window.
        samples: number of samples of the stream up to the end of the window.
        values: metrics by name.
        tables: counters of each table at the end of the window.
        observed: values that depend on the clock and the machine: freshness, lag, bytes, skipped
            rows.
        windows: number of windows that were joined into this one.
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


class WindowCuts:
    """Cut a stream at whole multiples of `seconds` of event time, or after every `samples`.

    A sample belongs to the window of the newest event time so far, its own included. Late samples
    therefore fall into the open window, and windows never go back. The cut depends on the sequence
    of samples alone, not on batches or the clock.
    """

    def __init__(self, seconds: float | None = None, samples: int | None = None) -> None:
        if (seconds is None) == (samples is None):
            raise ConfigError(
                f"Windows: expected either seconds or samples, got seconds={seconds!r}, "
                f"samples={samples!r}. Give for example seconds=3600."
            )
        if seconds is not None:
            checks.seconds("Windows.seconds", seconds, above=0)
        if samples is not None:
            checks.whole_number("Windows.samples", samples, 1, 2**63 - 1)
        self._width = None if seconds is None else max(1, round(seconds * 1e6))
        self._rows = samples
        self.watermark: int | None = None
        self.seen = 0

    @property
    def every(self) -> list[int | None]:
        """The width of a window in microseconds, and its samples; one of them is None."""
        return [self._width, self._rows]

    def window_at(self, time: int) -> int | None:
        """Return the window of an event time; None where windows are of samples."""
        return None if self._width is None else time // self._width

    def pieces(self, times: Array | None, num_samples: int) -> Iterator[tuple[int, slice]]:
        """Yield the next samples as pairs of window number and rows, by rising number.

        Args:
            times: int64 microseconds [n], or None.
            num_samples: n.

        Raises:
            DataError: the windows are of seconds, but times are missing.
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
        checks.at_least("Windows.most", most, 2)
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
        numbers = []
        for window in self.windows:
            timed = window.begin is not None
            bounds = [timed, window.begin or 0, window.end or 0]
            numbers.append([*bounds, window.rows, window.samples, window.windows])
        return {
            "stride": self._stride,
            "numbers": np.array(numbers, np.int64).reshape(-1, 6),
            "values": columns([w.values for w in self.windows]),
            "tables": counters([w.tables for w in self.windows]),
            "wall_observed": columns([w.observed for w in self.windows]),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._stride = int(state["stride"])
        numbers = np.asarray(state["numbers"]).tolist()
        parts = zip(
            numbers,
            rows_of(state["values"]),
            tables_of(state["tables"]),
            rows_of(state["wall_observed"]),
            strict=True,
        )
        self.windows = []
        for (timed, begin, end, rows, samples, windows), values, tables, observed in parts:
            window = Window(None, None, rows, samples, values, tables, observed, windows)
            if timed:
                window.begin = begin
                window.end = end
            self.windows.append(window)


def _mean(
    first: Mapping[str, float], first_rows: int, later: Mapping[str, float], later_rows: int
) -> dict[str, float]:
    """Return the means of two windows weighted by rows; undefined values are ignored."""
    means = {}
    for name in dict.fromkeys([*first, *later]):
        total = 0.0
        rows = 0
        for values, weight in ((first, first_rows), (later, later_rows)):
            value = values.get(name, math.nan)
            if not math.isnan(value):
                total += value * weight
                rows += weight
        means[name] = total / rows if rows else math.nan
    return means
