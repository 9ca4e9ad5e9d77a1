# SPDX-License-Identifier: Apache-2.0
"""Held-back events: a share of a stream that is scored and never learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.batch import Batch, Ids, changed
from hotbed.training.gate.hashes import event_hashes, scattered

MOST_SAVES = 16
"""Saves after which the scores of a published version are dropped."""

_SALT = np.uint64(0xD1B54A32D192ED03)
LabelScores = dict[str, NDArray[np.float64]]
"""Scores by label, [n] each; "" is the only label."""


def divided(batch: Batch, share: float) -> tuple[Batch, Batch | None]:
    """Return the events of a batch that are learned, and those that are held back, if any.

    A hash of its features and its time chooses an event, so an event that comes twice is held back
    twice, and every run chooses alike. At least one event of a batch is learned.

    Args:
        batch: of NumPy arrays.
        share: how many events are held back, from 0 to 1.
    """
    if not share or not batch.num_samples or batch.plans is not None:
        return batch, None
    draws = scattered(event_hashes(batch) ^ _SALT) >> np.uint64(11)
    is_held_back = draws < np.uint64(share * 2**53)
    learned = np.flatnonzero(~is_held_back)
    if len(learned) in (0, batch.num_samples):
        return batch, None
    members = {
        "position": batch.position,
        "encoder": batch.encoder,
        "previews": batch.previews,
        "grain_ends": tuple(np.searchsorted(learned, batch.grain_ends).tolist()),
    }
    return changed(batch.take(learned), members), bare(batch.take(np.flatnonzero(is_held_back)))


def bare(batch: Batch) -> Batch:
    """Return a batch without what belongs to its place in the stream."""
    return Batch(batch.ids, dict(batch.dense), batch.labels, batch.weight, batch.time)


@dataclass(frozen=True)
class PastVersion:
    """How a published version scored the events that came before it.

    Attributes:
        save: number of the save that made it.
        end: number of the event after the last one that it scored.
        scores: of the events before `end`.
    """

    save: int
    end: int
    scores: LabelScores


class HeldBackEvents:
    """The newest held-back events, with their scores by the versions published last.

    Attributes:
        trusted: events that came before the version that is served was published; at most `size`.
        fresh: events that came since; at most `size`.
        past: versions published last, oldest first; the last one is served.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._end = 0  # number of the event after the last trusted one
        self.trusted: Batch | None = None
        self.fresh: Batch | None = None
        self.past: list[PastVersion] = []

    @property
    def all(self) -> Batch | None:
        """The trusted events, then the fresh ones."""
        parts = [part for part in (self.trusted, self.fresh) if part is not None]
        return Batch.concat(parts) if parts else None

    def add(self, batch: Batch) -> None:
        """Add events, the newest ones."""
        parts = [batch] if self.fresh is None else [self.fresh, batch]
        self.fresh = Batch.concat(parts)[-self._size :]

    def trust(self, scores: LabelScores, save: int) -> None:
        """Trust the fresh events, too: save `save` is published, and gives `all` these scores."""
        events = self.all
        if events is None:
            return
        self._end += 0 if self.fresh is None else len(self.fresh)
        self.trusted = events[-self._size :]
        self.fresh = None
        newest = {label: of_label[-self._size :] for label, of_label in scores.items()}
        self.past.append(PastVersion(save, self._end, newest))
        self.past = [version for version in self.past if version.save > save - MOST_SAVES]

    def forget_fresh(self) -> None:
        """Drop the fresh events: a version is held, and what came before it may be wrong."""
        self.fresh = None

    def shared(self, version: PastVersion, label: str) -> tuple[slice, NDArray[np.float64]]:
        """Return which trusted events a past version scored, and its scores of them."""
        num_trusted = 0 if self.trusted is None else len(self.trusted)
        first = self._end - num_trusted
        scores = version.scores.get(label, np.empty(0))
        first_shared = max(first, version.end - len(scores))
        number = max(0, version.end - first_shared)
        rows = slice(first_shared - first, first_shared - first + number)
        return rows, scores[len(scores) - number :]

    def state(self) -> dict[str, Any]:
        """Return the events and scores as JSON values and NumPy arrays."""
        past = []
        for version in self.past:
            scores = {label: of.astype(np.float32) for label, of in version.scores.items()}
            past.append([version.save, version.end, scores])
        return {
            "end": self._end,
            "trusted": _plain(self.trusted),
            "fresh": _plain(self.fresh),
            "past": past,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._end = state["end"]
        self.trusted = _batch(state["trusted"])
        self.fresh = _batch(state["fresh"])
        self.past = []
        for save, end, scores in state["past"]:
            exact = {label: of.astype(np.float64) for label, of in scores.items()}
            self.past.append(PastVersion(save, end, exact))


def _plain(batch: Batch | None) -> dict[str, Any] | None:
    if batch is None:
        return None
    ids = {name: [ids.values, ids.offsets, ids.weights] for name, ids in batch.ids.items()}
    return {
        "ids": ids,
        "dense": dict(batch.dense),
        "labels": dict(batch.labels),
        "weight": batch.weight,
        "time": batch.time,
    }


def _batch(plain: Mapping[str, Any] | None) -> Batch | None:
    if plain is None:
        return None
    ids = {name: Ids(*parts) for name, parts in plain["ids"].items()}
    return Batch(ids, plain["dense"], plain["labels"], plain["weight"], plain["time"])
