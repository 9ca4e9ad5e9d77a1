# SPDX-License-Identifier: Apache-2.0
"""The plan of a job on several ranks: what was measured of it, the predictions, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotbed.data.histories import KeptByKey
from hotbed.embedding.tier import Ssd
from hotbed.errors import ConfigError
from hotbed.job.job import Job
from hotbed.job.ranks import num_ranks
from hotbed.job.sampled_tables import Sampled
from hotbed.job.workload import workload_of
from hotbed.memory_limit import CONTAINER, memory_limits

if TYPE_CHECKING:
    from hotbed.parallel.forecast.ranks import DiskTimes, RanksPlan, Workload

LEAST_CPU_SHARE = 0.85
"""Share of the time of steps for which they must have a processor."""
READ_BYTES = 4096
READ_CPU_SECONDS = {"io_uring": 2e-6, "threads": 8e-6}
"""Of a processor, to read a row from a disk: docs/tiers.md."""
MOST_SPREAD = 0.25
"""By how much rounds of the same steps may differ."""


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job.

    Attributes:
        work: what was measured and sampled.
        plans: by number of ranks, rising.
        sampled: what was read of the data.
        ram: bytes of memory of a process that may be used; None = not said.
        needed: the fewest ranks that fit into `ram`; None: none do, or it was not said.
        notes: what the reader must know, a sentence or two each.
    """

    work: Workload
    plans: Sequence[RanksPlan]
    sampled: Sampled
    ram: float | None
    needed: int | None
    notes: Sequence[str]


@dataclass(frozen=True)
class Disk:
    """How fast a disk is.

    Attributes:
        reads: a second, of blocks at random, many at once.
        engine: that reads them.
        write_bytes: a second, in order; None = not known: those of the reads.
    """

    reads: float
    engine: str = "io_uring"
    write_bytes: float | None = None

    def times(self) -> DiskTimes:
        """Return how long it takes for a row."""
        from hotbed.parallel.forecast.ranks import DiskTimes

        in_order = self.write_bytes or self.reads * READ_BYTES
        return DiskTimes(1 / self.reads, READ_CPU_SECONDS[self.engine], 1 / in_order)


@dataclass(frozen=True)
class Wishes:
    """What the user of a plan says.

    Attributes:
        ranks: their number; None = 1, 2, 4 up to 256.
        ram: bytes of memory of a process.
        rows: that tables will have, by name.
        latency: seconds of a message between hosts.
        bandwidth: bytes a second between hosts.
        disks: of each host, for tables on `hb.Ssd`; the slowest counts.
        host_ranks: ranks of each host; None = one, or all are processes of this machine where no
            latency or bandwidth is said.
        cores: of each host; None = those of this machine.
    """

    ranks: int | None = None
    ram: float | None = None
    rows: Mapping[str, float] | None = None
    latency: float | None = None
    bandwidth: float | None = None
    disks: Sequence[Disk] = ()
    host_ranks: int | None = None
    cores: int | None = None


def folders_of(job: Job) -> dict[str, str]:
    """Return the folders in which tables of a job lie, and the engine that reads each."""
    tiers = [tier for tier in job.tables.tiers() if isinstance(tier, Ssd)]
    return {str(tier.path): tier.engine for tier in sorted(tiers, key=lambda tier: str(tier.path))}


def plan(job: Job, wishes: Wishes) -> JobPlan:
    """Predict memory, bytes and seconds of a job on several ranks.

    It reads up to 5 million samples, and takes about half a minute.

    Raises:
        ConfigError: the job has no `train`; a table of `rows` does not exist; or this process is
            one of several ranks itself.
    """
    from hotbed.parallel.forecast.ranks import MOST_RANKS, needed_ranks, planned

    _check_wishes(job, wishes)
    host_ranks = wishes.host_ranks or 1
    work, sampled = workload_of(job, wishes.rows or {})
    if wishes.cores is not None:
        work = replace(work, cores=wishes.cores)
    if any(wish is not None for wish in (wishes.host_ranks, wishes.latency, wishes.bandwidth)):
        work = work.with_hosts(host_ranks, wishes.latency, wishes.bandwidth)
    slowest = min(wishes.disks, key=lambda disk: disk.reads, default=None)
    work = replace(work, disk=None if slowest is None else slowest.times())
    of_hosts = (host_ranks << power for power in range(MOST_RANKS.bit_length()))
    numbers = sorted({1, *(number for number in of_hosts if number <= MOST_RANKS)})
    if wishes.ranks is not None:
        numbers = sorted({1, wishes.ranks})
    plans = [planned(work, ranks) for ranks in numbers]
    needed = None
    if wishes.ram is not None:
        needed = needed_ranks(work, wishes.ram)
    notes = [
        *_disturbance(work, plans),
        *_shared_cores(work, plans),
        *_kept_notes(job, work),
        *_notes(job, sampled, plans, wishes, needed),
    ]
    return JobPlan(work, plans, sampled, wishes.ram, needed, notes)


def _check_wishes(job: Job, wishes: Wishes) -> None:
    """Raise ConfigError for a job or for wishes that cannot be planned."""
    from hotbed.parallel.forecast.ranks import MOST_RANKS

    if num_ranks() > 1:
        raise ConfigError(
            f"plan: it starts the ranks that it measures, got a process of {num_ranks()} ranks. "
            "Run `hotbed plan` without torchrun."
        )
    if job.train is None:
        raise ConfigError(
            "job.train: missing key, got none. A plan samples the ids of `train`: add a source."
        )
    if wishes.ranks is not None and not 1 <= wishes.ranks <= MOST_RANKS:
        raise ConfigError(
            f"--ranks: a table lies on at most {MOST_RANKS} ranks, got {wishes.ranks}. Give a "
            f"number from 1 to {MOST_RANKS}."
        )
    host_ranks = wishes.host_ranks or 1
    if wishes.ranks is not None and wishes.ranks % host_ranks:
        raise ConfigError(
            f"--host-ranks: all hosts have as many ranks, got {host_ranks} for --ranks "
            f"{wishes.ranks}. Give a multiple of {host_ranks} as --ranks."
        )


def _container_notes(plans: Sequence[RanksPlan], wishes: Wishes) -> Iterator[str]:
    """Yield how much memory the container of this process allows, and which plans exceed it."""
    smallest = next(iter(memory_limits()), None)
    if smallest is None or smallest.of != CONTAINER:
        return
    limit = smallest.limit_bytes
    text = f"Memory: the container that this runs in allows {limit / 1e9:,.1f} GB"
    hosts = wishes.host_ranks is not None or wishes.latency is not None or wishes.bandwidth
    on_host = wishes.host_ranks or (1 if hosts else None)  # None: all ranks are in the container
    too_large = [
        of_ranks.ranks for of_ranks in plans if sum(sorted(of_ranks.memory)[::-1][:on_host]) > limit
    ]
    if not too_large:
        yield f"{text} for all processes in it, and each plan fits."
        return
    ranks = "1 rank" if too_large == [1] else f"{', '.join(map(str, too_large))} ranks"
    yield (
        f"{text} for all processes in it, and {ranks} would take more: the kernel would end them. "
        "Raise the limit, or say --ram of the machines that will train."
    )


def _shared_cores(work: Workload, plans: Sequence[RanksPlan]) -> Iterator[str]:
    """Yield which ranks share cores, and what to say of other machines."""
    crowded = [of_ranks.ranks for of_ranks in plans if work.on_host(of_ranks.ranks) > work.cores]
    if not crowded:
        return
    of_host = "each host" if work.whole_host else "this machine"
    advice = "" if work.whole_host else "--latency or --host-ranks where ranks have hosts, and "
    yield (
        f"From {crowded[0]} ranks on, ranks share the {work.cores} cores of {of_host}, and take "
        f"longer. Say {advice}--cores N of a host with others."
    )


def _kept_notes(job: Job, work: Workload) -> Iterator[str]:
    """Yield what each key of a history or count takes."""
    tables = {table.name: table for table in work.tables}
    for column in job.declared.kept:
        assert isinstance(column, KeptByKey)
        newest = tables[column.newest_table]
        memory = newest.memory_of_all() + tables[column.older_table].memory_of_all()
        num_keys = float(newest.rows.sum())
        yield (
            f"{column.name!r} is kept of {num_keys:,.0f} keys by {column.by!r}, with "
            f"{memory / max(num_keys, 1):,.0f} bytes of memory each."
        )


def _disturbance(work: Workload, plans: Sequence[RanksPlan]) -> Iterator[str]:
    """Yield a warning if the steps that were measured waited for a processor, or differed."""
    if work.cpu_share >= LEAST_CPU_SHARE and work.spread <= MOST_SPREAD:
        return
    from hotbed.parallel.forecast.ranks import planned

    of_ranks = ""
    if len(plans) > 1:
        of_two = planned(replace(work, disk=None), 2)
        waiting = of_two.times["waiting"]
        of_ranks = (
            f"Two ranks waited {1e3 * waiting:,.1f} ms a step for each other, which counts for "
            "every number of ranks: their times may be up to "
            f"{of_two.seconds / (of_two.seconds - waiting) - 1:.0%} too long. "
        )
    yield (
        f"Warning: the measurement was disturbed. Its steps had a processor for "
        f"{work.cpu_share:.0%} of their time, and rounds of the same steps differed by "
        f"{work.spread:.0%}. Times of one process are those of a processor: they may be up to "
        f"{work.spread:.0%} too long. {of_ranks}Plan again on an idle machine."
    )


def _notes(
    job: Job, sampled: Sampled, plans: Sequence[RanksPlan], wishes: Wishes, needed: int | None
) -> Iterator[str]:
    """Yield what the reader must know of a plan."""
    if not sampled.whole:
        read = f"{sampled.samples:,}"
        total = "an unknown number" if sampled.total is None else f"{sampled.total:,}"
        yield (
            f"The ids of {read} of {total} samples were read; rows are extrapolated as they grew. "
            "Say --rows TABLE=N where you know better."
        )
    grains = min(of_ranks.grains for of_ranks in plans)
    more = [of_ranks for of_ranks in plans if of_ranks.grains > grains]
    if more:
        yield (
            f"{more[0].ranks} ranks and more need grains: {more[0].grains} or more in the job, "
            f"which has {grains}."
        )
    if wishes.ram is None:
        yield from _container_notes(plans, wishes)
        return
    if needed is None:
        yield f"No number of ranks fits into {wishes.ram / 1e9:,.1f} GB a process."
    else:
        several = "one process fits" if needed == 1 else f"it takes {needed} ranks to fit"
        yield f"Memory: {several} into {wishes.ram / 1e9:,.1f} GB a process."
    for of_ranks in plans:
        if of_ranks.most_memory > wishes.ram and of_ranks.ranks == wishes.ranks:
            yield (
                f"{of_ranks.ranks} ranks do not fit: the largest process takes "
                f"{of_ranks.most_memory / 1e9:,.1f} GB."
            )
