# SPDX-License-Identifier: Apache-2.0
"""Vocabularies: how often each value occurs, most frequent first, out of core.

A chunk gives the counts of its values, a bucket one sorted run of the values whose hashes it holds,
and `frequent_first` merges the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.arrays import as_numpy, nulls_of, series_of
from hotbed.data.arrow_types import is_bytes
from hotbed.data.columns import ids_of
from hotbed.errors import SchemaError
from hotbed.prepare.shuffle import BatchReader


def count_values(values: pa.Array, name: str) -> pa.RecordBatch:
    """Return the number of rows of each value; missing values are left out.

    Args:
        values: integers or text; text may be a dictionary.
        name: of the column, for messages.

    Returns:
        Columns `key` (the id, int64), `count` and, for text, `word`.

    Raises:
        SchemaError: the values cannot be ids.
    """
    if pa.types.is_dictionary(values.type):
        words, counts = _counts_of_dictionary(values)
    else:
        words, counts = _counts_of(values)
    columns = {"key": ids_of(words, name), "count": counts}
    if is_bytes(words.type):
        is_text = pa.types.is_string(words.type) or pa.types.is_large_string(words.type)
        columns["word"] = words.cast(pa.large_string() if is_text else pa.large_binary())
    return pa.RecordBatch.from_pydict(columns)


def _counts_of(values: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the different values, without null, and how often each occurs."""
    kind = values.type
    counts = series_of("value", values.drop_null()).value_counts(name="count")
    different = counts["value"].to_arrow().cast(kind)
    return different, counts["count"].to_numpy().astype(np.int64)


def _counts_of_dictionary(values: pa.DictionaryArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the words that occur, without null, and how often; a word may come twice."""
    words = values.dictionary
    places = as_numpy(values.indices.drop_null())
    counts = np.bincount(places, minlength=len(words))
    counts[nulls_of(words)] = 0
    present = np.flatnonzero(counts)
    return words.take(pa.array(present)), counts[present]


def sum_counts(counts: pa.Table | pa.RecordBatch) -> pl.DataFrame:
    """Return the sum of the counts of each key, in any order.

    Raises:
        SchemaError: some of the values are text, others are integers.
    """
    frame = _frame(counts)
    sums = [pl.col("count").sum()]
    if "word" in frame.columns:
        if frame["word"].null_count():
            raise mixed_types()
        sums.append(pl.col("word").min())  # for two words of one id
    return frame.group_by("key").agg(sums)


def run_of(
    counts: pl.DataFrame, min_count: int, max_size: int | None, batch_rows: int = 65_536
) -> Iterator[pa.RecordBatch]:
    """Yield the frequent keys of a bucket in the order of the vocabulary: a sorted run."""
    frequent = _in_order(counts.filter(pl.col("count") >= min_count)).slice(0, max_size)
    for part in frequent.iter_slices(batch_rows):
        yield _batch(part)


def frequent_first(runs: Sequence[BatchReader]) -> Iterator[pl.DataFrame]:
    """Merge sorted runs: yield all keys, most frequent first; of equal counts, the least first.

    Some record batches of each run are in memory.

    Raises:
        SchemaError: some of the values are text, others are integers.
    """
    waiting = [_Run(run) for run in runs if run.num_batches]
    if len({tuple(run.head.columns) for run in waiting}) > 1:
        raise mixed_types()
    while waiting:
        # rows behind the first end of a head may follow rows that are not read yet
        ends = [run.head.tail(1) for run in waiting if run.has_more]
        parts: list[pl.DataFrame] = []
        if not ends:
            parts = [run.head for run in waiting]
            waiting = []
        else:
            first_end = _in_order(pl.concat(ends)).row(0, named=True)
            parts = [run.take_until(first_end) for run in waiting]
            waiting = [run for run in waiting if len(run.head)]
        yield _in_order(pl.concat(parts))


class _Run:
    """A sorted run that is being merged. `head`: rows that were read and not yet taken."""

    def __init__(self, run: BatchReader) -> None:
        self._batches = iter(run)
        self._left: int = run.num_batches
        self.head = self._next()

    @property
    def has_more(self) -> bool:
        """Whether rows follow the head."""
        return self._left > 0

    def take_until(self, end: dict[str, Any]) -> pl.DataFrame:
        """Return the rows up to and with `end`, and read on if none are left."""
        value = _value(self.head)
        is_more_frequent = pl.col("count") > end["count"]
        is_before = (pl.col("count") == end["count"]) & (pl.col(value) <= end[value])
        num_rows = int(self.head.select((is_more_frequent | is_before).sum()).item())
        head = self.head.head(num_rows)
        self.head = self.head.slice(num_rows)
        if not len(self.head) and self.has_more:
            self.head = self._next()
        return head

    def _next(self) -> pl.DataFrame:
        self._left -= 1
        return _frame(next(self._batches))


def mixed_types() -> SchemaError:
    """Return the error for text and integers in one vocabulary."""
    return SchemaError(
        "a vocabulary: expected values of one type, got text and integers. Declare one type for "
        "the columns in the source."
    )


def _value(counts: pl.DataFrame) -> str:
    """Return the column by which equal counts are ordered."""
    if "word" in counts.columns:
        return "word"
    return "key"


def _in_order(counts: pl.DataFrame) -> pl.DataFrame:
    return counts.sort("count", _value(counts), descending=[True, False])


def _frame(counts: pa.Table | pa.RecordBatch) -> pl.DataFrame:
    if isinstance(counts, pa.RecordBatch):
        counts = pa.Table.from_batches([counts])
    frame = pl.from_arrow(counts)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _batch(counts: pl.DataFrame) -> pa.RecordBatch:
    columns = {
        "key": counts["key"].to_numpy().astype(np.int64),
        "count": counts["count"].to_numpy().astype(np.int64),
    }
    if "word" in counts.columns:
        words = counts["word"].to_arrow()
        columns["word"] = words
    return pa.RecordBatch.from_pydict(columns)


class WordsFile:
    """The words of a vocabulary with their counts and ids, for people."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> WordsFile:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, counts: pl.DataFrame, num_before: int) -> None:
        """Append words, most frequent first; `num_before`: those that were written before."""
        values = counts["word"] if "word" in counts.columns else counts["key"]
        ids = np.arange(num_before + 1, num_before + 1 + len(counts))
        table = pa.table(
            {"value": values.to_arrow(), "count": counts["count"].to_arrow(), "id": ids}
        )
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
