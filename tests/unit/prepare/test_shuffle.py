# SPDX-License-Identifier: Apache-2.0
"""The shuffle against plain Python lists: any partitions, any number of buckets."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.embedding.hashing import mix64
from hotbed.prepare.shuffle import BucketShuffle, Side, buckets_for

Partitions = list[list[list[int | None]]]

partitions = st.lists(
    st.lists(st.lists(st.none() | st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1))),
    max_size=4,
)


def write(shuffle: BucketShuffle, data: Partitions) -> None:
    """Write keys with their number in the chunk and a text; a missing key is left out."""
    for number in reversed(range(len(data))):  # tasks end in any order
        with shuffle.writer(number) as writer:
            for chunk in data[number]:
                rows = [row for row, key in enumerate(chunk) if key is not None]
                keys = np.array([chunk[row] for row in rows], np.int64)
                columns = {
                    "key": keys,
                    "row": np.array(rows, np.uint32),
                    "text": pa.array([f"{number} {row}" for row in rows], pa.large_string()),
                }
                writer.write(keys, pa.RecordBatch.from_pydict(columns))


@given(partitions, st.integers(1, 5))
def test_shuffle_gives_all_rows_of_a_key_to_one_bucket_in_their_order(
    data: Partitions, num_buckets: int
) -> None:
    expected = defaultdict(list)
    for number, partition in enumerate(data):
        for chunk in partition:
            for row, key in enumerate(chunk):
                if key is not None:
                    expected[key].append((row, f"{number} {row}"))
    with tempfile.TemporaryDirectory() as folder:
        shuffle = BucketShuffle(Path(folder), num_buckets)
        write(shuffle, data)
        by_key = defaultdict(list)
        sorted_keys: list[int] = []
        for bucket in shuffle.buckets():
            rows = shuffle.read(bucket).rows.to_pylist()
            keys = {row["key"] for row in rows}
            assert not keys & by_key.keys()
            for row in rows:
                by_key[row["key"]].append((row["row"], row["text"]))
            sorted_keys += sorted(keys, key=lambda key: int(mix64(np.array([key]))[0]))
    assert by_key == expected
    hashes = mix64(np.array(sorted_keys, np.int64))
    assert (np.sort(hashes) == hashes).all()


@given(partitions, st.integers(1, 5))
def test_side_gives_back_what_buckets_computed_for_each_row(
    data: Partitions, num_buckets: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shuffle = BucketShuffle(Path(folder) / "shuffle", num_buckets)
        write(shuffle, data)
        side = Side(Path(folder) / "side", num_buckets)
        for number in reversed(shuffle.buckets()):
            bucket = shuffle.read(number)
            columns = {}
            if bucket.rows.num_columns:
                texts = bucket.rows.column("text").to_pylist()
                columns["text"] = pa.array([f"<{text}>" for text in texts], pa.large_string())
                lists = [[key, key] for key in bucket.rows.column("key").to_pylist()]
                columns["keys"] = pa.array(lists, pa.large_list(pa.int64()))
            side.write(number, bucket, columns)
        for number, partition in enumerate(data):
            reader = side.reader(number)
            for place, chunk in enumerate(partition):
                columns = reader.read(place, len(chunk)).to_pydict()
                texts = [f"<{number} {row}>" for row in range(len(chunk))]
                keys = [None if key is None else [key, key] for key in chunk]
                absent = [key is None for key in chunk]
                assert columns["keys"] == keys
                assert columns["text"] == [
                    None if is_absent else text
                    for is_absent, text in zip(absent, texts, strict=True)
                ]


def test_a_second_attempt_of_a_partition_replaces_the_first(tmp_path: Path) -> None:
    shuffle = BucketShuffle(tmp_path, 2)
    write(shuffle, [[[1, 2, 3]], [[4]]])
    write(shuffle, [[[1]]])
    keys: list[int] = []
    for bucket in shuffle.buckets():
        keys += shuffle.read(bucket).rows.column("key").to_pylist()
    assert sorted(keys) == [1, 4]


@pytest.mark.parametrize(
    ("num_bytes", "memory", "workers", "buckets"),
    [(0, 4 << 30, 2, 1), (1 << 40, 1, 1, 4096), (48 << 20, 96 << 20, 2, 12)],
)
def test_buckets_are_as_many_as_the_memory_asks_for(
    num_bytes: int, memory: int, workers: int, buckets: int
) -> None:
    assert buckets_for(num_bytes, memory, workers) == buckets
