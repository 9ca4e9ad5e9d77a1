# SPDX-License-Identifier: Apache-2.0
"""How predicted probabilities fare in each segment of the samples, such as each country."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hotbed.metrics.classification import AUC, Calibration, LogLoss
from hotbed.metrics.metric import Array, Metric, Samples

OTHER = "(other)"
"""The samples of all values that have no figures of their own."""

MOST_VALUES = 1000
MOST_VALUES_OF_STREAM = 100
"""Values whose samples are counted apart; those that come after so many others are not."""

STREAM_BINS = 1024
STREAM_EXACT = 4096
"""Samples of a value from which its AUC on an endless stream is counted in bins."""

BLOCK = 16_384
"""Samples that are counted together: to count each small batch alone would take longer."""


@dataclass(frozen=True)
class ValueFigures:
    """The figures of one value: its samples, those with a positive label, and its metrics."""

    value: str
    rows: int
    positives: int
    metrics: Mapping[str, float]


class SegmentFigures:
    """AUC, log loss and calibration of the samples of each value of a segment.

    Args:
        segment: what the group of a sample is a value of; a `Scorer` reads it.
        most: values that have figures of their own, the most frequent ones.
        endless: count in memory that does not grow: an AUC of more than `STREAM_EXACT` samples is
            counted in bins, and values have figures of their own if they are among the first
            `MOST_VALUES_OF_STREAM`.
    """

    def __init__(self, segment: Any, most: int = 20, *, endless: bool = False) -> None:
        self.segment = segment
        self._most = most
        self._endless = endless
        self._held = MOST_VALUES_OF_STREAM if endless else MOST_VALUES
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._codes: dict[str, int] = {}
        self._values: list[_ValueCounts] = []
        self._rest = self._value()
        self._waiting: list[Samples] = []
        self._num_waiting = 0

    def update(
        self, prediction: Any, label: Any, weight: Any = None, group: Sequence[str] = ()
    ) -> None:
        """Add probabilities, labels and weights, [n] each, of samples of the values `group`."""
        labels = np.array(label, np.float64).reshape(-1)
        weights = np.ones(len(labels))
        if weight is not None:
            weights = np.array(weight, np.float64).reshape(-1)
        predictions = np.array(prediction, np.float64).reshape(-1)
        codes = list(map(self._codes.get, group))
        if None in codes:  # a value that is new, or that came after too many others
            codes = list(map(self._code, group))
        numbers = np.array(codes, np.int16)  # which sort fast
        self._waiting.append(Samples(predictions, labels, weights, numbers))
        self._num_waiting += len(labels)
        if self._num_waiting >= BLOCK:
            self._count()

    def figures(self) -> list[ValueFigures]:
        """Return the figures of the most frequent values, and of the others together.

        Those of most samples come first, and the others, which have the value `OTHER`, last.
        Metrics that are undefined, as the AUC of one class alone, are nan.
        """
        self._count()
        names = sorted(self._codes, key=lambda name: (-self._values[self._codes[name]].rows, name))
        rest = self._value()
        for name in names[self._most :]:
            rest.merge(self._values[self._codes[name]])
        rest.merge(self._rest)
        figures = [self._values[self._codes[name]].figures(name) for name in names[: self._most]]
        return [*figures, rest.figures(OTHER)] if rest.rows else figures

    def state(self) -> dict[str, Any]:
        """Return the counts by value, and the samples that are not counted yet."""
        return {
            "names": list(self._codes),
            "values": [value.state() for value in (*self._values, self._rest)],
            "waiting": Samples.concat(self._waiting).state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; later figures have the same bits."""
        self.clear()
        self._codes = {name: code for code, name in enumerate(state["names"])}
        *values, rest = state["values"]
        for saved in values:
            self._values.append(self._value())
            self._values[-1].load_state(saved)
        self._rest.load_state(rest)
        waiting = Samples.from_state(state["waiting"])
        if len(waiting.label):
            self._waiting = [waiting]
            self._num_waiting = len(waiting.label)

    def _code(self, name: str) -> int:
        """Return the number of a value in order of appearance; -1: too many came before."""
        code = self._codes.get(name)
        if code is None:
            code = len(self._codes)
            if code >= self._held:
                return -1
            self._codes[name] = code
        return code

    def _value(self) -> _ValueCounts:
        return _ValueCounts(AUC(STREAM_BINS, STREAM_EXACT) if self._endless else AUC())

    def _count(self) -> None:
        """Count the samples that wait, each with those of its value in their order."""
        samples = Samples.concat(self._waiting)
        self._waiting = []
        self._num_waiting = 0
        self._values += [self._value() for _ in range(len(self._codes) - len(self._values))]
        if samples.group is None:
            return
        samples = samples[np.argsort(samples.group, kind="stable")]
        codes: Array = np.asarray(samples.group)
        ends = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        for first, last in pairwise(ends):
            code = int(codes[first])
            value = self._rest if code < 0 else self._values[code]
            value.add(samples[first:last])


class _ValueCounts:
    """The samples of one value."""

    def __init__(self, auc: AUC) -> None:
        self.rows = 0
        self._positives = 0
        self._metrics: dict[str, Metric] = {
            "auc": auc,
            "log_loss": LogLoss(),
            "calibration": Calibration(),
        }

    def add(self, samples: Samples) -> None:
        self.rows += len(samples.label)
        self._positives += int((samples.label > 0.5).sum())
        for metric in self._metrics.values():
            metric.add(samples)

    def merge(self, later: _ValueCounts) -> None:
        self.rows += later.rows
        self._positives += later._positives
        for metric, other in zip(self._metrics.values(), later._metrics.values(), strict=True):
            metric.merge(other)

    def figures(self, name: str) -> ValueFigures:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of one class alone
            values = {key: float(metric.eval()) for key, metric in self._metrics.items()}
        return ValueFigures(name, self.rows, self._positives, values)

    def state(self) -> dict[str, Any]:
        metrics = {key: metric.state() for key, metric in self._metrics.items()}
        return {"rows": self.rows, "positives": self._positives, "metrics": metrics}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rows = int(state["rows"])
        self._positives = int(state["positives"])
        for key, metric in self._metrics.items():
            metric.load_state(state["metrics"][key])
