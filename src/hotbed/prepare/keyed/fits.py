# SPDX-License-Identifier: Apache-2.0
"""Fits of transforms that need all rows of a key in one place: what each passes to its shuffle, and
what it makes of the buckets.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.times import to_microseconds
from hotbed.data import numbers
from hotbed.data.arrays import as_numpy, nulls_of, numbers_of
from hotbed.data.arrow_types import is_bytes
from hotbed.data.columns import Columns
from hotbed.data.fit import Task, flat
from hotbed.data.fitted import FittedMap
from hotbed.data.schema import Dense, Id, Label, Schema
from hotbed.data.transforms import JoinGroupby, Map, TargetEncode
from hotbed.errors import ConfigError, SchemaError
from hotbed.prepare.keyed.encodings import Earlier, Encoding, OutOfFold
from hotbed.prepare.keyed.statistics import (
    earlier_means,
    fold_sums,
    group_parts,
    group_statistic,
    smoothed_means,
)
from hotbed.prepare.keyed.vocabulary import (
    WordsFile,
    count_values,
    frequent_first,
    mixed_types,
    run_of,
    sum_counts,
)
from hotbed.prepare.partitions import TRAIN, Chunk
from hotbed.prepare.places import Purpose, folds_of
from hotbed.prepare.shuffle import BatchReader, Bucket, Side

Keyed = tuple[NDArray[np.int64], pa.RecordBatch]
"""Keys of rows, and the rows."""


@dataclass(frozen=True)
class Places:
    """Where a fit puts its files.

    `output`: of the preparation. `folder`: a working folder, which is removed at the end. `number`:
    of the fit, which makes names differ.
    """

    output: Path
    folder: Path
    number: int

    def map_file(self, name: str) -> Path:
        """Return the path of the fitted map of a column or a joint name."""
        return self.output / "maps" / f"{self._name(name)}.rows"

    def words_file(self, name: str) -> Path:
        """Return the path of the words of a vocabulary."""
        return self.output / "vocabularies" / f"{self._name(name)}.parquet"

    def result_file(self, bucket: int) -> Path:
        """Return the path of what a bucket's task writes."""
        return self.folder / f"{bucket:08d}.result"

    def _name(self, name: str) -> str:
        letters = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:60]
        return f"{self.number:03d}-{letters}"


@dataclass(frozen=True)
class FitResult:
    """What a fit learned.

    `value`: what `Transform.learned` takes. `encoding`: what training rows get in its place; None
    for the same.
    """

    value: Any
    encoding: Encoding | None = None


class KeyedFit(ABC):
    """Base of the fits of one task. It can be pickled."""

    task: Task
    places: Places

    keeps_empty_chunks: ClassVar[bool] = False
    """Whether chunks without rows must be written, because buckets write a side."""

    @abstractmethod
    def select(self, chunk: Chunk, context: Columns) -> Keyed:
        """Return what goes to the buckets of a chunk.

        Args:
            chunk: the chunk.
            context: the columns of its training rows.
        """

    @abstractmethod
    def reduce(self, bucket: Bucket, number: int, prior: float) -> Iterable[pa.RecordBatch]:
        """Return the result of a bucket.

        Args:
            bucket: has rows.
            number: of the bucket.
            prior: the mean of the label, if the fit has one.
        """

    @abstractmethod
    def learned(self, results: Sequence[BatchReader], prior: float) -> FitResult:
        """Return what was learned, from the results of all buckets."""

    def labels(self, context: Columns) -> pa.Array | None:
        """Return the labels of training rows whose mean is the prior; None without a prior."""
        return None

    @property
    def name(self) -> str:
        """The column or the joint name."""
        return self.task.transform.joint or self.task.columns[0].name

    def _keys(self, context: Columns, num_rows: int) -> pa.Array:
        """Return the values that reach the transform, one a row."""
        (keys,) = self.task.values(context)
        if len(keys) != num_rows:
            raise SchemaError(
                f"column {self.name!r}: expected one key a row, got lists. Give "
                f"{type(self.task.transform).__name__} single values."
            )
        kind = keys.type
        if not (is_bytes(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise SchemaError(
                f"column {self.name!r}: expected keys that are integers or text, got {kind}. "
                "Bucketize it, or declare it an integer."
            )
        return keys


@dataclass(frozen=True)
class Vocabulary(KeyedFit):
    """Which values are frequent enough for a `Map`, most frequent first."""

    task: Task
    places: Places
    transform: Map

    def select(self, chunk: Chunk, context: Columns) -> Keyed:
        parts: list[pa.RecordBatch] = []
        for values in self.task.inputs(context):
            counts = count_values(flat(values), self.name)
            if counts.num_rows:
                parts.append(counts)
        if not parts:
            nothing = count_values(pa.array([], pa.int64()), self.name)
            return np.zeros(0, np.int64), nothing
        if len({part.schema for part in parts}) > 1:
            raise mixed_types()
        (counts,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return counts.column("key").to_numpy(), counts

    def reduce(self, bucket: Bucket, number: int, prior: float) -> Iterable[pa.RecordBatch]:
        counts = sum_counts(bucket.rows)
        return run_of(counts, self.transform.min_count, self.transform.max_size)

    def learned(self, results: Sequence[BatchReader], prior: float) -> FitResult:
        keys: list[NDArray[np.int64]] = []
        num_keys = 0
        with WordsFile(self.places.words_file(self.name)) as words:
            for part in frequent_first(results):
                if self.transform.max_size is not None:
                    part = part.head(self.transform.max_size - num_keys)
                words.write(part, num_keys)
                keys.append(part["key"].to_numpy())
                num_keys += len(part)
        return FitResult(_write_map(self.places.map_file(self.name), keys, []))


@dataclass(frozen=True)
class GroupStatistic(KeyedFit):
    """A statistic of a raw column by key, for `JoinGroupby`."""

    task: Task
    places: Places
    transform: JoinGroupby

    def select(self, chunk: Chunk, context: Columns) -> Keyed:
        keys = self._keys(context, int((chunk.part == TRAIN).sum()))
        name = self.transform.column
        values, is_missing = numbers_of(numbers.parsed(name, context.column(name)))
        rows = np.flatnonzero(~(is_missing | nulls_of(keys)))
        parts = group_parts(context.ids(keys)[rows], values[rows])
        return parts.column("key").to_numpy(), parts

    def reduce(self, bucket: Bucket, number: int, prior: float) -> Iterable[pa.RecordBatch]:
        keys, values = group_statistic(bucket.rows, self.transform.statistic)
        return [_key_values(keys, values[:, None])]

    def learned(self, results: Sequence[BatchReader], prior: float) -> FitResult:
        return FitResult(_map_of(self.places.map_file(self.name), results, 0, 1))


@dataclass(frozen=True)
class FoldMeans(KeyedFit):
    """Means of a label by key for `TargetEncode`, over all rows and out of each fold."""

    task: Task
    places: Places
    transform: TargetEncode
    label: Label
    seed: int
    rules: int

    def labels(self, context: Columns) -> pa.Array:
        return _labels(self.label, context)

    def select(self, chunk: Chunk, context: Columns) -> Keyed:
        keys = self._keys(context, int((chunk.part == TRAIN).sum()))
        rows = np.flatnonzero(~nulls_of(keys))
        folds = folds_of(chunk.hashes(self.seed, Purpose.FOLDS), self.transform.folds)
        sums = fold_sums(
            context.ids(keys)[rows],
            as_numpy(self.labels(context))[rows],
            folds[chunk.part == TRAIN][rows],
            self.transform.folds,
        )
        return sums.column("key").to_numpy(), sums

    def reduce(self, bucket: Bucket, number: int, prior: float) -> Iterable[pa.RecordBatch]:
        means = smoothed_means(bucket.rows, self.transform.folds, prior, self.transform.smooth)
        values = np.column_stack([means.all_rows, means.out_of_fold])
        return [_key_values(means.keys, values)]

    def learned(self, results: Sequence[BatchReader], prior: float) -> FitResult:
        column, step = _only(self.task)
        means = _map_of(self.places.map_file(self.name), results, 0, 1)
        folds_file = self.places.folder / "folds.rows"
        folds = _map_of(folds_file, results, 1, self.transform.folds + 1)
        encoding = OutOfFold(
            column.name,
            step + 1,
            replace(column, transforms=column.transforms[:step]),
            folds,
            prior,
            self.seed,
            self.rules,
        )
        return FitResult((prior, means), encoding)


@dataclass(frozen=True)
class EarlierMeans(KeyedFit):
    """Means of a label by key for `TargetEncode`, over all rows and over earlier ones."""

    keeps_empty_chunks: ClassVar[bool] = True

    task: Task
    places: Places
    transform: TargetEncode
    label: Label
    unit: str | None
    side: Side

    def labels(self, context: Columns) -> pa.Array:
        return _labels(self.label, context)

    def select(self, chunk: Chunk, context: Columns) -> Keyed:
        keys = self._keys(context, int((chunk.part == TRAIN).sum()))
        rows = np.flatnonzero(~nulls_of(keys))
        chosen = context.ids(keys)[rows]
        assert self.transform.ordered_by is not None
        order = _ordered(context.column(self.transform.ordered_by), self.unit)
        numbers_in_chunk = np.flatnonzero(chunk.part == TRAIN)[rows]
        columns = {
            "key": chosen,
            "time": order.take(pa.array(rows)),
            "label": as_numpy(self.labels(context))[rows],
            "row": numbers_in_chunk.astype(np.uint32),
        }
        return chosen, pa.RecordBatch.from_pydict(columns)

    def reduce(self, bucket: Bucket, number: int, prior: float) -> Iterable[pa.RecordBatch]:
        smooth = self.transform.smooth
        means = earlier_means(bucket.rows, prior, smooth)
        self.side.write(number, bucket, {"mean": pa.array(means)})
        keys = bucket.rows.column("key").to_numpy()
        labels = bucket.rows.column("label").to_numpy()
        no_folds = np.zeros(len(keys), np.int64)
        sums = fold_sums(keys, labels, no_folds, 1)
        all_rows = smoothed_means(pa.Table.from_batches([sums]), 1, prior, smooth)
        return [_key_values(all_rows.keys, all_rows.all_rows[:, None])]

    def learned(self, results: Sequence[BatchReader], prior: float) -> FitResult:
        column, step = _only(self.task)
        means = _map_of(self.places.map_file(self.name), results, 0, 1)
        encoding = Earlier(column.name, step + 1, self.side, prior)
        return FitResult((prior, means), encoding)


def _only(task: Task) -> tuple[Dense | Id, int]:
    """Return the column and the step of a task that is not joint."""
    (column,) = task.columns
    (step,) = task.steps
    assert isinstance(column, (Dense, Id))
    return column, step


def keyed_fit(task: Task, schema: Schema, places: Places, num_buckets: int, seed: int) -> KeyedFit:
    """Return the fit of a task whose learner is keyed.

    Raises:
        ConfigError: a transform of one's own has a keyed learner.
    """
    transform = task.transform
    if isinstance(transform, Map):
        return Vocabulary(task, places, transform)
    if isinstance(transform, JoinGroupby):
        return GroupStatistic(task, places, transform)
    if not isinstance(transform, TargetEncode):
        raise ConfigError(
            f"column {task.columns[0].name!r}: {type(transform).__name__} has a keyed learner, got "
            "a transform of one's own. Let it learn without `keyed`."
        )
    label = schema[transform.label]
    assert isinstance(label, Label)
    if transform.ordered_by is None:
        return FoldMeans(task, places, transform, label, seed, schema.rules)
    time = schema.time
    unit = None
    if time is not None and time.source == transform.ordered_by:
        unit = time.unit
    return EarlierMeans(
        task, places, transform, label, unit, Side(places.folder / "side", num_buckets)
    )


def _labels(label: Label, context: Columns) -> pa.Array:
    """Return the labels as float64."""
    values = numbers.label(label, context.column(label.source))
    return pa.array(values.astype(np.float64))


def _ordered(values: pa.Array, unit: str | None) -> pa.Array:
    """Return numbers in the order of a column of times or numbers; `unit`: of times."""
    if unit is not None:
        return to_microseconds(values, unit)
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        return to_microseconds(values, "us")
    if pa.types.is_integer(values.type):
        return values.cast(pa.int64())
    if is_bytes(values.type):
        raise SchemaError(
            f"target_encode.ordered_by: expected numbers or times, got {values.type}. Name the "
            "column of the schema's time, whose unit is known."
        )
    return values.cast(pa.float64())


def _key_values(keys: NDArray[np.int64], values: NDArray[np.float64]) -> pa.RecordBatch:
    """Return keys and their values, [k, width], as a record batch."""
    columns: dict[str, Any] = {"key": keys}
    for number in range(values.shape[1]):
        columns[str(number)] = np.ascontiguousarray(values[:, number])
    return pa.RecordBatch.from_pydict(columns)


def _map_of(path: Path, results: Sequence[BatchReader], first: int, stop: int) -> FittedMap:
    """Write the columns `first` to `stop` of the values of all buckets as a fitted map."""
    keys: list[NDArray[np.int64]] = []
    values = [np.zeros((0, stop - first), np.float32)]
    for result in results:
        for batch in result:
            keys.append(batch.column("key").to_numpy())
            columns = [batch.column(str(number)).to_numpy() for number in range(first, stop)]
            values.append(np.column_stack(columns).astype(np.float32))
    return _write_map(path, keys, values)


def _write_map(
    path: Path, keys: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float32]]
) -> FittedMap:
    path.parent.mkdir(parents=True, exist_ok=True)
    all_keys = np.concatenate([np.zeros(0, np.int64), *keys])
    all_values = None
    if values:
        all_values = np.concatenate(values)
    return FittedMap.write(path, all_keys, all_values)
