# SPDX-License-Identifier: Apache-2.0
"""Statistics of a number by key: what `TargetEncode` and `JoinGroupby` learn.

A chunk gives partial sums of its rows, a bucket adds those of its keys in the order of the chunks.
Sums are float64 and are taken one after another, so that they have the same bits on any machine.
The keys of a bucket are sorted by `mix64`: so are those of all buckets, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.arrays import as_numpy, nulls_of
from hotbed.data.columns import distinct_ids
from hotbed.embedding.hashing import mix64
from hotbed.prepare.keyed.derive import Histories

Floats = NDArray[np.float64]
Keys = NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """The different keys of rows, sorted by their hashes.

    `keys`: int64 [k]. `numbers`: of each row, its key's place in `keys`, int64 [n].
    """

    keys: Keys
    numbers: NDArray[np.int64]

    @classmethod
    def of(cls, keys: Keys) -> Groups:
        """Return the groups of the keys of rows, int64 [n]."""
        distinct, numbers = distinct_ids(keys)
        order = np.argsort(mix64(distinct))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return cls(distinct[order], places[numbers])

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the values of each key, added one after another, float64 [k]."""
        return _summed(self.numbers, values, len(self.keys))

    def least(self, values: Floats) -> Floats:
        """Return the least value of each key, float64 [k]."""
        least = np.full(len(self.keys), np.inf)
        np.minimum.at(least, self.numbers, values)
        return least


def _summed(cells: NDArray[np.int64], values: NDArray[np.generic], num_cells: int) -> Floats:
    """Return the sum of the values of each cell, added one after another, float64."""
    sums = np.bincount(cells, values, num_cells)
    return sums.astype(np.float64)  # NumPy counts in integers if it has no values


# --- the mean of a label, without the rows of a fold ---------------------------------------------


def fold_sums(
    keys: Keys, labels: Floats, folds: NDArray[np.int64], num_folds: int
) -> pa.RecordBatch:
    """Return the number of rows and the sum of the labels of each key and fold.

    Args:
        keys: int64 [n].
        labels: float64 [n].
        folds: 0 .. `num_folds` - 1, int64 [n].
        num_folds: with 1, all rows are in fold 0.
    """
    groups = Groups.of(keys)
    cells = groups.numbers * num_folds + folds
    num_cells = len(groups.keys) * num_folds
    counts = np.bincount(cells, minlength=num_cells)
    sums = _summed(cells, labels, num_cells)
    filled = np.flatnonzero(counts)
    return pa.RecordBatch.from_pydict(
        {
            "key": groups.keys[filled // num_folds],
            "fold": (filled % num_folds).astype(np.uint16),
            "count": counts[filled],
            "sum": sums[filled],
        }
    )


@dataclass(frozen=True)
class Means:
    """Smoothed means of a label by key.

    `keys`: int64 [k], by hash. `all_rows`: over all rows, float64 [k]. `out_of_fold`: over the rows
    outside of each fold, float64 [k, folds].
    """

    keys: Keys
    all_rows: Floats
    out_of_fold: Floats


def smoothed_means(sums: pa.Table, num_folds: int, prior: float, smooth: float) -> Means:
    """Return (sum + smooth * prior) / (count + smooth) of each key of a bucket.

    Args:
        sums: partial sums as of `fold_sums`, in the order of their chunks.
        num_folds: as in `fold_sums`.
        prior: the mean of the label over all training rows.
        smooth: how many rows with the label `prior` are added.
    """
    groups = Groups.of(sums.column("key").to_numpy())
    cells = groups.numbers * num_folds + sums.column("fold").to_numpy()
    shape = (len(groups.keys), num_folds)
    num_cells = shape[0] * num_folds
    fold_counts = _summed(cells, sums.column("count").to_numpy(), num_cells)
    fold_totals = _summed(cells, sums.column("sum").to_numpy(), num_cells)
    counts, other_counts = _without_each(fold_counts.reshape(shape))
    totals, other_totals = _without_each(fold_totals.reshape(shape))
    return Means(
        groups.keys,
        smoothed(totals, counts, prior, smooth),
        smoothed(other_totals, other_counts, prior, smooth),
    )


def smoothed(sums: Floats, counts: Floats, prior: float, smooth: float) -> Floats:
    """Return (sum + smooth * prior) / (count + smooth); the prior if there is not any row."""
    rows = counts + smooth
    means = np.full(sums.shape, prior)
    np.divide(sums + smooth * prior, rows, out=means, where=counts > 0)
    return means


def _without_each(values: Floats) -> tuple[Floats, Floats]:
    """Return the sum of the columns, [k], and for each column the sum of the others, [k, f].

    The sum of the others does not come from a difference: no bit depends on the column itself.
    """
    num_keys, num_folds = values.shape
    others = np.zeros(values.shape)
    before = np.zeros(num_keys)
    for fold in range(num_folds):
        others[:, fold] = before
        before = before + values[:, fold]
    after = np.zeros(num_keys)
    for fold in reversed(range(num_folds)):
        others[:, fold] += after
        after = after + values[:, fold]
    return before, others


# --- the mean of a label over earlier rows --------------------------------------------------------


def earlier_means(rows: pa.Table, prior: float, smooth: float) -> Floats:
    """Return the smoothed mean of the label over the strictly earlier rows of each row's key.

    A row without a time gets the prior and is earlier than no other row.

    Args:
        rows: all rows of a bucket: `key`, `time` (numbers that order the rows), `label`.
        prior: the mean of the label over all training rows.
        smooth: how many rows with the label `prior` are added.

    Returns:
        float64 [n], in the order of `rows`.
    """
    has_time = ~nulls_of(rows.column("time"))
    dated = rows.filter(pa.array(has_time))
    histories = Histories.of(dated)
    labels = as_numpy(dated.column("label"))[histories.order]
    frame = pl.DataFrame({"key": histories.keys, "label": labels})
    # each key on its own, so that no bit depends on the other keys of the bucket
    sums_until = frame.select(pl.col("label").cum_sum().over("key"))["label"].to_numpy()
    last_before = np.maximum(histories.moments - 1, 0)
    counts = histories.moments - histories.keys
    sums = np.zeros(len(counts))
    np.copyto(sums, sums_until[last_before], where=counts > 0)
    dated_means = smoothed(sums, counts.astype(np.float64), prior, smooth)
    means = np.full(rows.num_rows, prior)
    means[has_time] = as_numpy(histories.in_rows(dated_means))
    return means


# --- statistics of a column -----------------------------------------------------------------------


def group_parts(keys: Keys, values: Floats) -> pa.RecordBatch:
    """Return count, sum, squares, least and most of the values of each key.

    `squares` is the sum of the squared distances from the mean of the key's values in this chunk.

    Args:
        keys: int64 [n].
        values: float64 [n], without NaN.
    """
    groups = Groups.of(keys)
    counts = groups.sums(np.ones(len(values)))
    sums = groups.sums(values)
    means = sums / counts
    return pa.RecordBatch.from_pydict(
        {
            "key": groups.keys,
            "count": counts,
            "sum": sums,
            "squares": groups.sums(np.square(values - means[groups.numbers])),
            "least": groups.least(values),
            "most": -groups.least(-values),
        }
    )


def group_statistic(parts: pa.Table, statistic: str) -> tuple[Keys, Floats]:
    """Return the keys of a bucket, sorted by hash, and a statistic of each.

    Args:
        parts: as of `group_parts`, in the order of their chunks.
        statistic: count, sum, mean, min, max, or std (the squares divided by the count - 1; NaN for
            a single value).
    """
    groups = Groups.of(parts.column("key").to_numpy())
    if statistic == "min":
        return groups.keys, groups.least(parts.column("least").to_numpy())
    if statistic == "max":
        return groups.keys, -groups.least(-parts.column("most").to_numpy())
    part_counts = parts.column("count").to_numpy()
    counts = groups.sums(part_counts)
    if statistic == "count":
        return groups.keys, counts
    part_sums = parts.column("sum").to_numpy()
    sums = groups.sums(part_sums)
    if statistic == "sum":
        return groups.keys, sums
    least = groups.least(parts.column("least").to_numpy())
    most = -groups.least(-parts.column("most").to_numpy())
    is_constant = least == most  # no rounding of sums gets into its mean
    means = np.where(is_constant, least, sums / counts)
    if statistic == "mean":
        return groups.keys, means
    distances = part_sums / part_counts - means[groups.numbers]
    between = groups.sums(part_counts * np.square(distances))
    squares = groups.sums(parts.column("squares").to_numpy()) + between
    with np.errstate(divide="ignore", invalid="ignore"):
        variances = squares / (counts - 1)
    variances[is_constant & (counts > 1)] = 0.0
    return groups.keys, np.sqrt(variances)
