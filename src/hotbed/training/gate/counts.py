# SPDX-License-Identifier: Apache-2.0
"""What is counted of the events of a stream: sums and histograms that can be added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hotbed.training.gate.hashes import Hashes, event_hashes, id_hashes
from hotbed.training.step.example import Example
from hotbed.training.step.reading import host
from hotbed.training.step.scorer import Scores

BINS = 64
"""Bins of a histogram, beside one before them for samples without a value."""

_SEEN_PLACES = 1 << 15
"""Places for the hashes of the newest samples."""

_SCORES_PER_BIN = 4
"""Bins of a logit from one whole number to the next."""

Counts = NDArray[np.float64]


@dataclass
class EventCounts:
    """Sums and histograms of some events, which can be added to those of other events.

    Attributes:
        samples: number of events.
        seconds: by how much event time advanced, in seconds.
        late_seconds: sum over the events of how far each lay behind the newest event time.
        repeated: events that are equal to one of the newest events before.
        unscored: predictions that are not finite.
        labels: by label, [5]: sums of weight, label, prediction, loss, and weight x label where it
            is a probability.
        columns: by column, [1 + BINS]: samples without a value, then values by bin.
        scores: by label, [1 + BINS]: scores that are not finite, then scores by bin.
        tables: by table, [4]: the rows admitted, refused and evicted meanwhile, and the ids that
            were looked up.
        partitions: by partition of the source, how many messages of it were read.
    """

    samples: float = 0.0
    seconds: float = 0.0
    late_seconds: float = 0.0
    repeated: float = 0.0
    unscored: float = 0.0
    labels: dict[str, Counts] = field(default_factory=dict)
    columns: dict[str, Counts] = field(default_factory=dict)
    scores: dict[str, Counts] = field(default_factory=dict)
    tables: dict[str, Counts] = field(default_factory=dict)
    partitions: dict[str, float] = field(default_factory=dict)

    def plus(self, other: EventCounts, share: float = 1.0) -> EventCounts:
        """Return these counts times `share`, and those of other events."""
        total = EventCounts()
        for member in fields(self):
            mine = getattr(self, member.name)
            theirs = getattr(other, member.name)
            if isinstance(mine, dict):
                names = dict.fromkeys([*mine, *theirs])
                value = {
                    name: share * mine.get(name, 0.0) + theirs.get(name, 0.0) for name in names
                }
            else:
                value = share * mine + theirs
            setattr(total, member.name, value)
        return total

    def state(self) -> dict[str, Any]:
        """Return the counts as numbers and NumPy arrays by name."""
        return {member.name: getattr(self, member.name) for member in fields(self)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the counts whose `state` this was."""
        return cls(**state)


class LabelKinds(Protocol):
    """What a criterion knows of labels."""

    def is_probability(self, label: str | None) -> bool: ...
    def missing_below(self, label: str | None) -> float | None: ...


class EventCounter:
    """Counts the events of a stream, batch by batch, once they are learned."""

    def __init__(self) -> None:
        self.counts = EventCounts()
        self._watermark: int | None = None
        self._seen = np.zeros(_SEEN_PLACES, np.uint64)

    def count(self, outputs: Scores, example: Example, kinds: LabelKinds | None) -> None:
        """Count a batch and its scores; `kinds`: of its labels, None where they are not known."""
        counts = self.counts
        counts.samples += example.num_samples
        self._count_times(example)
        if kinds is not None and len(outputs) == 3:
            self._count_scores(outputs, example, kinds)
        batch = example.batch
        if batch is None or example.structure is not None or not example.num_samples:
            return
        for name, ids in batch.ids.items():
            missing = 0
            if ids.offsets is not None:
                missing = int(np.count_nonzero(host(ids.lengths()) == 0))
            places = id_hashes(name, ids) >> np.uint64(58)
            _add(counts.columns, name, missing, np.bincount(places.astype(np.int64), None, BINS))
        for name, values in batch.dense.items():
            numbers = np.asarray(host(values), np.float32).reshape(example.num_samples, -1)
            finite = numbers[np.isfinite(numbers)]
            _add(counts.columns, name, numbers.size - finite.size, _by_size(finite))
        self._count_repeated(event_hashes(batch))

    def state(self) -> dict[str, Any]:
        """Return what was counted, as JSON values and NumPy arrays."""
        return {"counts": self.counts.state(), "watermark": self._watermark, "seen": self._seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.counts = EventCounts.of_state(state["counts"])
        self._watermark = state["watermark"]
        self._seen = np.array(state["seen"], np.uint64)

    def _count_times(self, example: Example) -> None:
        if example.time is None or not example.num_samples:
            return
        times = np.asarray(host(example.time), np.int64)
        before = int(times[0]) if self._watermark is None else self._watermark
        newest = np.maximum(np.maximum.accumulate(times), before)
        self._watermark = int(newest[-1])
        self.counts.seconds += (self._watermark - before) / 1e6
        self.counts.late_seconds += float((newest - times).sum(dtype=np.float64)) / 1e6

    def _count_scores(self, outputs: Scores, example: Example, kinds: LabelKinds) -> None:
        _, prediction, labels = outputs
        weight = host(example.weight)
        weights = np.ones(example.num_samples) if weight is None else weight.astype(np.float64)
        for name, scores, values in scored_labels(prediction, labels, example.num_samples):
            label = name or ""
            finite = np.isfinite(scores)
            unscored = int(np.count_nonzero(~finite))
            self.counts.unscored += unscored
            is_probability = kinds.is_probability(name)
            bins = _by_logit(scores[finite]) if is_probability else _by_size(scores[finite])
            _add(self.counts.scores, label, unscored, bins)
            missing_below = kinds.missing_below(name)
            if missing_below is not None:
                finite &= values >= missing_below
            sums = label_sums(scores[finite], values[finite], weights[finite], is_probability)
            self.counts.labels[label] = self.counts.labels.get(label, 0.0) + sums

    def _count_repeated(self, hashes: Hashes) -> None:
        """Count the samples whose hash is among those of the newest samples."""
        places = hashes >> np.uint64(49)
        order = np.argsort(hashes, kind="stable")
        is_twice = hashes[order][1:] == hashes[order][:-1]
        repeated = self._seen[places] == hashes
        repeated[order[1:][is_twice]] = True
        self.counts.repeated += int(np.count_nonzero(repeated))
        self._seen[places] = hashes


def scored_labels(
    prediction: Any, labels: Any, num_samples: int
) -> list[tuple[str | None, Counts, Counts]]:
    """Return name, scores and values of each label with one score a sample; the only one: None."""
    named = prediction if isinstance(prediction, Mapping) else {None: prediction}
    scored = []
    for name, scores in named.items():
        values = labels.get(name) if isinstance(labels, Mapping) else labels
        if values is not None and np.size(scores) == num_samples == np.size(values):
            flat = np.asarray(scores, np.float64).reshape(-1)
            scored.append((name, flat, np.asarray(values, np.float64).reshape(-1)))
    return scored


def losses_of(scores: Counts, values: Counts, is_probability: bool) -> Counts:
    """Return the log loss of probabilities, clipped at 1e-7, or the squared error of amounts."""
    if not is_probability:
        return (scores - values) ** 2
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    losses: Counts = -values * np.log(clipped) - (1 - values) * np.log1p(-clipped)
    return losses


def label_sums(scores: Counts, values: Counts, weights: Counts, is_probability: bool) -> Counts:
    """Return the entry of a label in `EventCounts.labels`, [5]."""
    losses = losses_of(scores, values, is_probability)
    positives = weights @ values if is_probability else 0.0
    return np.array(
        [weights.sum(), weights @ values, weights @ scores, weights @ losses, positives]
    )


def _add(histograms: dict[str, Counts], name: str, missing: int, bins: NDArray[Any]) -> None:
    counts = np.concatenate([[missing], bins]).astype(np.float64)
    histograms[name] = histograms.get(name, 0.0) + counts


def _by_logit(scores: Counts) -> NDArray[np.int64]:
    """Return the number of probabilities in each bin of their logits, -8 to 8."""
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    logits = np.log(clipped) - np.log1p(-clipped)
    places = np.clip(np.floor(logits * _SCORES_PER_BIN) + BINS // 2, 0, BINS - 1)
    return np.bincount(places.astype(np.int64), minlength=BINS)


def _by_size(numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many numbers have each sign and power of two; powers beyond 2**15 are one bin."""
    _, exponents = np.frexp(numbers)
    places = np.clip(exponents, -15, 15) + 16
    places = np.where(numbers < 0, places + 31, places)
    return np.bincount(np.where(numbers == 0, 0, places).astype(np.int64), minlength=BINS)
