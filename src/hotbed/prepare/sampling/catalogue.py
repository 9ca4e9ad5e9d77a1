# SPDX-License-Identifier: Apache-2.0
"""The items that negatives are drawn from, in files that tasks map into their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.columns import Columns, ids_of
from hotbed.embedding.hashing import Uint64Array, mix64
from hotbed.errors import DataError
from hotbed.prepare.sampling.draw import Weights, count_up_to, running_sum
from hotbed.prepare.sampling.order import Order
from hotbed.prepare.shuffle import Bucket

Int64Array = NDArray[np.int64]

_COUNTS = ("train", "valid")
_KEY = "key"
_TIME = "time"
_VALUE = "value "
"""The prefix of raw columns: their names cannot clash with those of the others."""


def item_rows(
    names: Sequence[str], rows: pa.RecordBatch, order: Order, is_valid: NDArray[np.bool_]
) -> tuple[Int64Array, pa.RecordBatch]:
    """Return the keys and the rows of a shuffle by item: one for each version of a chunk's items.

    A version is a run of an item's rows, in the order of their times, with the same values.

    Args:
        names: the raw columns of an item, itself first.
        rows: the raw rows of a chunk; those without an item or a time are left out.
        order: the times of the rows.
        is_valid: which rows are for validation, [n].
    """
    context = Columns(rows)
    items = context.column(names[0])
    times, without_time = order.times(rows)
    places = np.flatnonzero(~(np.asarray(items.is_null()) | without_time))
    arrays: dict[str, pa.Array] = {
        _KEY: pa.array(ids_of(items, names[0])[places]),
        _TIME: pa.array(times[places]),
    }
    for name, part in zip(_COUNTS, (~is_valid, is_valid), strict=True):
        arrays[name] = pa.array(part[places].astype(np.int64))
    for name in names:
        values = context.column(name)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        arrays[_VALUE + name] = values.take(pa.array(places))
    versions = _versions(pa.table(arrays))
    columns = {name: versions.column(name).combine_chunks() for name in versions.column_names}
    return versions.column(_KEY).to_numpy(), pa.RecordBatch.from_pydict(columns)


def items_of(bucket: Bucket) -> pa.Table:
    """Return the versions of a bucket's items in the order of (hash of the item, time)."""
    return _versions(bucket.rows)


def _versions(rows: pa.Table) -> pa.Table:
    """Return the first row of each version, with the counts of its rows."""
    keys = mix64(rows.column(_KEY).to_numpy())
    times = rows.column(_TIME).to_numpy()
    order = np.lexsort((times, keys))
    rows = rows.take(pa.array(order))
    values = [name for name in rows.column_names if name.startswith(_VALUE)]
    is_first = np.zeros(len(order), bool)
    for name in [_KEY, *values]:
        runs = pl.Series(pl.from_arrow(rows.column(name))).to_frame().select(pl.all().rle_id())
        is_first |= np.diff(runs.to_series().to_numpy(), prepend=-1) != 0
    first = np.flatnonzero(is_first)
    versions = rows.take(pa.array(first))
    for name in _COUNTS:
        counts = np.add.reduceat(rows.column(name).to_numpy(), first) if len(first) else first
        place = versions.schema.get_field_index(name)
        versions = versions.set_column(place, name, pa.array(counts))
    return versions


@dataclass(frozen=True)
class Catalogue:
    """All items of the source, in the order of the hashes of their keys.

    `hashes`: of the items' keys, uint64 [n]. `train`, `valid`: weights of the items in each part.
    `starts`: where the versions of each item begin, int64 [n + 1]. `times`: of the versions,
    ascending for each item. `values`: the raw columns of the versions.
    """

    hashes: Uint64Array
    train: Weights
    valid: Weights
    starts: Int64Array
    times: Int64Array
    values: pa.Table

    @staticmethod
    def write(folder: Path, buckets: Iterable[pa.Table], power: float) -> None:
        """Write the items of all buckets, in the order of buckets.

        Args:
            folder: a working folder, which is made.
            buckets: the tables that `items_of` returned.
            power: of the items' numbers of rows.

        Raises:
            DataError: no row has an item.
        """
        folder.mkdir(parents=True, exist_ok=True)
        hashes: list[Uint64Array] = []
        num_versions: list[Int64Array] = []
        counts: dict[str, list[Int64Array]] = {name: [] for name in _COUNTS}
        writer = None
        with open(folder / "times", "wb") as times:
            for versions in buckets:
                distinct, first = np.unique(
                    mix64(versions.column(_KEY).to_numpy()), return_index=True
                )
                hashes.append(distinct)
                num_versions.append(np.diff(first, append=versions.num_rows))
                for name in _COUNTS:
                    of_versions = running_sum(versions.column(name).to_numpy())
                    ends = np.append(first[1:], versions.num_rows)
                    counts[name].append(of_versions[ends] - of_versions[first])
                times.write(versions.column(_TIME).to_numpy().tobytes())
                values = versions.drop_columns([_KEY, _TIME, *_COUNTS])
                if writer is None:
                    writer = pa.ipc.new_file(str(folder / "values.arrow"), values.schema)
                writer.write_table(values.combine_chunks())
        if writer is not None:
            writer.close()
        if not sum(map(len, hashes)):
            raise DataError(
                "negatives: expected items to draw, got no row with an item. Check the source, "
                "and the name of the column."
            )
        # Raw numbers: NumPy parses the header of an .npy file with `ast`, which fails at times when
        # several threads of Python 3.11 do so at once.
        np.concatenate(hashes).tofile(folder / "hashes")
        running_sum(np.concatenate(num_versions)).tofile(folder / "starts")
        for name in _COUNTS:
            weights = Weights.of(np.concatenate(counts[name]), power)
            weights.ends.tofile(folder / name)

    @staticmethod
    def open(folder: Path) -> Catalogue:
        """Return the catalogue that `write` wrote, mapped into memory.

        The folder is one of the preparation's own, so that no other process cuts its files.
        """
        ends = [np.memmap(folder / name, np.int64, mode="r") for name in _COUNTS]
        file = pa.ipc.open_file(pa.memory_map(str(folder / "values.arrow")))
        return Catalogue(
            np.memmap(folder / "hashes", np.uint64, mode="r"),
            Weights(ends[0]),
            Weights(ends[1]),
            np.memmap(folder / "starts", np.int64, mode="r"),
            np.memmap(folder / "times", np.int64, mode="r"),
            file.read_all(),
        )

    def places(self, keys: Int64Array) -> Int64Array:
        """Return the places of items, [n], by their keys."""
        return np.searchsorted(self.hashes, mix64(keys))

    def take(
        self, names: Sequence[str], places: Int64Array, times: Int64Array | None = None
    ) -> Mapping[str, pa.Array]:
        """Return the raw columns `names` of the items at `places`, as they were at `times`.

        Before the first row of an item, and without times, it is as in its first row.
        """
        versions = self.starts[places]
        if times is not None:
            ends = count_up_to(self.times, versions, self.starts[places + 1], times)
            versions = np.maximum(ends - 1, versions)
        columns: dict[str, pa.Array] = {}
        for name in names:
            columns[name] = _take(self.values.column(_VALUE + name), versions)
        return columns


def _take(values: pa.ChunkedArray, places: Int64Array) -> pa.Array:
    """Return the values at `places`; Arrow's `take` would copy all chunks into one first."""
    lengths = [len(chunk) for chunk in values.chunks]
    ends = np.cumsum(lengths)
    owners = np.searchsorted(ends, places, side="right")
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=len(lengths))
    parts = [pa.nulls(0, values.type)]
    begin = 0
    for number, chunk in enumerate(values.chunks):
        rows = order[begin : begin + counts[number]]
        first = ends[number] - len(chunk)
        parts.append(chunk.take(pa.array(places[rows] - first)))
        begin += len(rows)
    back = np.empty(len(places), np.int64)
    back[order] = np.arange(len(places))
    return pa.concat_arrays(parts).take(pa.array(back))
