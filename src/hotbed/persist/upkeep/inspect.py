# SPDX-License-Identifier: Apache-2.0
"""Questions about checkpoints: whether one is sound, what it holds, and what differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.connectors.position import join_position
from hotbed.connectors.times import EARLIEST
from hotbed.data.schema import Schema
from hotbed.embedding.footprint import predicted
from hotbed.errors import FormatError
from hotbed.files import Where
from hotbed.persist.container.check.manifest import built_config
from hotbed.persist.container.format import DenseTensor, Reader, read_newest
from hotbed.persist.container.manifest import TableEntry
from hotbed.persist.container.row_order import partition_ranges
from hotbed.persist.container.store import ADVICE
from hotbed.persist.publish.version import request_schema
from hotbed.persist.state.digest import comparable_position, content_digest, part_digests
from hotbed.persist.state.open_rows import read_open_rows
from hotbed.persist.state.tables import flat

_SPAN_ROWS = 1 << 16


def verify(where: Where) -> dict[str, Any]:
    """Check everything about a checkpoint: files, numbers of rows, order, partitions.

    Returns:
        `folder`, `kind`, `version`, `digest`, `content_digest`, and the numbers of its `links` and
        `files` and their `bytes`.

    Raises:
        FormatError: something is wrong; the message names it.
    """
    return read_newest(where, _verified)


def _verified(reader: Reader) -> dict[str, Any]:
    reader.verify()
    for entry in reader.manifest.tables:
        rows = sum(batch.num_rows for batch in reader.rows(entry.name))
        if rows != entry.rows:
            raise FormatError(
                f"{reader.folder}: table {entry.name!r} has other rows than the manifest says, "
                f"got {rows} instead of {entry.rows}. {ADVICE}"
            )
    num_files = 0
    num_bytes = 0
    for link in reader.links:
        for entry_of_file in link.manifest.files.values():
            num_files += 1
            num_bytes += entry_of_file.bytes
    return {
        **_head(reader),
        "content_digest": content_digest(reader),
        "links": len(reader.links),
        "files": num_files,
        "bytes": num_bytes,
    }


def _head(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "folder": reader.folder,
        "kind": manifest.kind,
        "version": manifest.version,
        "digest": manifest.digest,
    }


# --- description --------------------------------------------------------------------------------


def describe_checkpoint(where: Where) -> dict[str, Any]:
    """Describe a checkpoint by plain values: tables, sizes, histograms, positions, digests, chain.

    `classes`: the digests of the sources of classes of other packages, by kind. `derived`: raw
    columns of requests that depend on other rows, and how they are computed. `maps`:
    the number of fitted maps of its schema. `held`: why a gate did not publish the state; `forced`:
    why it was published all the same. `ids`: of an exported model that takes tensors, the
    file of its id graph, the tensors, and the lookups whose ids it computes. `on_disk`: of a table
    whose tier is `Ssd`, the memory and the disk that its rows take. `join`: of a join of streams,
    what `join_facts` returns. Histograms are lists of `{"from", "to", "rows"}`: of the Euclidean
    norms of rows of floats, and of counts where they are kept.
    """
    return read_newest(where, _description)


def _description(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    network = [tensor for tensor in reader.tensors() if tensor.name.startswith("network/")]
    num_bytes = []
    for link in reader.links:
        files = link.manifest.files.values()
        num_bytes.append(sum(entry.bytes for entry in files))
    schema = Schema.from_json(request_schema(manifest) or {"columns": []})
    num_parameters = 0
    for tensor in network:
        num_parameters += int(np.prod(tensor.shape))
    return {
        **_head(reader),
        "parent": manifest.parent,
        "chain": [link.to_json() for link in manifest.chain],
        "classes": (manifest.model or {}).get("classes", {}),
        "package_version": manifest.package_version,
        "format_version": manifest.format_version,
        "bytes": num_bytes,
        "positions": manifest.positions,
        **_join(reader),
        "counters": manifest.counters,
        "dense": {"tensors": len(network), "parameters": num_parameters},
        **_id_graph(reader),
        "derived": dict(schema.derived),
        "maps": len(schema.maps),
        "held": [entry.reason for entry in manifest.held or ()],
        "forced": manifest.forced,
        "tables": [_table_description(reader, entry) for entry in manifest.tables],
    }


def _join(reader: Reader) -> dict[str, Any]:
    facts = join_facts(reader)
    return {"join": facts} if facts else {}


def join_facts(reader: Reader) -> dict[str, Any]:
    """Return what a join of streams holds and counted in a state; nothing for other states.

    Returns:
        `open_impressions` and `held_outcomes`, as numbers; `counts` by name, since the stream
        began; `watermark` and `newest`, the newest event times by input and partition, in
        microseconds; None before the first event.
    """
    positions = map(join_position, reader.manifest.positions.values())
    position = next(filter(None, positions), None)
    rows = read_open_rows(reader)
    if position is None or rows is None:
        return {}
    num_rows: dict[str, int] = {}
    for log in ("impressions", "outcomes"):
        num_rows[log] = sum(batch.num_rows for batch in rows.batches(log))
    return {
        "open_impressions": num_rows["impressions"],
        "held_outcomes": num_rows["outcomes"],
        "counts": position["counts"],
        "watermark": _known_time(position["watermark"]),
        "newest": [
            {name: _known_time(time) for name, time in lanes.items()} for lanes in position["lanes"]
        ],
    }


def _known_time(micros: int) -> int | None:
    return None if micros == EARLIEST else micros


def _id_graph(reader: Reader) -> dict[str, Any]:
    """Return the id graph of an exported model that takes tensors; nothing for other states."""
    graph = reader.links[0].manifest.graph
    if graph is None or graph.ids is None:
        return {}
    lookups = [lookup["feature"] for lookup in graph.ids["lookups"]]
    return {"ids": {**graph.ids, "lookups": lookups}}


def _table_description(reader: Reader, entry: TableEntry) -> dict[str, Any]:
    norms = _Histogram()
    counts = _Histogram()
    has_norms = entry.config.get("dtype") != "int32"  # whole numbers are parts of ids and times
    for batch in reader.rows(entry.name):
        if has_norms:
            values = _matrix(batch, "value").astype(np.float64)
            norms.add(np.sqrt(np.square(values).sum(axis=1)))
        if "count" in batch.schema.names:
            counts.add(batch.column("count").to_numpy().astype(np.float64))
    num_bytes = 0
    for part in entry.all_parts:
        num_bytes += reader.manifest.files[part.file].bytes
    num_candidates = 0
    if entry.candidates is not None:
        num_candidates = entry.candidates.rows
    sketched = set[int]()
    for batch in reader.waiting(entry.name).sketch:
        sketched.update(batch.column("partition").to_pylist())
    scalars = dict(entry.scalars)
    scalars.pop("rates", None)
    return {
        "name": entry.name,
        "dim": entry.config["dim"],
        "rows": entry.rows,
        "capacity": entry.config.get("capacity"),
        "on_disk": str(predicted(built_config(entry, reader.folder), entry.rows) or ""),
        "bytes": num_bytes,
        "changed": sum(part.rows for part in entry.parts),
        "removed": sum(part.rows for part in entry.removed),
        "candidates": num_candidates,
        "sketched_partitions": len(sketched),
        "scalars": scalars,
        "norms": norms.bins(),
        "counts": counts.bins(),
    }


class _Histogram:
    """Counts by powers of two; zero has a bin of its own."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by exponent
        self._zeros = 0

    def add(self, values: NDArray[np.float64]) -> None:
        _, exponents = np.frexp(values[values > 0])
        for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
            before = self._counts.get(int(exponent), 0)
            self._counts[int(exponent)] = before + int(count)
        self._zeros += int((values == 0).sum())

    def bins(self) -> list[dict[str, float]]:
        bins: list[dict[str, float]] = []
        if self._zeros:
            bins.append({"from": 0.0, "to": 0.0, "rows": self._zeros})
        for exponent in sorted(self._counts):
            rows = self._counts[exponent]
            bins.append({"from": 2.0 ** (exponent - 1), "to": 2.0**exponent, "rows": rows})
        return bins


# --- differences --------------------------------------------------------------------------------


def diff(a: Where, b: Where) -> dict[str, Any]:
    """Return what differs between two checkpoints, as plain values.

    Returns:
        `same`: whether their content is the same. `content_digests`. `tables`: rows `added`,
        `removed` and `changed` from `a` to `b`, and the `largest` difference of a value. `dense`:
        the largest difference by tensor, only tensors that differ. A table or tensor that only one
        has, and a tensor of another shape, is None. `positions` (without `now` and `topic`) and
        `counters`: those of a, then those of b. `others`: dotted names of what else differs, such
        as `progress.callbacks.evict.0` or `random.cpu`.
    """
    return read_newest(a, lambda one: read_newest(b, lambda two: _difference(one, two)))


def _difference(one: Reader, two: Reader) -> dict[str, Any]:
    readers = (one, two)
    names = sorted({*one.table_names, *two.table_names})
    digests = [content_digest(reader) for reader in readers]
    return {
        "same": digests[0] == digests[1],
        "content_digests": digests,
        "tables": {name: _table_difference(one, two, name) for name in names},
        "dense": _dense_differences(one.tensors(), two.tensors()),
        "positions": [comparable_position(reader.manifest.positions) for reader in readers],
        "counters": [reader.manifest.counters for reader in readers],
        "others": _other_differences(one, two),
    }


def _other_differences(one: Reader, two: Reader) -> list[str]:
    """Return the names of parts that differ and have neither rows nor tensors."""
    first = part_digests(one)
    second = part_digests(two)
    names = sorted({*first, *second})
    return [name for name in names if first.get(name) != second.get(name)]


def _dense_differences(one: list[DenseTensor], two: list[DenseTensor]) -> dict[str, float | None]:
    first = {tensor.name: tensor for tensor in one}
    second = {tensor.name: tensor for tensor in two}
    differences: dict[str, float | None] = {}
    for name in sorted({*first, *second}):
        old = first.get(name)
        new = second.get(name)
        if old is None or new is None or old[1:3] != new[1:3]:  # another dtype or shape
            differences[name] = None
        elif old.data != new.data:
            differences[name] = float(np.abs(_floats(old) - _floats(new)).max())
    return differences


def _floats(tensor: DenseTensor) -> NDArray[np.float64]:
    data = tensor.data
    dtype = tensor.dtype
    if dtype == "BF16":  # the upper half of a float32
        upper = np.frombuffer(data, "<u2").astype(np.uint32)
        return (upper << 16).view(np.float32).astype(np.float64)
    if dtype == "BOOL":
        return np.frombuffer(data, "?").astype(np.float64)
    kind = {"F": "f", "I": "i", "U": "u"}[dtype[0]]
    num_bytes = int(dtype[1:]) // 8
    return np.frombuffer(data, f"<{kind}{num_bytes}").astype(np.float64)


def _table_difference(one: Reader, two: Reader, name: str) -> dict[str, Any] | None:
    if name not in one.table_names or name not in two.table_names:
        return None
    total = {"added": 0, "removed": 0, "changed": 0, "largest": 0.0}
    spans = partition_ranges(one.entry(name).rows, _SPAN_ROWS)
    for old, new in zip(one.spans(name, spans), two.spans(name, spans), strict=True):
        if old is None or new is None:
            if new is not None:
                total["added"] += new.num_rows
            if old is not None:
                total["removed"] += old.num_rows
            continue
        old_ids = old.column("id")
        new_ids = new.column("id")
        common = np.intersect1d(old_ids, new_ids, assume_unique=True, return_indices=True)
        _, old_rows, new_rows = common
        total["added"] += new.num_rows - len(new_rows)
        total["removed"] += old.num_rows - len(old_rows)
        if len(old_rows):
            changed, largest = _row_differences(old, new, old_rows, new_rows)
            total["changed"] += changed
            total["largest"] = max(total["largest"], largest)
    return total


def _row_differences(
    old: pa.RecordBatch,
    new: pa.RecordBatch,
    old_rows: NDArray[np.int64],
    new_rows: NDArray[np.int64],
) -> tuple[int, float]:
    """Return how many of the paired rows differ, and the largest difference of a value."""
    differs = np.zeros(len(old_rows), bool)
    largest = 0.0
    for column in old.schema.names:
        if column not in new.schema.names:
            continue
        left = _matrix(old, column)[old_rows]
        right = _matrix(new, column)[new_rows]
        if left.shape != right.shape:
            differs[:] = True
            continue
        differs |= (left != right).any(axis=1)
        if column == "value":
            largest = float(np.abs(left.astype(np.float64) - right).max())
    return int(differs.sum()), largest


def _matrix(batch: pa.RecordBatch, column: str) -> NDArray[Any]:
    return flat(batch.column(column)).reshape(batch.num_rows, -1)
