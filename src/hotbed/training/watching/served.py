# SPDX-License-Identifier: Apache-2.0
"""Served: how a server answered while it followed a training; the report draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hotbed.pictures.charts import Chart, Series

Steps = list[tuple[float, float]]
"""Moments in unix seconds, ascending, and the version from each of them on."""


@dataclass(frozen=True)
class Answer:
    """One answer of a server.

    Attributes:
        at: when it came, in unix seconds.
        seconds: how long it took.
        version: the version that gave it.
    """

    at: float
    seconds: float
    version: int


@dataclass(frozen=True)
class Delay:
    """How long a version took from the last event that it learned.

    Attributes:
        at: when it was first served, in unix seconds.
        published: seconds until it was published.
        served: seconds until it was served.
    """

    at: float
    published: float
    served: float


@dataclass(frozen=True)
class Served:
    """The answers that a client received, for `hotbed.training.watching.report.add_serving`.

    Attributes:
        answers: in the order in which they came, at least one.
        versions: manifests of the published versions; `version`, `caught` and `published` are read.
            A version is served from its first answer on. None if the server did not follow a
            training.
        scores: unix seconds and score, a pair for each version, by group and candidate.
    """

    answers: Sequence[Answer]
    versions: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return the numbers for the cards of the report, by name."""
        versions = {answer.version for answer in self.answers}
        numbers = {
            "requests answered": float(len(self.answers)),
            "p50, ms": round(1000 * _quantile(self.answers, 0.5), 2),
            "p99, ms": round(1000 * _quantile(self.answers, 0.99), 2),
            "versions served": float(len(versions)),
        }
        seconds = sorted(delay.served for delay in self._delays())
        if seconds:
            numbers["learned to served, s (p50)"] = round(seconds[len(seconds) // 2], 2)
        return numbers

    def charts(self) -> list[Chart]:
        """Return latency, versions, freshness and scores over seconds since the first answer."""
        charts = [self._latency()]
        versions = self._versions()
        if versions.series:  # a single answer spans no time
            charts.append(versions)
        delays = self._delays()
        if delays:
            charts.append(self._freshness(delays))
        for group, candidates in self.scores.items():
            lines = []
            for color, (name, points) in enumerate(candidates.items()):
                if points:
                    x = [self._since_begin(time) for time, _ in points]
                    y = [score for _, score in points]
                    lines.append(Series(name, x, y, color, dots=True))
            if lines:
                title = f"Scores for {group}, a point a version"
                charts.append(self._chart(title, lines, from_zero=True))
        return charts

    def _since_begin(self, at: float) -> float:
        """Return the seconds from the first answer to a moment."""
        return at - self.answers[0].at

    def _chart(self, title: str, lines: list[Series], *, from_zero: bool = False) -> Chart:
        """Return a chart over all seconds in which the server answered."""
        seconds = self._since_begin(self.answers[-1].at)
        return Chart(title, "seconds", lines, x_bounds=(0.0, seconds or 1.0), from_zero=from_zero)

    def _delays(self) -> list[Delay]:
        """Return the delay of each version that replaced another one, by version."""
        first_answers: dict[int, Answer] = {}
        for answer in self.answers:
            first_answers.setdefault(answer.version, answer)
        delays = []
        for version in sorted(self.versions, key=lambda version: int(version["version"])):
            answer = first_answers.get(version["version"], self.answers[0])
            if answer is self.answers[0] or "caught" not in version:
                continue
            learned = version["caught"]
            published = version["published"] - learned
            delays.append(Delay(answer.at, published, answer.at - learned))
        return delays

    def _freshness(self, delays: Sequence[Delay]) -> Chart:
        x = [self._since_begin(delay.at) for delay in delays]
        served = [delay.served for delay in delays]
        published = [delay.published for delay in delays]
        lines = [
            Series("served", x, served, color=0, dots=True),
            Series("published", x, published, color=2, dots=True),
        ]
        title = "Freshness, seconds since its last event was learned"
        return self._chart(title, lines, from_zero=True)

    def _latency(self) -> Chart:
        size = max(20, len(self.answers) // 40)
        starts = range(0, len(self.answers), size)
        parts = [self.answers[start : start + size] for start in starts]
        x = [self._since_begin(part[-1].at) for part in parts]
        median = [1000 * _quantile(part, 0.5) for part in parts]
        high = [1000 * _quantile(part, 0.9) for part in parts]
        lines = [Series("p50", x, median, color=0), Series("p90", x, high, color=1)]
        chart = self._chart("Latency, milliseconds as the client saw them", lines, from_zero=True)
        chart.levels = {"p99 of all answers": 1000 * _quantile(self.answers, 0.99)}
        return chart

    def _versions(self) -> Chart:
        """Return steps of the version that answered, and of the version that was learned."""
        ended = self.answers[-1].at
        served: Steps = [(self.answers[0].at, float(self.answers[0].version))]
        for before, answer in pairwise(self.answers):
            if before.version != answer.version:
                served.append((answer.at, float(answer.version)))
        learned: Steps = []
        for version in self.versions:
            if version.get("caught", ended) < ended:
                learned.append((version["caught"], float(version["version"])))
        lines = []
        for name, color, steps in (("served", 0, served), ("learned", 2, sorted(learned))):
            line = self._step_line(name, color, steps)
            if line.x:
                lines.append(line)
        return self._chart("Version, in steps of the training", lines)

    def _step_line(self, name: str, color: int, steps: Steps) -> Series:
        """Return a line that is level between steps, from the first answer to the last one."""
        line = Series(name, [], [], color)
        began = self.answers[0].at
        ended = self.answers[-1].at
        for (begin, version), (end, _) in pairwise([*steps, (ended, 0.0)]):
            if end > began:
                line.x += [self._since_begin(max(begin, began)), self._since_begin(end)]
                line.y += [version, version]
        return line


def _quantile(answers: Sequence[Answer], share: float) -> float:
    """Return the seconds within which a share of the answers came."""
    seconds = sorted(answer.seconds for answer in answers)
    return seconds[min(len(answers) - 1, int(len(answers) * share))]
