# SPDX-License-Identifier: Apache-2.0
"""ServingQuality: which version serves better, from what was shown and what was clicked."""

from __future__ import annotations

import dataclasses
import logging
import time
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotbed import checks, config
from hotbed.connectors.dead_letters import DeadLetters
from hotbed.connectors.join.join import Join
from hotbed.connectors.join.rules import Wait
from hotbed.connectors.journal import Journal
from hotbed.connectors.live import Live
from hotbed.connectors.position import Position, decisions_of
from hotbed.connectors.read_plan import JoinWishes, ReadPlan, Skips
from hotbed.connectors.status import ended, status_of
from hotbed.errors import ConfigError
from hotbed.files import local_path
from hotbed.job.file import read_values
from hotbed.persist.container.store import JOURNAL, LETTERS
from hotbed.quality.cells import QualitySettings, measure_window
from hotbed.quality.page import PAGE, write_page
from hotbed.quality.readings import readings
from hotbed.quality.results import Quality
from hotbed.quality.samples import MeasuredColumns, joined
from hotbed.quality.state import WindowStates
from hotbed.signals import ended_by_signals
from hotbed.training.watching.endpoint import Endpoint

log = logging.getLogger("hotbed")

STATES = "states"
_MOST_SECONDS = 1e9  # of a window: calendars end in the year 9999
MOST_SHOWN = 512
"""Windows of a folder that the page shows, the newest ones."""


@dataclass(frozen=True)
class ServingQuality:
    """The quality of what was served: metrics by route, version and segment, with intervals.

    Served scores are compared with what happened: the AUC, log loss, normalized entropy,
    calibration, the rate of positives, and hit rate and NDCG of the shown lists. Intervals are
    right for users with several samples each. docs/measure.md says how to read them.

    Args:
        samples: a join of a request log with outcomes, which waits for their windows.
        label: of the join; None = its first one.
        score: the column of scores; None = `score`, or `score_LABEL` for one of several labels.
        user: the column that says whose samples belong together; None = each request is a user of
            its own, as is a request whose user is null, empty text or NaN.
        segments: columns whose values are measured apart.
        seconds: length of a window of event time; windows begin at its whole multiples. None = one
            window, of a join that ends.
        k: of the hit rate: the share of lists with an outcome that have one among their k highest
            scores. NDCG takes whole lists.
        level: of the intervals.
        baseline: the route that others are compared with.
        most: values of a column that are measured apart, the most frequent ones.
        output: the folder of results and, of a join that never ends, of its states.
        every_seconds: seconds between two states.
        port: of metrics for Prometheus, while a join that never ends is measured; 0 = a free one,
            None = no metrics.
        host: the address of the metrics.
        on_error: "skip" leaves out rows that cannot be read, and counts them.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> shown = hb.sources.RequestLog("/log/ranker", follow=False)
        >>> clicks = hb.sources.Parquet("clicks.parquet")
        >>> keys = ["request_id", "item"]
        >>> samples = hb.sources.Join(shown, clicks, keys, within=1800, time="served_at")
        >>> hb.ServingQuality(samples, user="user", segments=["country"]).measure().windows
    """

    samples: Join
    label: str | None = None
    score: str | None = None
    user: str | None = None
    segments: Sequence[str] = ()
    seconds: float | None = 3600.0
    k: int = 1
    level: float = 0.95
    baseline: str = "stable"
    most: int = 20
    output: str | None = None
    every_seconds: float = 60.0
    port: int | None = None
    host: str = "127.0.0.1"
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if not isinstance(self.samples, Join) or not isinstance(self.samples.rule, Wait):
            raise ConfigError(
                f"measure.samples: needs a join that waits for outcomes, got {self.samples!r:.80}. "
                "Give hb.sources.Join(RequestLog(…), outcomes, …)."
            )
        if self.label is not None and self.label not in self.samples.kinds:
            raise ConfigError(
                f"measure.label: the join has no such label, got {self.label!r}. "
                f"{config.did_you_mean(self.label, self.samples.kinds)}"
            )
        if self.samples.endless and (self.output is None or self.seconds is None):
            raise ConfigError(
                f"measure: samples that never end need windows and an output, got seconds="
                f"{self.seconds!r}, output={self.output!r}. Give seconds=3600 and a folder."
            )
        if self.seconds is not None:
            advice = "Give the length of a window, or null for one window."
            checks.finite_number(
                "measure.seconds", self.seconds, above=0, most=_MOST_SECONDS, advice=advice
            )
        checks.whole_number("measure.k", self.k, 1)
        checks.between("measure.level", self.level, 0.5, 0.9999)
        checks.whole_number("measure.most", self.most, 1)
        checks.between("measure.port", self.port, 0, 65_535)
        checks.seconds("measure.every_seconds", self.every_seconds, least=0)

    @staticmethod
    def read(path: str | Path, assignments: Mapping[str, object] | None = None) -> ServingQuality:
        """Return the value of a YAML or JSON file, with values set by dotted path."""

        def build(spec: dict[str, Any]) -> ServingQuality:
            return typing.cast(ServingQuality, config.build(spec, ServingQuality, "measure"))

        return read_values(path, assignments or {}, build)

    @property
    def settings(self) -> QualitySettings:
        """How a window is measured."""
        return QualitySettings(self.segments, self.k, self.level, self.baseline, self.most)

    def skips(self) -> Skips | None:
        """Return where bad rows are counted; None if the first one is an error."""
        return Skips() if self.on_error == "skip" else None

    def columns(self) -> MeasuredColumns:
        """Return the columns that are measured.

        Raises:
            SchemaError: the samples lack one.
        """
        label = self.label or next(iter(self.samples.kinds))
        schema = self.samples.schema()
        score = self.score or "score"
        if self.score is None and score not in schema.names:
            score = f"score_{label}"
        clock = (self.samples.time, self.samples.unit)
        columns = MeasuredColumns.of(schema, clock, score, label)
        columns = dataclasses.replace(columns, user=self.user, segments=self.segments)
        columns.check(schema)
        return columns

    def measure(
        self,
        stopped: Callable[[], bool] = lambda: False,
        report: Callable[[Quality], None] = lambda quality: None,
    ) -> Quality:
        """Measure all windows; return them, or of a join that never ends the newest 512.

        Args:
            stopped: asked several times a second; a join that never ends is measured until it
                returns True, or until SIGINT or SIGTERM, and saved then.
            report: called with each window once it is measured.

        Raises:
            SchemaError: the samples lack a column.
            PersistError: the disk refuses, another process measures into this folder, or the
                states in it are of other settings.
        """
        output = None if self.output is None else local_path(self.output, "measure.output")
        results = Results(output, report)
        with ExitStack() as opened:
            if self.samples.endless:
                assert output is not None
                following = opened.enter_context(_Following(self, output))
                following.measure(results, stopped)
            else:
                windows = OpenWindows(self)
                plan = ReadPlan(windows.columns.names, skips=self.skips(), opens=True)
                batches = self.samples.read(plan=plan)
                with ended(batches):
                    for batch, _ in batches:
                        windows.add(batch)
                results.add(windows.close())
        results.show()
        return results.quality()


class Results:
    """Where the measured windows go: a folder, if there is one, and who asked for them."""

    def __init__(self, output: Path | None, report: Callable[[Quality], None]) -> None:
        self._output = output
        self._report = report
        self._parts: list[Quality] = []
        self._is_changed = False

    def add(self, windows: Iterator[Quality]) -> None:
        """Take windows that are measured."""
        for window in windows:
            if self._output is None:
                self._parts.append(window)
            else:
                window.write(self._output)
            self._report(window)
            self._is_changed = True

    def show(self) -> bool:
        """Write the page again if a window was measured since the last call; return whether."""
        is_changed = self._is_changed
        self._is_changed = False
        if is_changed and self._output is not None:
            write_page(self._output / PAGE, self.quality())
        return is_changed

    def newest(self) -> Quality:
        """Return the newest window of the folder; none before one was measured."""
        assert self._output is not None
        return Quality.read(self._output, most=1)

    def quality(self) -> Quality:
        """Return all windows, or the newest of the folder."""
        if self._output is None:
            return Quality.concat(self._parts)
        return Quality.read(self._output, most=MOST_SHOWN)


def waits_of(samples: Join) -> int:
    """Return after how many microseconds the outcomes of a sample are known."""
    waits = max(outcome.within for outcome in samples.kinds.values()) + samples.lateness_seconds
    return int(waits * 1e6)


class OpenWindows:
    """The samples of windows that are not measured yet."""

    def __init__(self, quality: ServingQuality) -> None:
        self.columns = quality.columns()
        self._settings = quality.settings
        self._width = None if quality.seconds is None else max(1, round(quality.seconds * 1e6))
        self._waits = waits_of(quality.samples)
        self._parts: dict[int, list[pa.Table]] = defaultdict(list)
        self._new: list[pa.Table] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Take samples of the join."""
        if rows.num_rows:
            self._new.append(self.columns.samples(rows))
            self.put(self._new[-1])

    def put(self, samples: pa.Table) -> None:
        """Take samples as `MeasuredColumns.samples` returns them."""
        if self._width is None:
            self._parts[0].append(samples)
            return
        numbers = samples["time"].to_numpy() // self._width
        for number in np.unique(numbers).tolist():
            self._parts[number].append(samples.filter(pa.array(numbers == number)))

    @property
    def samples(self) -> list[pa.Table]:
        """The samples of all open windows."""
        return [part for number in sorted(self._parts) for part in self._parts[number]]

    def take_new(self) -> list[pa.Table]:
        """Return the samples that came since the last call."""
        new = self._new
        self._new = []
        return new

    def close(self, watermark: int | None = None) -> Iterator[Quality]:
        """Measure the windows that get no further samples, the oldest first.

        `watermark`: of the join; None = all windows.
        """
        for number in self._closed(watermark):
            begin, end = self._bounds(number)
            samples = joined(self._parts[number])
            quality, differences = measure_window(samples, self._settings)
            bounds = {"begin": begin, "end": end}
            yield Quality.of_rows(
                [{**bounds, **row} for row in quality], [{**bounds, **row} for row in differences]
            )
            del self._parts[number]

    def drop(self, watermark: int) -> None:
        """Forget the samples of windows that were measured before; `watermark`: of the join."""
        for number in self._closed(watermark):
            del self._parts[number]

    def _closed(self, watermark: int | None) -> list[int]:
        """Return the windows that get no further samples, rising."""
        numbers = sorted(self._parts)
        if watermark is None:
            return numbers
        return [number for number in numbers if self._bounds(number)[1] <= watermark - self._waits]

    def _bounds(self, number: int) -> tuple[int, int]:
        if self._width is not None:
            return number * self._width, (number + 1) * self._width
        times = joined(self._parts[number])["time"].to_numpy()
        return int(times.min()), int(times.max()) + 1


class _Following:
    """Measures a join that never ends, and resumes where an earlier process was.

    A state is saved after the windows before it are on disk. What a killed process had measured
    since its last state is measured again from the same samples: the journal has the turns.
    """

    def __init__(self, quality: ServingQuality, output: Path) -> None:
        self._quality = quality
        self._windows = OpenWindows(quality)
        settings = dataclasses.asdict(quality.settings)
        settings["segments"] = list(quality.segments)
        settings |= {"columns": list(self._windows.columns.names), "seconds": quality.seconds}
        folder = output / STATES
        folder.mkdir(parents=True, exist_ok=True)
        self._states = WindowStates(folder, settings)
        self._journal = Journal(folder / JOURNAL)
        self._live = Live(self._journal, DeadLetters(folder / LETTERS))
        self._saved_at = time.monotonic()
        self._signals: list[str] = []
        self._endpoint: Endpoint | None = None

    def __enter__(self) -> _Following:
        if self._quality.port is not None:
            self._endpoint = Endpoint(self._quality.port, self._quality.host)
            address = f"http://{self._quality.host}:{self._endpoint.port}/metrics"
            log.info("Prometheus: %s", address)
        return self

    def __exit__(self, *error: object) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._journal.close()

    def measure(self, results: Results, stopped: Callable[[], bool]) -> None:
        """Measure until `stopped` returns True, then save."""
        state = self._states.read()
        position = None
        wishes = JoinWishes(keeps_open=True)
        if state is not None:
            position = state.position
            wishes = JoinWishes(keeps_open=True, saved=state.open_rows)
            for samples in state.samples:
                self._windows.put(samples)
            self._windows.drop(position["watermark"])
        plan = ReadPlan(
            columns=self._windows.columns.names,
            skips=self._quality.skips(),
            live=self._live,
            opens=True,
            wishes=wishes,
        )
        source = self._quality.samples
        batches = source.read(position, plan=plan)
        self._show(results.newest())
        with ended(batches), ended_by_signals(self._signals.append):
            for batch, position in batches:
                self._windows.add(batch)
                results.add(self._windows.close(position["watermark"]))
                if results.show():
                    self._show(results.newest())
                is_over = stopped() or bool(self._signals)
                if is_over or time.monotonic() - self._saved_at >= self._quality.every_seconds:
                    self._save(batches, position)
                if is_over:
                    return

    def _show(self, newest: Quality) -> None:
        if self._endpoint is not None:
            self._endpoint.show(readings(newest))

    def _save(self, batches: Any, position: Position) -> None:
        rows = status_of(batches).open_rows
        assert rows is not None
        self._states.write(position, rows, self._windows.samples, self._windows.take_new())
        rows.release(position.state)
        self._journal.forget(decisions_of(position.state))
        self._quality.samples.commit(position)
        self._saved_at = time.monotonic()
