# SPDX-License-Identifier: Apache-2.0
"""The content digest: what a state holds, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.embedding.table import Table
from hotbed.errors import PersistError
from hotbed.persist.container.format import Reader
from hotbed.persist.container.manifest import Arrays
from hotbed.persist.container.row_order import sorted_rows
from hotbed.persist.state.open_rows import read_open_rows
from hotbed.persist.state.tables import flat

_COLUMNS = ("partition", "id", "value", "state", "last_seen", "count", "updated", "score")
_SKETCH_COLUMNS = ("partition", "generation", "bits", "newest", "cells")
_PASSED_OVER = ("now", "topic")  # members of positions that do not say how far they are


def content_digest(state: Reader | Mapping[str, Table]) -> str:
    """Return the SHA-256 (hex) of what a checkpoint, or what live tables hold.

    It does not depend on how a checkpoint was cut into files, fulls and deltas, nor on the states
    before it: two runs that learned the same have the same. See docs/format.md.

    Example: `content_digest(open_checkpoint("a")) == content_digest(open_checkpoint("b"))`
    """
    if isinstance(state, Mapping):
        tables = {}
        for name, table in state.items():
            if table.is_spread:
                raise PersistError(
                    f"content_digest: several ranks hold the rows of a table, got table {name!r}. "
                    "Save a state, and take its digest."
                )
            waiting = (table.candidates(), table.sketch())
            tables[name] = _of_table(table.dim, table.scalars(), table.export(), *waiting)
        return _hex(_canonical({"tables": tables}))
    parts = {
        "tables": {name: table_digest(state, name) for name in state.table_names},
        "dense": _of_dense(state),
        "progress": _of_progress(state),
        "positions": comparable_position(state.manifest.positions),
        "counters": state.manifest.counters,
    }
    rows = read_open_rows(state)
    if rows is not None:
        logs = {log: list(rows.batches(log)) for log in rows.opened}
        parts["open_rows"] = {log: _of_open(batches) for log, batches in logs.items() if batches}
    return _hex(_canonical(parts))


def comparable_position(position: Any) -> Any:
    """Return a position without the members that do not say how far it is.

    These are `now`, the time on the wall clock at which a block of a stream was taken, and `topic`,
    the id of a topic and the broker's timestamps.
    """
    if isinstance(position, list):
        return [comparable_position(item) for item in position]
    if not isinstance(position, dict):
        return position
    return {
        key: comparable_position(item) for key, item in position.items() if key not in _PASSED_OVER
    }


def table_digest(reader: Reader, name: str) -> str:
    """Return the content digest of one table of a checkpoint."""
    entry = reader.entry(name)
    dim = entry.config["dim"]
    return _of_table(dim, entry.scalars, reader.rows(name), *reader.waiting(name))


def _of_table(
    dim: int,
    scalars: Mapping[str, Any],
    rows: Iterable[pa.RecordBatch],
    candidates: Iterable[pa.RecordBatch],
    sketch: Iterable[pa.RecordBatch],
) -> str:
    waiting = list(candidates)
    if waiting:
        waiting = [sorted_rows(pa.concat_batches(waiting))]
    parts = {
        "dim": dim,
        "scalars": {name: value for name, value in scalars.items() if name != "evicted_by"},
        "rows": _of_columns(rows, _COLUMNS),
        "candidates": _of_columns(waiting, _COLUMNS),
    }
    sketches = _of_columns(sketch, _SKETCH_COLUMNS)
    if sketches:
        parts["sketch"] = sketches
    return _hex(_canonical(parts))


def _of_columns(batches: Iterable[pa.RecordBatch], columns: tuple[str, ...]) -> dict[str, str]:
    hashes: dict[str, Any] = {}
    for batch in batches:
        if not batch.num_rows:
            continue
        for name in columns:
            if name in batch.schema.names:
                values = np.ascontiguousarray(flat(batch.column(name)))
                hashes.setdefault(name, hashlib.sha256()).update(values)
    return {name: sha.hexdigest() for name, sha in hashes.items()}


def _of_open(batches: list[pa.RecordBatch]) -> dict[str, str]:
    """Return the digests of the columns of open rows, whose batches may differ in their types."""
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    table = pa.concat_tables(tables, promote_options="default").combine_chunks()
    digests: dict[str, str] = {}
    for name in table.schema.names:
        sha = hashlib.sha256()
        for chunk in table[name].chunks:
            _update(sha, chunk)
        digests[name] = sha.hexdigest()
    return digests


def _update(sha: Any, values: pa.Array) -> None:
    """Hash the values of a column, whatever lies in the places of nulls."""
    kind = values.type
    sha.update(np.asarray(values.is_valid()))
    if pa.types.is_struct(kind):
        for field in kind:
            _update(sha, values.field(field.name))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(values).fill_null(0)
        sha.update(np.ascontiguousarray(lengths))
        _update(sha, values.flatten())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        sha.update(np.ascontiguousarray(values.fill_null(0)))
    else:
        sha.update(_canonical([str(value) for value in values.to_pylist()]))


def _of_dense(reader: Reader) -> str:
    sha = hashlib.sha256()
    for name, dtype, shape, data in reader.tensors():
        sha.update(_canonical([name, dtype, shape]))
        sha.update(data)
    dense = reader.manifest.dense
    sha.update(_canonical({} if dense is None else dense.optimizers))
    return sha.hexdigest()


def _of_progress(reader: Reader) -> str:
    part = reader.manifest.progress
    if part is None:
        return _hex(_canonical({"tree": {}, "random": {}}))
    arrays = reader.arrays()
    trees = {"tree": _hashed_progress(part.tree, arrays), "random": _hashed(part.random, arrays)}
    return _hex(_canonical(trees))


def _hashed_progress(tree: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the tree of a run as `_hashed` does, without callbacks that kept nothing."""
    hashed: dict[str, Any] = _hashed(tree, arrays)
    callbacks = hashed.get("callbacks")
    if isinstance(callbacks, dict):
        hashed["callbacks"] = {name: state for name, state in callbacks.items() if state}
    return hashed


def _hashed(tree: Any, arrays: Arrays) -> Any:
    """Return a tree with the digests of its arrays, without what depends on the wall clock."""
    if isinstance(tree, list):
        return [_hashed(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    for mark in ("$array", "$scalar"):
        if set(tree) == {mark}:
            array = arrays[tree[mark]]
            return {mark: [str(array.dtype), list(array.shape), _hex(array.tobytes())]}
    return {key: _hashed(item, arrays) for key, item in tree.items() if not key.startswith("wall_")}


def part_digests(reader: Reader) -> dict[str, str]:
    """Return the digests of parts of a checkpoint that have no rows or tensors, by dotted name.

    They are the members of progress, of the random state, of the scalars of tables and of their
    candidates, and the settings of optimizers.
    """
    parts: dict[str, Any] = {}
    progress = reader.manifest.progress
    if progress is not None:
        arrays = reader.arrays()
        trees = {
            "progress": _hashed_progress(progress.tree, arrays),
            "random": _hashed(progress.random, arrays),
        }
        for name, tree in trees.items():
            for key, item in tree.items():
                inside = item if key == "callbacks" else {"": item}
                for inner, value in inside.items():
                    parts[f"{name}.{key}.{inner}".rstrip(".")] = value
    for entry in reader.manifest.tables:
        for key, value in entry.scalars.items():
            if key == "evicted_by":
                continue
            parts[f"tables.{entry.name}.{key}"] = value
        ids = reader.waiting(entry.name)
        candidates = list(ids.candidates)
        if candidates:
            candidates = [sorted_rows(pa.concat_batches(candidates))]
        parts[f"tables.{entry.name}.candidates"] = _of_columns(candidates, _COLUMNS)
        parts[f"tables.{entry.name}.sketch"] = _of_columns(ids.sketch, _SKETCH_COLUMNS)
    dense = reader.manifest.dense
    for name, optimizer in ({} if dense is None else dense.optimizers).items():
        parts[f"optimizers.{name}"] = optimizer
    return {name: _hex(_canonical(part)) for name, part in parts.items()}


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
