# SPDX-License-Identifier: Apache-2.0
"""What a run says of its version: scores, rows, counters of tables, and offsets of its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hotbed.data.batch import Batch
from hotbed.embedding.modules.state import dense_state
from hotbed.training.gate.counts import BINS, Counts, EventCounts, losses_of, scored_labels
from hotbed.training.gate.held_back import HeldBackEvents, LabelScores
from hotbed.training.gate.rules import Difference
from hotbed.training.run import Run
from hotbed.training.step.criterion import Criterion
from hotbed.training.step.example import prepare
from hotbed.training.step.scorer import Scorer, scorer_of

_UNIT = 2.0**-20
"""Norms are summed as whole multiples of this, so that ranks add them to the same bits."""

LEAST_TRUSTED = 100
"""Held-back events without which no version is compared with an earlier one."""

Counters = dict[str, dict[str, int]]


def scorer_for(run: Run) -> Scorer | None:
    """Return what scores held-back events; None where the network computes its own loss."""
    scorer = scorer_of(run.observer)
    if scorer is not None:
        return None if scorer.has_own_outputs else scorer
    criterion = run.learner.criterion
    if criterion is None:
        return None
    return Scorer(run.learner.network, criterion, {}, shard=run.learner.shard)


def scores_of(run: Run, scorer: Scorer, batch: Batch) -> LabelScores:
    """Return the scores of events by the model as it is; ranks share the events out."""
    learner = run.learner
    example = prepare(batch, learner.device, labelled=True, network=learner.network)
    parts: dict[str, list[Counts]] = {}
    (scored,) = scorer.scored([example.divided(learner.grains)])
    grains = [grain for grain in scored.grains if grain is not None]
    for (_, prediction, labels), grain in zip(scored.scores, grains, strict=True):
        for name, scores, _ in scored_labels(prediction, labels, grain.num_samples):
            parts.setdefault(name or "", []).append(scores)
    return {label: np.concatenate(of_label) for label, of_label in parts.items()}


def compared(
    criterion: Criterion | None, events: HeldBackEvents, scores: LabelScores, save: int
) -> list[Difference]:
    """Return how a version differs from those published last, on events before both.

    Args:
        criterion: of the labels.
        events: with the versions published last.
        scores: of all events, by the version.
        save: number of the save that makes the version.
    """
    trusted = events.trusted
    if trusted is None or criterion is None:
        return []
    weights = np.ones(len(trusted)) if trusted.weight is None else np.asarray(trusted.weight)
    differences = []
    for label, of_label in scores.items():
        name = label or None
        values = np.asarray(trusted.labels[name or next(iter(trusted.labels))], np.float64)
        is_probability = criterion.is_probability(name)
        missing_below = criterion.missing_below(name)
        shares = weights.astype(np.float64)
        if missing_below is not None:
            shares = shares * (values >= missing_below)
        losses = losses_of(of_label[: len(trusted)], values, is_probability)
        for version in events.past:
            rows, earlier = events.shared(version, label)
            share = shares[rows]
            before = share @ losses_of(earlier, values[rows], is_probability)
            if len(earlier) < LEAST_TRUSTED or not before:
                continue
            change = np.nan
            if is_probability:
                change = float(share @ of_label[: len(trusted)][rows] / (share @ earlier))
            loss = float(share @ losses[rows] / before)
            differences.append(Difference(save - version.save, label, loss, change))
    return differences


def num_unscored(scores: LabelScores) -> int:
    """Return how many scores are not finite."""
    return sum(int(np.count_nonzero(~np.isfinite(of_label))) for of_label in scores.values())


def norms_of(run: Run, batch: Batch) -> dict[str, float]:
    """Return by table the mean Euclidean norm of the rows of a batch's ids; NaN if one is NaN."""
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


def num_not_finite(run: Run) -> int:
    """Return how many parameters of the network are NaN or infinite."""
    number = 0
    for tensor in dense_state(run.learner.network).values():
        if torch.is_floating_point(tensor):
            number += int(tensor.numel() - torch.isfinite(tensor).sum())
    return number


def table_counters(run: Run) -> Counters:
    """Return the counters of each table, of all ranks; each of them must ask."""
    keys = ("admitted", "refused", "evicted", "rows")
    here = {}
    for name, table in run.tables.items():
        stats = table.stats
        here[name] = {key: stats[key] for key in keys}
    everywhere = run.learner.shard.gathered(here)
    return {
        name: {key: sum(part[name][key] for part in everywhere) for key in keys} for name in here
    }


def table_counts(
    run: Run, counts: EventCounts, before: Counters, now: Counters
) -> dict[str, Counts]:
    """Return the entries of `EventCounts.tables`, from the counters of two moments."""
    schema = getattr(run.model, "schema", None)
    looked_up: dict[str, float] = {}
    for column in () if schema is None else schema.ids:
        bins = counts.columns.get(column.name)
        if bins is not None:
            number = float(bins[-BINS:].sum())
            looked_up[column.table] = looked_up.get(column.table, 0.0) + number
    grown = {}
    for name, counters in now.items():
        earlier = before.get(name, counters)
        sums = [counters[key] - earlier[key] for key in ("admitted", "refused", "evicted")]
        grown[name] = np.array([*sums, looked_up.get(name, 0.0)])
    return grown


def offsets_of(run: Run) -> dict[str, int]:
    """Return the offset of each partition in the position of a run, by its path in the position."""
    offsets: dict[str, int] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key == "offsets" and isinstance(inner, Mapping):
                    for partition, offset in inner.items():
                        offsets[f"{path}{partition}"] = int(offset)
                else:
                    walk(inner, f"{path}{key}.")
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                walk(inner, f"{path}{number}.")

    if run.position is not None:
        walk(run.position.state, "")
    return offsets
