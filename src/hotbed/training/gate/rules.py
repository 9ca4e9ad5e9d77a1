# SPDX-License-Identifier: Apache-2.0
"""Rules of a gate: what a version must not do to be published.

A rule measures numbers of a version, and compares each with the same number of the versions that
were published before: their median, how far they lay above it, and a tolerance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hotbed import checks
from hotbed.config import kind_of
from hotbed.training.gate.counts import Counts, EventCounts
from hotbed.training.gate.sample import LabelScores

__all__ = [
    "CalibrationMoves",
    "ClockJumps",
    "ColumnsShift",
    "EntropyRises",
    "EventsRepeat",
    "LossRises",
    "MissingValues",
    "NormsGrow",
    "NotFinite",
    "PartitionsSilent",
    "RowsEvicted",
    "ScoresShift",
    "UnseenIds",
    "VolumeChanges",
    "WorseThanServed",
]

UsualValues = Mapping[str, Sequence[float]]
"""By measure, its values at the versions that were published, oldest first."""


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class VersionFacts:
    """What is known of a version that may be published.

    Attributes:
        newest: counts of the newest events.
        before: counts of the events of the versions published before, the older the less.
        served: scores of a sample of events by the version that is served now.
        scores: scores of the same events by this version.
        probabilities: labels whose scores are probabilities.
        served_norms: mean norm of the rows of the sample, by table, in the version served now.
        norms: the same of this version.
        num_not_finite: parameters of the network that are NaN or infinite.
    """

    newest: EventCounts
    before: EventCounts
    served: LabelScores = field(default_factory=dict)
    scores: LabelScores = field(default_factory=dict)
    probabilities: frozenset[str] = frozenset()
    served_norms: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    num_not_finite: int = 0


@dataclass(frozen=True)
class GateRule(ABC):
    """A rule over the numbers that `measure` returns.

    A number may lie above the median of its usual values by `tolerance` and `spread` deviations.
    The deviation is that of the values above the median, as if those below mirrored them: a loss
    that falls says nothing of how it rises. Usual values are those of the 16 versions that were
    published last.

    Attributes:
        tolerance: how far a number may always rise. Of ratios, 0.1 is 10 %.
        spread: how many deviations it may rise beside.
    """

    tolerance: float = 0.0
    spread: float = 6.0

    is_ratio: ClassVar[bool] = False
    """Whether `measure` returns logarithms of what messages show."""

    falls: ClassVar[bool] = False
    """Whether a number may not fall either."""

    needs_usual: ClassVar[bool] = True
    """Whether there is nothing to break before there are usual values."""

    def __post_init__(self) -> None:
        for name in ("tolerance", "spread"):
            where = f"{type(self).__name__}.{name}"
            checks.at_least(where, getattr(self, name), 0, "Give a number such as 0.1.")

    @abstractmethod
    def measure(self, facts: VersionFacts) -> dict[str, float]:
        """Return the numbers of a version, by what they are of, such as a column."""

    def broken(self, values: Mapping[str, float], usual: UsualValues) -> Iterator[str]:
        """Yield a sentence for each of the numbers that breaks the rule.

        Args:
            values: what `measure` returned of the version.
            usual: the same of earlier versions. Empty before there are enough of them.
        """
        for name, value in values.items():
            bounds = self._bounds(usual.get(name, ()))
            if bounds is not None and not bounds[0] <= value <= bounds[1]:
                low, high = bounds
                limit = (
                    f"at most {self._shown(high)}"
                    if value > high
                    else (f"at least {self._shown(low)}")
                )
                yield f"{name} is {self._shown(value)}, usual is {limit}"

    def _bounds(self, values: Sequence[float]) -> tuple[float, float] | None:
        if not values:
            return None if self.needs_usual else (-math.inf, self.tolerance)
        median = float(np.median(values))
        room = math.log1p(self.tolerance) if self.is_ratio else self.tolerance
        distances = np.asarray(values) - median
        high = median + room + self.spread * _deviation(distances)
        low = median - room - self.spread * _deviation(-distances)
        return (low if self.falls else -math.inf), high

    def _shown(self, value: float) -> str:
        return f"{math.exp(min(value, 700.0)) if self.is_ratio else value:.4g}"


@dataclass(frozen=True)
class LossRises(GateRule):
    """The loss of the newest events, scored before they were learned.

    Of each label, the log loss where predictions are probabilities, else the squared error.
    """

    tolerance: float = 0.1
    is_ratio: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        losses = {}
        for label, sums in facts.newest.labels.items():
            if sums[0] > 0 and sums[3] > 0:
                losses[_of("loss", label)] = math.log(sums[3] / sums[0])
        return losses


@dataclass(frozen=True)
class EntropyRises(GateRule):
    """Normalized entropy of the newest events, scored before they were learned.

    The log loss divided by that of the mean of the labels: another share of positives alone does
    not change it much.
    """

    tolerance: float = 0.1
    is_ratio: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        entropies = {}
        for label, (weight, _, _, loss, positives) in facts.newest.labels.items():
            rate = positives / weight if weight else 0.0
            if 0 < rate < 1 and loss > 0:
                base = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
                entropies[_of("normalized entropy", label)] = math.log(loss / weight / base)
        return entropies


@dataclass(frozen=True)
class CalibrationMoves(GateRule):
    """The mean score: of the newest events, against the mean of their labels; of the sample,
    against the mean score of the version served now. Neither may rise or fall.
    """

    tolerance: float = 0.3
    is_ratio: ClassVar[bool] = True
    falls: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        ratios = {}
        for label, (_, values, predictions, _, _) in facts.newest.labels.items():
            if values >= 0 and predictions >= 0:  # half a sample more: there may be no positives
                ratios[_of("calibration", label)] = math.log((predictions + 0.5) / (values + 0.5))
        for label, (scores, _) in facts.scores.items():
            served = facts.served.get(label, (np.empty(0),))[0]
            if len(served) == len(scores) and served.mean() > 0 and scores.mean() > 0:
                name = _of("mean score against the served version", label)
                ratios[name] = math.log(float(scores.mean() / served.mean()))
        return ratios


@dataclass(frozen=True)
class WorseThanServed(GateRule):
    """The version against the one served now, on the same events of before.

    The events are those of published versions: what came in since then has no part in it. The
    number is the loss divided by that of the served version.
    """

    tolerance: float = 0.02
    is_ratio: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        ratios = {}
        for label, (scores, values) in facts.scores.items():
            served, _ = facts.served.get(label, (np.empty(0), values))
            if not len(served) or len(served) != len(scores):
                continue
            if label in facts.probabilities:
                loss = _log_loss(scores, values)
                before = _log_loss(served, values)
            else:
                loss = float(np.mean((scores - values) ** 2))
                before = float(np.mean((served - values) ** 2))
            if loss > 0 and before > 0:
                ratios[_of("loss against the served version", label)] = math.log(loss / before)
        return ratios


@dataclass(frozen=True)
class UnseenIds(GateRule):
    """The share of ids that had no row in their table when they came."""

    tolerance: float = 0.1

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        shares = {}
        for table, (admitted, refused, _, _, looked_up) in facts.newest.tables.items():
            if looked_up > 0:
                shares[f"unseen ids of table {table!r}"] = (admitted + refused) / looked_up
        return shares


@dataclass(frozen=True)
class MissingValues(GateRule):
    """The share of events without a value in a column: an id that is null, a number that is NaN."""

    tolerance: float = 0.1

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        shares = {}
        for column, counts in facts.newest.columns.items():
            if facts.newest.samples:
                shares[f"missing values of column {column!r}"] = counts[0] / facts.newest.samples
        return shares


@dataclass(frozen=True)
class ColumnsShift(GateRule):
    """The population stability index of each column against the events of published versions.

    Ids are hashed into 64 bins, numbers are counted by sign and power of two. What chance alone
    adds is subtracted. 0.25 is the usual mark of a large shift.
    """

    tolerance: float = 0.25

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        return {
            f"shift of column {column!r}": stability(counts, facts.before.columns[column])
            for column, counts in facts.newest.columns.items()
            if column in facts.before.columns
        }


@dataclass(frozen=True)
class ScoresShift(GateRule):
    """The population stability index of the scores against the events of published versions."""

    tolerance: float = 0.25

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        return {
            _of("shift of the scores", label): stability(counts, facts.before.scores[label])
            for label, counts in facts.newest.scores.items()
            if label in facts.before.scores
        }


@dataclass(frozen=True)
class RowsEvicted(GateRule):
    """The share of the rows of a table that were evicted since the version before."""

    tolerance: float = 0.5

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        shares = {}
        for table, (_, _, evicted, rows, _) in facts.newest.tables.items():
            if rows + evicted > 0:
                shares[f"evicted rows of table {table!r}"] = evicted / (rows + evicted)
        return shares


@dataclass(frozen=True)
class NormsGrow(GateRule):
    """The mean norm of the rows of the sample, divided by that in the served version."""

    tolerance: float = 0.2
    is_ratio: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        ratios = {}
        for table, norm in facts.norms.items():
            before = facts.served_norms.get(table, 0.0)
            if norm > 0 and before > 0:
                name = f"norms of the rows of table {table!r} against the served version"
                ratios[name] = math.log(norm / before)
        return ratios


@dataclass(frozen=True)
class NotFinite(GateRule):
    """NaN and infinity: in scores, in the network, and in the rows of the sample.

    `tolerance`: how many of each may be there. It needs no usual values.
    """

    needs_usual: ClassVar[bool] = False

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        num_scores = facts.newest.unscored
        for scores, _ in facts.scores.values():
            num_scores += np.count_nonzero(~np.isfinite(scores))
        num_tables = sum(not math.isfinite(norm) for norm in facts.norms.values())
        return {
            "number of scores that are not finite": float(num_scores),
            "number of parameters that are not finite": float(facts.num_not_finite),
            "number of tables with rows that are not finite": float(num_tables),
        }

    def _bounds(self, values: Sequence[float]) -> tuple[float, float]:
        return -math.inf, self.tolerance


@dataclass(frozen=True)
class ClockJumps(GateRule):
    """Event time: by how many seconds it advanced, and how late events were on the mean."""

    tolerance: float = 21_600.0

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        newest = facts.newest
        if not newest.seconds and not newest.late_seconds:
            return {}
        late = newest.late_seconds / newest.samples if newest.samples else 0.0
        return {
            "advance of event time, in seconds,": newest.seconds,
            "mean lateness of events, in seconds,": late,
        }


@dataclass(frozen=True)
class VolumeChanges(GateRule):
    """Events in a second of event time. Their number may neither rise nor fall."""

    tolerance: float = 1.0
    is_ratio: ClassVar[bool] = True
    falls: ClassVar[bool] = True

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        newest = facts.newest
        if not newest.seconds or not newest.samples:
            return {}
        return {"events in a second": math.log(newest.samples / newest.seconds)}


@dataclass(frozen=True)
class PartitionsSilent(GateRule):
    """The share of the partitions of a source from which nothing was read."""

    tolerance: float = 0.3

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        counts = facts.newest.partitions
        if len(counts) < 2:
            return {}
        silent = sum(not count for count in counts.values())
        return {"share of silent partitions": silent / len(counts)}


@dataclass(frozen=True)
class EventsRepeat(GateRule):
    """The share of events that are equal to one of the newest 32,768 before, in all columns."""

    tolerance: float = 0.1

    def measure(self, facts: VersionFacts) -> dict[str, float]:
        if not facts.newest.samples:
            return {}
        return {"repeated events": facts.newest.repeated / facts.newest.samples}


def default_rules() -> tuple[GateRule, ...]:
    """Return one of each rule, with the tolerances that docs/gate.md says how to find."""
    return (
        NotFinite(),
        WorseThanServed(),
        LossRises(),
        EntropyRises(),
        CalibrationMoves(),
        UnseenIds(),
        MissingValues(),
        ColumnsShift(),
        ScoresShift(),
        RowsEvicted(),
        NormsGrow(),
        ClockJumps(),
        VolumeChanges(),
        PartitionsSilent(),
        EventsRepeat(),
    )


def stability(counts: Counts, before: Counts) -> float:
    """Return the population stability index of two histograms, less what chance alone adds.

    Of two samples of n and m from one distribution over k bins, chance adds (k - 1) (1/n + 1/m).
    """
    bins = (counts > 0) | (before > 0)
    num_bins = int(np.count_nonzero(bins))
    total = counts.sum()
    total_before = before.sum()
    if num_bins < 2 or not total or not total_before:
        return 0.0
    shares = (counts[bins] + 0.5) / (total + 0.5 * num_bins)
    shares_before = (before[bins] + 0.5) / (total_before + 0.5 * num_bins)
    index = float(((shares - shares_before) * np.log(shares / shares_before)).sum())
    chance = (num_bins - 1) * (1 / total + 1 / total_before)
    return max(0.0, index - float(chance))


def rule_name(rule: GateRule) -> str:
    """Return the name of a rule in messages, manifests and metrics."""
    return kind_of(type(rule))


def _deviation(distances: Counts) -> float:
    """Return the standard deviation that the distances above 0 and their mirror images have."""
    return float(np.sqrt(2 * np.mean(np.maximum(distances, 0.0) ** 2)))


def _log_loss(scores: Counts, values: Counts) -> float:
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    return float(np.mean(-values * np.log(clipped) - (1 - values) * np.log1p(-clipped)))


def _of(what: str, label: str) -> str:
    return f"{what} of {label!r}" if label else what
