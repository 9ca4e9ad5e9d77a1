# SPDX-License-Identifier: Apache-2.0
"""Which features of a fit and which rows of a score each of several ranks reads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hotbed.connectors import Concat, Memory, Prepared, Source
from hotbed.connectors.file_identity import FileIdentity
from hotbed.connectors.files import FileSource
from hotbed.connectors.source import Slice, TableJoin
from hotbed.data.batch import Batch, BatchSlice, changed, joined
from hotbed.data.dataset import Dataset
from hotbed.data.grains import failed_batch
from hotbed.objects import Identity, is_url
from hotbed.parallel import Requirement
from hotbed.parallel.placement import SCORED_TOGETHER
from hotbed.training.arguments import check_keeps
from hotbed.training.learned_types import check_encoder
from hotbed.training.run import Callbacks, Goal, Observer, Run
from hotbed.training.step.collector import Collector
from hotbed.training.step.example import Example, divided_at, prepare
from hotbed.training.step.fetcher import Fetcher
from hotbed.training.step.learner import SelfUpdating, StepLearner
from hotbed.training.step.planner import asked_collections, asked_together
from hotbed.training.step.scorer import Scorer, Scores

SHOWN_ROWS = 256
"""Rows in memory that are compared, evenly spread."""

MOST_ROWS = 1 << 20
"""Of a span of batches: its scores wait in memory, while their rows need not."""
MOST_BATCHES = 1024
"""Of a span."""
ScoredGrain = tuple[Scores, Batch]
"""The scores of a grain, and its labels, weights and times."""
SAME_DATA = Requirement(
    "read the same data, each some of its rows",
    "Give each rank the same files or rows, schema, batch_size, order and seed.",
)

Turn = tuple[int, range, Sequence[int]]
"""The number of grains that ranks score at once; the numbers of the rows of this rank in them, and
how many each of its grains has."""


def own_grains(
    goal: Goal, callbacks: Callbacks, observer: Observer | None, learner: StepLearner | SelfUpdating
) -> range | None:
    """Return the grains whose ids and dense columns this rank reads in a fit; None = those of all.

    Raises:
        ConfigError: on every rank: they would read parts of different data.
        HotbedError: on every rank: one of them could not count or compare its rows.
    """
    shard = learner.shard
    if shard.size == 1 or goal.online:
        return None
    data = goal.dataset
    rows = None
    with shard.together():  # a file may be damaged here alone
        if isinstance(data, Dataset) and data.can_share_out and learner.own_grains is not None:
            rows = identity_of(data.source)
    # tables on a disk fetch rows of coming batches by the ids of all grains
    fetches = Fetcher.of(learner.network) is not None
    reads_all = rows is None or fetches or observer is not None or callbacks.reads_features
    if shard.any(reads_all):
        return None
    assert isinstance(data, Dataset), "its rows are known"
    settings = {
        "rows": rows,
        "schema": data.schema.to_json(),
        "batch_size": data.batch_size,
        "drop_last": data.drop_last,
        "shuffle and seed": (data.shuffle, data.seed),
    }
    shard.check_equal(settings, SAME_DATA)
    return learner.own_grains


def identity_of(source: Source) -> Any:
    """Return plain values that differ where the rows do, as far as some of them show.

    Of a file these are its size, and a digest of its first and last 64 KiB; of an object its size
    and its tag. None = not known.
    """
    if isinstance(source, Memory):
        return _shown_rows(source)
    if isinstance(source, Prepared):
        return [source.num_rows(), source.settings]
    if isinstance(source, FileSource):
        files = []
        for file in source.files():
            name = os.path.basename(file)
            if is_url(file):
                there = Identity.of(file)
                files.append([name, there.size, there.mark])
            else:
                identity = FileIdentity.of(file, os.path.getsize(file))
                files.append([name, identity.size, identity.digest])
        return [source.settings, files]
    if isinstance(source, Slice):
        return _of_all([source.source], source.start, source.stop)
    if isinstance(source, TableJoin):
        return _of_all([source.source, source.table], source.on, source.table_on)
    if isinstance(source, Concat):
        return _of_all(source.sources)
    return None


def _of_all(sources: Any, *arguments: Any) -> Any:
    parts = [identity_of(source) for source in sources]
    return None if None in parts else [*parts, *arguments]


def _shown_rows(source: Memory) -> Any:
    table = source.table
    last = max(table.num_rows - 1, 0)
    places = np.unique(np.linspace(0, last, SHOWN_ROWS, dtype=np.int64))
    rows = pa.concat_tables([table.slice(place, 1) for place in places])
    digest = 0
    for column in rows.columns:  # as text, since Python has no object for some values
        values = column.combine_chunks()
        text = values.to_string(window=SHOWN_ROWS, container_window=SHOWN_ROWS)
        digest = zlib.crc32(text.encode(errors="surrogatepass"), digest)
    types = [f"{column.name}: {column.type}" for column in table.schema]
    return [table.num_rows, types, digest]


class PartScores:
    """Scores the batches of a Dataset in its order; each rank reads the rows of its own grains.

    A span of batches is cut into as many runs of grains as there are ranks. Each rank scores its
    run turn by turn, and the scores of a span go to all ranks with its labels, weights and times.

    Args:
        run: of the evaluation.
        dataset: in the order of its source.

    Attributes:
        num_batches: of the dataset.
    """

    def __init__(self, run: Run, dataset: Dataset) -> None:
        assert isinstance(run.observer, (Scorer, Collector)), "it scores"
        self._run = run
        self._observer = run.observer
        self._dataset = dataset
        self._shard = run.learner.shard
        self._num_rows = dataset.num_rows or 0
        num_batches = dataset.num_batches or 0
        size = max(1, min(MOST_BATCHES, MOST_ROWS // dataset.batch_size))
        num_spans = -(-num_batches // size)
        ends = [num_batches * number // num_spans for number in range(num_spans + 1)]
        self._spans = [range(first, last) for first, last in pairwise(ends)]
        self.num_batches = num_batches

    def examples(self) -> Generator[Example, None, int]:
        """Yield the batches with their scores, without columns that no metric reads.

        Returns:
            Their number. It is smaller than that of all batches where the run ends, or where scores
            draw random numbers, which each batch must in its turn: torch's generator is then as it
            was before the next batch.

        Raises:
            HotbedError: on every rank: one of them could not read its rows.
        """
        runs = ([rows for _, rows, _ in self._turns(batches)] for batches in self._spans)
        reading: Any = self._dataset.epoch(0, runs=runs)
        with closing(reading):
            for batches in self._spans:
                before = torch.get_rng_state()
                scored = self._scored(batches, reading)
                if scored is None:
                    torch.set_rng_state(before)
                    return batches.start
                for example in self._in_order(scored):
                    yield example
                    if self._run.ends():
                        return batches.start
        return self.num_batches

    def _turns(self, batches: range) -> list[Turn]:
        """Return how ranks score a span of batches: each a run of its grains, some in each turn."""
        size = self._dataset.batch_size
        num_ranks = self._shard.size
        lengths: list[int] = []
        for number in batches:
            num_samples = min(size, self._num_rows - number * size)
            ends = divided_at(num_samples, self._run.learner.grains)
            lengths += [last - first for first, last in pairwise((0, *ends)) if first < last]
        at_once = max(2, SCORED_TOGETHER // 2 // max(lengths))
        num_turns = -(-len(lengths) // (num_ranks * at_once))
        bounds = [len(lengths) * turn // num_turns for turn in range(num_turns + 1)]
        counts = [last - first for first, last in pairwise(bounds)]
        of_ranks = [
            [count * (rank + 1) // num_ranks - count * rank // num_ranks for count in counts]
            for rank in range(num_ranks)
        ]
        rows_before = list(accumulate(lengths, initial=batches.start * size))
        first = sum(map(sum, of_ranks[: self._shard.rank]))
        turns: list[Turn] = []
        for count, num_grains in zip(counts, of_ranks[self._shard.rank], strict=True):
            last = first + num_grains
            rows = range(rows_before[first], rows_before[last])
            turns.append((count, rows, lengths[first:last]))
            first = last
        return turns

    def _scored(self, batches: range, reading: Iterator[Batch]) -> list[ScoredGrain] | None:
        """Return the grains of a span in their order; None: scores draw random numbers."""
        of_ranks: list[list[ScoredGrain]] = [[] for _ in range(self._shard.size)]
        for count, _, lengths in self._turns(batches):
            read = partial(self._read, reading, lengths)
            scored = self._shard.shared_out(count, read, read, self._score)
            if scored is None:
                return None
            for rank, of_rank in enumerate(of_ranks):
                first, last = (count * r // self._shard.size for r in (rank, rank + 1))
                of_rank += scored[first:last]
        return [grain for of_rank in of_ranks for grain in of_rank]

    def _read(
        self, reading: Iterator[Batch], lengths: Sequence[int], numbers: range
    ) -> list[Example]:
        """Return the next grains of this rank, with the rows that they look up.

        Raises:
            HotbedError: on every rank: one of them could not read its samples.
        """
        learner = self._run.learner
        labelled = learner.criterion is not None
        error = None
        try:
            batch = next(reading)
            check_encoder(self._run.model, self._dataset.encoder)
        except Exception as of_reading:
            batch = changed(failed_batch(self._dataset.schema, 1), {"whole": None})
            error = of_reading
            lengths = [0]
        divided = changed(batch, {"grain_ends": tuple(accumulate(lengths))})
        example = prepare(divided, learner.device, labelled=labelled, network=learner.network)
        return asked_together(self._observer.scoring, changed(example, {"error": error}))

    def _score(self, grain: Example) -> ScoredGrain:
        """Return the scores of a grain, and it without columns that no metric reads."""
        assert grain.batch is not None, "it was read"
        ids = {name: grain.batch.ids[name] for name in self._observer.groups}
        outcomes = changed(grain.batch, {"ids": ids, "dense": {}, "plans": None, "encoder": None})
        return self._observer.outputs(grain), outcomes.map_arrays(np.asarray)

    def _in_order(self, scored: Sequence[ScoredGrain]) -> Iterator[Example]:
        """Yield the batches of a span, with the scores of their grains."""
        learner = self._run.learner
        labelled = learner.criterion is not None
        left = list(reversed(scored))
        while left:
            grains: list[ScoredGrain] = []
            num_samples = 0
            while left and num_samples < self._dataset.batch_size:
                grains.append(left.pop())
                num_samples += grains[-1][1].num_samples
            batch = joined([BatchSlice.of(outcomes) for _, outcomes in grains])
            batch = batch.at(None, self._dataset.encoder)
            example = prepare(batch, learner.device, labelled=labelled, network=learner.network)
            scores = [of_grain for of_grain, _ in grains]
            yield changed(example.divided(learner.grains), {"scores": scores})


def part_scores(run: Run) -> PartScores | None:
    """Return what scores the data of an evaluation by parts; None: each rank reads all rows.

    Raises:
        ConfigError: on every rank: they would read parts of different data.
        HotbedError: on every rank: one of them could not count or compare its rows.
    """
    shard = run.learner.shard
    data = run.dataset
    check_keeps(run.model.histories, getattr(data, "schema", None))
    if shard.size == 1 or not isinstance(data, Dataset):
        return None
    with shard.together():  # a file may be damaged here alone
        rows = identity_of(data.source) if _can_be_shared(run, data) else None
    if shard.any(rows is None):
        return None
    settings = {
        "rows": rows,
        "schema": data.schema.to_json(),
        "batch_size": data.batch_size,
        "drop_last": data.drop_last,
    }
    shard.check_equal(settings, SAME_DATA)
    return PartScores(run, data)


def _can_be_shared(run: Run, data: Dataset) -> bool:
    """Return whether the rows of other ranks are not needed, so that each reads its own."""
    learner = run.learner
    observer = run.observer
    assert isinstance(observer, (Scorer, Collector)), "it scores"
    is_in_order = data.shuffle <= 1 and data.grains == 1 and data.resumed_epoch is None
    if not (data.can_share_out and is_in_order) or learner.own_grains is None:
        return False
    columns = {column.name for column in data.schema.ids}
    # the question for rows says which rank cannot read its own
    asks = bool(asked_collections(observer.scoring, columns))
    # tables on a disk fetch rows of coming batches by the ids of all grains
    fetches = Fetcher.of(learner.network) is not None
    num_rows = (data.num_batches or 0) * data.batch_size if data.drop_last else data.num_rows
    has_enough = min(num_rows or 0, learner.grains) >= learner.shard.size
    reads_others = fetches or run.callbacks.reads_features or not observer.groups <= columns
    return asks and has_enough and not reads_others
