# SPDX-License-Identifier: Apache-2.0
"""A sample of the newest events, which each version scores before it is published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.batch import Batch, Ids
from hotbed.training.gate.counts import scored_labels
from hotbed.training.run import Run
from hotbed.training.step.example import Example, prepare
from hotbed.training.step.scorer import Scorer, host

_UNIT = 2.0**-20
"""Norms are summed as whole multiples of this, so that ranks add them to the same bits."""

LabelScores = dict[str, tuple[NDArray[np.float64], ...]]
"""Scores and values by label, [n] each."""


class EventSample:
    """Events of published versions, and events since then, at most `size` of each.

    The events since then are every k-th, with a k that doubles whenever there are too many.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stride = 1
        self._passed = 0
        self.known: Batch | None = None
        self.fresh: Batch | None = None

    def add(self, example: Example) -> None:
        """Take some samples of a batch that was learned."""
        batch = example.batch
        if batch is None or example.structure is not None or not batch.num_samples:
            return
        first = -self._passed % self._stride
        self._passed += batch.num_samples
        rows = np.arange(first, batch.num_samples, self._stride)
        if not len(rows):
            return
        taken = _bare(batch.map_arrays(host)).take(rows)
        self.fresh = taken if self.fresh is None else Batch.concat([self.fresh, taken])
        while len(self.fresh) > self._size:
            self.fresh = self.fresh.take(np.arange(0, len(self.fresh), 2))
            self._stride *= 2

    def accept(self) -> None:
        """Count the events since the last version as known: the version is published."""
        both = [part for part in (self.known, self.fresh) if part is not None]
        if both:
            known = Batch.concat(both)
            if len(known) > self._size:
                known = known.take(np.linspace(0, len(known) - 1, self._size).astype(np.int64))
            self.known = known
        self.forget_fresh()

    def forget_fresh(self) -> None:
        """Drop the events since the last version: it is held."""
        self.fresh = None
        self._stride = 1
        self._passed = 0

    def state(self) -> dict[str, Any]:
        """Return the events as JSON values and NumPy arrays."""
        batches = {"known": self.known, "fresh": self.fresh}
        return {
            "stride": self._stride,
            "passed": self._passed,
            **{name: None if batch is None else _plain(batch) for name, batch in batches.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._stride = state["stride"]
        self._passed = state["passed"]
        self.known = None if state["known"] is None else _batch(state["known"])
        self.fresh = None if state["fresh"] is None else _batch(state["fresh"])


def scores_of(run: Run, scorer: Scorer, batch: Batch) -> LabelScores:
    """Return the scores of a sample by the model as it is; ranks share the samples out."""
    learner = run.learner
    example = prepare(batch, learner.device, labelled=True, network=learner.network)
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for (_, prediction, labels), grain in scorer.scored(example.divided(learner.grains)):
        for name, scores, values in scored_labels(prediction, labels, grain.num_samples):
            parts.setdefault(name or "", []).append((scores, values))
    joined: LabelScores = {}
    for label, pairs in parts.items():
        columns = zip(*pairs, strict=True)
        joined[label] = tuple(np.concatenate(column) for column in columns)
    return joined


def norms_of(run: Run, batch: Batch) -> dict[str, float]:
    """Return by table the mean Euclidean norm of the rows of a sample's ids; NaN if one is NaN."""
    schema = getattr(run.model, "schema", None)
    sums: dict[str, tuple[int, int, bool]] = {}
    for column in () if schema is None else schema.ids:
        table = run.tables.get(column.table)
        if table is None or column.name not in batch.ids:
            continue
        ids = np.unique(np.asarray(batch.ids[column.name].values))
        slots = table.find(ids)
        rows = table.gather(slots[slots >= 0]).astype(np.float64)
        norms = np.sqrt((rows * rows).sum(axis=1))
        is_finite = bool(np.isfinite(norms).all())
        total = int(np.rint(norms / _UNIT).sum()) if is_finite else 0
        before = sums.get(column.table, (0, 0, True))
        sums[column.table] = (before[0] + total, before[1] + len(norms), before[2] and is_finite)
    means: dict[str, float] = {}
    everywhere = run.learner.shard.gathered(sums)
    for name in sums:
        totals, numbers, finite = zip(*(part[name] for part in everywhere), strict=True)
        if sum(numbers):
            means[name] = sum(totals) * _UNIT / sum(numbers) if all(finite) else np.nan
    return means


def _bare(batch: Batch) -> Batch:
    """Return a batch without what belongs to its place in the stream."""
    return Batch(batch.ids, dict(batch.dense), batch.labels, batch.weight, batch.time)


def _plain(batch: Batch) -> dict[str, Any]:
    ids = {name: [ids.values, ids.offsets, ids.weights] for name, ids in batch.ids.items()}
    return {
        "ids": ids,
        "dense": dict(batch.dense),
        "labels": dict(batch.labels),
        "weight": batch.weight,
        "time": batch.time,
    }


def _batch(plain: Mapping[str, Any]) -> Batch:
    ids = {name: Ids(*parts) for name, parts in plain["ids"].items()}
    return Batch(ids, plain["dense"], plain["labels"], plain["weight"], plain["time"])
