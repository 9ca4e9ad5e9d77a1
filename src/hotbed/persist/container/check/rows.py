# SPDX-License-Identifier: Apache-2.0
"""Checks of row files: their columns, and the order, the number and the numbers of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed import config
from hotbed.embedding.hashing import partition
from hotbed.embedding.policy import Admission, evictions, kept_columns, sketch_layout
from hotbed.embedding.rule import Adagrad
from hotbed.embedding.snapshot import COLUMN_TYPES, value_type
from hotbed.embedding.table import Table
from hotbed.persist.container.check.manifest import built_config, format_error
from hotbed.persist.container.manifest import PartEntry, TableEntry

# bound the memory of a check, whatever the size of a batch
_ROWS_AT_ONCE = 1 << 16
_NUMBERS_AT_ONCE = 1 << 20
_PLACE_TYPES = {"partition": pa.uint8(), "id": pa.int64()}
_SKETCH_TYPES = {
    "partition": pa.uint8(),
    "generation": pa.uint8(),
    "bits": pa.uint8(),
    "newest": pa.int64(),
}
_CANDIDATE_TYPES = {**_PLACE_TYPES, "count": pa.uint32(), "last_seen": pa.int64()}


def row_types(entry: TableEntry, contents: str, place: str) -> dict[str, pa.DataType]:
    """Return the columns that the row files of a table must have, by the table's config.

    Args:
        entry: the table in the manifest.
        contents: those of the manifest. Published values have neither state nor policies.
        place: where the manifest lies, for messages.

    Raises:
        FormatError: the config cannot be built.
    """
    values = built_config(entry, place)
    dim = int(values["dim"])
    types = {**_PLACE_TYPES, "value": pa.list_(value_type(values.get("dtype", "float32")), dim)}
    if contents == "values":
        return types
    rule = values.get("rule") or Adagrad()
    width = rule.state_width(dim)
    if width:
        types["state"] = pa.list_(pa.float32(), width)
    for name in kept_columns(values.get("admit"), evictions(values.get("evict"))):
        types[name] = COLUMN_TYPES[name]
    if rule.scope == "catch_up":
        types["updated"] = COLUMN_TYPES["updated"]
    return types


def removed_types() -> dict[str, pa.DataType]:
    """Return the columns of a file of removed ids."""
    return dict(_PLACE_TYPES)


def checked_rows(
    batches: Iterator[pa.RecordBatch], part: PartEntry, types: Mapping[str, pa.DataType], place: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a part, each checked.

    Columns, partitions, order and number of rows must be as the manifest says, and numbers finite.
    """
    rows = 0
    last: tuple[int, int] | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, types, place)
        _check_finite(batch, place)
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            last = _check_order(batch.slice(start, _ROWS_AT_ONCE), part, last, place)
        rows += batch.num_rows
        yield batch
    _check_number(rows, part.rows, place)


def _check_finite(rows: pa.RecordBatch, place: str) -> None:
    for name in ("value", "state"):
        if name not in rows.schema.names:
            continue
        numbers = rows.column(name).flatten().to_numpy()
        for start in range(0, len(numbers), _NUMBERS_AT_ONCE):
            piece = numbers[start : start + _NUMBERS_AT_ONCE]
            is_finite = np.isfinite(piece)
            if not is_finite.all():
                problem = f"column {name!r} must hold finite numbers"
                raise format_error(place, problem, float(piece[~is_finite][0]))


def _check_order(
    rows: pa.RecordBatch, part: PartEntry, last: tuple[int, int] | None, place: str
) -> tuple[int, int]:
    """Check that rows follow `last`, the (partition, id) before them; return their own last."""
    partitions = rows.column("partition").to_numpy()
    ids = rows.column("id").to_numpy()
    _check_partitions(partitions, ids, place)
    first = (int(partitions[0]), int(ids[0]))
    if not _rise(partitions, ids) or (last is not None and first <= last):
        raise format_error(place, "rows out of order, or two of one id", first)
    end = (int(partitions[-1]), int(ids[-1]))
    if first[0] < part.first or end[0] > part.last:
        raise format_error(place, "rows of other partitions than the manifest says", first[0])
    return end


def checked_candidates(
    batches: Iterator[pa.RecordBatch], entry: TableEntry, place: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the ids that wait for admission, or of a sketch, each checked."""
    width = getattr(_admission_of(entry), "sketch_width", 0)
    rows = 0
    waiting = [np.empty(0, np.int64)]
    for batch in batches:
        if not batch.num_rows:
            continue
        _check_columns(batch, _CANDIDATE_TYPES, place)
        partitions = batch.column("partition").to_numpy()
        ids = batch.column("id").to_numpy()
        if not width:
            _check_partitions(partitions, ids, place)
            waiting.append(ids)
        elif len(ids) != 4 * width or (partitions != partitions[0]).any():
            problem = f"a sketch has {4 * width} counters a partition"
            raise format_error(place, problem, len(ids))
        rows += batch.num_rows
        yield batch
    all_ids = np.concatenate(waiting)
    if len(np.unique(all_ids)) != len(all_ids):
        raise format_error(place, "an id waits twice", len(all_ids))
    assert entry.candidates is not None
    _check_number(rows, entry.candidates.rows, place)


def checked_sketch(
    batches: Iterator[pa.RecordBatch], entry: TableEntry, place: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the sketches that count ids that wait for admission, each checked."""
    layout = sketch_layout(_admission_of(entry))
    if layout is None:
        raise format_error(place, "its table's admission begins no sketch", entry.name)
    types = {**_SKETCH_TYPES, "cells": pa.list_(pa.uint8(), layout.part_bytes)}
    places: list[tuple[int, int]] = []
    for batch in batches:
        _check_columns(batch, types, place)
        numbers = {name: batch.column(name).to_pylist() for name in _SKETCH_TYPES}
        for bits in numbers["bits"]:
            if bits != layout.bits:
                raise format_error(place, f"a cell must have {layout.bits} bits", bits)
        for generation in numbers["generation"]:
            if generation >= layout.num_generations:
                problem = f"a sketch has {layout.num_generations} generations"
                raise format_error(place, problem, generation)
        places += zip(numbers["partition"], numbers["generation"], strict=True)
        yield batch
    if len(set(places)) != len(places):
        raise format_error(place, "a generation comes twice", len(places))
    assert entry.sketch is not None
    _check_number(len(places), entry.sketch.rows, place)


def _admission_of(entry: TableEntry) -> Admission | None:
    """Return the admission of a table in a manifest."""
    hint = config.parameters(Table)["admit"].annotation
    admit: Admission | None = config.build(entry.config.get("admit"), hint)
    return admit


def _check_partitions(partitions: NDArray[np.uint8], ids: NDArray[np.int64], place: str) -> None:
    if not np.array_equal(partitions, partition(ids)):
        problem = "an id lies in a partition that is not its own"
        raise format_error(place, problem, int(ids[0]))


def _check_number(rows: int, expected: int, place: str) -> None:
    if rows != expected:
        problem = f"it has {rows} rows, the manifest says otherwise"
        raise format_error(place, problem, expected)


def _rise(partitions: NDArray[np.uint8], ids: NDArray[np.int64]) -> bool:
    same = partitions[1:] == partitions[:-1]
    rising = (partitions[1:] > partitions[:-1]) | (same & (ids[1:] > ids[:-1]))
    return bool(rising.all())


def _check_columns(batch: pa.RecordBatch, types: Mapping[str, pa.DataType], place: str) -> None:
    names = batch.schema.names
    missing = [name for name in types if name not in names]
    if missing:
        raise format_error(place, f"columns {missing} are missing", names)
    if len(set(names)) != len(names):
        raise format_error(place, "two columns have one name", names)
    for name in names:
        expected = types.get(name, COLUMN_TYPES.get(name))
        column = batch.column(name)
        if expected is not None and column.type != expected:
            raise format_error(place, f"column {name!r} must be {expected}", str(column.type))
        nulls = column.null_count
        if pa.types.is_fixed_size_list(column.type):
            nulls += column.flatten().null_count
        if nulls:
            raise format_error(place, f"column {name!r} has nulls", nulls)
