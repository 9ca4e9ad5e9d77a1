# SPDX-License-Identifier: Apache-2.0
"""How a server answered while it followed a training: latency, versions, freshness, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hotbed.metrics.chart import Chart, Series


@dataclass(frozen=True)
class Answer:
    """One answer of a server: when it came (unix seconds), how many seconds it took, and which version gave it."""

    at: float
    seconds: float
    version: int


@dataclass(frozen=True)
class Served:
    """What a client saw, for `hotbed.training.report.add_serving`.

    `answers`: in the order that they came, at least one. `versions`: manifests of what was published; `version`, `caught` and
    `published` are read. A version is served from the first answer that it gave on. `scores`: what some candidates
    were given, by name: unix seconds and score, a pair a version.
    """

    answers: Sequence[Answer]
    versions: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """The most important ones, by name."""
        waits = sorted(served for _, _, served in self._delays())
        return {
            "requests answered": float(len(self.answers)),
            "ms, half of the requests": round(1000 * _within(self.answers, 0.5), 2),
            "ms, 99 % of them": round(1000 * _within(self.answers, 0.99), 2),
            "versions served": float(len({one.version for one in self.answers})),
            **({"s, learned to served": round(waits[len(waits) // 2], 2)} if waits else {}),
        }

    def charts(self) -> list[Chart]:
        """Latency, versions, freshness and scores over the seconds since the first answer."""
        began, delays = self.answers[0].at, self._delays()
        found = [self._latency(), self._versions()]
        if delays:
            x = [at - began for at, _, _ in delays]
            named = {
                "served": [served for _, _, served in delays],
                "published": [published for _, published, _ in delays],
            }
            lines = [Series(name, x, y, color, True) for color, (name, y) in zip((0, 2), named.items(), strict=True)]
            found.append(Chart("Freshness, seconds since its last event was learned", "seconds", lines, from_zero=True))
        lines = [Series(name, [at - began for at, _ in given], [score for _, score in given], color, True)
                 for color, (name, given) in enumerate(self.scores.items()) if given]  # fmt: skip
        return [*found, Chart("Scores of the same candidates, a point a version", "seconds", lines)] if lines else found

    def _delays(self) -> list[tuple[float, float, float]]:
        """Of each version that took another's place: when, and how long after it was caught it was published, and served."""
        found = []
        for version in sorted(self.versions, key=lambda one: int(one["version"])):
            first = next((one for one in self.answers if one.version == version["version"]), None)
            if first is not None and first is not self.answers[0] and "caught" in version:
                found.append((first.at, version["published"] - version["caught"], first.at - version["caught"]))
        return found

    def _latency(self) -> Chart:
        size = max(20, len(self.answers) // 40)
        parts = [self.answers[start : start + size] for start in range(0, len(self.answers), size)]
        x = [part[-1].at - self.answers[0].at for part in parts]
        shares = {"half within": 0.5, "90 % within": 0.9}
        lines = [Series(name, x, [1000 * _within(part, share) for part in parts], color)
                 for color, (name, share) in enumerate(shares.items())]  # fmt: skip
        levels = {"99 % of all within": 1000 * _within(self.answers, 0.99)}
        return Chart("Latency, milliseconds as the client saw them", "seconds", lines, levels=levels, from_zero=True)

    def _versions(self) -> Chart:
        """Steps: the version that answered, and the one that training had come to."""
        began, ended = self.answers[0].at, self.answers[-1].at
        served = [(after.at, float(after.version)) for before, after in pairwise([None, *self.answers])
                  if after is not None and (before is None or before.version != after.version)]  # fmt: skip
        caught = sorted(
            (one["caught"], float(one["version"])) for one in self.versions if one.get("caught", ended) < ended
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
                lines.append(Series(name, x, [version for *_, version in spans for _ in range(2)], color))
        return Chart("Version, in steps of the training", "seconds", lines)


def _within(answers: Sequence[Answer], share: float) -> float:
    """Seconds within which a share of the answers came."""
    return sorted(one.seconds for one in answers)[min(len(answers) - 1, int(len(answers) * share))]
