# SPDX-License-Identifier: Apache-2.0
"""Tables into and out of a checkpoint, and the content digest: what a state holds, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from hotbed.embedding.policy import PARTITIONS
from hotbed.embedding.table import Table
from hotbed.errors import FormatError
from hotbed.persist.format import NO_WATERMARK, ByPartition, Reader, Writer
from hotbed.persist.tree import unpacked

_COLUMNS = ("id", "value", "state", "last_seen", "count", "updated", "score")


class Rows(Protocol):
    """The rows of a table at one moment: what `Table.snapshot` gives."""

    num_rows: int
    scalars: dict[str, Any]

    def rows(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def candidates(self) -> Iterator[pa.RecordBatch]: ...
    def close(self, saved: bool) -> None: ...


@dataclass(frozen=True)
class CapturedTable:
    """One table in a capture. `total`: its rows at that moment; `rows`: all of them, or those that changed."""

    name: str
    config: Mapping[str, Any]
    total: int
    rows: Rows


class Whole:
    """A table itself in the place of a snapshot, for a save that nothing runs beside."""

    def __init__(self, table: Table) -> None:
        self.num_rows, self.scalars = len(table), table.scalars()
        self.rows, self.candidates = table.export, table.candidates

    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def close(self, saved: bool) -> None: ...


def write_table(writer: Writer, number: int, table: CapturedTable) -> dict[str, Any]:
    folder, rows = table_folder(number, table.name), table.rows
    spans = partition_ranges(rows.num_rows)
    # every part before the next kind: a part's file is written in one go, and tombstones are few
    parts = _parts(writer, f"{folder}/rows", spans, rows.rows)
    removed = _parts(writer, f"{folder}/removed", partition_ranges(0), rows.removed)
    file = f"{folder}/candidates.arrow"
    waiting = writer.write_batches(file, rows.candidates())
    return {
        "name": table.name,
        "config": table.config,
        "rows": table.total,
        "scalars": rows.scalars,
        "parts": parts,
        "removed": removed,
        "candidates": {"file": file, "rows": waiting} if waiting else None,
    }


def _parts(writer: Writer, name: str, spans: list[range], batches: Any) -> list[dict[str, Any]]:
    parts = []
    for span in spans:
        file = f"{name}-{span.start:03d}-{span.stop - 1:03d}.arrow"
        if rows := writer.write_batches(file, batches(span)):
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    return parts


def load_table(reader: Reader, table: Table) -> None:
    """Load a table of a checkpoint, its chain in order, in the place of all that `table` holds."""
    if len(table) or table.step:
        table.clear()
    for link in reader.links:
        for batch in link.parts(table.name, "removed"):
            table.remove(batch.column("id"))
        table.load(link.parts(table.name))
    entry = reader.links[-1].entry(table.name)
    if len(reader.links) > 1 and entry["scalars"]["watermark"] > NO_WATERMARK:
        table.evict(entry["scalars"]["watermark"])  # what was expired but not yet swept has no tombstone
    table.load_scalars(entry["scalars"])
    table.load_candidates(reader.candidates(table.name))
    if len(table) != entry["rows"]:
        raise FormatError(f"{reader.folder}: table {table.name!r} has {len(table)} rows after loading — "
                          f"received {entry['rows']} in the manifest — do not use it; restore a copy")  # fmt: skip


def table_folder(number: int, name: str) -> str:
    """Folder of a table: its number and its name, made safe for any file system.

    >>> table_folder(3, "item/colour")
    'tables/003-item%2Fcolour'
    """
    return f"tables/{number:03d}-{quote(name, safe='')[:100]}"


def partition_ranges(rows: int, rows_per_part: int = 1 << 20) -> list[range]:
    """Equal ranges of the 256 partitions for a table of `rows`, about `rows_per_part` rows each."""
    parts = 1
    while parts < PARTITIONS and rows > parts * rows_per_part:
        parts *= 2
    width = PARTITIONS // parts
    return [range(first, first + width) for first in range(0, PARTITIONS, width)]


# --- the content digest ---------------------------------------------------------------------------------------------


def content_digest(state: Reader | Mapping[str, Table]) -> str:
    """SHA-256 (hex) of what a checkpoint, or of what live tables hold; see docs/format.md.

    It does not depend on how a checkpoint was cut into files, fulls and deltas, nor on what it descends from. Two runs
    that learned the same have the same.

    Example: `content_digest(open_checkpoint("a")) == content_digest(open_checkpoint("b"))`
    """
    if isinstance(state, Mapping):
        tables = {
            name: _of_table(one.dim, one.scalars(), one.export(), one.candidates()) for name, one in state.items()
        }
        return _hex(_canonical({"tables": tables}))
    tables = {name: table_digest(state, name) for name in (entry["name"] for entry in state.manifest["tables"])}
    manifest = state.manifest
    parts = {"tables": tables, "dense": _of_dense(state), "progress": _of_progress(state)}
    return _hex(_canonical({**parts, "positions": manifest["positions"], "counters": manifest["counters"]}))


def table_digest(reader: Reader, name: str) -> str:
    """The same of one table of a checkpoint."""
    entry = reader.links[-1].entry(name)
    return _of_table(entry["config"]["dim"], entry["scalars"], reader.rows(name), reader.candidates(name))


def _of_table(
    dim: int, scalars: Mapping[str, Any], rows: Iterable[pa.RecordBatch], candidates: Iterable[pa.RecordBatch]
) -> str:
    sha = hashlib.sha256(_canonical({"dim": dim, "scalars": scalars}))
    for batch in rows:
        _hash_rows(sha, batch)
    sha.update(b"\xff\xff")
    waiting = ByPartition(iter(candidates))
    for partition in range(PARTITIONS):
        if (batch := waiting.take(partition)) is not None:
            order = np.argsort(batch.column("id").to_numpy(), kind="stable")
            _hash_rows(sha, batch.take(pa.array(order)))
    return sha.hexdigest()


def _hash_rows(sha: Any, batch: pa.RecordBatch) -> None:
    sha.update(struct.pack("<BQ", batch.column("partition")[0].as_py(), batch.num_rows))
    for name in (name for name in _COLUMNS if name in batch.schema.names):
        column = batch.column(name)
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        sha.update(name.encode() + b"\0")
        sha.update(np.ascontiguousarray(flat.to_numpy()))


def _of_dense(reader: Reader) -> str:
    """Read without torch and without NumPy's types, so that bfloat16 is bytes like any other."""
    data, sha = reader.dense(), hashlib.sha256()
    if data:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(bytes(data[8 : 8 + size]))
        for name in sorted(header):
            if name != "__metadata__":
                first, last = header[name]["data_offsets"]
                sha.update(_canonical([name, header[name]["dtype"], header[name]["shape"]]))
                sha.update(data[8 + size + first : 8 + size + last])
    sha.update(_canonical((reader.manifest["dense"] or {"optimizers": {}})["optimizers"]))
    return sha.hexdigest()


def _of_progress(reader: Reader) -> str:
    part = reader.manifest.get("progress") or {"file": None, "tree": {}, "random": {}}
    arrays = unpacked(reader.read(part["file"])) if part["file"] else {}

    def plain(tree: Any) -> Any:
        if isinstance(tree, list):
            return [plain(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if set(tree) in ({"$array"}, {"$scalar"}):
            (mark, name), *_ = tree.items()
            return {mark: [str(arrays[name].dtype), list(arrays[name].shape), _hex(arrays[name].tobytes())]}
        return {key: plain(item) for key, item in tree.items() if not key.startswith("wall_")}

    return _hex(_canonical({"tree": plain(part["tree"]), "random": plain(part["random"])}))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
