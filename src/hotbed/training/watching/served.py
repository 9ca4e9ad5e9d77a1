# SPDX-License-Identifier: Apache-2.0
"""How a server answered while it followed a training: latency, versions, freshness, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hotbed.training.watching.chart import Chart, Series


@dataclass(frozen=True)
class Answer:
    """One answer of a server: when it came (unix seconds), how many seconds it took, and which
    version gave it.
    """

    at: float
    seconds: float
    version: int


@dataclass(frozen=True)
class Served:
    """What a client saw, for `hotbed.training.watching.report.add_serving`.

    `answers`: in the order that they came, at least one. `versions`: manifests of what was
    published; `version`, `caught` and `published` are read. A version is served from the first
    answer that it gave on. `scores`: by whom they were asked for and by candidate, unix seconds and
    score, a pair a version.
    """

    answers: Sequence[Answer]
    versions: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """The most important ones, by name."""
        waits = sorted(served for _, _, served in self._delays())
        return {
            "requests answered": float(len(self.answers)),
            "p50, ms": round(1000 * _within(self.answers, 0.5), 2),
            "p99, ms": round(1000 * _within(self.answers, 0.99), 2),
            "versions served": float(len({one.version for one in self.answers})),
            **({"learned to served, s (p50)": round(waits[len(waits) // 2], 2)} if waits else {}),
        }

    def charts(self) -> list[Chart]:
        """Latency, versions, freshness and scores over the seconds since the first answer."""
        began = self.answers[0].at
        charts = [self._latency(), self._versions()]
        delays = self._delays()
        if delays:
            x = [at - began for at, _, _ in delays]
            lines = [
                Series("served", x, [served for _, _, served in delays], 0, True),
                Series("published", x, [published for _, published, _ in delays], 2, True),
            ]
            charts.append(
                self._chart(
                    "Freshness, seconds since its last event was learned", lines, from_zero=True
                )
            )
        for group, candidates in self.scores.items():
            lines = [
                Series(
                    name,
                    [at - began for at, _ in points],
                    [score for _, score in points],
                    color,
                    True,
                )
                for color, (name, points) in enumerate(candidates.items())
                if points
            ]
            if lines:
                charts.append(
                    self._chart(f"Scores for {group}, a point a version", lines, from_zero=True)
                )
        return charts

    def _chart(self, title: str, lines: list[Series], *, from_zero: bool = False) -> Chart:
        """A chart over all seconds in which the server answered."""
        seconds = self.answers[-1].at - self.answers[0].at
        return Chart(title, "seconds", lines, x_bounds=(0.0, seconds or 1.0), from_zero=from_zero)

    def _delays(self) -> list[tuple[float, float, float]]:
        """Of each version that took another's place: when, and how long after it was caught it was
        published, and served.
        """
        found = []
        for version in sorted(self.versions, key=lambda one: int(one["version"])):
            first = next((one for one in self.answers if one.version == version["version"]), None)
            if first is not None and first is not self.answers[0] and "caught" in version:
                found.append(
                    (
                        first.at,
                        version["published"] - version["caught"],
                        first.at - version["caught"],
                    )
                )
        return found

    def _latency(self) -> Chart:
        size = max(20, len(self.answers) // 40)
        parts = [self.answers[start : start + size] for start in range(0, len(self.answers), size)]
        x = [part[-1].at - self.answers[0].at for part in parts]
        shares = {"p50": 0.5, "p90": 0.9}
        lines = [
            Series(name, x, [1000 * _within(part, share) for part in parts], color)
            for color, (name, share) in enumerate(shares.items())
        ]
        levels = {"p99 of all answers": 1000 * _within(self.answers, 0.99)}
        chart = self._chart("Latency, milliseconds as the client saw them", lines, from_zero=True)
        chart.levels = levels
        return chart

    def _versions(self) -> Chart:
        """Steps: the version that answered, and the one that training had come to."""
        began = self.answers[0].at
        ended = self.answers[-1].at
        served = [
            (after.at, float(after.version))
            for before, after in pairwise([None, *self.answers])
            if after is not None and (before is None or before.version != after.version)
        ]
        caught = sorted(
            (one["caught"], float(one["version"]))
            for one in self.versions
            if one.get("caught", ended) < ended
        )
        lines = []
        for name, color, steps in (("served", 0, served), ("learned", 2, caught)):
            spans = [
                (max(at, began), until, version)
                for (at, version), (until, _) in pairwise([*steps, (ended, 0.0)])
                if until > began
            ]
            x = [edge - began for at, until, _ in spans for edge in (at, until)]
            if x:
                lines.append(
                    Series(name, x, [version for *_, version in spans for _ in range(2)], color)
                )
        return self._chart("Version, in steps of the training", lines)


def _within(answers: Sequence[Answer], share: float) -> float:
    """Seconds within which a share of the answers came."""
    return sorted(one.seconds for one in answers)[min(len(answers) - 1, int(len(answers) * share))]
