# SPDX-License-Identifier: Apache-2.0
"""Vocabularies out of core against a plain dict: any chunks, buckets and sizes of runs."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import SchemaError
from hotbed.prepare.keyed.vocabulary import count_values, frequent_first, run_of, sum_counts
from hotbed.prepare.shuffle import BatchReader, BatchWriter, BucketShuffle

words = st.none() | st.text("abcß", max_size=2)
numbers = st.none() | st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1)


def learned(
    chunks: list[pa.Array],
    num_buckets: int,
    min_count: int = 1,
    max_size: int | None = None,
    run_rows: int = 2,
) -> list[dict[str, Any]]:
    """Return the vocabulary of all chunks, through files."""
    with tempfile.TemporaryDirectory() as folder:
        shuffle = BucketShuffle(Path(folder) / "shuffle", num_buckets)
        for number, chunk in enumerate(chunks):
            counts = count_values(chunk, "x")
            with shuffle.writer(number) as writer:
                writer.write(counts.column("key").to_numpy(), counts)
        runs = []
        for bucket in shuffle.buckets():
            rows = shuffle.read(bucket).rows
            path = Path(folder) / f"{bucket}.run"
            with BatchWriter(path) as file:
                if rows.num_columns:
                    for batch in run_of(sum_counts(rows), min_count, max_size, run_rows):
                        file.write(batch)
            runs.append(BatchReader(path))
        merged: list[dict[str, Any]] = []
        for part in frequent_first(runs):
            merged += part.to_dicts()
        return merged[:max_size]


@given(
    st.sampled_from([(words, pa.string()), (words, pa.binary()), (numbers, pa.int64())]).flatmap(
        lambda kind: st.tuples(
            st.lists(st.lists(kind[0], max_size=20), max_size=4), st.just(kind[1])
        )
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
def test_vocabulary_equals_that_of_a_counter(
    values: tuple[list[list[Any]], pa.DataType],
    num_buckets: int,
    run_rows: int,
    min_count: int,
    max_size: int | None,
) -> None:
    chunks, kind = values
    arrays = [pa.array(chunk).cast(kind) for chunk in chunks]
    counts = Counter(value for array in arrays for value in array.to_pylist() if value is not None)
    frequent = [(-count, value) for value, count in counts.items() if count >= min_count]
    expected = [(value, -count) for count, value in sorted(frequent)][:max_size]
    rows = learned(arrays, num_buckets, min_count, max_size, run_rows)
    assert [(row.get("word", row["key"]), row["count"]) for row in rows] == expected


@pytest.mark.parametrize("num_buckets", [1, 64])
def test_text_and_integers_in_one_vocabulary_are_rejected(num_buckets: int) -> None:
    with pytest.raises(SchemaError, match="expected values of one type, got text and integers"):
        learned([pa.array([1, 2, 3]), pa.array(["a", "b"])], num_buckets)
