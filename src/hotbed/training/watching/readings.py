# SPDX-License-Identifier: Apache-2.0
"""Readings: the numbers of a run, under one name each, for TensorBoard and Prometheus."""

from __future__ import annotations

import math
from typing import Any

from hotbed.connectors.times import EARLIEST
from hotbed.data.dataset import Dataset
from hotbed.embedding.tier import Ssd
from hotbed.memory_limit import memory_limits
from hotbed.training.columns import Tables, is_reason
from hotbed.training.decisions.checkpoint import Checkpoint
from hotbed.training.decisions.eviction_schedule import sweeping
from hotbed.training.gate.gatekeeper import Gatekeeper
from hotbed.training.run import Run
from hotbed.training.run_state import held_rows
from hotbed.training.watching.endpoint import Reading
from hotbed.training.watching.segments import MODEL, BySegment, SegmentTables
from hotbed.training.writes import Writes

TOTALS = ("skipped_rows", "skipped_batches", "dead_letters")
DISK_TOTALS = ("num_reads", "put_bytes", "written_bytes")
DISK_LEVELS = ("file_bytes", "live_bytes", "waiting_extents")
ROW_LEVELS = ("resident", "memory_bytes")
ROW_TOTALS = ("hits", "misses", "fetched", "waited_seconds")
TABLE_TOTALS = ("admitted", "refused", "evicted", "evicted_by_reason")


def statistics(run: Run) -> Tables:
    """Return the statistics of each table.

    While an eviction is under way they are those of its begin: how far a sweep has come at a moment
    may depend on checkpoints, and with it the reasons of evictions, which are left out. Ids of
    batches that are mapped ahead do not count. On several ranks they are those of this one.
    """
    schedule = sweeping(run)
    before: Tables = {}
    if schedule is not None:
        before = schedule.statistics
    elif run.stage is not None and run.ahead:
        before = run.stage.statistics
    tables = {}
    for name, table in run.tables.items():
        counters = before.get(name) or table.stats
        tables[name] = {key: value for key, value in counters.items() if not is_reason(key)}
    return tables


def statistics_of_ranks(run: Run) -> Tables:
    """Return `statistics`, added over all ranks; each of them must ask."""
    (tables,) = run.learner.summed([statistics(run)])
    return tables


def evictions(run: Run) -> Tables:
    """Return the evicted rows of each table that has any, by reason.

    They are added over all ranks; each of them must ask.
    """
    (every,) = run.learner.summed([counters_of(run)])
    tables = {}
    for name, counters in every.items():
        counts = {key: value for key, value in counters.items() if is_reason(key) and value}
        if counts:
            tables[name] = {key.removeprefix("evicted_"): count for key, count in counts.items()}
    return tables


def counters_of(run: Run) -> Tables:
    """Return what `Table.stats` says now; of several ranks, of the rows of this one."""
    return {name: table.stats for name, table in run.tables.items()}


def readings(run: Run, tables: Tables | None = None) -> list[Reading]:
    """Return every number to watch at this moment.

    Args:
        run: the training.
        tables: the counters of all ranks; None = `counters_of(run)`.
    """
    values = [Reading("steps", run.step, total=True), Reading("samples", run.samples, total=True)]
    if run.loss is not None:
        values.append(Reading("loss", float(run.loss.detach())))
    for name, value in run.metrics.items():
        values.append(Reading("metric", value, {"metric": name}))
    for name, value in run.window.items():
        values.append(Reading("window_metric", value, {"metric": name}))
    for part, optimizer in (("dense", run.learner.dense), ("tables", run.learner.sparse)):
        if optimizer is not None and optimizer.param_groups:
            rate = float(optimizer.param_groups[0]["lr"])
            values.append(Reading("learning_rate", rate, {"of": part}))
    for name, counters in (tables or counters_of(run)).items():
        for key, value in counters.items():
            labels = {"table": name}
            if is_reason(key):
                labels["reason"] = key.removeprefix("evicted_")
                key = "evicted_by_reason"
            values.append(Reading(f"table_{key}", value, labels, key in TABLE_TOTALS))
    values += _disk_readings(run)
    limits = memory_limits()
    if limits:
        values.append(Reading("memory_used_bytes", limits[0].used_bytes))
        values.append(Reading("memory_limit_bytes", limits[0].limit_bytes))
    if run.now is not None:
        values.append(Reading("watermark_seconds", run.now / 1e6))
    for name, value in observations(run).items():
        values.append(Reading(name, value, total=name in TOTALS))
    values += _join_readings(run)
    for segments in run.callbacks.of(BySegment):
        values += _segment_readings(segments.recent)
    for checkpoint in run.callbacks.of(Checkpoint):
        values += _write_readings("save", checkpoint.saves, run.step)
        if checkpoint.publications is not None:
            values += _write_readings("publication", checkpoint.publications, run.step)
        if checkpoint.gatekeeper is not None:
            values += _gate_readings(checkpoint.gatekeeper)
    return values


def _gate_readings(keeper: Gatekeeper) -> list[Reading]:
    """Return what a gate decided: how many versions it held, and which rules the newest broke."""
    values = [
        Reading("gate_held_versions", keeper.num_held, total=True),
        Reading("gate_held_in_a_row", keeper.in_a_row),
    ]
    for rule in keeper.rule_names:
        broken = sum(reason.rule == rule for reason in keeper.reasons)
        values.append(Reading("gate_broken", broken, {"rule": rule}))
    return values


def _join_readings(run: Run) -> list[Reading]:
    """Return what the join of a stream says; its reader may be ahead of training."""
    open_rows = held_rows(run)
    if open_rows is None:
        return []
    values = [Reading(f"join_{key}", value) for key, value in open_rows.levels().items()]
    for key, count in dict(open_rows.counts).items():
        values.append(Reading(f"join_{key}", count, total=True))
    if open_rows.watermark > EARLIEST:
        values.append(Reading("join_watermark_seconds", open_rows.watermark / 1e6))
    for number, highs in enumerate(open_rows.newest()):
        for partition, newest in highs.items():
            if newest > EARLIEST:
                labels = {"input": str(number), "partition": partition}
                values.append(Reading("join_newest_seconds", newest / 1e6, labels))
    return values


def _segment_readings(tables: SegmentTables) -> list[Reading]:
    """Return the rows of each value of a column, and the metrics of the model there."""
    values = []
    for column, rows in tables.items():
        for row in rows:
            labels = {"segment": column, "value": row.value}
            values.append(Reading("segment_rows", row.rows, labels))
            for name, value in row.figures.get(MODEL, {}).items():
                if math.isfinite(value):
                    values.append(Reading("segment_metric", value, {**labels, "metric": name}))
    return values


def _write_readings(name: str, writes: Writes, step: int) -> list[Reading]:
    """Return what is known of saves or of published versions at a step."""
    values = [
        Reading(f"{name}s", writes.count, total=True),
        Reading(f"{name}_failures", writes.failures, total=True),
        Reading(f"steps_since_{name}", step - writes.last_step),
    ]
    if writes.last_seconds is not None:
        values.append(Reading(f"last_{name}_timestamp_seconds", writes.last_seconds))
        values.append(Reading(f"last_{name}_bytes", writes.last_bytes))
    if writes.last_duration is not None:
        values.append(Reading(f"last_{name}_duration_seconds", writes.last_duration))
    return values


def _disk_readings(run: Run) -> list[Reading]:
    """Return what the tables on disks say, and the disk of each folder once."""
    values = []
    for name, table in run.tables.items():
        stats = table.tier_stats
        if stats:
            labels = {"table": name}
            for key in ROW_LEVELS:
                values.append(Reading(f"table_disk_{key}", stats[key], labels))
            for key in ROW_TOTALS:
                values.append(Reading(f"table_disk_{key}", stats[key], labels, total=True))
    for folder, stats in _disks(run).items():
        labels = {"folder": folder}
        for key in (*DISK_TOTALS, *DISK_LEVELS):
            values.append(Reading(f"disk_{key}", stats[key], labels, key in DISK_TOTALS))
    return values


def _disks(run: Run) -> dict[str, dict[str, Any]]:
    """Return the statistics of each folder in which rows lie."""
    disks = {}
    for table in run.tables.values():
        if isinstance(table.tier, Ssd):
            disks[str(table.tier.path)] = table.tier_stats
    return disks


def disk_totals(run: Run) -> dict[str, float]:
    """Return what disks did since this process began, all tables together; empty without any.

    Like `observations`, it depends on the clock and the machine.
    """
    on_disk = [table.tier_stats for table in run.tables.values() if table.tier_stats]
    if not on_disk:
        return {}
    totals: dict[str, float] = {}
    for key in ROW_TOTALS:
        totals[key] = sum(stats[key] for stats in on_disk)
    for key in (*DISK_TOTALS, *DISK_LEVELS):
        totals[key] = sum(stats[key] for stats in _disks(run).values())
    return totals


def observations(run: Run) -> dict[str, float]:
    """Return the values that depend on the clock and the machine; they are never part of a state.

    Values that are not known are left out.

    * `bytes`: of all tables.
    * `skipped_batches`: left out by loss scaling.
    * `freshness_seconds`: the clock minus the newest event time that was learned.
    * `lag_rows`: rows that wait at the source.
    * `source_reached`: 1 if the source answers, 0 while it is away.
    * `skipped_rows`, `dead_letters`: left out by the reader, which reads ahead of training.
    """
    num_bytes = 0
    for table in run.tables.values():
        num_bytes += sum(value for key, value in table.stats.items() if "bytes" in key)
    return {"bytes": num_bytes, **stream_observations(run)}


def stream_observations(run: Run) -> dict[str, float]:
    """Return the values of `observations` that are not of tables: no barrier is needed for them."""
    values: dict[str, float] = {"skipped_batches": run.counts.skipped}
    if run.now is not None:
        values["freshness_seconds"] = run.clock() - run.now / 1e6
    lag = getattr(run.dataset, "lag", None)
    if lag is not None:
        values["lag_rows"] = lag
    if isinstance(run.dataset, Dataset) and run.dataset.status.is_reached is not None:
        values["source_reached"] = run.dataset.status.is_reached
    skips = getattr(run.dataset, "skips", None)
    if skips is not None:
        values["skipped_rows"] = skips.total
    live = getattr(run.dataset, "live", None)
    if live is not None:
        values["dead_letters"] = live.dead_letters.total
    return values
