# SPDX-License-Identifier: Apache-2.0
"""Fitting out of core: each transform learns from the training rows of all partitions.

Each learned step that follows another one in the same column takes one more pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotbed.data.columns import Columns
from hotbed.data.context import BadRows
from hotbed.data.fit import Task, open_tasks
from hotbed.data.learners import Learner, Moments
from hotbed.data.schema import Dense, Id, Schema
from hotbed.errors import DataError
from hotbed.prepare.keyed.encodings import training_schema
from hotbed.prepare.keyed.fits import FitResult, KeyedFit, Places, keyed_fit
from hotbed.prepare.partitions import TRAIN, Chunk, Partition
from hotbed.prepare.shuffle import BatchReader, BatchWriter, BucketShuffle, ShuffleWriter
from hotbed.prepare.stages import Work
from hotbed.prepare.view import View


@dataclass(frozen=True)
class Fitted:
    """`schema`: over raw rows. `view`: shows training rows with their own target encodings."""

    schema: Schema
    view: View


@dataclass
class _Partial:
    """What the task of a partition returns.

    `learners`: of plain tasks. `priors`: for each keyed fit, the mean of its labels.
    """

    num_rows: int
    learners: list[Learner]
    priors: list[Moments]


@dataclass(frozen=True)
class _Pass:
    """The task of a pass: learn from the training rows of one partition."""

    view: View
    tasks: Sequence[Task]
    fits: Sequence[KeyedFit]
    shuffles: Sequence[BucketShuffle]
    rules: int

    def __call__(self, partition: Partition) -> _Partial:
        learners = [task.learner() for task in self.tasks]
        part = _Partial(0, learners, [Moments() for _ in self.fits])
        with ExitStack() as opened:
            writers = []
            for shuffle in self.shuffles:
                writers.append(opened.enter_context(shuffle.writer(partition.number)))
            for chunk in self.view.chunks(partition):
                train = chunk.of_part(TRAIN)
                part.num_rows += len(train)
                try:
                    self._learn(chunk, Columns(train.rows, self.rules), part, writers)
                except BadRows as bad:
                    row = int(np.flatnonzero(bad.mask)[0])
                    raise train.located(row, bad.message, bad.column) from None
        return part

    def _learn(
        self, chunk: Chunk, context: Columns, part: _Partial, writers: Sequence[ShuffleWriter]
    ) -> None:
        """Learn from a chunk; `context`: the columns of its training rows."""
        for task, learner in zip(self.tasks, part.learners, strict=True):
            task.add(learner, context)
        for number, fit in enumerate(self.fits):
            keys, rows = fit.select(chunk, context)
            if len(keys) or fit.keeps_empty_chunks:
                writers[number].write(keys, rows)
            labels = fit.labels(context)
            if labels is not None:
                part.priors[number].add(labels, context)


@dataclass(frozen=True)
class _Reducing:
    """The task that turns a bucket of a keyed fit into its result."""

    fits: Sequence[KeyedFit]
    shuffles: Sequence[BucketShuffle]
    priors: Sequence[float]

    def __call__(self, place: tuple[int, int]) -> None:
        """Write the result of a bucket; `place`: the numbers of the fit and of the bucket."""
        number, bucket_number = place
        fit = self.fits[number]
        bucket = self.shuffles[number].read(bucket_number)
        with BatchWriter(fit.places.result_file(bucket_number)) as file:
            if bucket.rows.num_rows or (fit.keeps_empty_chunks and bucket.rows.num_columns):
                for batch in fit.reduce(bucket, bucket_number, self.priors[number]):
                    file.write(batch)


@dataclass(frozen=True)
class _Finishing:
    """The task that writes the fitted map of a keyed fit."""

    fits: Sequence[KeyedFit]
    priors: Sequence[float]
    num_buckets: int

    def __call__(self, number: int) -> FitResult:
        fit = self.fits[number]
        results = [
            BatchReader(fit.places.result_file(bucket)) for bucket in range(self.num_buckets)
        ]
        return fit.learned(results, self.priors[number])


def fit(schema: Schema, work: Work, view: View, output: Path) -> Fitted:
    """Fit all transforms of `schema` on the training rows.

    Args:
        schema: the columns and their roles.
        work: what stages share.
        view: the rows.
        output: the folder of the preparation, for maps and vocabularies.

    Raises:
        DataError: no row is for training.
    """
    number = 1
    num_fits = 0
    while True:
        training = training_schema(schema, view.encoded)
        tasks = open_tasks(training)
        if not tasks:
            return Fitted(schema, view)
        plain = [task for task in tasks if not task.learner().keyed]
        fits: list[KeyedFit] = []
        for task in tasks:
            if task.learner().keyed:
                num_fits += 1
                places = Places(output, work.folder / f"fit-{num_fits:03d}", num_fits)
                fits.append(keyed_fit(task, schema, places, work.num_buckets, view.seed))
        shuffles = [BucketShuffle(keyed.places.folder, work.num_buckets) for keyed in fits]
        learning = _Pass(view, plain, fits, shuffles, schema.rules)
        part = _learn(work, learning, number)
        for task, learner in zip(plain, part.learners, strict=True):
            schema = _filled(schema, task, learner.learned())
        finished = _finished(work, learning, part.priors, number)
        for keyed, learned in zip(fits, finished, strict=True):
            schema = _filled(schema, keyed.task, learned.value)
            if learned.encoding is not None:
                view = replace(view, encoded=(*view.encoded, learned.encoding))
        number += 1


def _learn(work: Work, learning: _Pass, number: int) -> _Partial:
    """Return what one pass over all partitions learned."""
    merged: _Partial | None = None
    for part in work.map(f"fit {number}", learning, work.partitions):
        if merged is None:
            merged = part
            continue
        merged.num_rows += part.num_rows
        for learner, later in zip(
            [*merged.learners, *merged.priors], [*part.learners, *part.priors], strict=True
        ):
            learner.merge(later)
    if merged is None or not merged.num_rows:
        raise DataError(
            "fit: no row is for training, got an empty part `train`. Give the split a smaller "
            "share, or the source more rows."
        )
    return merged


def _finished(
    work: Work, learning: _Pass, labels: Sequence[Moments], number: int
) -> list[FitResult]:
    """Return what the keyed fits of a pass learned; `labels`: of each fit."""
    if not learning.fits:
        return []
    priors = [moments.learned()[0] for moments in labels]
    reducing = _Reducing(learning.fits, learning.shuffles, priors)
    places = list(itertools.product(range(len(learning.fits)), range(work.num_buckets)))
    for _ in work.map(f"fit {number}, keys", reducing, places):
        pass
    finishing = _Finishing(learning.fits, priors, work.num_buckets)
    return list(work.map(f"fit {number}, maps", finishing, range(len(learning.fits))))


def _filled(schema: Schema, task: Task, value: Any) -> Schema:
    """Return the schema over raw rows with what a task over training rows learned."""
    for column, step in zip(task.columns, task.steps, strict=True):
        raw = schema[column.name]
        assert isinstance(raw, (Dense, Id))
        transforms = list(raw.transforms)
        # target encodings that training rows bring along stand before the task's transforms
        place = len(transforms) - len(column.transforms) + step
        transforms[place] = transforms[place].learned(value)
        schema = schema.with_transforms(column.name, transforms)
    return schema
