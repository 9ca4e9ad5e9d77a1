# SPDX-License-Identifier: Apache-2.0
"""The content digest: what a state holds, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.embedding.table import Table
from hotbed.persist.format import Reader
from hotbed.persist.rows import flat, sorted_rows

_COLUMNS = ("partition", "id", "value", "state", "last_seen", "count", "updated", "score")


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
    tables = {name: table_digest(state, name) for name in state.table_names}
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
        entries = {name: state.links[-1].entry(name) for name in state.table_names}
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


def _of_table(
    dim: int,
    scalars: Mapping[str, Any] | None,
    rows: Iterable[pa.RecordBatch],
    candidates: Iterable[pa.RecordBatch],
    columns: tuple[str, ...] = _COLUMNS,
) -> str:
    waiting = list(candidates)
    sorted_ = [sorted_rows(pa.concat_batches(waiting))] if waiting else []
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


def _of_dense(reader: Reader) -> str:
    sha = hashlib.sha256()
    for name, dtype, shape, data in reader.tensors():
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
