# SPDX-License-Identifier: Apache-2.0
"""What people ask about checkpoints: whether one is sound, what it holds, what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import FormatError
from hotbed.files import Where
from hotbed.persist.chain import all_parts
from hotbed.persist.digest import comparable_position, content_digest
from hotbed.persist.format import Reader, read_newest
from hotbed.persist.rows import flat, partition_ranges
from hotbed.persist.store import ADVICE


def verify(where: Where) -> dict[str, Any]:
    """Check everything about a checkpoint: files, row numbers, order, partitions. FormatError names
        what is wrong.

    Returns `{"folder", "kind", "version", "digest", "content_digest", "links", "files", "bytes"}`.
    """
    return read_newest(where, _verified)


def _verified(reader: Reader) -> dict[str, Any]:
    reader.verify()
    for entry in reader.manifest["tables"]:
        rows = sum(batch.num_rows for batch in reader.rows(entry["name"]))
        if rows != entry["rows"]:
            raise FormatError(
                f"{reader.folder}: table {entry['name']!r} has {rows} rows — received "
                f"{entry['rows']} in the "
                f"manifest — {ADVICE}"
            )
    files = [entry for link in reader.links for entry in link.manifest["files"].values()]
    return {
        **_head(reader),
        "content_digest": content_digest(reader),
        "links": len(reader.links),
        "files": len(files),
        "bytes": sum(entry["bytes"] for entry in files),
    }


def describe_checkpoint(where: Where) -> dict[str, Any]:
    """Describe a checkpoint by plain values: tables, sizes, histograms, positions, digests, chain.

    Histograms are `{"from", "to", "rows"}` lists: of the Euclidean norms of rows, and of counts
    where they are kept.
    """
    return read_newest(where, _description)


def _description(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    tables = [_described_table(reader, entry) for entry in manifest["tables"]]
    dense = [(name, shape) for name, _, shape, _ in reader.tensors() if name.startswith("network/")]
    return {
        **_head(reader),
        "parent": manifest["parent"],
        "chain": manifest.get("chain", []),
        "package_version": manifest["package_version"],
        "format_version": manifest["format_version"],
        "bytes": [
            sum(entry["bytes"] for entry in link.manifest["files"].values())
            for link in reader.links
        ],
        "positions": manifest["positions"],
        "counters": manifest["counters"],
        "dense": {
            "tensors": len(dense),
            "parameters": sum(int(np.prod(shape)) for _, shape in dense),
        },
        "tables": tables,
    }


def _head(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "folder": reader.folder,
        **{name: manifest[name] for name in ("kind", "version", "digest")},
    }


def _described_table(reader: Reader, entry: Mapping[str, Any]) -> dict[str, Any]:
    norms = _Histogram()
    counts = _Histogram()
    for batch in reader.rows(entry["name"]):
        values = flat(batch.column("value")).reshape(batch.num_rows, -1).astype(np.float64)
        norms.add(np.sqrt(np.square(values).sum(axis=1)))
        if "count" in batch.schema.names:
            counts.add(batch.column("count").to_numpy().astype(np.float64))
    files = reader.manifest["files"]
    own = [part["file"] for part in all_parts(entry)]
    waiting = entry["candidates"]
    return {
        "name": entry["name"],
        "dim": entry["config"]["dim"],
        "rows": entry["rows"],
        "bytes": sum(files[name]["bytes"] for name in own),
        "changed": sum(part["rows"] for part in entry["parts"]),
        "removed": sum(part["rows"] for part in entry.get("removed", ())),
        "candidates": waiting["rows"] if waiting else 0,
        "scalars": {name: value for name, value in entry["scalars"].items() if name != "rates"},
        "norms": norms.bins(),
        "counts": counts.bins(),
    }


class _Histogram:
    """Counts by powers of two; zero apart."""

    def __init__(self) -> None:
        self._counts: dict[int | None, int] = {}

    def add(self, values: NDArray[np.float64]) -> None:
        exponents = np.frexp(values[values > 0])[1]
        for exponent, n in zip(*np.unique(exponents, return_counts=True), strict=True):
            self._counts[int(exponent)] = self._counts.get(int(exponent), 0) + int(n)
        if zeros := int((values == 0).sum()):
            self._counts[None] = self._counts.get(None, 0) + zeros

    def bins(self) -> list[dict[str, float]]:
        known = sorted(exponent for exponent in self._counts if exponent is not None)
        found = [{"from": 2.0 ** (e - 1), "to": 2.0**e, "rows": self._counts[e]} for e in known]
        return (
            [{"from": 0.0, "to": 0.0, "rows": self._counts[None]}] if None in self._counts else []
        ) + found


def diff(a: Where, b: Where) -> dict[str, Any]:
    """What differs between two checkpoints, as plain values; `{"same": True, ...}` where their
    content is the same.

    `tables`: rows added, removed and changed from `a` to `b`, and the largest difference of a
    value; `dense`: the largest difference by tensor, only those that differ; None = only in one, or
    of another shape. `positions` (without `now` and `topic`), `counters`: [a's, b's].
    """
    return read_newest(a, lambda one: read_newest(b, lambda two: _difference(one, two)))


def _difference(one: Reader, two: Reader) -> dict[str, Any]:
    names = sorted({*one.table_names, *two.table_names})
    tables = {name: _table_difference(one, two, name) for name in names}
    first, second = (
        {name: (dtype, shape, data) for name, dtype, shape, data in reader.tensors()}
        for reader in (one, two)
    )
    dense: dict[str, float | None] = {}
    for name in sorted({*first, *second}):
        if name not in first or name not in second or first[name][:2] != second[name][:2]:
            dense[name] = None
        elif first[name][2] != second[name][2]:
            values = [_floats(*rest) for rest in (first[name], second[name])]
            dense[name] = float(np.abs(values[0] - values[1]).max())
    positions = [comparable_position(reader.manifest["positions"]) for reader in (one, two)]
    counters = [reader.manifest["counters"] for reader in (one, two)]
    digests = [content_digest(reader) for reader in (one, two)]
    return {
        "same": digests[0] == digests[1],
        "content_digests": digests,
        "tables": tables,
        "dense": dense,
        "positions": positions,
        "counters": counters,
    }


def _floats(dtype: str, shape: list[int], data: memoryview) -> NDArray[np.float64]:
    if dtype == "BF16":  # the upper half of a float32
        return (
            (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        )
    kinds = {"F": "f", "I": "i", "U": "u", "B": "?"}
    kind = "?" if dtype == "BOOL" else f"<{kinds[dtype[0]]}{int(dtype[1:]) // 8}"
    return np.frombuffer(data, kind).astype(np.float64)


def _table_difference(one: Reader, two: Reader, name: str) -> dict[str, Any] | None:
    if name not in one.table_names or name not in two.table_names:
        return None
    added = removed = changed = 0
    largest = 0.0
    spans = partition_ranges(one.links[-1].entry(name)["rows"], 1 << 16)
    for old, new in zip(one.spans(name, spans), two.spans(name, spans), strict=True):
        if old is None or new is None:
            added = added + (new.num_rows if new else 0)
            removed = removed + (old.num_rows if old else 0)
            continue
        _, here, there = np.intersect1d(
            old.column("id"), new.column("id"), assume_unique=True, return_indices=True
        )
        added = added + new.num_rows - len(there)
        removed = removed + old.num_rows - len(here)
        columns = [column for column in old.schema.names if column in new.schema.names]
        differs = np.zeros(len(here), bool)
        for column in columns if len(here) else ():
            left, right = (
                _matrix(batch, column)[rows] for batch, rows in ((old, here), (new, there))
            )
            differs |= (left != right).any(axis=1) if left.shape == right.shape else True
            if column == "value" and left.shape == right.shape:
                largest = max(largest, float(np.abs(left.astype(np.float64) - right).max()))
        changed += int(differs.sum())
    return {"added": added, "removed": removed, "changed": changed, "largest": largest}


def _matrix(batch: pa.RecordBatch, column: str) -> NDArray[Any]:
    return flat(batch.column(column)).reshape(batch.num_rows, -1)
