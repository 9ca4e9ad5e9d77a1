# SPDX-License-Identifier: Apache-2.0
"""Columns that tell the label by themselves: nearly always a leak, such as an outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.data.arrays import as_numpy, numbers_of
from hotbed.data.arrow_types import is_list
from hotbed.data.columns import ids_of
from hotbed.embedding.hashing import Uint64Array

MOST_AUC = 0.8
"""A column that alone has an AUC above this is reported."""

LEAST_ROWS = 1000
LEAST_OF_A_CLASS = 20
SAMPLE_ROWS = 16_384

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """A column, or whether an item is in a history, that tells a label by itself."""

    what: str
    label: str
    auc: float
    num_rows: int

    def __str__(self) -> str:
        return (
            f"{self.what} alone tells the label {self.label!r}, with an AUC of {self.auc:.3f} on "
            f"{self.num_rows:,} rows. Is it known before the label, and made alike for both?"
        )


class LabelSample:
    """A sample of the rows of a preparation, with their labels.

    The rows with the smallest hashes of their places are kept, so that the sample does not depend
    on the order of the rows. A positive and its negatives are kept together.
    """

    def __init__(self) -> None:
        self._limit = (1 << 64) - 1
        self._rows: pa.Table | None = None
        self._hashes = np.zeros(0, np.uint64)
        self._labels: dict[str, FloatArray] = {}

    def add(
        self, rows: pa.RecordBatch, labels: Mapping[str, FloatArray], hashes: Uint64Array
    ) -> None:
        """Add rows.

        Args:
            rows: raw and derived columns.
            labels: by name, [n].
            hashes: of the rows' places, [n].
        """
        sample = np.flatnonzero(hashes <= np.uint64(self._limit))
        later = LabelSample()
        later._limit = self._limit
        later._rows = _plain(pa.Table.from_batches([rows])).take(pa.array(sample))
        later._hashes = hashes[sample]
        later._labels = {name: values[sample].astype(np.float64) for name, values in labels.items()}
        self.merge(later)

    def merge(self, later: LabelSample) -> None:
        """Add the rows of `later`."""
        if later._rows is None:
            return
        self._limit = min(self._limit, later._limit)
        tables = [later._rows] if self._rows is None else [self._rows, later._rows]
        self._rows = pa.concat_tables(tables, promote_options="permissive")
        self._hashes = np.concatenate([self._hashes, later._hashes])
        for name, values in later._labels.items():
            before = self._labels.get(name, np.zeros(0))
            self._labels[name] = np.concatenate([before, values])
        while (self._hashes <= np.uint64(self._limit)).sum() > SAMPLE_ROWS:
            self._limit //= 2
        sample = np.flatnonzero(self._hashes <= np.uint64(self._limit))
        self._rows = self._rows.take(pa.array(sample))
        self._hashes = self._hashes[sample]
        self._labels = {name: values[sample] for name, values in self._labels.items()}

    def findings(
        self, columns: Sequence[str], histories: Sequence[tuple[str, str]]
    ) -> list[Finding]:
        """Return what tells a label by itself.

        Args:
            columns: the raw columns of the features.
            histories: pairs of a column of lists, and a column of items that the lists hold.
        """
        findings: list[Finding] = []
        if self._rows is None:
            return findings
        for label, values in self._labels.items():
            is_known = np.isin(values, (0.0, 1.0))
            num_positives = int((values == 1).sum())
            smaller = min(num_positives, len(values) - num_positives)
            is_enough = len(values) >= LEAST_ROWS and smaller >= LEAST_OF_A_CLASS
            if not is_known.all() or not is_enough:
                continue
            for what, area in self._areas(columns, histories, values > 0):
                if area > MOST_AUC:
                    findings.append(Finding(what, label, area, len(values)))
        return findings

    def _areas(
        self,
        columns: Sequence[str],
        histories: Sequence[tuple[str, str]],
        is_positive: NDArray[np.bool_],
    ) -> Iterator[tuple[str, float]]:
        """Yield the AUC of each column, and of whether the items are in their histories."""
        assert self._rows is not None
        names = self._rows.column_names
        for name in columns:
            if name in names:
                yield f"column {name!r}", self._area(name, is_positive)
        for history, item in histories:
            if history not in names or item not in names:
                continue
            if is_list(self._column(history).type) and not is_list(self._column(item).type):
                score = self._is_in(history, item).astype(np.float64)
                area = auc(score, is_positive)
                yield f"whether {item!r} is in {history!r}", max(area, 1 - area)

    def _area(self, name: str, is_positive: NDArray[np.bool_]) -> float:
        values = self._column(name)
        if is_list(values.type):
            lengths = as_numpy(pc.list_value_length(values).fill_null(-1)).astype(np.float64)
            area = auc(lengths, is_positive)
            return max(area, 1 - area)
        best = 0.5
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            numbers, is_missing = numbers_of(values)
            area = auc(np.where(is_missing, -np.inf, numbers), is_positive)
            best = max(area, 1 - area)
        return max(best, self._area_of_words(values, name, is_positive))

    def _area_of_words(self, values: pa.Array, name: str, is_positive: NDArray[np.bool_]) -> float:
        """Return the AUC of the rate of positives of each value in the other half of the rows."""
        words = ids_of(_as_key(values), name)
        words = np.where(np.asarray(values.is_null()), np.int64(-1), words)
        _, codes = np.unique(words, return_inverse=True)
        fold = (self._hashes & np.uint64(1)).astype(np.intp)
        counts = np.zeros((2, int(codes.max()) + 1))
        positives = np.zeros_like(counts)
        np.add.at(counts, (fold, codes), 1)
        np.add.at(positives, (fold, codes), is_positive)
        prior = is_positive.mean()
        rates = (positives + prior) / (counts + 1)
        areas = [
            auc(rates[1 - half, codes[fold == half]], is_positive[fold == half]) for half in (0, 1)
        ]
        return float(np.mean(areas))

    def _is_in(self, history: str, item: str) -> NDArray[np.bool_]:
        """Return for each row whether its item is in its history."""
        lists = self._column(history)
        parents = as_numpy(pc.list_parent_indices(lists))
        members = ids_of(_as_key(pc.list_flatten(lists)), history)
        items = ids_of(_as_key(self._column(item)), item)
        is_in = np.zeros(len(items), bool)
        is_in[parents[members == items[parents]]] = True
        return is_in

    def _column(self, name: str) -> pa.Array:
        assert self._rows is not None
        return self._rows.column(name).combine_chunks()


def auc(scores: FloatArray, is_positive: NDArray[np.bool_]) -> float:
    """Return the share of pairs of a positive and a negative that the scores put in order."""
    _, codes, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[codes]
    num_positives = int(is_positive.sum())
    num_pairs = num_positives * (len(scores) - num_positives)
    if not num_pairs:
        return 0.5
    above = ranks[is_positive].sum() - num_positives * (num_positives + 1) / 2
    return float(above / num_pairs)


def _plain(rows: pa.Table) -> pa.Table:
    """Return rows without dictionaries, which differ from chunk to chunk, and without views."""
    for place, field in enumerate(rows.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            rows = rows.set_column(place, field.name, rows.column(place).cast(kind))
    return rows


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _plain_type(kind.value_type)
        return kind if item == kind.value_type else pa.large_list(item)
    return kind


def _as_key(values: pa.Array) -> pa.Array:
    """Return values as integers or text, which have ids."""
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return values
    if pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return values.cast(pa.string())
    if pa.types.is_temporal(kind) and kind.bit_width == 64:
        return values.view(pa.int64())
    return pa.array([None if value is None else str(value) for value in values.to_pylist()])
