# SPDX-License-Identifier: Apache-2.0
"""Rules of a gate: which numbers of a version may not rise, and how far they may.

A rule measures numbers of a version, and compares each with the same number of the versions that
were published before: their median, how far they lay above it, and a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hotbed.metrics.stability import stability
from hotbed.training.gate.counts import Counts, EventCounts

LEAST_USUAL = 3
"""Usual values of a number against an earlier version, without which those of a later one count."""

UsualValues = Mapping[str, Sequence[float]]
"""By number, its values at the versions that were published, oldest first."""


@dataclass(frozen=True)
class Difference:
    """A version against one that was published before, on held-back events before both.

    Attributes:
        saves: how many saves before.
        label: name of the label; "" is the only one.
        loss: mean loss of the version divided by that of the earlier one.
        scores: mean score divided by that of the earlier version; NaN where they are amounts.
    """

    saves: int
    label: str
    loss: float
    scores: float = math.nan

    def name(self, what: str) -> str:
        """Return the name of a number."""
        return f"{_of(what, self.label)} against the version {self.saves} saves before"


@dataclass(frozen=True)
class VersionFacts:
    """What is known of a version that may be published.

    Attributes:
        newest: counts of the newest events.
        before: counts of the events of the versions published before, the older the less.
        differences: the comparisons with the versions published last.
        served: how many saves before the version was made that is served now; 0: there is none.
        num_unscored: scores of trusted events that are not finite.
        rows: number of rows by table.
        served_norms: mean norm of the rows of the trusted events, by table, in the served version.
        norms: the same of this version.
        num_not_finite: parameters of the network that are NaN or infinite.
    """

    newest: EventCounts = field(default_factory=EventCounts)
    before: EventCounts = field(default_factory=EventCounts)
    differences: Sequence[Difference] = ()
    served: int = 0
    num_unscored: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    served_norms: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    num_not_finite: int = 0


@dataclass(frozen=True)
class GateRule:
    """A rule over the numbers that `measure` returns, by what they are of, such as a column.

    Attributes:
        name: in messages, manifests, metrics and `PublishGate.limits`.
        measure: returns the numbers of a version.
        is_ratio: whether they are logarithms of what messages show; a limit of 0.1 is 10 %.
        falls: whether a number may not fall either.
        needs_usual: whether there is nothing to break before there are usual values.
        floor: what the median of usual values counts for at least.
        spread: how many deviations a number may lie above its usual values, beside the limit.
    """

    name: str
    measure: Callable[[VersionFacts], dict[str, float]]
    is_ratio: bool = False
    falls: bool = False
    needs_usual: bool = True
    floor: float = -math.inf
    spread: float = 6.0

    def broken(
        self, values: Mapping[str, float], usual: UsualValues, limit: float
    ) -> Iterator[str]:
        """Yield a sentence for each of the numbers that breaks the rule.

        Args:
            values: what `measure` returned of the version.
            usual: the same of earlier versions. Empty before there are enough of them.
            limit: how far a number may rise.
        """
        for name, value in values.items():
            bounds = self._bounds(usual.get(name, ()), limit)
            if bounds is None:
                continue
            low, high = bounds
            if not value <= high:  # NaN, too
                yield f"{name} is {self._shown(value)}, usual is at most {self._shown(high)}"
            elif value < low:
                yield f"{name} is {self._shown(value)}, usual is at least {self._shown(low)}"

    def _bounds(self, values: Sequence[float], limit: float) -> tuple[float, float] | None:
        room = math.log1p(limit) if self.is_ratio else limit
        if not values:
            return None if self.needs_usual else (-math.inf, room)
        median = float(np.median(values))
        distances = np.asarray(values) - median
        low = median - room - self.spread * _deviation(-distances)
        high = max(median, self.floor) + room + self.spread * _deviation(distances)
        return (low if self.falls else -math.inf), high

    def _shown(self, value: float) -> str:
        return f"{math.exp(min(value, 700.0)) if self.is_ratio else value:.4g}"


def against_served(
    facts: VersionFacts, values: Mapping[str, float], usual: UsualValues
) -> tuple[dict[str, float], dict[str, Sequence[float]]]:
    """Return the numbers against the version that is served, and their usual values.

    A version is usually worse on events of before, the more saves before they lie. Where too few
    versions were compared over so many saves, values over fewer saves count.
    """
    served: dict[str, float] = {}
    usual_values: dict[str, Sequence[float]] = {}
    for what in _AGAINST:
        for difference in facts.differences:
            name = difference.name(what)
            if difference.saves != facts.served or name not in values:
                continue
            served[name] = values[name]
            for saves in range(difference.saves, 0, -1):
                earlier = usual.get(replace(difference, saves=saves).name(what), ())
                if len(earlier) >= LEAST_USUAL:
                    usual_values[name] = earlier
                    break
    return served, usual_values


def _not_finite(facts: VersionFacts) -> dict[str, float]:
    num_tables = sum(not math.isfinite(norm) for norm in facts.norms.values())
    return {
        "number of scores that are not finite": facts.newest.unscored + facts.num_unscored,
        "number of parameters that are not finite": float(facts.num_not_finite),
        "number of tables with rows that are not finite": float(num_tables),
    }


def _loss(facts: VersionFacts) -> dict[str, float]:
    losses = {}
    for label, sums in facts.newest.labels.items():
        if sums[0] > 0 and sums[3] > 0:
            losses[_of("loss", label)] = math.log(sums[3] / sums[0])
    return losses


def _entropy(facts: VersionFacts) -> dict[str, float]:
    entropies = {}
    for label, (weight, _, _, loss, positives) in facts.newest.labels.items():
        rate = positives / weight if weight else 0.0
        if 0 < rate < 1 and loss > 0:
            base = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
            entropies[_of("normalized entropy", label)] = math.log(loss / weight / base)
    return entropies


def _calibration(facts: VersionFacts) -> dict[str, float]:
    ratios = {}
    for label, (_, values, predictions, _, _) in facts.newest.labels.items():
        if values >= 0 and predictions >= 0:  # half a sample more: there may be no positives
            ratios[_of("calibration", label)] = math.log((predictions + 0.5) / (values + 0.5))
    return ratios


def _served_loss(facts: VersionFacts) -> dict[str, float]:
    return {
        difference.name("loss"): math.log(difference.loss) if difference.loss > 0 else math.nan
        for difference in facts.differences
    }


def _served_scores(facts: VersionFacts) -> dict[str, float]:
    return {
        difference.name("change of the mean score"): abs(math.log(difference.scores))
        for difference in facts.differences
        if difference.scores > 0
    }


def _unseen_ids(facts: VersionFacts) -> dict[str, float]:
    return {
        f"share of unseen ids of table {table!r}": (admitted + refused) / looked_up
        for table, (admitted, refused, _, looked_up) in facts.newest.tables.items()
        if looked_up > 0
    }


def _missing_values(facts: VersionFacts) -> dict[str, float]:
    if not facts.newest.samples:
        return {}
    return {
        f"share of missing values of column {column!r}": counts[0] / facts.newest.samples
        for column, counts in facts.newest.columns.items()
    }


def _columns(facts: VersionFacts) -> dict[str, float]:
    return {
        f"shift of column {column!r}": stability(counts, facts.before.columns[column])
        for column, counts in facts.newest.columns.items()
        if column in facts.before.columns
    }


def _scores(facts: VersionFacts) -> dict[str, float]:
    return {
        _of("shift of the scores", label): stability(counts, facts.before.scores[label])
        for label, counts in facts.newest.scores.items()
        if label in facts.before.scores
    }


def _evicted_rows(facts: VersionFacts) -> dict[str, float]:
    shares = {}
    for table, sums in facts.newest.tables.items():
        rows_before = sums[2] + facts.rows.get(table, 0)
        if rows_before > 0:
            shares[f"share of evicted rows of table {table!r}"] = sums[2] / rows_before
    return shares


def _norms(facts: VersionFacts) -> dict[str, float]:
    ratios = {}
    for table, norm in facts.norms.items():
        before = facts.served_norms.get(table, 0.0)
        if norm > 0 and before > 0:
            name = f"norms of the rows of table {table!r} against the served version"
            ratios[name] = math.log(norm / before)
    return ratios


def _clock(facts: VersionFacts) -> dict[str, float]:
    newest = facts.newest
    if not newest.seconds and not newest.late_seconds:
        return {}
    late = newest.late_seconds / newest.samples if newest.samples else 0.0
    return {
        "advance of event time, in seconds,": newest.seconds,
        "mean lateness of events, in seconds,": late,
    }


def _volume(facts: VersionFacts) -> dict[str, float]:
    newest = facts.newest
    if not newest.seconds or not newest.samples:
        return {}
    return {"number of events a second": math.log(newest.samples / newest.seconds)}


def _partitions(facts: VersionFacts) -> dict[str, float]:
    counts = facts.newest.partitions
    if len(counts) < 2:
        return {}
    return {"share of silent partitions": sum(not count for count in counts.values()) / len(counts)}


def _repeats(facts: VersionFacts) -> dict[str, float]:
    if not facts.newest.samples:
        return {}
    return {"share of repeated events": facts.newest.repeated / facts.newest.samples}


RULES = (
    GateRule("not_finite", _not_finite, needs_usual=False),
    GateRule("loss", _loss, is_ratio=True),
    GateRule("entropy", _entropy, is_ratio=True),
    GateRule("calibration", _calibration, is_ratio=True, falls=True),
    GateRule("unseen_ids", _unseen_ids),
    GateRule("missing_values", _missing_values),
    GateRule("columns", _columns),
    GateRule("scores", _scores),
    GateRule("evicted_rows", _evicted_rows),
    GateRule("norms", _norms, is_ratio=True),
    GateRule("clock", _clock),
    GateRule("volume", _volume, is_ratio=True, falls=True),
    GateRule("partitions", _partitions),
    GateRule("repeats", _repeats),
)
"""The rules over the newest events, and over the rows."""

SERVED_RULES = (
    GateRule("served_loss", _served_loss, True, needs_usual=False, floor=0.0, spread=2.0),
    GateRule("served_scores", _served_scores, True, needs_usual=False, floor=0.0),
)
"""The rules over a version against the one that is served, on the same held-back events."""

_AGAINST = ("loss", "change of the mean score")


def _deviation(distances: Counts) -> float:
    """Return the standard deviation that the distances above 0 and their mirror images have."""
    return float(np.sqrt(2 * np.mean(np.maximum(distances, 0.0) ** 2)))


def _of(what: str, label: str) -> str:
    return f"{what} of {label!r}" if label else what
