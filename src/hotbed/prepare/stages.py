# SPDX-License-Identifier: Apache-2.0
"""The stages that decide which rows there are: derived columns, split and negatives.

Each takes a view, and returns one that shows the rows after the stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.concat import Concat
from hotbed.connectors.files import FileSource, Section
from hotbed.connectors.memory import Memory
from hotbed.connectors.parquet import Parquet, row_groups
from hotbed.connectors.paths import size_of
from hotbed.connectors.source import Source
from hotbed.data import numbers
from hotbed.data.columns import Columns
from hotbed.data.context import BadRows
from hotbed.data.learners import Quantiles
from hotbed.data.schema import Schema
from hotbed.memory import return_free_memory
from hotbed.prepare.engine import Engine
from hotbed.prepare.inputs import Inputs
from hotbed.prepare.keyed.derive import Derivation, Histories, rows_with_key
from hotbed.prepare.partitions import VALID, Chunk, Partition
from hotbed.prepare.places import Purpose
from hotbed.prepare.preparation import Preparation
from hotbed.prepare.sampling.catalogue import Catalogue, item_rows, items_of
from hotbed.prepare.sampling.negatives import (
    Negatives,
    draw_bucket,
    label_of,
    user_rows,
    with_label,
)
from hotbed.prepare.sampling.order import Order
from hotbed.prepare.shuffle import BucketShuffle, Side, buckets_for
from hotbed.prepare.view import DrawnRows, View

Item = TypeVar("Item")
Result = TypeVar("Result")

_COMPRESSION = 5
"""How much larger compressed text is than its file. Only the number of buckets depends on it."""


@dataclass(frozen=True)
class Stage:
    """A stage of a preparation has `done` of `total` tasks."""

    name: str
    done: int
    total: int


Report = Callable[[Stage], None]


@dataclass(frozen=True)
class Work:
    """What the stages of one preparation share.

    Args:
        engine: runs tasks.
        inputs: the files of the source.
        partitions: of the source.
        folder: a working folder, which no other process uses.
        num_buckets: of shuffles; results do not depend on it.
        memory: bytes that all tasks together may take.
        report: called when a task of a stage has ended.
        counts: what stages count, by name; it goes into the workflow.
    """

    engine: Engine
    inputs: Inputs
    partitions: Sequence[Partition]
    folder: Path
    num_buckets: int
    memory: int
    report: Report
    counts: dict[str, int] = field(default_factory=dict)

    def map(
        self, stage: str, task: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result]:
        """Yield `task(item)` for each item, in order, and report how far the stage is.

        Raises:
            DataError: an input file changed.
        """
        total = len(items)
        self.report(Stage(stage, 0, total))
        try:
            yield from self.engine.map(
                _Returning(task, self.memory),
                items,
                lambda done: self.report(Stage(stage, done, total)),
            )
        except Exception:
            self.inputs.check()  # a file that changes may be the cause
            raise
        self.inputs.check()

    def shuffled(self, stage: str, view: View, select: Select) -> BucketShuffle:
        """Return the rows of a view by key; `select` returns keys and rows of a chunk."""
        shuffle = BucketShuffle(self.folder / _file_name(stage), self.num_buckets)
        for _ in self.map(stage, _Shuffling(view, shuffle, select), self.partitions):
            pass
        return shuffle

    def side(self, stage: str) -> Side:
        """Return a new side for what the tasks of buckets compute."""
        return Side(self.folder / f"{_file_name(stage)}.side", self.num_buckets)


@dataclass(frozen=True)
class _Returning(Generic[Item, Result]):
    """A task after which free memory goes back to the system.

    Memory that was kept after one bucket would be missing for the next.
    """

    task: Callable[[Item], Result]
    memory: int

    def __call__(self, item: Item) -> Result:
        result = self.task(item)
        return_free_memory(above=self.memory // 2)
        return result


Select = Callable[[Chunk], tuple[NDArray[np.int64], pa.RecordBatch]]


@dataclass(frozen=True)
class _Shuffling:
    """The task that writes the rows of a partition by key."""

    view: View
    shuffle: BucketShuffle
    select: Select

    def __call__(self, partition: Partition) -> None:
        with self.shuffle.writer(partition.number) as writer:
            for chunk in self.view.chunks(partition):
                writer.write(*self.select(chunk))


def _file_name(stage: str) -> str:
    return stage.replace(" ", "-")


def num_buckets(job: Preparation, workers: int) -> int:
    """Return the number of buckets with which the tasks of a preparation stay in its memory."""
    num_bytes = source_bytes(job.source)
    if job.negatives is not None:
        num_bytes *= 1 + job.negatives.per_positive
    return buckets_for(num_bytes, job.memory_bytes, workers)


def source_bytes(source: Source) -> int:
    """Return about how many bytes the rows of a source take in memory; 0 if that is unknown."""
    if isinstance(source, Parquet):
        num_bytes = 0
        for file in source.files():
            num_bytes += sum(group.total_byte_size for group in row_groups(file))
        return num_bytes
    if isinstance(source, FileSource):
        num_bytes = 0
        for file in source.files():
            factor = 1 if Section(file).compression is None else _COMPRESSION
            num_bytes += size_of(file) * factor
        return num_bytes
    if isinstance(source, Concat):
        return sum(source_bytes(part) for part in source.sources)
    if isinstance(source, Memory):
        return int(source.table.nbytes)
    inner = getattr(source, "source", None)
    if isinstance(inner, Source):
        return source_bytes(inner)
    return 0


# --- derived columns ------------------------------------------------------------------------------


def derive(job: Preparation, work: Work, view: View) -> View:
    """Return the view with all derived columns."""
    for number, group in enumerate(_groups(job.derive), 1):
        stage = f"derive {number}"
        unit = "s"
        if job.schema.time is not None:
            unit = job.schema.time.unit
        shuffle = work.shuffled(stage, view, _Keys(group, unit))
        side = work.side(stage)
        task = _Deriving(shuffle, side, group)
        for _ in work.map(f"{stage}, values", task, shuffle.buckets()):
            pass
        shutil.rmtree(shuffle.folder)
        view = replace(view, derived=(*view.derived, side))
    return view


def _groups(derivations: Sequence[Derivation]) -> list[list[Derivation]]:
    """Return runs of derivations that need the same shuffle and do not read each other."""
    groups: list[list[Derivation]] = []
    for derivation in derivations:
        if groups:
            first = groups[-1][0]
            names = {other.name for other in groups[-1]}
            is_alike = (derivation.by, derivation.time) == (first.by, first.time)
            if is_alike and not names & set(derivation.inputs()):
                groups[-1].append(derivation)
                continue
        groups.append([derivation])
    return groups


@dataclass(frozen=True)
class _Keys:
    derivations: Sequence[Derivation]
    unit: str

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.int64], pa.RecordBatch]:
        try:
            return rows_with_key(chunk.rows, self.derivations, self.unit)
        except BadRows as bad:
            row = int(np.flatnonzero(bad.mask)[0])
            name = self.derivations[0].time
            raise chunk.located(row, f"column {name!r}: {bad.message}", name) from None


@dataclass(frozen=True)
class _Deriving:
    """The task that computes derived columns of a bucket."""

    shuffle: BucketShuffle
    side: Side
    derivations: Sequence[Derivation]

    def __call__(self, number: int) -> None:
        bucket = self.shuffle.read(number)
        histories = Histories.of(bucket.rows)
        columns = {}
        for derivation in self.derivations:
            columns[derivation.name] = derivation.values(bucket.rows, histories)
        self.side.write(number, bucket, columns)


# --- parts ----------------------------------------------------------------------------------------


def split(job: Preparation, work: Work, view: View) -> View:
    """Return the view with the part of each row."""
    if job.split is None:
        return view
    learner = job.split.learner()
    learned = job.split
    if learner is not None:
        assert job.schema.time is not None
        with_times = view
        if job.schema.time.source not in {derivation.name for derivation in job.derive}:
            with_times = replace(view, derived=())  # lists of earlier values are large
        for later in work.map("split", _Times(with_times, job.schema, learner), work.partitions):
            learner.merge(later)
        learned = job.split.learned(learner.learned())
    return replace(view, split=learned)


@dataclass(frozen=True)
class _Times:
    """The task that learns from the times of a partition's rows."""

    view: View
    schema: Schema
    empty: Quantiles

    def __call__(self, partition: Partition) -> Quantiles:
        learner = Quantiles(self.empty.shares)
        time = self.schema.time
        assert time is not None
        for chunk in self.view.chunks(partition):
            context = Columns(chunk.rows)
            times = numbers.time(time, context.column(time.source))
            learner.add(pa.array(times), context)
        return learner


# --- negatives ------------------------------------------------------------------------------------


def add_negatives(job: Preparation, work: Work, view: View) -> View:
    """Return the view with sampled negatives."""
    negatives = job.negatives
    if negatives is None:
        return view
    order = order_of(job, negatives)
    items = work.shuffled("items", view, _Items(negatives, order))
    tables = work.map("items, counts", _Counting(items), items.buckets())
    catalogue = work.folder / "catalogue"
    Catalogue.write(catalogue, tables, negatives.exponent)
    users = work.shuffled("users", view, _Users(negatives, order, job.schema, job.seed))
    side = work.side("negatives")
    task = _Drawing(users, side, negatives, catalogue)
    totals = np.zeros(2, np.int64)
    for counts in work.map("negatives", task, users.buckets()):
        totals += counts
    shutil.rmtree(users.folder)
    work.counts["negatives"] = int(totals[0])
    work.counts["positives_without_negatives"] = int(totals[1])
    return replace(view, drawn=DrawnRows(negatives, order, catalogue, side))


def order_of(job: Preparation, negatives: Negatives) -> Order:
    """Return the order of a user's rows: that of the histories, else that of the schema's time."""
    if negatives.seen == "never":
        return Order()
    time = job.schema.time
    unit = "s" if time is None else time.unit
    of_user = [derivation for derivation in job.derive if derivation.by == negatives.user]
    for derivation in of_user:
        if negatives.item in derivation.columns():
            return Order(derivation.time, unit)
    if time is not None:
        return Order(time.source, unit)
    if of_user:
        return Order(of_user[0].time, unit)
    return Order()


@dataclass(frozen=True)
class _Items:
    negatives: Negatives
    order: Order

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.int64], pa.RecordBatch]:
        return item_rows(self.negatives.of_item, chunk.rows, self.order, chunk.part == VALID)


@dataclass(frozen=True)
class _Counting:
    shuffle: BucketShuffle

    def __call__(self, number: int) -> pa.Table:
        return items_of(self.shuffle.read(number))


@dataclass(frozen=True)
class _Users:
    negatives: Negatives
    order: Order
    schema: Schema
    seed: int

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.int64], pa.RecordBatch]:
        label = label_of(self.schema)
        return user_rows(
            self.negatives,
            with_label(chunk.rows, label),
            label,
            self.order,
            chunk.part == VALID,
            chunk.hashes(self.seed, Purpose.NEGATIVES),
        )


@dataclass(frozen=True)
class _Drawing:
    """The task that draws the negatives of the users in a bucket."""

    shuffle: BucketShuffle
    side: Side
    negatives: Negatives
    catalogue: Path

    def __call__(self, number: int) -> tuple[int, int]:
        """Return the number of negatives, and of positives for which there is nothing to draw."""
        bucket = self.shuffle.read(number)
        drawn = draw_bucket(self.negatives, Catalogue.open(self.catalogue), bucket)
        self.side.write(number, bucket, {"items": drawn.items})
        return drawn.num_items, drawn.num_without
