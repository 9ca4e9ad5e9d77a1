# SPDX-License-Identifier: Apache-2.0
"""The workload of a job, for its plan: read its ids, and measure its steps.

This process stays as it is: what is measured runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import PARTITIONS
from hotbed.errors import ConfigError, DataError
from hotbed.job.job import Job
from hotbed.job.sampled_tables import (
    DistinctIds,
    Sampled,
    SampledHistories,
    expected_ids,
    facts_of,
    table_facts,
)
from hotbed.memory import peak_bytes

if TYPE_CHECKING:
    from hotbed.data.batch import Batch
    from hotbed.data.schema import Schema
    from hotbed.embedding.table import Table
    from hotbed.parallel.forecast.ranks import SampledBatch, SaveTimes, Workload
    from hotbed.training.model import RecModel

SAMPLES = 5_000_000
"""Samples of the data that are read for their ids."""
KEPT_SAMPLES = 1_000_000
"""Samples that are read where the schema keeps histories, which takes longer."""
SAMPLE_ROWS = 1 << 16
"""Samples that are read at a time."""
BATCHES = 8
"""Batches that are measured and whose messages are counted."""
SECONDS = 3.0
"""Time to measure steps of one process in."""
ROUNDS = 3
"""How often steps are measured, in turn: the least disturbed round counts."""
PAIR_SECONDS = 4.0
"""Time that as many steps of one process take as two ranks are measured in."""
LEAST_SAVED_ROWS = 10_000
"""Rows of a state whose time a row is measured."""
LEAST_STEPS = 6
MOST_STEPS = 200
T = TypeVar("T")


def workload_of(job: Job, rows: Mapping[str, float]) -> tuple[Workload, Sampled]:
    """Return what a job is and takes on this machine, and what was read of its data.

    Args:
        job: with `train`.
        rows: that the user expects of tables, by name.

    Raises:
        ConfigError: `rows` names a table that the job does not have.
    """
    work, sampled = _alone(_measured, job.to_json(), dict(rows))
    return _with_two_ranks(job, work), sampled


def _alone(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a call returns in a process of its own, as a rank would be: with one thread."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, arguments)


# --- two ranks of this machine --------------------------------------------------------------------


def _with_two_ranks(job: Job, work: Workload) -> Workload:
    """Return a workload with what two ranks of this machine take: their link, and some steps."""
    from hotbed.parallel.forecast.ranks import LinkSpeed
    from hotbed.parallel.probe import on_two_ranks

    steps = round(PAIR_SECONDS / max(work.step_seconds.values()))
    steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
    of_ranks = on_two_ranks(_as_rank, job.to_json(), steps)
    link = LinkSpeed(sorted(of_ranks[0].link.items()))
    own_seconds = max(of_rank.own_seconds for of_rank in of_ranks)
    wait_seconds = max(of_rank.wait_seconds for of_rank in of_ranks)
    share = min(work.cpu_share, *(of_rank.cpu_share for of_rank in of_ranks))
    crowding = max(of_rank.crowding for of_rank in of_ranks)
    work = replace(work, link=link, cpu_share=share, crowding=crowding)
    return work.as_two_ranks(own_seconds, wait_seconds)


@dataclass(frozen=True)
class RankSteps:
    """What a rank measured, of its least disturbed steps.

    Attributes:
        link: seconds of a call, by the bytes that it sends.
        own_seconds: of a step, beside calls to the other rank.
        wait_seconds: of a step, in these calls.
        cpu_share: of its own seconds, for which the rank had a processor.
        crowding: how many times as long it computes while the other one does, too.
    """

    link: Mapping[int, float]
    own_seconds: float
    wait_seconds: float
    cpu_share: float
    crowding: float = 1.0


def _as_rank(spec: Mapping[str, Any], steps: int) -> RankSteps:
    """Measure the link, then train as one of two ranks; the later half of the steps counts."""
    from hotbed.parallel.probe import probe

    job = _to_measure(Job.from_json(spec))
    connections = probe()
    crowding = _crowding(job)
    model = job.rec_model(job.fitted())
    measured = []
    waited = 0.0
    with contextlib.closing(_batches(job, model)) as batches:
        for batch in islice(batches, steps):
            seconds, cpu_seconds = _timed(model.step, batch)
            so_far = model.learner.end()[model.learner.shard.rank].wait_seconds
            waits = so_far - waited
            waited = so_far
            measured.append((min(seconds - waits, cpu_seconds), waits, seconds - waits))
    rounds = np.array_split(np.array(measured[steps // 2 :]), ROUNDS)
    own_seconds, waits, _ = np.min([np.median(part, 0) for part in rounds], 0)
    total, _, total_wall = np.concatenate(rounds).sum(0)
    share = min(total / max(total_wall, 1e-9), 1.0)
    return RankSteps(connections.seconds, float(own_seconds), float(waits), float(share), crowding)


def _crowding(job: Job) -> float:
    """Return how many times as long a step of one process takes while another one computes, too."""
    from hotbed.parallel.probe import crowding

    with _independent():
        model = job.rec_model(job.fitted())
        with contextlib.closing(_batches(job, model)) as every_batch:
            batches = list(islice(every_batch, BATCHES))

    def compute() -> float:
        with _independent():
            return float(np.median(_later(model.step, batches, SECONDS / 6)[:, 1]))

    return crowding(compute)


@contextlib.contextmanager
def _independent() -> Iterator[None]:
    """Let a rank train a copy of its own within."""
    from hotbed.parallel.world import INDEPENDENT

    os.environ[INDEPENDENT] = "1"
    try:
        yield
    finally:
        del os.environ[INDEPENDENT]


def _timed(call: Callable[[Batch], object], batch: Batch) -> tuple[float, float]:
    """Call with a batch; return the seconds that it took, and those of this thread's processor."""
    began = time.perf_counter()
    began_cpu = time.thread_time()
    call(batch)
    return time.perf_counter() - began, time.thread_time() - began_cpu


# --- what a process of its own measures -----------------------------------------------------------


def _measured(spec: Mapping[str, Any], rows: Mapping[str, float]) -> tuple[Workload, Sampled]:
    """Return what a job is and takes, and what was read of its data; it trains a few steps.

    `rows`: that the user expects of tables.
    """
    import hotbed as hb
    from hotbed.parallel.forecast.ranks import LinkSpeed, Workload

    hb.set_num_threads(1)
    job = _to_measure(Job.from_json(spec))
    tables = Job.from_json(spec).tables
    schema = job.fitted()
    model = job.rec_model(schema)
    _check_tables(rows, model.tables)
    process_bytes = _process_bytes(job, model)
    read = read_ids(job, model)
    if read.histories is not None:
        batches = list(read.histories.last)
    else:
        with contextlib.closing(_batches(job, model)) as every_batch:
            batches = list(islice(every_batch, BATCHES))
    sampled_batches = [_sampled_batch(model, batch, read.histories) for batch in batches]
    steps = _step_seconds(job, schema, batches)
    sampled = read.sampled
    facts = [
        facts_of(table, tables.tier_of(name), read.ids[name], job, sampled, rows.get(name))
        for name, table in model.tables.items()
    ]
    if read.histories is not None:
        num_batches = sampled.samples / job.fit.batch_size
        begun = read.histories.begun()
        facts = [replace(fact, begun=begun.get(fact.name, 0) / num_batches) for fact in facts]
    dense = [1, *(parameter.numel() for parameter in hb.dense_parameters(model.network))]
    floats = [buffer for buffer in model.network.buffers() if buffer.is_floating_point()]
    work = Workload(
        tables=facts,
        batches=sampled_batches,
        batch_size=job.fit.batch_size,
        grains=model.grains,
        modules=len(_modules(model)),
        dense=[*dense, *(buffer.numel() for buffer in floats if buffer.numel())],
        process_bytes=process_bytes,
        step_seconds=steps.seconds,
        read_seconds=read.seconds,
        feature_seconds=read.seconds * _share_of_features(job, model),
        history_seconds=0.0 if read.histories is None else read.histories.seconds(),
        cpu_share=steps.cpu_share,
        spread=steps.spread,
        score_seconds=_score_seconds(model, batches),
        save=_save_times(job, schema, model),
        link=LinkSpeed.of(0.0, math.inf),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    return work, sampled


def _to_measure(job: Job) -> Job:
    """Return a job with its grains on several ranks, one thread, and all rows in memory.

    The time of a disk is computed, because the few rows of a measurement would all be in memory.
    """
    grains = 2
    with contextlib.suppress(ConfigError):  # fewer; the plan says how many are needed
        grains = job.num_grains(grains)
    fit = replace(job.fit, torch_threads=job.fit.torch_threads or 1)
    return replace(job, grains=grains, fit=fit, tables=job.tables.in_memory())


def _check_tables(rows: Mapping[str, float], tables: Mapping[str, Table]) -> None:
    for name in rows:
        if name not in tables:
            raise ConfigError(
                f"--rows: unknown table, got {name!r}. Name one of the tables {sorted(tables)}."
            )


def _modules(model: RecModel) -> list[Any]:
    from hotbed.embedding.modules import table_modules

    return table_modules(model.network)


def _batches(job: Job, model: RecModel) -> Generator[Batch]:
    """Yield the batches of the job, epoch after epoch, by the grains of its model."""
    assert job.train is not None
    data = job.dataset(job.train, model.schema)
    data.divide(model.grains)
    for epoch in count():
        has_rows = False
        for batch in data.epoch(epoch):
            has_rows = True
            yield batch
        if not has_rows:
            raise DataError("job.train: a plan needs a batch, got empty data. Give data with rows.")


def _process_bytes(job: Job, model: RecModel) -> float:
    """Return the most memory that a process takes for some steps, but for its rows."""
    began = time.perf_counter()
    with contextlib.closing(_batches(job, model)) as batches:
        for number, batch in enumerate(batches, 1):
            model.step(batch)
            if number >= BATCHES and time.perf_counter() - began > SECONDS / 2:
                break
    rows = 0.0
    for table in model.tables.values():
        of_partitions = np.full(PARTITIONS, len(table) / PARTITIONS)
        facts = table_facts(table, of_partitions, np.zeros(PARTITIONS))
        rows += facts.memory_of_all()
    return peak_bytes() - rows


@dataclass(frozen=True)
class StepTimes:
    """Steps of one process.

    Attributes:
        seconds: of a step on a processor, by its samples.
        cpu_share: of the time, for which the process had a processor.
        spread: by how much the rounds of whole batches differed, as a share of the shortest.
    """

    seconds: Mapping[int, float]
    cpu_share: float
    spread: float


def _step_seconds(job: Job, schema: Schema, batches: Sequence[Batch]) -> StepTimes:
    """Measure a step of all grains, of half of them, of one, and of less.

    As many samples in as many grains are what a rank computes. A thread that waits for a processor
    takes none, so the times are those of an otherwise idle machine, but for its caches.
    """
    assert isinstance(job.grains, int)
    whole = job.fit.batch_size
    parts = {1: job.grains, 2: job.grains // 2, job.grains: 1, 8 * job.grains: 1}
    models = {}
    for part, grains in parts.items():
        samples = max(whole // part, 1)
        models[samples] = replace(job, grains=max(grains, 1)).rec_model(schema)
    medians: dict[int, list[float]] = {samples: [] for samples in models}
    totals = np.zeros(2)
    for _ in range(ROUNDS):
        for samples, model in models.items():
            parts_of_batches = [batch[:samples] for batch in batches]
            times = _later(model.step, parts_of_batches, SECONDS / len(models) / ROUNDS)
            medians[samples].append(float(np.median(times[:, 1])))
            totals += times.sum(0)
    of_whole = medians[max(medians)]
    return StepTimes(
        {samples: min(of_rounds) for samples, of_rounds in medians.items()},
        float(min(totals[1] / totals[0], 1.0)),
        max(of_whole) / min(of_whole) - 1,
    )


def _later(
    call: Callable[[Batch], object], batches: Sequence[Batch], limit: float
) -> NDArray[np.float64]:
    """Return the times of the later half of the calls that the time is enough for, [calls, 2]."""
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(times) < LEAST_STEPS or time.perf_counter() - began < limit:
        times.append(_timed(call, batches[len(times) % len(batches)]))
    return np.array(times[len(times) // 2 :])


def _score_seconds(model: RecModel, batches: Sequence[Batch]) -> float:
    """Return the seconds of a processor to score a batch."""
    times = _later(model.predict, batches, SECONDS / 4)
    return float(np.median(times[:, 1]))


def _save_times(job: Job, schema: Schema, model: RecModel) -> SaveTimes | None:
    """Return what a row takes in a full state; None where the measurement has too few rows."""
    from hotbed.parallel.forecast.ranks import SaveTimes

    rows = sum(len(table) for table in model.tables.values())
    if rows < LEAST_SAVED_ROWS:
        return None
    empty_seconds, empty_bytes = _saved(job.rec_model(schema))
    seconds, num_bytes = _saved(model)
    return SaveTimes(
        max(seconds - empty_seconds, 0.0) / rows, max(num_bytes - empty_bytes, 0) / rows
    )


def _saved(model: RecModel) -> tuple[float, int]:
    """Return the seconds and the bytes of a model that is saved in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        began = time.perf_counter()
        model.save(path)
        seconds = time.perf_counter() - began
        return seconds, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@dataclass(frozen=True)
class ReadIds:
    """What was read of the data of a job.

    Attributes:
        ids: of each table.
        sampled: how much was read, and what it says of all.
        seconds: to read a batch of the job.
        histories: that were filled; None = the schema keeps none.
    """

    ids: Mapping[str, DistinctIds]
    sampled: Sampled
    seconds: float
    histories: SampledHistories | None


def read_ids(
    job: Job, model: RecModel, batch_size: int = SAMPLE_ROWS, total: int | None = None
) -> ReadIds:
    """Read the ids of each table in the data of a job.

    Args:
        job: its `train` is read.
        model: of the job.
        batch_size: samples that are read at a time.
        total: samples of the data, if `train` has only the first of them.
    """
    assert job.train is not None
    in_order = replace(job, fit=replace(job.fit, shuffle=0))
    data = in_order.dataset(job.train, model.schema, batch_size=batch_size)
    data.prefetch = 0
    counted = {name: DistinctIds() for name in model.tables}
    histories = None
    most = SAMPLES
    if model.schema.kept:
        histories = SampledHistories(model.schema, job.fit.batch_size, BATCHES)
        most = KEPT_SAMPLES
    samples = 0
    seconds = 0.0
    batches = data.epoch(0)
    whole = False
    growth: dict[int, dict[str, int]] = {}
    while samples < most:
        began = time.perf_counter()
        batch = next(batches, None)
        seconds += time.perf_counter() - began
        if batch is None:
            whole = True
            break
        samples += batch.num_samples
        for part in [batch] if histories is None else histories.fill(batch):
            for name, ids in _ids_of(model, part):
                counted[name].add(ids.values)
        growth[samples] = {name: len(distinct) for name, distinct in counted.items()}
        if histories is not None:
            growth[samples] |= histories.num_rows()
    if total is None:
        total = samples if whole else data.num_rows
    expected = expected_ids(growth, total or samples)
    if histories is not None:
        counted |= histories.ids()
    return ReadIds(
        counted,
        Sampled(samples, whole, total, expected),
        seconds * job.fit.batch_size / max(samples, 1),
        histories,
    )


def _share_of_features(job: Job, model: RecModel) -> float:
    """Return the share of reading that ranks share out by grains: of ids and dense columns."""
    assert job.train is not None
    in_order = replace(job, fit=replace(job.fit, shuffle=0))
    data = in_order.dataset(job.train, model.schema)
    data.prefetch = 0
    data.divide(model.grains)
    if not data.can_share_out:
        return 0.0
    seconds = []
    for grains in (None, range(0)):
        began = time.thread_time()
        for _ in islice(data.epoch(0, grains), BATCHES):
            pass
        seconds.append(time.thread_time() - began)
    of_all, of_none = seconds
    return max(1 - of_none / max(of_all, 1e-9), 0.0)


def _ids_of(model: RecModel, batch: Batch) -> Iterator[tuple[str, Any]]:
    """Yield the name of the table and the ids of each feature."""
    for module in _modules(model):
        for feature, ids in zip(module.features, module.inputs_of(batch), strict=True):
            yield feature.table, ids


def _sampled_batch(
    model: RecModel, batch: Batch, histories: SampledHistories | None = None
) -> SampledBatch:
    """Return a batch as the plan sees it; `histories`: as they are before it."""
    from hotbed.parallel.forecast.ranks import SampledBatch, SampledIds

    samples: dict[str, list[Any]] = {name: [] for name in model.tables}
    values: dict[str, list[Any]] = {name: [] for name in samples}
    for name, ids in _ids_of(model, batch):
        samples[name].append(np.repeat(np.arange(batch.num_samples), ids.lengths()))
        values[name].append(ids.values)
    if histories is not None:
        for name, rows in histories.rows_of(batch).items():
            samples[name].append(np.zeros(len(rows), np.int64))
            values[name].append(rows)
    tables = []
    for name in samples:
        distinct, numbers = np.unique(np.concatenate(values[name]), return_inverse=True)
        tables.append(
            SampledIds(np.concatenate(samples[name]), numbers.reshape(-1), partition(distinct))
        )
    ends = batch.grain_ends or [
        (grain + 1) * batch.num_samples // model.grains for grain in range(model.grains)
    ]
    return SampledBatch(ends, tables)
