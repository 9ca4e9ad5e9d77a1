# SPDX-License-Identifier: Apache-2.0
"""Profile: what is seen of the rows of a preparation while they are written.

Profiles of partitions merge, in the order of the partitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from hotbed.data.arrays import as_numpy, numbers_of
from hotbed.data.arrow_types import is_list
from hotbed.data.batch import Batch
from hotbed.data.columns import Columns
from hotbed.data.learners import Moments, Quantiles
from hotbed.data.schema import Schema
from hotbed.data.transforms import Map
from hotbed.prepare.report.alone import LabelSample
from hotbed.prepare.report.distinct import Distinct
from hotbed.prepare.report.timeline import Timeline

SAMPLE_ROWS = 2048
"""Rows of a chunk whose dense values are drawn."""

PIECE_ROWS = 4096
"""Rows of a point in charts over the order of the rows, which data without times get."""

NUM_QUANTILES = 200
"""Ranks of a dense feature that are drawn, at equal distances."""


class ColumnProfile:
    """A raw column: missing and different values, and of numbers the least, largest and mean.

    Attributes:
        values: the number of values, missing ones included; of lists, the items.
        missing: missing values: nulls, NaN and empty lists.
        distinct: counts different values.
        low: the least number; NaN without numbers.
        high: the largest number; NaN without numbers.
        types: names of the Arrow types.
    """

    def __init__(self) -> None:
        self.values = 0
        self.missing = 0
        self.distinct = Distinct()
        self.low = math.nan
        self.high = math.nan
        self.types: dict[str, None] = {}
        self._moments = Moments()

    @property
    def mean(self) -> float:
        """The mean of the numbers; NaN without numbers."""
        if not self._moments.count:
            return math.nan
        return self._moments.learned()[0]

    def add(self, values: pa.Array, context: Columns) -> None:
        """Add the next rows of the column."""
        kind = values.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not pa.types.is_null(kind):
            self.types[str(kind)] = None
        while is_list(values.type):
            empty = as_numpy(values.value_lengths().fill_null(0)) == 0
            self.values += int(empty.sum())
            self.missing += int(empty.sum())
            values = values.flatten()
        self.values += len(values)
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            numbers, null = numbers_of(values)
            self.missing += int(null.sum())
            if null.any():
                values = values.filter(pa.array(~null))
                numbers = numbers[~null]
            if len(numbers):
                self._moments.add(values, context)
                self._widen(float(numbers.min()), float(numbers.max()))
        else:
            self.missing += values.null_count
        self.distinct.add(values)

    def merge(self, later: ColumnProfile) -> None:
        """Add the rows of `later`."""
        self.values += later.values
        self.missing += later.missing
        self.types.update(later.types)
        self.distinct.merge(later.distinct)
        self._moments.merge(later._moments)
        self._widen(later.low, later.high)

    def _widen(self, low: float, high: float) -> None:
        self.low = float(np.fmin(self.low, low))
        self.high = float(np.fmax(self.high, high))


@dataclass
class PartProfile:
    """The rows of a part: `train` or `valid`.

    Attributes:
        rows: their number.
        positives: the sum of each label.
        timeline: rows and sums of the labels over time; empty without a time column.
        pieces: without a time column, rows and sums of the labels of pieces of the data, in order.
        ids: by id feature that ends with a `Map`, its ids, and those that the vocabulary lacks.
    """

    rows: int
    positives: dict[str, float]
    timeline: Timeline
    pieces: list[list[float]] = field(default_factory=list)
    ids: dict[str, tuple[int, int]] = field(default_factory=dict)

    def merge(self, later: PartProfile) -> None:
        """Add the rows of `later`."""
        self.rows += later.rows
        for name, total in later.positives.items():
            self.positives[name] += total
        self.timeline.merge(later.timeline)
        self.pieces += later.pieces
        for name, (num_ids, num_unknown) in later.ids.items():
            before_ids, before_unknown = self.ids.get(name, (0, 0))
            self.ids[name] = (before_ids + num_ids, before_unknown + num_unknown)


class Profile:
    """What the report of a preparation shows about its rows.

    Attributes:
        columns: by raw column.
        parts: by name of the part.
        dense: by dense feature, the distribution of its values as the model gets them.
        amounts: the labels that have other values than 0 and 1.
        sample: rows with their labels.
    """

    def __init__(self, raw: Schema) -> None:
        self.columns: dict[str, ColumnProfile] = {}
        self.parts: dict[str, PartProfile] = {}
        self.dense: dict[str, Quantiles] = {}
        self.amounts: dict[str, None] = {}
        self.sample = LabelSample()
        self._labels = [label.name for label in raw.labels]
        self._mapped = [
            column.name
            for column in raw.ids
            if column.transforms and isinstance(column.transforms[-1], Map)
        ]

    def add(self, part: str, rows: pa.RecordBatch, batch: Batch) -> None:
        """Add rows of one part.

        Args:
            part: its name.
            rows: raw and derived columns.
            batch: the same rows, encoded.
        """
        context = Columns(rows)
        for name in rows.schema.names:
            column = self.columns.setdefault(name, ColumnProfile())
            column.add(context.column(name), context)
        self._add_part(part, batch)
        self._add_dense(batch.dense, context)

    def merge(self, later: Profile) -> None:
        """Add the rows of `later`, which lie behind those of this profile."""
        for name, column in later.columns.items():
            self.columns.setdefault(name, ColumnProfile()).merge(column)
        for name, part in later.parts.items():
            if name in self.parts:
                self.parts[name].merge(part)
            else:
                self.parts[name] = part
        self.amounts.update(later.amounts)
        self.sample.merge(later.sample)
        for name, quantiles in later.dense.items():
            self._quantiles(name).merge(quantiles)

    def _add_part(self, name: str, batch: Batch) -> None:
        labels = [batch.labels[label].astype(np.float64) for label in self._labels]
        for label, values in zip(self._labels, labels, strict=True):
            if not np.isin(values, (0.0, 1.0)).all():
                self.amounts[label] = None
        numbers = np.stack([np.ones(batch.num_samples), *labels], axis=1)
        totals = numbers.sum(axis=0).tolist()
        positives = dict(zip(self._labels, totals[1:], strict=True))
        part = PartProfile(batch.num_samples, positives, Timeline(len(totals)))
        if batch.time is None:
            starts = range(0, batch.num_samples, PIECE_ROWS)
            part.pieces = np.add.reduceat(numbers, starts, axis=0).tolist()
        else:
            part.timeline.add(batch.time, numbers)
        for feature in self._mapped:
            ids = batch.ids[feature].values
            num_unknown = len(ids) - int(np.count_nonzero(ids))
            part.ids[feature] = (len(ids), num_unknown)
        if name in self.parts:
            self.parts[name].merge(part)
        else:
            self.parts[name] = part

    def _add_dense(self, dense: Mapping[str, np.ndarray], context: Columns) -> None:
        for name, values in dense.items():
            flat = values.reshape(-1)
            step = max(1, len(flat) // SAMPLE_ROWS)
            sample = pa.array(flat[::step])
            self._quantiles(name).add(sample, context)

    def _quantiles(self, name: str) -> Quantiles:
        if name not in self.dense:
            shares = [number / NUM_QUANTILES for number in range(NUM_QUANTILES + 1)]
            self.dense[name] = Quantiles(shares)
        return self.dense[name]
