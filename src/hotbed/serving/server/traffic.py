# SPDX-License-Identifier: Apache-2.0
"""Counts of the requests that each version answered, and why it answered them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hotbed.serving.session import Scores

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the counts of latencies, in seconds."""
_MOST_ENTRIES = 32


class Answering(NamedTuple):
    """A version, and why it answers: a role of the rule, or because requests name it."""

    version: int
    route: str


@dataclass
class AnswerCounts:
    """Counts of answers since the version began to answer.

    Attributes:
        requests, rows: that were scored, and their candidates.
        errors: requests that the version could not score.
        seconds: from the decoded requests to their scores.
        scores, score_sum: finite scores of the first output, their number and their sum.
        buckets: requests by latency, each up to its bound of `BUCKETS`; the last has no bound.
    """

    requests: int = 0
    rows: int = 0
    errors: int = 0
    seconds: float = 0.0
    scores: int = 0
    score_sum: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, num_rows: int, seconds: float, answer: Scores) -> None:
        """Count an answer."""
        self.requests += 1
        self.rows += num_rows
        self.seconds += seconds
        self.buckets[bisect_left(BUCKETS, seconds)] += 1
        if not answer.nonfinite:
            first = next(iter(answer.outputs.values()))
            self.scores += first.size
            self.score_sum += float(first.sum())


class VersionTraffic:
    """The counts of the versions that answered last; those of older versions are dropped."""

    def __init__(self) -> None:
        self._entries = dict[Answering, AnswerCounts]()

    def of(self, version: int, route: str) -> AnswerCounts:
        """Return the counts of a version."""
        key = Answering(version, route)
        counts = self._entries.get(key)
        if counts is None:
            entries = {**self._entries, key: AnswerCounts()}
            while len(entries) > _MOST_ENTRIES:
                del entries[next(iter(entries))]
            self._entries = entries  # replaced as a whole: other threads read it
            counts = entries[key]
        return counts

    def status(self) -> list[dict[str, Any]]:
        """Return all counts as plain values."""
        entries = self._entries.items()
        return [{**key._asdict(), **asdict(counts)} for key, counts in entries]


@dataclass
class ShadowCounts:
    """What a shadow did.

    Attributes:
        requests, rows: that it scored, and their candidates.
        dropped: requests of the sample that it did not score: too many, or its rule had ended.
        errors: requests that it could not score.
        different: candidates whose scores differ by more than 1e-6.
        difference_sum, difference_most: of the absolute differences of the scores that are finite.
    """

    requests: int = 0
    rows: int = 0
    dropped: int = 0
    errors: int = 0
    different: int = 0
    difference_sum: float = 0.0
    difference_most: float = 0.0
