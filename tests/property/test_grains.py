# SPDX-License-Identifier: Apache-2.0
"""Whatever the source, the order and the batch size: the grains of a batch have the rows that a
plain list of rows gives them, and any position resumes exactly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hotbed.connectors import Concat, Memory, Norm, Parquet, Prepared, Raw, Source
from hotbed.connectors.prepared import WORKFLOW_FILE, sealed
from hotbed.data import Batch, Dataset, Dense, Id, Label, Schema
from hotbed.files import digest_of

pytestmark = pytest.mark.core
SCHEMA = Schema([Label("label"), Id("row"), Dense("x")])
BAD = 7
"""Every seventh row has no x."""


def columns(begin: int, end: int, *, bad: bool = True) -> pa.Table:
    x = [None if bad and row % BAD == 0 else float(row) for row in range(begin, end)]
    columns = {"label": [0.0] * len(x), "row": range(begin, end), "x": pa.array(x, pa.float32())}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def in_memory(num_rows: int, folder: Path) -> Source:
    return Memory(columns(0, num_rows))


def of_parquet(num_rows: int, folder: Path) -> Source:
    for number, begin in enumerate(range(0, num_rows, 23)):
        rows = columns(begin, min(begin + 23, num_rows))
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=5)
    pq.write_table(columns(0, 0), folder / "9.parquet")
    return Parquet(str(folder / "*.parquet"))


def prepared(num_rows: int, folder: Path) -> Source:
    pq.write_table(columns(0, num_rows), folder / "a.parquet", row_group_size=9)
    path = folder / "a.parquet"
    entry = {"file": "a.parquet", "bytes": path.stat().st_size, "sha256": digest_of(str(path))}
    workflow = {"parts": {"train": {"rows": num_rows, "files": [entry]}}}
    (folder / WORKFLOW_FILE).write_text(json.dumps(sealed(workflow)))
    return Prepared(str(folder))


def of_norm(num_rows: int, folder: Path) -> Source:
    rows = columns(0, num_rows, bad=False)
    bags = pa.array([[row] for row in range(num_rows)], pa.list_(pa.int64()))
    dense = pa.FixedSizeListArray.from_arrays(rows["x"].combine_chunks(), 1)
    rows = rows.set_column(1, "row", bags).set_column(2, "x", dense)
    norm = Norm(folder / "0.norm", ["label"], ["row"], dense="x")
    norm.write(Memory(rows))
    return norm


def of_raw(num_rows: int, folder: Path) -> Source:
    layout: Any = {"num_dense": 1, "slots": {"row": 1}, "dense_type": "float32", "dense": "x"}
    rows = columns(0, num_rows, bad=False)
    dense = pa.FixedSizeListArray.from_arrays(rows["x"].combine_chunks(), 1)
    label = pa.array([0] * num_rows, pa.int64())
    rows = rows.set_column(2, "x", dense).set_column(0, "label", label)
    Raw(folder / "0.raw", **layout).write(Memory(rows))
    return Raw(folder / "0.raw", **layout)


def combined(num_rows: int, folder: Path) -> Source:
    middle = num_rows // 3
    side = Memory({"label": [0.0], "more": [1]})
    first = Memory(columns(-5, num_rows)).slice(5, 5 + middle)
    return Concat([first, of_parquet(num_rows, folder).slice(middle)]).join(side, on="label")


MAKERS = [in_memory, of_parquet, prepared, of_norm, of_raw, combined]
HAS_BAD = {in_memory, of_parquet, prepared, combined}


def expected_runs(
    num_rows: int, bad: bool, grains: int, shuffle: int, cache: bool, epoch: int
) -> list[list[int]]:
    """The rows of each grain in their order."""
    sizes = [(num_rows + grain) // grains for grain in range(grains)]
    runs: list[list[int]] = []
    begin = 0
    for grain, size in enumerate(sizes):
        rows = [r for r in range(begin, begin + size) if not bad or r % BAD]
        begin += size
        buffer = -(-shuffle // grains)
        if cache and shuffle:
            order = np.random.default_rng((0, epoch, grain + 1)).permutation(len(rows))
            rows = [rows[place] for place in order]
        elif shuffle > 1:
            random = np.random.default_rng((0, epoch, grain + 1))
            ends = [random.integers(buffer // 2 + 1, buffer + 1), *[buffer] * len(rows)]
            shuffled: list[int] = []
            for number, end in enumerate(ends):
                part = rows[len(shuffled) : len(shuffled) + end]
                random = np.random.default_rng((0, epoch, number, grain + 1))
                shuffled += [part[place] for place in random.permutation(len(part))]
            rows = shuffled
        runs.append(rows)
    return runs


def expected_batches(
    runs: Sequence[list[int]], batch_size: int, drop_last: bool
) -> list[list[list[int]]]:
    grains = len(runs)
    batches: list[list[list[int]]] = []
    taken = [0] * grains
    number = 0
    while any(taken[grain] < len(runs[grain]) for grain in range(grains)):
        number += 1
        ends = [(number * batch_size + grain) // grains for grain in range(grains)]
        batches.append([run[begin:end] for run, begin, end in zip(runs, taken, ends, strict=True)])
        taken = ends
    if drop_last and batches and sum(map(len, batches[-1])) < batch_size:
        batches.pop()
    return [batch for batch in batches if any(batch)]


def runs_of(batch: Batch) -> list[list[int]]:
    rows = batch.ids["row"].values.tolist()
    begins = [0, *batch.grain_ends[:-1]]
    assert batch.grain_ends[-1] == batch.num_samples == len(rows)
    assert batch.dense["x"].reshape(-1).tolist() == rows
    return [rows[begin:end] for begin, end in zip(begins, batch.grain_ends, strict=True)]


@pytest.mark.parametrize("maker", MAKERS)
def test_grains_have_the_rows_of_their_ranges(maker: Callable[..., Source]) -> None:
    @settings(max_examples=settings.default.max_examples)
    @given(
        num_rows=st.sampled_from([0, 1, 3, 8, 30, 64, 100]),
        grains=st.sampled_from([2, 4, 8]),
        batch_size=st.sampled_from([1, 3, 8, 16, 50]),
        shuffle=st.sampled_from([0, 1, 20, 60]),
        cache=st.booleans(),
        drop_last=st.booleans(),
        epoch=st.integers(0, 2),
        data=st.data(),
    )
    def check(
        num_rows: int,
        grains: int,
        batch_size: int,
        shuffle: int,
        cache: bool,
        drop_last: bool,
        epoch: int,
        data: st.DataObject,
    ) -> None:
        assume(num_rows or maker is not of_norm)  # without a sample, its header has no dense value
        with tempfile.TemporaryDirectory() as folder:
            source = maker(num_rows, Path(folder))

            def make() -> Dataset:
                dataset = Dataset(
                    source,
                    SCHEMA,
                    batch_size,
                    shuffle,
                    drop_last=drop_last,
                    on_error="skip",
                    prefetch=0,
                    cache=cache,
                )
                dataset.divide(grains)
                return dataset

            bad = maker in HAS_BAD
            runs = expected_runs(num_rows, bad, grains, shuffle, cache, epoch)
            dataset = make()
            promised = dataset.num_batches
            batches = list(dataset.epoch(epoch))
            expected = expected_batches(runs, batch_size, drop_last)
            assert [runs_of(batch) for batch in batches] == expected
            assert dataset.num_rows == sum(map(len, runs))
            if not bad:
                assert len(batches) == promised
            if batches:
                number = data.draw(st.integers(0, len(batches) - 1))
                position = json.dumps(batches[number].position.to_json())
                resumed = make().resume(position)
                assert [runs_of(batch) for batch in resumed] == expected[number + 1 :]
                runs = expected_runs(num_rows, bad, grains, shuffle, cache, epoch + 1)
                following = expected_batches(runs, batch_size, drop_last)
                assert [runs_of(batch) for batch in resumed] == following

    check()


@pytest.mark.parametrize("grains", [1, 4])
def test_rows_of_a_stream_are_read_in_their_order(grains: int) -> None:
    """A pass in the order of events, as `online_train` makes, is not divided by ranges of rows."""
    dataset = Dataset(Memory(columns(0, 50, bad=False)), SCHEMA, 16)
    dataset.divide(grains)
    batches = [batch for batch in dataset.stream() if batch is not None]
    assert [row for batch in batches for row in batch.ids["row"].values.tolist()] == [*range(50)]
    assert all(batch.grain_ends == () for batch in batches)
