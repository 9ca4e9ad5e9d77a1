# SPDX-License-Identifier: Apache-2.0
"""The items that negatives are drawn from, in files that tasks map into their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from hotbed.data.columns import Columns, ids_of
from hotbed.embedding.hashing import Uint64Array
from hotbed.errors import DataError
from hotbed.prepare.sampling.draw import Weights
from hotbed.prepare.shuffle import Bucket, hash_keys

Int64Array = NDArray[np.int64]

_COUNTS = ("train", "valid")
_KEY = "key"
_VALUE = "value "
"""The prefix of raw columns: their names cannot clash with those of the others."""


def item_rows(
    names: Sequence[str], rows: pa.RecordBatch, is_valid: NDArray[np.bool_]
) -> tuple[Int64Array, pa.RecordBatch]:
    """Return the keys and the rows of a shuffle by item: one row for each item of the chunk.

    Args:
        names: the raw columns of an item, itself first.
        rows: the raw rows of a chunk; those without an item are left out.
        is_valid: which rows are for validation, [n].
    """
    columns = Columns(rows)
    items = columns.column(names[0])
    places = np.flatnonzero(~np.asarray(items.is_null()))
    keys = ids_of(items, names[0])[places]
    keys, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    arrays: dict[str, pa.Array] = {_KEY: pa.array(keys)}
    for name, part in zip(_COUNTS, (~is_valid, is_valid), strict=True):
        counts = np.bincount(numbers[part[places]], minlength=len(keys))
        arrays[name] = pa.array(counts.astype(np.int64))
    for name in names:
        values = columns.column(name)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        arrays[_VALUE + name] = values.take(pa.array(places[first]))
    return keys, pa.RecordBatch.from_pydict(arrays)


def items_of(bucket: Bucket) -> pa.Table:
    """Return the items of a bucket in the order of their hashes, with the values of first rows."""
    keys = bucket.rows.column(_KEY).to_numpy()
    _, first, numbers = np.unique(hash_keys(keys), return_index=True, return_inverse=True)
    items = bucket.rows.take(pa.array(first))
    for name in _COUNTS:
        counts = np.zeros(len(first), np.int64)
        np.add.at(counts, numbers, bucket.rows.column(name).to_numpy())
        place = items.schema.get_field_index(name)
        items = items.set_column(place, name, pa.array(counts))
    return items


@dataclass(frozen=True)
class Catalogue:
    """All items of the source, in the order of the hashes of their keys.

    `hashes`: of the items' keys, uint64 [n]. `train`, `valid`: weights of the items in each part.
    `values`: the raw columns of the items.
    """

    hashes: Uint64Array
    train: Weights
    valid: Weights
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
        keys: list[Int64Array] = []
        counts: dict[str, list[Int64Array]] = {name: [] for name in _COUNTS}
        writer = None
        try:
            for items in buckets:
                keys.append(items.column(_KEY).to_numpy())
                for name in _COUNTS:
                    counts[name].append(items.column(name).to_numpy())
                values = items.drop_columns([_KEY, *_COUNTS])
                if writer is None:
                    writer = pa.ipc.new_file(str(folder / "values.arrow"), values.schema)
                writer.write_table(values.combine_chunks())
        finally:
            if writer is not None:
                writer.close()
        if not sum(map(len, keys)):
            raise DataError(
                "negatives: expected items to draw, got no row with an item. Check the source, "
                "and the name of the column."
            )
        np.save(folder / "hashes.npy", hash_keys(np.concatenate(keys)))
        for name in _COUNTS:
            weights = Weights.of(np.concatenate(counts[name]), power)
            np.save(folder / f"{name}.npy", weights.ends)

    @staticmethod
    def open(folder: Path) -> Catalogue:
        """Return the catalogue that `write` wrote, mapped into memory."""
        ends = [open_memmap(folder / f"{name}.npy", mode="r") for name in _COUNTS]
        hashes = open_memmap(folder / "hashes.npy", mode="r")
        file = pa.ipc.open_file(pa.memory_map(str(folder / "values.arrow")))
        return Catalogue(hashes, Weights(ends[0]), Weights(ends[1]), file.read_all())

    def places(self, keys: Int64Array) -> Int64Array:
        """Return the places of items, [n], by their keys."""
        return np.searchsorted(self.hashes, hash_keys(keys))

    def take(self, names: Sequence[str], places: pa.Array) -> Mapping[str, pa.Array]:
        """Return the raw columns `names` of the items at `places`."""
        taken: dict[str, pa.Array] = {}
        for name in names:
            values = self.values.column(_VALUE + name)
            taken[name] = _take(values, places.to_numpy(zero_copy_only=False))
        return taken


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
        own = order[begin : begin + counts[number]]
        first = ends[number] - len(chunk)
        parts.append(chunk.take(pa.array(places[own] - first)))
        begin += len(own)
    back = np.empty(len(places), np.int64)
    back[order] = np.arange(len(places))
    return pa.concat_arrays(parts).take(pa.array(back))
