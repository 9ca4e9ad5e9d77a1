# SPDX-License-Identifier: Apache-2.0
"""The tables of a job as its plan sees them, from the ids that were read of its data."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotbed.data.histories import keys_of, read_stored
from hotbed.embedding.footprint import ledger_bytes, row_bytes
from hotbed.embedding.hashing import mix64, partition
from hotbed.embedding.histories import HistoryStore, history_tables, rows_here
from hotbed.embedding.policy import PARTITIONS, Lfu, Lru, MinCount, Probability
from hotbed.embedding.tier import Ssd, Tier
from hotbed.job.job import Job

if TYPE_CHECKING:
    from hotbed.data.batch import Batch
    from hotbed.data.schema import Schema
    from hotbed.embedding.table import Table
    from hotbed.parallel.forecast.tables import TableFacts

MOST_IDS = 1 << 20
"""Distinct ids of a table that are all remembered."""
PART_ENTRIES = 1 << 22
"""Entries of histories that are in memory at a time."""


class DistinctIds:
    """The distinct ids of a table, and how often each occurs.

    Above a million, it remembers those whose hash ends in zeros: a known share of all.

    Attributes:
        ids: that are remembered, int64 [n].
        counts: how often each occurred, int64 [n].
    """

    def __init__(self, most: int = MOST_IDS) -> None:
        self.ids = np.empty(0, np.int64)
        self.counts = np.empty(0, np.int64)
        self._most = most
        self._zeros = 0

    @property
    def scale(self) -> int:
        """How many distinct ids each remembered one stands for."""
        return 1 << self._zeros

    def __len__(self) -> int:
        return len(self.ids) * self.scale

    def add(self, ids: NDArray[np.int64]) -> None:
        """Take the ids of some samples, int64 [m]."""
        if self._zeros:
            ids = ids[self._remembered(ids)]
        values, counts = np.unique(ids, return_counts=True)
        every = np.concatenate([self.ids, values])
        self.ids, places = np.unique(every, return_inverse=True)
        weights = np.concatenate([self.counts, counts])
        self.counts = np.bincount(places.reshape(-1), weights, len(self.ids)).astype(np.int64)
        while len(self.ids) > self._most:
            self._zeros += 1
            remembered = self._remembered(self.ids)
            self.ids = self.ids[remembered]
            self.counts = self.counts[remembered]

    def by_partition(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of a weight for each distinct id, in each partition, [256].

        Of a share of the ids it is the mean of all partitions: they hardly differ.
        """
        if self._zeros:
            return np.full(PARTITIONS, weights.sum() * self.scale / PARTITIONS)
        return np.bincount(partition(self.ids), weights, PARTITIONS).astype(np.float64)

    def others(self, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> DistinctIds:
        """Return other ids, of which each stands for as many as those here."""
        others = DistinctIds(self._most)
        others.ids = ids
        others.counts = counts
        others._zeros = self._zeros
        return others

    def _remembered(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        remembered: NDArray[np.bool_] = (mix64(ids) & np.uint64(self.scale - 1)) == 0
        return remembered


class SampledHistories:
    """The histories and counts of samples that are read, in a store that no model has.

    Args:
        schema: with columns that a model keeps.
        batch_size: samples of the batches in `last`.
        num_last: batches in `last`.

    Attributes:
        last: the batches that were filled last.
    """

    def __init__(self, schema: Schema, batch_size: int, num_last: int) -> None:
        self._store = HistoryStore(schema, history_tables(schema))
        self._keys = {column.name: DistinctIds() for column in self._store.columns}
        self._batch_size = batch_size
        self.last: deque[Batch] = deque(maxlen=num_last)
        kinds = [column.kind_in(schema) for column in self._store.columns]
        entries = sum(min(kind.length, kind.within) for kind in kinds)
        self._part_rows = max(PART_ENTRIES // entries, batch_size)

    def fill(self, batch: Batch) -> Iterator[Batch]:
        """Yield the parts of a batch with the values that training would have there."""
        for start in range(0, batch.num_samples, self._part_rows):
            part = self._store.fill(batch[start : start + self._part_rows], leaves=True)
            for column in self._store.columns:
                keys, numbers = keys_of(column, part)
                self._keys[column.name].add(keys[numbers[numbers >= 0]])
            for first in range(0, part.num_samples, self._batch_size):
                self.last.append(part[first : first + self._batch_size])
            yield part

    def num_rows(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        return {name: len(table) for name, table in self._store.tables.items()}

    def rows_of(self, batch: Batch) -> dict[str, NDArray[np.int64]]:
        """Return the ids of the rows that a batch reads, by table."""
        store = self._store
        ids = {name: np.empty(0, np.int64) for name in store.tables}

        def read(wanted: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
            ids.update(wanted)
            return rows_here(store.tables, wanted)

        keys = [keys_of(column, batch) for column in store.columns]
        read_stored(store.columns, store.schema, keys, read)
        return ids

    def begun(self) -> dict[str, int]:
        """Return how many keys have had their first older row, by the table of these rows."""
        begun: dict[str, int] = {}
        for column in self._store.columns:
            keys = self._keys[column.name]
            num_older, _ = self._store.older_ids(column, keys.ids)
            begun[column.older_table] = int((num_older > 0).sum()) * keys.scale
        return begun

    def seconds(self) -> float:
        """Return the seconds of a processor to fill a batch, and to add what its rows leave."""
        times = []
        for batch in self.last:
            began = time.thread_time()
            self._store.fill(batch, leaves=True)
            times.append(time.thread_time() - began)
        return float(np.median(times))

    def ids(self) -> dict[str, DistinctIds]:
        """Return the ids of the rows of each table, and how often they are looked up.

        The older rows of a key are looked up as often as the key.
        """
        ids: dict[str, DistinctIds] = {}
        for column in self._store.columns:
            keys = self._keys[column.name]
            has_row = self._store.tables[column.newest_table].find(keys.ids) >= 0
            keys = keys.others(keys.ids[has_row], keys.counts[has_row])
            num_older, older = self._store.older_ids(column, keys.ids)
            ids[column.newest_table] = keys
            ids[column.older_table] = keys.others(older, np.repeat(keys.counts, num_older))
        return ids


@dataclass(frozen=True)
class Sampled:
    """What was read of the data.

    Attributes:
        samples: read.
        whole: whether these are all.
        total: of the data, where it is known.
        distinct: ids of each table in these samples.
    """

    samples: int
    whole: bool
    total: int | None
    distinct: Mapping[str, int]


def expected_ids(growth: Mapping[int, Mapping[str, int]], total: int) -> dict[str, int]:
    """Return how many distinct ids each table has in `total` samples.

    Beyond those that were read they grow as in the later half of these: by a power of the samples.

    Args:
        growth: numbers of samples, rising; for each the distinct ids by table.
        total: samples of the data.
    """
    last = max(growth)
    half = min(growth, key=lambda samples: abs(samples - last / 2))
    expected = {}
    for name, num_ids in growth[last].items():
        factor = 1.0
        if total > last > half and growth[half][name]:
            power = math.log(num_ids / growth[half][name]) / math.log(last / half)
            factor = (total / last) ** power
        expected[name] = round(num_ids * factor)
    return expected


def facts_of(
    table: Table, tier: Tier, ids: DistinctIds, job: Job, sampled: Sampled, rows: float | None
) -> TableFacts:
    """Return a table with the rows that it will have: as the user says, by capacity, by the ids.

    `tier`: where the rows of the job lie.
    """
    expected = table.capacity if rows is None else rows
    admitted = _admitted(table, ids.counts * job.fit.epochs)
    if expected is not None:
        facts = table_facts(table, np.full(PARTITIONS, expected / PARTITIONS), np.zeros(PARTITIONS))
    else:
        factor = sampled.distinct[table.name] / max(len(ids), 1)
        waiting = np.zeros(len(admitted))
        if isinstance(table.admit, MinCount):
            waiting = 1.0 - admitted
        facts = table_facts(
            table, ids.by_partition(admitted) * factor, ids.by_partition(waiting) * factor
        )
    if not isinstance(tier, Ssd):
        return facts
    from hotbed.parallel.forecast.tables import LookupRates, OnDisk

    counts = ids.counts[admitted > 0]
    batches = sampled.samples / job.fit.batch_size
    popularity = LookupRates.of(counts, ids.scale, batches, float(facts.rows.sum()))
    row = row_bytes(table.dim, table.dtype, table.rule)
    ledger = ledger_bytes(table.rule, table.admit, table.evictions)
    return replace(facts, on_disk=OnDisk(tier.ram_rows, row, ledger, popularity))


def _admitted(table: Table, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how likely each id gets a row; it occurs so often."""
    if isinstance(table.admit, MinCount) and table.admit.is_on:
        return (counts * table.admit.coefficient >= (table.admit.count or 0)).astype(np.float64)
    if isinstance(table.admit, Probability) and table.admit.is_on:
        share = float(table.admit.p or 0.0)
        return 1.0 - np.power(1.0 - share, counts.astype(np.float64))
    return np.ones(len(counts))


def table_facts(
    table: Table, rows: NDArray[np.float64], waiting: NDArray[np.float64]
) -> TableFacts:
    """Return a table with these rows in each partition, as far as its policies keep them."""
    from hotbed.embedding.policy import kept_columns
    from hotbed.parallel.forecast.tables import TableFacts

    caps = [policy for policy in table.evictions if isinstance(policy, (Lru, Lfu))]
    caps = [policy for policy in caps if policy.is_on]
    for policy in caps:
        rows = np.minimum(rows, policy.rows_a_partition or 0)
    ages = any(isinstance(policy, Lfu) and policy.clock == "time" for policy in caps)
    return TableFacts(
        name=table.name,
        dim=table.dim,
        row_bytes=table.native.row_bytes,
        words=1 + table.keeps_times + ages,
        counted=table.native_admits or "count" in kept_columns(table.admit, table.evictions),
        capped=bool(caps),
        rows=rows,
        waiting=waiting,
        is_kept=table.dtype == "int32",
    )
