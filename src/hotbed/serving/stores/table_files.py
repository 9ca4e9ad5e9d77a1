# SPDX-License-Identifier: Apache-2.0
"""Write the files of a version's tables: their rows, what deltas changed, and the hottest ids."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.files import digest_of, new_file
from hotbed.frozen import FrozenRows, IdArray, RowDtype, id_column, sliced, write_rows
from hotbed.persist.container.format import Link, Reader
from hotbed.persist.state.tables import table_folder
from hotbed.serving.rows import ServedTable
from hotbed.serving.stores.mapped import MappedVersion

_HOT_IDS = 1 << 22  # ids that are kept in the order of their counts
_REMEMBERED_DELTAS = 16  # the newest deltas, each with a file of the ids that it changed
_ROWS_DIGEST = "xxh3"


class TableFiles:
    """The files of one table of a version. Files of the version before are not written again.

    Args:
        folder: the folder of the model.
        reader: the state that becomes the version.
        number: number of the table in the manifest of the state.
        dtype: type of the rows.
        before: the version before, whose files may serve again.
        damaged: the names of those that may not.
    """

    def __init__(
        self,
        folder: Path,
        reader: Reader,
        number: int,
        dtype: RowDtype,
        before: MappedVersion | None,
        damaged: Collection[str],
    ) -> None:
        entry = reader.manifest.tables[number]
        self._folder = folder
        self._links = reader.links
        self._name = entry.name
        self._config: Mapping[str, Any] = entry.config
        # whole numbers take the room of float32, and lose nothing
        self._dtype = "float32" if self._config.get("dtype") == "int32" else dtype
        self._dim = int(self._config["dim"])
        self._stem = Path(table_folder(number, self._name)).name
        self._deltas = dict[int, _Delta]()
        self._earlier = dict[str, dict[str, Any]]()
        self._has_no_counts = False
        if before is not None and self._name in before.spec["tables"]:
            self._compare(before, damaged)

    def _compare(self, before: MappedVersion, damaged: Collection[str]) -> None:
        """Collect from the version before what this one need not write or read again."""
        entry = before.spec["tables"][self._name]
        hot = entry["hot"]
        for earlier in (*entry["layers"], *entry["changed"], *([hot] if hot else [])):
            if earlier["file"] not in damaged:
                self._earlier[earlier["file"]] = earlier
        self._has_no_counts = hot is None and before.spec["chain"][0] == self._digest(0)

    def write(self) -> dict[str, Any]:
        """Write what is missing, and return the entry of the table in the version's file.

        The rows are those of the full, and those that its deltas changed since.
        """
        layers = [self._full()]
        if self._last:
            layers.insert(0, self._overlay())
        hot = self._hot()
        end = self._last + 1
        oldest = max(1, end - _REMEMBERED_DELTAS)
        changed = [self._changed(number) for number in range(oldest, end)]
        return {"layers": layers, "hot": hot, "changed": changed}

    @property
    def _last(self) -> int:
        """The number of the newest delta; 0 is the full."""
        return len(self._links) - 1

    def _delta(self, number: int) -> _Delta:
        if number not in self._deltas:
            self._deltas[number] = _Delta(self._links[number], self._name, self._dim)
        return self._deltas[number]

    def _digest(self, number: int) -> str:
        return self._links[number].manifest.digest

    def _path(self, number: int, ending: str) -> Path:
        key = self._digest(number)[:32]
        return self._folder / f"{key}-{self._stem}.{ending}"

    def _rows_path(self, number: int) -> Path:
        return self._path(number, f"{self._dtype}.rows")

    def _full(self) -> dict[str, Any]:
        """Return the entry of the file of the full's rows."""
        path = self._rows_path(0)
        entry = self._earlier_rows(path)
        if entry is None:
            write_rows(path, self._dim, self._links[0].parts(self._name), dtype=self._dtype)
            entry = _rows_entry(path)
        return entry

    def _overlay(self) -> dict[str, Any]:
        """Return the entry of the file of all rows that deltas changed since the full."""
        path = self._rows_path(self._last)
        entry = self._earlier_rows(path)
        if entry is not None:
            return entry
        number = self._last
        deltas = [self._delta(number)]
        earlier = None
        while number > 1 and earlier is None:
            number -= 1
            earlier = self._rows_of(number)
            if earlier is None:
                deltas.append(self._delta(number))
        merge = _Merge(deltas, earlier)
        write_rows(path, self._dim, merge.rows(), merge.removed(), self._dtype)
        return _rows_entry(path)

    def _rows_of(self, number: int) -> ServedTable | None:
        """Return the rows that deltas up to this one changed, None without a whole file of them.

        The file is read here: what is damaged in it would be whole in the next one.
        """
        path = self._rows_path(number)
        entry = self._earlier_rows(path)
        if entry is None or digest_of(path, _ROWS_DIGEST) != entry[_ROWS_DIGEST]:
            return None
        return ServedTable(self._config, [FrozenRows(path)])

    def _changed(self, number: int) -> dict[str, Any]:
        """Return the entry of the file of the ids that a delta changed."""
        path = self._path(number, "changed")
        entry = self._earlier_entry(path)
        if entry is None:
            ids = self._delta(number).changed
            entry = write_small(path, ids.tobytes())
        return {**entry, "digest": self._digest(number)}

    def _hot(self) -> dict[str, Any] | None:
        """Return the entry of the file of ids by falling count; None if rows have no counts."""
        if self._has_no_counts:
            return None
        path = self._path(0, "hot")
        entry = self._earlier_entry(path)
        if entry is not None:
            return entry
        ids = _hottest(self._links[0].parts(self._name))
        if not len(ids):
            return None
        return write_small(path, ids.tobytes())

    def _earlier_rows(self, path: Path) -> dict[str, Any] | None:
        """Return the entry of a file of rows of the version before, None without its digest."""
        entry = self._earlier_entry(path)
        return entry if entry is not None and _ROWS_DIGEST in entry else None

    def _earlier_entry(self, path: Path) -> dict[str, Any] | None:
        """Return the entry of a file that the version before has, None where it is gone."""
        entry = self._earlier.get(path.name)
        if entry is None or not path.exists():
            return None
        if path.stat().st_size != entry["bytes"]:
            return None
        return entry


def _rows_entry(path: Path) -> dict[str, Any]:
    digest = digest_of(path, _ROWS_DIGEST)
    return {"file": path.name, "bytes": path.stat().st_size, _ROWS_DIGEST: digest}


class _Delta:
    """What one delta holds of a table. Its ids are kept, and its rows read when they are needed.

    Attributes:
        removed: the ids without a row now.
        changed: the ids with a new row or without one now: each once, rising.
    """

    def __init__(self, link: Link, table: str, dim: int) -> None:
        self._link = link
        self._table = table
        self._dim = dim
        self.removed = id_column(link.removed(table))
        self.changed = np.union1d(id_column(self.batches()), self.removed)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the new rows."""
        yield from sliced(self._link.parts(self._table), self._dim)


class _Merge:
    """Merge deltas, newest first, and a file of earlier changes: the newest entry of an id counts.

    `rows` has to be read to its end before `removed`.
    """

    def __init__(self, deltas: list[_Delta], earlier: ServedTable | None) -> None:
        self._deltas = deltas
        self._earlier = earlier
        self._decided = np.empty(0, np.int64)  # ids with an entry so far, rising
        self._removed = list[IdArray]()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that count."""
        for delta in self._deltas:
            for batch in delta.batches():
                ids = batch.column("id").to_numpy()
                is_open = self._is_open(ids)
                yield batch.filter(pa.array(is_open))
            self._remove(delta.removed)
            self._decided = np.union1d(self._decided, delta.changed)
        if self._earlier is not None:
            (layer,) = self._earlier.layers
            ids, removed = layer.entries()
            open_ids = ids[self._is_open(ids)]
            yield from self._earlier.batches(open_ids)
            self._remove(removed)

    def removed(self) -> Iterator[pa.RecordBatch]:
        """Yield the ids without a row."""
        for ids in self._removed:
            column = pa.array(ids)
            yield pa.record_batch({"id": column})

    def _remove(self, ids: IdArray) -> None:
        open_ids = ids[self._is_open(ids)]
        self._removed.append(open_ids)

    def _is_open(self, ids: IdArray) -> NDArray[np.bool_]:
        """Return which ids have no newer entry, bool [n]."""
        num_decided = len(self._decided)
        if not num_decided:
            return np.ones(len(ids), bool)
        places = np.searchsorted(self._decided, ids)
        places = np.minimum(places, num_decided - 1)
        is_open: NDArray[np.bool_] = self._decided[places] != ids
        return is_open


def _hottest(batches: Iterable[pa.RecordBatch]) -> IdArray:
    """Return the ids of the highest counts, highest first; none where rows have no counts."""
    no_ids = np.empty(0, np.int64)
    ids = [no_ids]
    counts = [no_ids]
    for batch in batches:
        if "count" not in batch.schema.names:
            return no_ids
        batch_counts = batch.column("count").to_numpy()
        ids.append(batch.column("id").to_numpy().copy())  # a view would keep the batch
        counts.append(batch_counts.astype(np.int64))
        if sum(map(len, ids)) > 2 * _HOT_IDS:
            top_ids, top_counts = _highest(ids, counts)
            ids = [top_ids]
            counts = [top_counts]
    return _highest(ids, counts)[0]


def _highest(ids: list[IdArray], counts: list[IdArray]) -> tuple[IdArray, IdArray]:
    all_ids = np.concatenate(ids)
    all_counts = np.concatenate(counts)
    order = np.lexsort([all_ids, -all_counts])
    order = order[:_HOT_IDS]
    return all_ids[order], all_counts[order]


def write_small(path: Path, data: bytes | memoryview) -> dict[str, Any]:
    """Write a small file, if it is not there as it should be, and return its entry."""
    if not path.exists() or path.read_bytes() != data:
        with new_file(path) as file:
            file.write(data)
    return {"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
