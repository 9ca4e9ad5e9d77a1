# SPDX-License-Identifier: Apache-2.0
"""Scores of impressions when they were shown, until their labels are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError
from hotbed.training.run import Run
from hotbed.training.step.example import Example, prepare
from hotbed.training.step.reading import host
from hotbed.training.step.scorer import Scorer


class ShownScores:
    """Scores the impressions of a join before anything is learned of them.

    An impression takes 9 bytes, and 4 for each label, until all of its labels are known.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(0, np.int64)  # rising
        self._left = np.zeros(0, np.uint8)  # labels that were not told yet
        self._scores: dict[str, np.ndarray] = {}

    def begin(self, run: Run) -> None:
        """Ask the join of a run for its impressions.

        Raises:
            ConfigError: the data are not a join of streams, several processes learn them, or a
                gate holds events back, whose impressions would stay open.
        """
        if run.callbacks.held_back:
            raise ConfigError(
                "Windows.scored: 'shown' counts impressions that are learned, got a gate that "
                f"holds back {run.callbacks.held_back:g} of them. Give PublishGate(held_back=0), "
                "or leave scored out."
            )
        if not isinstance(run.dataset, Dataset) or not run.dataset.endless:
            raise ConfigError(
                "Windows.scored: 'shown' scores the impressions of a join of streams, got "
                f"{type(run.dataset).__name__} that ends. Leave it out."
            )
        if run.learner.shard.size > 1:
            raise ConfigError(
                "Windows.scored: 'shown' scores impressions in one process, got "
                f"{run.learner.shard.size} ranks. Leave it out."
            )
        run.ask_join(replace(run.goal.wishes, previews=True))

    def score(self, run: Run, scorer: Scorer) -> None:
        """Score the impressions that came before the batch of a step, which is not learned yet."""
        batch = None if run.example is None else run.example.batch
        if batch is None or batch.previews is None:
            return
        previews = prepare(
            batch.previews, run.learner.device, labelled=True, network=run.learner.network
        )
        _, prediction, _ = scorer.outputs(previews)
        scores = prediction if isinstance(prediction, dict) else {"": prediction}
        numbers = batch.previews.impressions
        self._numbers = np.concatenate([self._numbers, numbers])
        left = np.full(len(numbers), len(scores), np.uint8)
        self._left = np.concatenate([self._left, left])
        for name, values in scores.items():
            values = np.asarray(values, np.float32).reshape(len(numbers), -1)[:, 0]
            before = self._scores.get(name, np.zeros(0, np.float32))
            self._scores[name] = np.concatenate([before, values])

    def take(self, outputs: tuple[Any, ...], example: Example) -> tuple[tuple[Any, ...], Example]:
        """Return a learned example with the scores that its impressions had when they were shown.

        Samples of impressions that were not scored, because they were shown before the first run
        with this callback, are left out.
        """
        _, prediction, _ = outputs
        batch = example.batch
        if batch is None or batch.impressions is None:
            raise ConfigError(
                "Windows.scored: 'shown' needs the impressions of a join, got data without them. "
                "Read a hb.sources.Join, or leave it out."
            )
        numbers = host(batch.impressions)
        if len(self._numbers):
            places = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
            is_known = self._numbers[places] == numbers
        else:
            places = np.zeros(len(numbers), np.int64)
            is_known = np.zeros(len(numbers), bool)
        rows = np.flatnonzero(is_known)
        places = places[rows]
        shown = example
        if len(rows) < len(numbers):
            shown = prepare(batch.map_arrays(host).take(rows), example.device, labelled=True)
        labels = host(shown.labels)
        by_name = labels if isinstance(labels, dict) else {"": labels}
        for values in by_name.values():
            is_told = np.reshape(values, len(rows)) >= 0
            np.subtract.at(self._left, places[is_told], np.uint8(1))
        scores: Any = {name: values[places] for name, values in self._scores.items()}
        if not isinstance(prediction, dict):
            scores = scores.get("", np.zeros(0, np.float32)).reshape(
                (len(rows), *np.shape(prediction)[1:])
            )
        self._forget()
        return (None, scores, labels), shown

    def _forget(self) -> None:
        """Drop the impressions whose labels were all told, if they are many."""
        is_open = self._left > 0
        if 2 * np.count_nonzero(is_open) > len(is_open):
            return
        self._numbers = self._numbers[is_open]
        self._left = self._left[is_open]
        self._scores = {name: values[is_open] for name, values in self._scores.items()}

    def state(self) -> dict[str, Any]:
        """Return the scores of the impressions that are open."""
        is_open = self._left > 0
        scores = {name: values[is_open] for name, values in self._scores.items()}
        return {"numbers": self._numbers[is_open], "left": self._left[is_open], "scores": scores}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._numbers = np.asarray(state["numbers"], np.int64)
        self._left = np.asarray(state["left"], np.uint8)
        self._scores = {
            name: np.asarray(values, np.float32) for name, values in state["scores"].items()
        }
