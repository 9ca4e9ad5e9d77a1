# SPDX-License-Identifier: Apache-2.0
"""Predict what a job takes on several ranks: memory, bytes, messages, a disk, seconds.

Pure functions of a `Workload`: what a sample of the job's data and a few steps of one process say.
docs/ranks.md has the formulas; nothing here reads data, measures or starts a process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hotbed.embedding.policy import PARTITIONS
from hotbed.parallel.hosts import Hosts
from hotbed.parallel.placement import SCORED_TOGETHER, Placement

from .messages import (
    CALLS_OF_ROWS,
    FLOAT,
    Counts,
    Sent,
    StepFacts,
    sent_for_histories,
    sent_in_step,
)
from .tables import Floats, TableFacts

MOST_RANKS = PARTITIONS
"""The parts of a table, each of which can lie on a rank of its own."""
SPARE = 32 << 20
"""Bytes of what malloc keeps in a long run, and of the buffers of a save."""

PARTS = ("network", "reading", "messages", "bytes", "waiting", "disk")
"""What takes the time of a step; "network" is its own work, with the update of its rows."""


@dataclass(frozen=True, eq=False)
class SampledIds:
    """The ids of one table in a batch.

    Attributes:
        samples: which of the batch each id belongs to, [m].
        numbers: of the ids: equal ids have one number, [m].
        partitions: of the id of each number, [distinct ids].
    """

    samples: Counts
    numbers: Counts
    partitions: NDArray[np.uint8]

    def asked(self, block_ends: Sequence[int], owners: NDArray[np.uint8], ranks: int) -> Counts:
        """Return how many distinct ids each block asks each rank for, [blocks, ranks].

        Args:
            block_ends: the samples before which the blocks end.
            owners: of each partition, [256].
            ranks: their number.
        """
        blocks = np.searchsorted(np.asarray(block_ends), self.samples, "right")
        num_ids = len(self.partitions)
        pairs = np.unique(blocks * num_ids + self.numbers)
        block, number = np.divmod(pairs, max(num_ids, 1))
        owner = owners[self.partitions[number]].astype(np.int64)
        counts = np.bincount(block * ranks + owner, minlength=len(block_ends) * ranks)
        return counts.reshape(len(block_ends), ranks)


@dataclass(frozen=True, eq=False)
class SampledBatch:
    """A batch of the job: where its grains end, and the ids of each table.

    Those of a table of histories belong to no sample: each rank reads all of them.
    """

    grain_ends: Sequence[int]
    tables: Sequence[SampledIds]

    def block_ends(self, placement: Placement) -> list[int]:
        """Return the samples before which the blocks of all ranks end.

        Where there are more grains than the batch has, they are equal runs of its samples.
        """
        ends = list(self.grain_ends)
        if placement.grains != len(ends):
            num_samples = ends[-1]
            ends = [
                (grain + 1) * num_samples // placement.grains for grain in range(placement.grains)
            ]
        blocks = [block for blocks in placement.blocks for block in blocks]
        return [ends[block.first + block.size - 1] for block in blocks]


@dataclass(frozen=True)
class LinkSpeed:
    """How long messages between ranks take.

    Attributes:
        points: bytes to one other rank, rising, and the seconds of a call that sends them.
    """

    points: Sequence[tuple[int, float]]

    @staticmethod
    def of(latency: float, bandwidth: float) -> LinkSpeed:
        """Return a link with this latency in seconds and this bandwidth in bytes a second."""
        far = 1 << 30
        return LinkSpeed([(0, latency), (far, latency + far / bandwidth)])

    @property
    def latency(self) -> float:
        """Seconds of a call that sends next to nothing."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest messages that were measured."""
        (few, short), (many, long) = self.points[-2:]
        return (many - few) / (long - short)

    def seconds(self, num_bytes: float, peers: float) -> float:
        """Return the seconds of a call that sends `num_bytes` in all, in one message a peer."""
        if not peers:
            return 0.0
        sizes, times = zip(*self.points, strict=True)
        beyond = max(num_bytes - sizes[-1], 0) / self.bandwidth
        return float(max(peers - 1, 0) * self.latency + np.interp(num_bytes, sizes, times) + beyond)


@dataclass(frozen=True)
class DiskTimes:
    """How long a disk takes for the rows of `hb.Ssd`.

    Attributes:
        read_seconds: of a row, of many that are read at once.
        cpu_seconds: of a processor for it.
        byte_seconds: of a byte, of many in the order of the disk.
    """

    read_seconds: float
    cpu_seconds: float
    byte_seconds: float


@dataclass(frozen=True)
class SaveTimes:
    """What a row takes in a full state.

    Attributes:
        row_seconds: to read and write it on one process, from memory.
        row_bytes: of its files.
    """

    row_seconds: float
    row_bytes: float


@dataclass(frozen=True, eq=False)
class Workload:
    """The figures of a job that its plan is computed from.

    Attributes:
        tables: with their expected rows.
        batches: of the job, by grains.
        batch_size: samples of a step.
        grains: of a step; more ranks need more.
        modules: collections of tables in the network.
        dense: numbers of values: of the loss, of each dense parameter and each buffer.
        process_bytes: of a process that trains all grains, without its rows.
        step_seconds: by samples, rising: of a step in grains of the job's size, on one thread.
        read_seconds: of reading a batch.
        feature_seconds: those of them that ranks share out by grains; 0 = each reads all.
        history_seconds: of a step: to fill the histories of its samples, which each rank does.
        link: between ranks, or between hosts that share it among their ranks.
        cores: of a machine, or of each host.
        crowding: how many times as long a process computes while other cores compute, too: they
            share caches, memory, and the units of a core that has two threads.
        copy_seconds: a byte that is sent, beside the call that sends it: to gather and to add it.
        slack_seconds: of a step, in which ranks wait for the slowest.
        whole_host: whether there are several machines; else all ranks are on one.
        host_ranks: ranks of each of several machines.
        host_link: between the ranks of one of several machines; None = it has one.
        cpu_share: of the time of the steps that were measured, for which they had a processor.
        spread: by how much rounds of the same steps differed, as a share of the shortest.
        score_seconds: to score a batch on one thread.
        save: of a full state; None = not measured.
        disk: of the tables on one; None = no table is, or it is not known.
    """

    tables: Sequence[TableFacts]
    batches: Sequence[SampledBatch]
    batch_size: int
    grains: int
    modules: int
    dense: Sequence[int]
    process_bytes: float
    step_seconds: Mapping[int, float]
    read_seconds: float
    link: LinkSpeed
    cores: int
    crowding: float = 1.0
    copy_seconds: float = 0.0
    slack_seconds: float = 0.0
    feature_seconds: float = 0.0
    history_seconds: float = 0.0
    whole_host: bool = False
    host_ranks: int = 1
    host_link: LinkSpeed | None = None
    cpu_share: float = 1.0
    spread: float = 0.0
    score_seconds: float = 0.0
    save: SaveTimes | None = None
    disk: DiskTimes | None = None

    def placement(self, ranks: int) -> Placement:
        """Return where rows and grains lie: grains of the job, or the least that are enough."""
        return Placement(ranks, max(self.grains, 1 << (ranks - 1).bit_length()))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense values that ranks add."""
        return FLOAT * sum(self.dense)

    def pressure(self, ranks: int) -> float:
        """Return how many times as long each of some ranks computes as a process that is alone.

        Those of a host share its cores.
        """
        on_host = self.on_host(ranks)
        return 1.0 if on_host == 1 else self.crowding * max(1.0, on_host / self.cores)

    def on_host(self, ranks: int) -> int:
        """Return how many of some ranks are on one host."""
        return min(self.host_ranks, ranks) if self.whole_host else ranks

    def as_two_ranks(self, own_seconds: float, wait_seconds: float) -> Workload:
        """Return the same as two ranks of this machine took for a step.

        Args:
            own_seconds: of a processor, beside calls.
            wait_seconds: in calls, which wait for a processor, too, where there is one for both.
        """
        of_two = planned(replace(self, disk=None), 2)
        seconds = own_seconds * max(1.0, 2 / self.cores)
        copied = max(seconds - (of_two.seconds - of_two.link_seconds), 0.0)
        waited = own_seconds + wait_seconds - seconds
        return replace(
            self,
            copy_seconds=copied / float(of_two.sent_bytes.max()) / self.pressure(2),
            slack_seconds=max(waited - of_two.link_seconds, 0.0),
        )

    def with_hosts(
        self, ranks: int, latency: float | None = None, bandwidth: float | None = None
    ) -> Workload:
        """Return the same on hosts of some ranks each, with this link where it is given.

        The hosts have as many cores as this one.
        """
        latency = self.link.latency if latency is None else latency
        bandwidth = self.link.bandwidth if bandwidth is None else bandwidth
        link = LinkSpeed.of(latency, bandwidth)
        return replace(self, link=link, whole_host=True, host_ranks=ranks, host_link=self.link)

    def hosts(self, ranks: int) -> Hosts:
        """Return the hosts of so many ranks; as `Hosts.of`."""
        return Hosts.of([rank // self.host_ranks for rank in range(ranks)])

    def call_seconds(self, sent: Sent) -> Floats:
        """Return the seconds of each call."""
        between, on_host = self._links(sent)
        share = self.host_ranks if between is self.link else 1
        seconds = []
        for num_bytes, messages in zip(sent.num_bytes.max(2), sent.messages.max(2), strict=True):
            of_hosts = between.seconds(share * num_bytes[0], messages[0])
            seconds.append(of_hosts + on_host.seconds(num_bytes[1], messages[1]))
        return np.array(seconds)

    def latencies(self, sent: Sent) -> Floats:
        """Return the seconds of each call that its messages take without their bytes."""
        between, on_host = self._links(sent)
        latencies: Floats = sent.messages.max(2) @ [between.latency, on_host.latency]
        return latencies

    def _links(self, sent: Sent) -> tuple[LinkSpeed, LinkSpeed]:
        """Return the link between ranks that are hosts of their own, and that on a host."""
        on_host = self.host_link or self.link
        is_one_host = sent.messages.shape[2] <= self.host_ranks
        return (on_host if is_one_host else self.link), on_host


@dataclass(frozen=True, eq=False)
class RanksPlan:
    """What is predicted for a number of ranks; arrays are by rank.

    Attributes:
        ranks: their number.
        grains: of a step.
        rows: that each owns.
        table_bytes: of these rows, with index and waiting ids.
        memory: of each process.
        asked: distinct ids that each is asked for in a step, by all ranks.
        sent_bytes: of each in a step, to all others.
        messages: that the rank with most of them sends in a step.
        times: seconds of a step, by what takes them: `PARTS`.
        disk: bytes of the rows of each rank on its disk.
        reads: rows that a rank reads from it in a step, about.
        scored_seconds: of a batch of a stream that is scored, each rank its grains.
        evaluated_seconds: of a batch in `evaluate`, where several batches are scored together.
        save_seconds: of a full state; None = not measured.
        state_bytes: of a full state, of all ranks.
    """

    ranks: int
    grains: int
    rows: Floats
    table_bytes: Floats
    memory: Floats
    asked: Floats
    sent_bytes: Floats
    messages: float
    times: Mapping[str, float]
    disk: Floats
    reads: float
    scored_seconds: float
    evaluated_seconds: float
    save_seconds: float | None
    state_bytes: float | None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.times.values())

    @property
    def link_seconds(self) -> float:
        """Seconds of a step in calls to other ranks."""
        return self.times["messages"] + self.times["bytes"]

    @property
    def limit(self) -> str:
        """What takes most of a step."""
        return max(self.times, key=lambda part: self.times[part])

    @property
    def most_memory(self) -> float:
        """Bytes of the largest process."""
        return float(self.memory.max())

    @staticmethod
    def balance(values: Floats) -> float:
        """Return the most beside the mean: 1 = all ranks have the same."""
        mean = values.mean()
        return float(values.max() / mean) if mean else 1.0


def planned(work: Workload, ranks: int) -> RanksPlan:
    """Predict a job on `ranks` ranks."""
    placement = work.placement(ranks)
    owners = [placement.owners(table.name) for table in work.tables]
    rows = np.zeros(ranks)
    table_bytes = np.zeros(ranks)
    disk = np.zeros(ranks)
    for table, owner in zip(work.tables, owners, strict=True):
        rows += np.bincount(owner, table.rows, ranks)
        table_bytes += table.memory(owner, ranks)
        disk += table.disk(owner, ranks)
    hosts = work.hosts(ranks)
    asked_tables = [table for table in work.tables if not table.is_kept]
    facts = StepFacts(asked_tables, work.dense, work.modules)
    asked = np.zeros(ranks)
    steps = []
    for batch in work.batches:
        counts = _asked_of(work, batch, placement, owners)
        steps.append(sent_in_step(facts, placement, hosts, counts))
        asked += counts.sum((0, 1))
    sent_for_reads = _sent_for_histories(work, hosts, owners, ranks)
    sent = Sent.mean(steps) if steps else Sent.nothing(ranks)
    sent = Sent.of_calls([sent, sent_for_reads])
    sent_bytes = sent.num_bytes.sum((0, 1))
    reads = sum(table.reads(ranks) for table in work.tables)
    of_histories = float(work.call_seconds(sent_for_reads).sum())
    return RanksPlan(
        ranks,
        placement.grains,
        rows,
        table_bytes,
        memory=table_bytes + process_memory(work, placement) + 2 * sent_bytes,
        asked=asked / max(len(steps), 1),
        sent_bytes=sent_bytes,
        messages=float(sent.messages.sum((0, 1)).max()),
        times=_times(work, placement, sent, reads),
        disk=disk,
        reads=reads,
        scored_seconds=_scored_seconds(work, placement, sent, 1) + of_histories,
        evaluated_seconds=of_histories
        + _scored_seconds(work, placement, sent, math.ceil(SCORED_TOGETHER / work.batch_size)),
        save_seconds=_save_seconds(work, float(rows.max()), float(disk.max())),
        state_bytes=None if work.save is None else work.save.row_bytes * float(rows.sum()),
    )


def _times(work: Workload, placement: Placement, sent: Sent, reads: float) -> dict[str, float]:
    """Return the seconds of a step of the slowest rank, by what takes them.

    It computes its grains, and reads, where no other core does that ahead. Of several it calls
    the others, copies what it sends, and waits for the slowest. What takes a processor takes longer
    where ranks share cores. A disk works beside all of this.
    """
    pressure = work.pressure(placement.ranks)
    ranks = placement.ranks
    grains = max(len(placement.grains_of(rank)) for rank in range(ranks))
    network = seconds_of(work.step_seconds, work.batch_size * grains / placement.grains)
    network += work.history_seconds * (1 - grains / placement.grains)
    network *= pressure
    cores = work.cores // work.on_host(ranks)
    reading = work.read_seconds - work.feature_seconds * (1 - grains / placement.grains)
    reading = max(reading - network, 0.0) if cores > 1 else pressure * reading
    messages = float(work.latencies(sent).sum())
    sent_bytes = float(sent.num_bytes.sum((0, 1)).max())
    several = ranks > 1
    times = {
        "network": network,
        "reading": reading,
        "messages": messages,
        "bytes": float(work.call_seconds(sent).sum())
        - messages
        + pressure * work.copy_seconds * sent_bytes,
        "waiting": several * work.slack_seconds,
    }
    assert tuple(times) == PARTS[:-1]
    return times | {"disk": _disk_seconds(work, reads, ranks, sum(times.values()))}


def _scored_seconds(work: Workload, placement: Placement, sent: Sent, num_batches: int) -> float:
    """Return the seconds to score one of `num_batches` batches for which each rank asks once."""
    grains = max(len(placement.grains_of(rank)) for rank in range(placement.ranks))
    latency = float(work.latencies(sent)[:CALLS_OF_ROWS].sum())
    of_bytes = float(work.call_seconds(sent)[:CALLS_OF_ROWS].sum()) - latency
    calls = of_bytes + 2 * latency / num_batches  # of the question, and to gather the scores
    pressure = work.pressure(placement.ranks)
    return pressure * work.score_seconds * grains / placement.grains + calls


def _disk_seconds(work: Workload, reads: float, ranks: int, others: float) -> float:
    """Return the seconds that rows on a disk add to a step that takes `others` without them.

    They take a processor, and more where the disk needs longer than the whole step. Ranks of one
    machine share its disk.
    """
    if work.disk is None:
        return 0.0
    of_disk = reads * work.on_host(ranks) * work.disk.read_seconds
    return max(work.pressure(ranks) * reads * work.disk.cpu_seconds, of_disk - others)


def _save_seconds(work: Workload, rows: float, disk_bytes: float) -> float | None:
    """Return the seconds of a full state, of the rank that has most rows."""
    if work.save is None:
        return None
    from_disk = 0.0 if work.disk is None else disk_bytes * work.disk.byte_seconds
    return rows * work.save.row_seconds + from_disk


def _asked_of(
    work: Workload, batch: SampledBatch, placement: Placement, owners: Sequence[NDArray[np.uint8]]
) -> Counts:
    """Return how many ids each block asks each rank for, [tables, blocks, ranks].

    Nobody asks for the rows of histories.
    """
    ends = batch.block_ends(placement)
    return np.stack(
        [
            ids.asked(ends, owner, placement.ranks)
            for table, ids, owner in zip(work.tables, batch.tables, owners, strict=True)
            if not table.is_kept
        ]
    )


def _sent_for_histories(
    work: Workload, hosts: Hosts, owners: Sequence[NDArray[np.uint8]], ranks: int
) -> Sent:
    """Return what each rank sends for the histories of a step, in the mean of the batches."""
    tables = [table for table in work.tables if table.is_kept]
    if not tables or not work.batches:
        return Sent.nothing(ranks)
    steps = []
    for batch in work.batches:
        rows = [
            np.bincount(owner[ids.partitions], minlength=ranks)
            for table, ids, owner in zip(work.tables, batch.tables, owners, strict=True)
            if table.is_kept
        ]
        steps.append(sent_for_histories(tables, hosts, np.stack(rows)))
    return Sent.mean(steps)


def process_memory(work: Workload, placement: Placement) -> Floats:
    """Return the bytes of each rank's process without rows and messages.

    One process holds the gradients of all grains, a rank those of its own.
    """
    grains = np.array([len(placement.grains_of(rank)) for rank in range(placement.ranks)])
    fewer = np.maximum(work.grains - grains, 0)
    memory: Floats = work.process_bytes + SPARE - fewer * work.dense_bytes
    return memory


def seconds_of(measured: Mapping[int, float], samples: float) -> float:
    """Return the seconds of a step of `samples`, on lines between the measured numbers."""
    sizes = sorted(measured)
    # a larger step is not shorter: where it was, that was noise
    times = list(accumulate((measured[size] for size in sizes), max))
    if samples < sizes[0] and len(sizes) > 1:
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        return max(times[0] - slope * (sizes[0] - samples), 0.0)
    return float(np.interp(samples, sizes, times))


def needed_ranks(work: Workload, ram: float) -> int | None:
    """Return the fewest ranks whose processes each fit into `ram` bytes; None: no number does."""
    without_messages = replace(work, batches=())
    for ranks in range(1, MOST_RANKS + 1):
        fits = planned(without_messages, ranks).most_memory <= ram
        if fits and planned(work, ranks).most_memory <= ram:
            return ranks
    return None
