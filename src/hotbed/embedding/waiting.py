# SPDX-License-Identifier: Apache-2.0
"""Counts of the ids that wait for admission: from native tables to record batches, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .policy import PARTITIONS

Generation = tuple[int, int, NDArray[np.uint32]]
"""Of a sketch: the bits of a cell, the time of the newest id, and the cells."""


def candidate_batches(
    candidates_of: Callable[[int], Mapping[str, Any]],
    plain_sketch_of: Callable[[int], NDArray[np.uint32]],
) -> Iterator[pa.RecordBatch]:
    """Yield the candidates of each partition, or the counters of its plain sketch, if it has any.

    Columns: partition, id, count, last_seen; `id` of a counter is its number.
    """
    for partition in range(PARTITIONS):
        columns = candidates_of(partition)
        plain = plain_sketch_of(partition)
        if len(plain):
            times = np.zeros(len(plain), np.int64)
            columns = {"id": np.arange(len(plain)), "count": plain, "last_seen": times}
        num_rows = len(columns["id"])
        if num_rows:
            values = {name: pa.array(columns[name]) for name in ("id", "count", "last_seen")}
            yield pa.record_batch({"partition": _number(partition, num_rows), **values})


def sketch_batches(sketch_of: Callable[[int], Sequence[Generation]]) -> Iterator[pa.RecordBatch]:
    """Yield the sketch of each partition where one has begun, a row for each generation.

    Columns: partition, generation (0 = the younger), bits, newest, cells.
    """
    for partition in range(PARTITIONS):
        generations = sketch_of(partition)
        if not generations:
            continue
        cells = np.concatenate([words.view(np.uint8) for _, _, words in generations])
        num_bytes = len(cells) // len(generations)
        columns = {
            "partition": _number(partition, len(generations)),
            "generation": pa.array(range(len(generations)), pa.uint8()),
            "bits": pa.array([bits for bits, _, _ in generations], pa.uint8()),
            "newest": pa.array([newest for _, newest, _ in generations], pa.int64()),
            "cells": pa.FixedSizeListArray.from_arrays(pa.array(cells), num_bytes),
        }
        yield pa.record_batch(columns)


def load_candidates(native: Any, batches: Iterable[pa.RecordBatch], *, is_plain: bool) -> None:
    """Load batches of `candidate_batches` into a native table.

    `is_plain`: whether they hold the counters of plain sketches.
    """
    for batch in batches:
        count = batch.column("count").to_numpy()
        if is_plain:
            native.load_plain_sketch(batch.column("partition")[0].as_py(), count)
        else:
            ids = batch.column("id").to_numpy()
            native.load_candidates(ids, count, batch.column("last_seen").to_numpy())


def load_sketch(native: Any, batches: Iterable[pa.RecordBatch]) -> None:
    """Load batches of `sketch_batches`, also of another size, number of bits or generations."""
    for batch in batches:
        names = ("partition", "generation", "bits", "newest")
        numbers = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        cells = batch.column("cells").flatten().to_numpy()
        for row, words in zip(numbers, np.split(cells, batch.num_rows), strict=True):
            native.load_sketch(*row, words.view(np.uint32))


def _number(partition: int, n: int) -> pa.Array:
    return pa.array(np.full(n, partition, np.uint8))
