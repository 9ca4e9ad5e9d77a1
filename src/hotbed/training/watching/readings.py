# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run that are worth watching, under one name each; TensorBoard and Prometheus
show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotbed.training.watching.columns import Tables

TOTALS = ("skipped_rows", "skipped_batches", "dead_letters")


@dataclass(frozen=True)
class Reading:
    """One number to watch: `name` as Prometheus wants it, `labels` that tell it from its like.

    `total`: it only rises while a process lives: a counter, whose rate is of interest.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    total: bool = False


def statistics(run: Any) -> Tables:
    """Statistics of each table, now; while an eviction is under way, as of when it began: how far a
    sweep has come at a moment may depend on checkpoints and is of no interest.
    """
    return {
        name: dict(run.statistics.get(name) or table.stats) if run.sweeping else dict(table.stats)
        for name, table in run.tables.items()
    }


def readings(run: Any) -> list[Reading]:
    """Every number to watch at this moment; names are Prometheus', after `hotbed_`."""
    found = [Reading("steps", run.step, total=True), Reading("samples", run.samples, total=True)]
    if run.loss is not None:
        found.append(Reading("loss", float(run.loss.detach())))
    found += [Reading("metric", value, {"metric": name}) for name, value in run.metrics.items()]
    found += [
        Reading("window_metric", value, {"metric": name}) for name, value in run.window.items()
    ]
    for name, optimizer in (("dense", run.learner.dense), ("tables", run.learner.sparse)):
        if optimizer is not None and optimizer.param_groups:
            found.append(
                Reading("learning_rate", float(optimizer.param_groups[0]["lr"]), {"of": name})
            )
    for table, stats in ((name, table.stats) for name, table in run.tables.items()):
        totals = ("admitted", "refused", "evicted")
        found += [
            Reading(f"table_{key}", value, {"table": table}, key in totals)
            for key, value in stats.items()
        ]
    if run.now is not None:
        found.append(Reading("watermark_seconds", run.now / 1e6))
    found += [
        Reading(name, value, total=name in TOTALS) for name, value in observations(run).items()
    ]
    return found


def observations(run: Any) -> dict[str, float]:
    """What the clock and the machine have to do with; never part of a state. What cannot be told is
    left out.

    `freshness_seconds`: the clock minus the newest event time learned; `lag_rows`: rows that wait
    at the source; `bytes`: of all tables; `skipped_rows`, `dead_letters`: left out by the reader,
    which is ahead of training; `skipped_batches`: left out by loss scaling.
    """
    stats = [table.stats for table in run.tables.values()]
    found: dict[str, float] = {
        "bytes": sum(value for one in stats for key, value in one.items() if "bytes" in key)
    }
    found["skipped_batches"] = run.skipped
    if run.now is not None:
        found["freshness_seconds"] = run.clock() - run.now / 1e6
    if getattr(run.dataset, "lag", None) is not None:
        found["lag_rows"] = run.dataset.lag
    skips = getattr(run.dataset, "skips", None)
    live = getattr(run.dataset, "live", None)
    if skips is not None:
        found["skipped_rows"] = skips.total
    if live is not None:
        found["dead_letters"] = live.dead_letters.total
    return found
