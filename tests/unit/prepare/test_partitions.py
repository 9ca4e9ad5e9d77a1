# SPDX-License-Identifier: Apache-2.0
"""Partitions: each row of a source once, in order, in chunks and at places that never change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from hotbed.connectors.read_plan import ReadPlan
from hotbed.errors import ConfigError, DecodeError
from hotbed.prepare import partitions
from hotbed.prepare.partitions import Partition
from hotbed.prepare.places import Purpose, folds_of, hash_places, shares_of

pytestmark = pytest.mark.core
partitions_of = partial(partitions.partitions_of, chunk_rows=7)


def table(first: int, count: int) -> pl.DataFrame:
    numbers = np.arange(first, first + count)
    return pl.DataFrame({"row": numbers, "key": numbers % 3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows 0 to 99 in files of 40, 0, 45 and 15 rows, and a table of keys."""
    table(0, 40).write_csv(tmp_path / "0.csv")
    table(40, 0).write_csv(tmp_path / "1.csv")
    table(40, 45).write_csv(tmp_path / "2.csv")
    table(0, 40).write_parquet(tmp_path / "0.parquet", row_group_size=16)
    table(40, 45).write_parquet(tmp_path / "2.parquet", row_group_size=100)
    table(85, 15).write_parquet(tmp_path / "3.parquet", row_group_size=15)
    pl.DataFrame({"key": [0, 1, 2], "word": ["a", "b", "c"]}).write_csv(tmp_path / "keys.csv")
    return tmp_path


def sources(folder: Path) -> dict[str, hb.sources.Source]:
    csv = hb.sources.Csv(str(folder / "[0-9].csv"))
    parquet = hb.sources.Parquet(str(folder / "[0-9].parquet"))
    keys = hb.sources.Csv(str(folder / "keys.csv"))
    last = hb.sources.Parquet(str(folder / "3.parquet"))
    return {
        "csv": csv,
        "parquet": parquet,
        "join": parquet.join(keys, on="key"),
        "concat": hb.sources.Concat([csv, last]),
        "slice": parquet.slice(10, 90),
        "memory": hb.sources.Memory(table(0, 30)),
    }


NUM_PARTITIONS = {"csv": 3, "parquet": 5, "join": 5, "concat": 4, "slice": 1, "memory": 1}


@pytest.mark.parametrize("kind", NUM_PARTITIONS)
def test_chunks_hold_all_rows_of_a_source_in_order(folder: Path, kind: str) -> None:
    source = sources(folder)[kind]
    expected = [row for batch, _ in source.read() for row in batch.to_pylist()]
    parts = partitions_of(source)
    assert len(parts) == NUM_PARTITIONS[kind]
    assert [part.number for part in parts] == list(range(len(parts)))
    rows = []
    for part in parts:
        chunks = list(part.chunks())
        assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
        assert all(len(chunk) == 7 for chunk in chunks[:-1])
        rows += [row for chunk in chunks for row in chunk.rows.to_pylist()]
    assert rows == expected


def test_places_count_the_rows_of_a_file_over_its_row_groups(folder: Path) -> None:
    places: dict[int, list[int]] = {}
    rows: dict[int, list[int]] = {}
    for part in partitions_of(sources(folder)["parquet"]):
        for chunk in part.chunks(ReadPlan(("row",))):
            places.setdefault(part.file, []).extend(chunk.places.tolist())
            rows.setdefault(part.file, []).extend(chunk.rows.column("row").to_pylist())
    assert [len(numbers) for numbers in places.values()] == [40, 45, 15]
    for numbers in places.values():
        assert numbers == list(range(len(numbers)))
    assert rows[1][0] == 40


def test_place_of_a_row_is_named_as_people_count(folder: Path) -> None:
    csv = partitions_of(sources(folder)["csv"])[0]
    assert str(csv.place(4)) == f"{folder / '0.csv'}, line 6"
    parquet = partitions_of(sources(folder)["join"])[0]
    assert str(parquet.place(4)) == f"{folder / '0.parquet'}, row 5"


def test_torn_parquet_file_is_named(folder: Path) -> None:
    torn = folder / "2.parquet"
    torn.write_bytes(torn.read_bytes()[:-10])
    parts = partitions_of(sources(folder)["parquet"])
    with pytest.raises(DecodeError, match=r"2\.parquet: not a whole parquet file"):
        list(parts[-2].chunks())


def test_endless_source_is_refused() -> None:
    source = hb.sources.Kafka("localhost:9092", "clicks")
    with pytest.raises(ConfigError, match="a preparation needs a source that ends"):
        partitions_of(source)


def test_hashes_of_places_are_even_and_independent() -> None:
    rows = np.arange(100_000)
    hashes = [
        hash_places(file, rows, seed, purpose)
        for file in (0, 1)
        for seed in (0, 1)
        for purpose in (Purpose.FOLDS, Purpose.SPLIT)
    ]
    assert len(np.unique(np.concatenate(hashes))) == 8 * len(rows)
    shares = [shares_of(own) for own in hashes]
    folds = np.bincount(folds_of(hashes[0], 5))
    assert np.abs(folds / len(rows) - 0.2).max() < 0.01
    for number, own in enumerate(shares):
        assert np.abs(np.histogram(own, 20, (0, 1))[0] / len(rows) - 0.05).max() < 0.005
        for other in shares[:number]:
            assert abs(np.corrcoef(own, other)[0, 1]) < 0.02


def test_hashes_of_a_place_do_not_depend_on_its_chunk() -> None:
    whole = hash_places(3, np.arange(50), 7)
    assert (hash_places(3, np.arange(20, 30), 7) == whole[20:30]).all()


def test_partition_of_no_rows_has_no_chunks() -> None:
    source = hb.sources.Memory(table(0, 0))
    assert list(Partition(0, source).chunks()) == []
