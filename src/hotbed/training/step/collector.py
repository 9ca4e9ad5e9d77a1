# SPDX-License-Identifier: Apache-2.0
"""Collector: the predictions of all examples, for `predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hotbed.data.batch import Batch
from hotbed.data.dataset import Dataset
from hotbed.training.step.example import CPU, Example
from hotbed.training.step.reading import OneLate
from hotbed.training.step.scorer import Scorer, Scores, Watcher, scored_later


def to_predict(data: Any) -> Any:
    """Return the data that `predict` reads: a Dataset without its labels, one Batch as a list."""
    if isinstance(data, Dataset):
        return data.without_labels()
    if isinstance(data, Batch):
        return [data]
    return data


class Collector:
    """Collects the predictions of every example, for `predict`."""

    groups: frozenset[str] = frozenset()

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.scoring = scorer.scoring
        self.outputs = partial(_outputs_without_labels, scorer)
        self._parts: list[Any] = []
        self._late: OneLate[Example] = OneLate()
        self.watchers: list[Watcher] = []

    def scored(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return examples of one kind with their scores, as `Scorer.scored`."""
        return self._scorer.scored(examples, self.outputs)

    def observe(self, example: Example) -> None:
        """Predict one example, grain by grain; a device computes while the last one is read."""
        later = partial(_outputs_later_without_labels, self._scorer)
        self._add(self._late.put(scored_later(self._scorer, example, later)))
        if example.device == CPU:
            self.finish()

    def finish(self) -> None:
        """Collect the predictions of the last example."""
        self._add(self._late.rest())

    def _add(self, examples: Sequence[Example]) -> None:
        for example in examples:
            self._parts += [prediction for _, prediction, _ in example.scores]

    def settle(self) -> None: ...

    def barrier(self, step: int, now: int | None) -> bool:
        """Return True: predicting reads the tables."""
        return True

    def predictions(self) -> Any:
        """Return float32 [n] (or [n, k]), or a dict of these for a network with several outputs."""
        self.finish()
        if not self._parts:
            return np.empty(0, np.float32)
        if isinstance(self._parts[0], dict):
            predictions = {}
            for name in self._parts[0]:
                parts = [part[name] for part in self._parts]
                predictions[name] = np.concatenate(parts)
            return predictions
        return np.concatenate([np.atleast_1d(part) for part in self._parts])


def _outputs_later_without_labels(scorer: Scorer, example: Example) -> Callable[[], Scores]:
    return scorer.outputs_later(replace(example, labels=None))


def _outputs_without_labels(scorer: Scorer, example: Example) -> Scores:
    return _outputs_later_without_labels(scorer, example)()
