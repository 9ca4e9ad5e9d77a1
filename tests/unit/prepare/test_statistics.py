# SPDX-License-Identifier: Apache-2.0
"""Statistics by key against plain dicts: any chunks, any number of buckets."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.embedding.hashing import mix64
from hotbed.prepare.keyed.statistics import (
    earlier_means,
    fold_sums,
    group_parts,
    group_statistic,
    smoothed_means,
)
from hotbed.prepare.shuffle import BucketShuffle

FOLDS = 3

label = st.floats(-100, 100) | st.sampled_from([0.0, 1.0, 0.1])
row = st.tuples(st.integers(-3, 3), label, st.integers(0, FOLDS - 1), st.none() | st.integers(0, 5))
chunks = st.lists(st.lists(row, max_size=12), max_size=4)
Row = tuple[int, float, int, int | None]


def in_buckets(parts: list[pa.RecordBatch], num_buckets: int) -> list[pa.Table]:
    """Return the tables of all buckets with rows, through files."""
    with tempfile.TemporaryDirectory() as folder:
        shuffle = BucketShuffle(Path(folder), num_buckets)
        with shuffle.writer(0) as writer:
            for part in parts:
                writer.write(part.column("key").to_numpy(), part)
        tables = [shuffle.read(bucket).rows for bucket in shuffle.buckets()]
        return [table for table in tables if table.num_rows]


def columns_of(rows: list[Row]) -> tuple[Any, Any, Any, list[int | None]]:
    keys, labels, folds, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    return np.array(keys, np.int64), np.array(labels, float), np.array(folds, int), list(times)


def mean_by_hand(labels: list[float], prior: float, smooth: float) -> float:
    if not labels:
        return prior
    return (math.fsum(labels) + smooth * prior) / (len(labels) + smooth)


@given(chunks, st.integers(1, 4), st.sampled_from([0.0, 2.5]))
def test_smoothed_means_equal_those_of_a_dict(
    chunks_of_rows: list[list[Row]], num_buckets: int, smooth: float
) -> None:
    everything = [row for rows in chunks_of_rows for row in rows]
    parts = [fold_sums(*columns_of(rows)[:3], FOLDS) for rows in chunks_of_rows]
    keys: list[int] = []
    for table in in_buckets(parts, num_buckets):
        means = smoothed_means(table, FOLDS, 0.25, smooth)
        keys += means.keys.tolist()
        for number, key in enumerate(means.keys.tolist()):
            labels = [row[1] for row in everything if row[0] == key]
            expected = mean_by_hand(labels, 0.25, smooth)
            assert means.all_rows[number] == pytest.approx(expected, abs=1e-9)
            for fold in range(FOLDS):
                labels = [row[1] for row in everything if row[0] == key and row[2] != fold]
                expected = mean_by_hand(labels, 0.25, smooth)
                assert means.out_of_fold[number, fold] == pytest.approx(expected, abs=1e-9)
    assert sorted(keys) == sorted({row[0] for row in everything})
    hashes = mix64(np.array(keys, np.int64))
    assert (np.sort(hashes) == hashes).all()


@given(chunks.filter(lambda rows: any(rows)), st.floats(-100, 100))
def test_no_bit_of_a_mean_depends_on_labels_of_its_own_fold(
    chunks_of_rows: list[list[Row]], other: float
) -> None:
    def means(number: int | None) -> Any:
        parts = []
        for rows in chunks_of_rows:
            changed = [(row[0], other if row[2] == number else row[1], *row[2:]) for row in rows]
            parts.append(fold_sums(*columns_of(changed)[:3], FOLDS))
        (table,) = in_buckets(parts, 1)
        return smoothed_means(table, FOLDS, 0.25, 1.0).out_of_fold

    as_is = means(None)
    for fold in range(FOLDS):
        assert (means(fold)[:, fold] == as_is[:, fold]).all()


@given(chunks, st.integers(1, 4), st.sampled_from([0.0, 2.5]))
def test_earlier_means_equal_those_of_a_dict(
    chunks_of_rows: list[list[Row]], num_buckets: int, smooth: float
) -> None:
    everything = [row for rows in chunks_of_rows for row in rows]
    parts = []
    for rows in chunks_of_rows:
        keys, labels, _, times = columns_of(rows)
        columns = {"key": keys, "label": labels, "time": pa.array(times, pa.int64())}
        parts.append(pa.RecordBatch.from_pydict(columns))
    num_rows = 0
    for table in in_buckets(parts, num_buckets):
        means = earlier_means(table, 0.25, smooth)
        for mean, row in zip(means.tolist(), table.to_pylist(), strict=True):
            num_rows += 1
            time = row["time"]
            earlier = [
                label
                for key, label, _, before in everything
                if key == row["key"] and None not in (before, time) and before < time
            ]
            assert mean == pytest.approx(mean_by_hand(earlier, 0.25, smooth), abs=1e-9)
    assert num_rows == len(everything)


@given(chunks, st.integers(1, 4))
def test_group_statistics_equal_those_of_a_dict(
    chunks_of_rows: list[list[Row]], num_buckets: int
) -> None:
    by_key = defaultdict(list)
    for rows in chunks_of_rows:
        for key, value, _, _ in rows:
            by_key[key].append(value)
    by_hand = {
        "count": len,
        "sum": math.fsum,
        "mean": statistics.fmean,
        "min": min,
        "max": max,
        "std": lambda values: statistics.stdev(values) if len(values) > 1 else math.nan,
    }
    parts = [group_parts(*columns_of(rows)[:2]) for rows in chunks_of_rows]
    tables = in_buckets(parts, num_buckets)
    for statistic, function in by_hand.items():
        learned: dict[int, float] = {}
        for table in tables:
            keys, values = group_statistic(table, statistic)
            learned.update(zip(keys.tolist(), values.tolist(), strict=True))
        expected = {key: function(values) for key, values in by_key.items()}
        assert learned == pytest.approx(expected, abs=1e-9, nan_ok=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0.1, 0.7, 1e9 + 0.1]))
def test_equal_values_of_a_key_have_no_deviation(counts: list[int], value: float) -> None:
    parts = [group_parts(np.full(count, 7), np.full(count, value)) for count in counts]
    table = pa.Table.from_batches(parts)
    assert group_statistic(table, "mean")[1].tolist() == [value]
    if sum(counts) > 1:
        assert group_statistic(table, "std")[1].tolist() == [0.0]


@given(chunks)
def test_statistics_have_the_same_bits_for_any_number_of_buckets(
    chunks_of_rows: list[list[Row]],
) -> None:
    def bits(num_buckets: int) -> list[Any]:
        parts = [fold_sums(*columns_of(rows)[:3], FOLDS) for rows in chunks_of_rows]
        means = [smoothed_means(t, FOLDS, 0.1, 0.3) for t in in_buckets(parts, num_buckets)]
        values = [np.concatenate([[], *(mean.all_rows for mean in means)]).tobytes()]
        others = [mean.out_of_fold.reshape(-1) for mean in means]
        values.append(np.concatenate([[], *others]).tobytes())
        groups = [group_parts(*columns_of(rows)[:2]) for rows in chunks_of_rows]
        deviations = [group_statistic(t, "std")[1] for t in in_buckets(groups, num_buckets)]
        return [*values, np.concatenate([[], *deviations]).tobytes()]

    assert bits(1) == bits(3) == bits(7)
