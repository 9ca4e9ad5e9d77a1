# SPDX-License-Identifier: Apache-2.0
"""Tables into and out of a checkpoint, and the content digest: what a state holds, whatever files
it lies in.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import describe
from hotbed.embedding.table import Table
from hotbed.errors import FormatError, PersistError
from hotbed.persist.format import Link, Reader, Writer, in_order, partition_ranges
from hotbed.persist.store import ADVICE

BATCH_ROWS = 4096
VALUES = ("partition", "id", "value", "count")
_NEVER = -(2**63)  # the watermark of a table that was told no time
_COLUMNS = ("partition", "id", "value", "state", "last_seen", "count", "updated", "score")


class Rows(Protocol):
    """The rows of a table at one moment: what `Table.snapshot` gives."""

    num_rows: int
    changes: bool
    scalars: dict[str, Any]

    def rows(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]: ...
    def candidates(self) -> Iterator[pa.RecordBatch]: ...
    def close(self, saved: bool) -> None: ...


@dataclass(frozen=True)
class CapturedTable:
    """One table in a capture. `total`: its rows at that moment; `rows`: all of them, or those that
    changed.
    """

    name: str
    config: Mapping[str, Any]
    total: int
    rows: Rows


class Whole:
    """A table itself in the place of a snapshot, for a save that nothing runs beside."""

    def __init__(self, table: Table) -> None:
        self.num_rows = len(table)
        self.changes = False
        self.scalars = table.scalars()
        self.rows = table.export
        self.candidates = table.candidates

    def removed(self, partitions: Iterable[int]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def close(self, saved: bool) -> None: ...


def write_table(writer: Writer, number: int, table: CapturedTable) -> dict[str, Any]:
    folder = table_folder(number, table.name)
    rows = table.rows
    spans = partition_ranges(rows.num_rows)
    # every part before the next kind: a part's file is written in one go, and tombstones are few
    parts = _parts(writer, f"{folder}/rows", spans, rows.rows)
    removed = (
        _parts(writer, f"{folder}/removed", partition_ranges(0), rows.removed)
        if rows.changes
        else []
    )
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
        if rows := writer.write_batches(file, _gathered(batches(span))):
            parts.append({"file": file, "first": span.start, "last": span.stop - 1, "rows": rows})
    return parts


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least BATCH_ROWS, but for the last."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        waiting.append(batch)
        held += batch.num_rows
        if held >= BATCH_ROWS:
            yield pa.concat_batches(waiting) if len(waiting) > 1 else batch
            waiting = []
            held = 0
    if waiting:
        yield pa.concat_batches(waiting)


def write_values(writer: Writer, number: int, link: Link, name: str) -> dict[str, Any]:
    """Write the values of a delta's own rows, and its removed ids; returns the table's entry in the
    manifest.
    """
    entry = dict(link.entry(name))
    folder = table_folder(number, name)
    for member, columns in (("parts", VALUES), ("removed", VALUES[:2])):
        parts = []
        for part in entry[member]:
            file = f"{folder}/{PurePosixPath(part['file']).name}"
            rows = link.part(link.entry(name), member, part)
            writer.write_batches(file, (only(batch, columns) for batch in rows))
            parts.append({**part, "file": file})
        entry[member] = parts
    return entry


def only(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    """The columns of these names that are there."""
    return batch.select([name for name in columns if name in batch.schema.names])


def moments(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Unix seconds, where known: `learned`, of the newest event in a state; `caught`, when training
    had come to it.
    """
    tree = (manifest["progress"] or {}).get("tree") or {}
    known = [
        (tree.get("run") or {}).get("now"),
        *(entry["scalars"]["watermark"] for entry in manifest["tables"]),
    ]
    times = [micros for micros in known if micros is not None and micros != _NEVER]
    caught = {"caught": float(tree["wall_caught"])} if "wall_caught" in tree else {}
    return {"learned": max(times) / 1e6, **caught} if times else caught


def network_bytes(reader: Reader) -> bytes:
    """The network's tensors alone as the bytes of a safetensors file, without torch; empty where
    there are none.
    """
    found = [one for one in tensors(reader) if one[0].startswith("network/")]
    found.sort(
        key=lambda one: (-len(one[3]) // max(1, int(np.prod(one[2]))), one[0])
    )  # wide types first: all are aligned
    header = {}
    at = 0
    for name, dtype, shape, data in found:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(one[3] for one in found) if found else b""


def load_table(reader: Reader, name: str, table: Table) -> None:
    """Load a table of a checkpoint, its chain in order, in the place of all that `table` holds."""
    if len(table) or table.step:
        table.clear()
    for link in reader.links:
        for batch in link.parts(name, "removed"):
            table.remove(batch.column("id"))
        table.load(link.parts(name))
    settle_table(table, reader.links[-1].entry(name), reader.links[-1])
    table.load_candidates(reader.candidates(name))


def settle_table(table: Table, entry: Mapping[str, Any], link: Link) -> None:
    """After the rows of a full or a delta: what belongs to the table as a whole, and a check of its
    size.
    """
    table.load_scalars(entry["scalars"])
    if len(table) != entry["rows"]:
        raise FormatError(
            f"{link.store.place(link.folder)}: table {entry['name']!r} has {len(table)} rows "
            "after loading — "
            f"received {entry['rows']} in the manifest — {ADVICE}"
        )


def warm_start(
    tables: Mapping[str, Table],
    checkpoint: Reader,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    *,
    optimizer_state: bool = False,
    now: int | None = None,
) -> dict[str, str]:
    """Rows of another job's checkpoint into tables of this one; returns table here -> table there.

    `rename`: names there to names here, or pairs of a regular expression that matches the whole
    name there and its replacement, the first that matches counts. Tables without a counterpart,
    here or there, are left alone. `optimizer_state`: also state and the step that bias correction
    counts; both tables then need the same rule. Counts and times come where the table here keeps
    them; `now`: int64 microseconds, when rows without a time count as seen. Raises PersistError for
    two tables with one name, other dims or rules, and FormatError naming a bad file, before
    anything changes.

    Example: `warm_start({"item": table}, open_checkpoint("old"), rename=[(r"v1_(.*)", r"\\1")])`
    """
    sources: dict[str, str] = {}
    for there in table_names(checkpoint):
        here = _renamed(there, rename)
        if here in sources:
            raise PersistError(
                f"warm start: two tables become {here!r} — received {sources[here]!r} and "
                f"{there!r} — "
                "rename one of them"
            )
        sources[here] = there
    found = {here: there for here, there in sources.items() if here in tables}
    for here, there in found.items():
        entry = checkpoint.links[-1].entry(there)["config"]
        _check_alike(tables[here], entry, there, optimizer_state=optimizer_state)
        timed = next(checkpoint.links[0].parts(there), None)
        if (
            now is None
            and tables[here].needs_times
            and timed is not None
            and "last_seen" not in timed.schema.names
        ):
            raise PersistError(
                f"warm start: table {here!r} needs times — received none in {there!r} — give "
                "now=, when its "
                "rows count as seen"
            )
    checkpoint.verify()
    for here, there in found.items():
        table = tables[here]
        scalars = checkpoint.links[-1].entry(there)["scalars"]
        dropped = ("partition", "updated") if optimizer_state else ("partition", "updated", "state")
        for batch in checkpoint.rows(there):
            kept = batch.select([name for name in batch.schema.names if name not in dropped])
            if now is not None and "last_seen" not in kept.schema.names:
                kept = kept.append_column(
                    "last_seen", pa.array(np.full(kept.num_rows, now, np.int64))
                )
            table.load([kept])
        if optimizer_state:
            table.load_scalars(
                {**table.scalars(), "step": scalars["step"], "rates": scalars["rates"]}
            )
    return found


def _renamed(name: str, rename: Mapping[str, str] | Sequence[tuple[str, str]]) -> str:
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    for pattern, replacement in rename:
        try:
            if (match := re.fullmatch(pattern, name)) is not None:
                return match.expand(replacement)
        except (re.error, IndexError) as error:
            raise PersistError(
                f"warm start: no rule to rename by — received {(pattern, replacement)!r}: {error} "
                "— give a "
                "regular expression and what takes its place"
            ) from error
    return name


def _check_alike(
    table: Table, config: Mapping[str, Any], there: str, *, optimizer_state: bool
) -> None:
    if config["dim"] != table.dim:
        raise PersistError(
            f"warm start: table {table.name!r} has dim {table.dim} — received {config['dim']} in "
            f"{there!r} — "
            "build it with the same dim, or rename it away"
        )
    rule = describe(table.rule)
    if optimizer_state and rule["kind"] != config["rule"]["kind"]:
        raise PersistError(
            f"warm start: table {table.name!r} has the rule {rule['kind']} — received the state of "
            f"{config['rule']['kind']} in {there!r} — use optimizer_state=False"
        )


def table_folder(number: int, name: str) -> str:
    """Folder of a table: its number and its name, made safe for any file system.

    >>> table_folder(3, "item/colour")
    'tables/003-item%2Fcolour'
    """
    return f"tables/{number:03d}-{quote(name, safe='')[:100]}"


# --- the content digest ---------------------------------------------------------------------------


def content_digest(state: Reader | Mapping[str, Table]) -> str:
    """SHA-256 (hex) of what a checkpoint, or of what live tables hold; see docs/format.md.

    It does not depend on how a checkpoint was cut into files, fulls and deltas, nor on what it
    descends from. Two runs that learned the same have the same.

    Example: `content_digest(open_checkpoint("a")) == content_digest(open_checkpoint("b"))`
    """
    if isinstance(state, Mapping):
        tables = {
            name: _of_table(one.dim, one.scalars(), one.export(), one.candidates())
            for name, one in state.items()
        }
        return _hex(_canonical({"tables": tables}))
    tables = {name: table_digest(state, name) for name in table_names(state)}
    parts = {
        "tables": tables,
        "dense": _of_dense(state),
        "progress": _of_progress(state),
        "positions": comparable_position(state.manifest["positions"]),
        "counters": state.manifest["counters"],
    }
    return _hex(_canonical(parts))


def comparable_position(position: Any) -> Any:
    """A position without what does not tell how far it is.

    That is `now`, the time on the wall clock at which a block of a stream was taken, and `topic`,
    the id of a topic and the broker's timestamps.
    """
    if isinstance(position, list):
        return [comparable_position(item) for item in position]
    if not isinstance(position, dict):
        return position
    kept = {key: item for key, item in position.items() if key not in ("now", "topic")}
    return {key: comparable_position(item) for key, item in kept.items()}


def values_digest(state: Reader | Mapping[str, Table]) -> str:
    """SHA-256 (hex) of the rows' values alone: what a server holds that followed a run, and the run
    itself, have the same.
    """
    if isinstance(state, Mapping):
        sources = {name: (table.dim, table.export()) for name, table in state.items()}
    else:
        entries = {name: state.links[-1].entry(name) for name in table_names(state)}
        sources = {
            name: (entry["config"]["dim"], state.rows(name)) for name, entry in entries.items()
        }
    tables = {
        name: _of_table(dim, None, rows, (), ("id", "value"))
        for name, (dim, rows) in sources.items()
    }
    return _hex(_canonical({"tables": tables}))


def table_digest(reader: Reader, name: str) -> str:
    """The content digest of one table of a checkpoint."""
    entry = reader.links[-1].entry(name)
    return _of_table(
        entry["config"]["dim"], entry["scalars"], reader.rows(name), reader.candidates(name)
    )


def table_names(reader: Reader) -> list[str]:
    """Names of a checkpoint's tables."""
    return [entry["name"] for entry in reader.manifest["tables"]]


def tensors(reader: Reader) -> Iterator[tuple[str, str, list[int], memoryview]]:
    """Name, dtype, shape and bytes of each dense tensor by name, without torch; bfloat16 is bytes
    like any other.
    """
    for name, tensor in sorted(reader.tensors(), key=lambda named: named[0]):
        yield name, tensor["dtype"], tensor["shape"], memoryview(tensor["data"])


def _of_table(
    dim: int,
    scalars: Mapping[str, Any] | None,
    rows: Iterable[pa.RecordBatch],
    candidates: Iterable[pa.RecordBatch],
    columns: tuple[str, ...] = _COLUMNS,
) -> str:
    waiting = list(candidates)
    sorted_ = [in_order(pa.concat_batches(waiting))] if waiting else []
    held = {"rows": _of_columns(rows, columns), "candidates": _of_columns(sorted_, columns)}
    return _hex(_canonical({"dim": dim, "scalars": scalars, **held}))


def _of_columns(batches: Iterable[pa.RecordBatch], columns: tuple[str, ...]) -> dict[str, str]:
    hashes: dict[str, Any] = {}
    for batch in (batch for batch in batches if batch.num_rows):
        for name in (name for name in columns if name in batch.schema.names):
            hashes.setdefault(name, hashlib.sha256()).update(
                np.ascontiguousarray(flat(batch.column(name)))
            )
    return {name: sha.hexdigest() for name, sha in hashes.items()}


def flat(column: pa.Array) -> NDArray[Any]:
    """A column's values as one flat array, without a copy where Arrow allows."""
    values: NDArray[Any] = (
        column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    ).to_numpy()
    return values


def _of_dense(reader: Reader) -> str:
    sha = hashlib.sha256()
    for name, dtype, shape, data in tensors(reader):
        sha.update(_canonical([name, dtype, shape]))
        sha.update(data)
    sha.update(_canonical((reader.manifest["dense"] or {"optimizers": {}})["optimizers"]))
    return sha.hexdigest()


def _of_progress(reader: Reader) -> str:
    part = reader.manifest.get("progress") or {"file": None, "tree": {}, "random": {}}
    arrays = reader.arrays()

    def plain(tree: Any) -> Any:
        if isinstance(tree, list):
            return [plain(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if set(tree) in ({"$array"}, {"$scalar"}):
            (mark, name), *_ = tree.items()
            return {
                mark: [
                    str(arrays[name].dtype),
                    list(arrays[name].shape),
                    _hex(arrays[name].tobytes()),
                ]
            }
        return {key: plain(item) for key, item in tree.items() if not key.startswith("wall_")}

    return _hex(_canonical({"tree": plain(part["tree"]), "random": plain(part["random"])}))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
