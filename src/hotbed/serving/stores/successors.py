# SPDX-License-Identifier: Apache-2.0
"""Check that a state may follow a served version: it is of the same model, and not earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hotbed.data.arrow_types import decimal_of, holds_text
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, PersistError
from hotbed.persist.container.format import Reader
from hotbed.persist.container.store import MANIFEST_FILE, LocalStore
from hotbed.serving.arguments import column_shapes
from hotbed.serving.stores.base import ModelVersion

_ANYTHING = ("", "mixed")


def check_same_model(
    before: ModelVersion,
    schema: Mapping[str, Any],
    graph: Mapping[str, Any],
    place: str,
    *,
    of_training: bool = False,
) -> None:
    """Raise ConfigError unless requests for `before` fit a version with this schema and graph.

    It has the same inputs, with types that are not known to differ, and the same outputs. Numbers
    of a wider or narrower type do not differ: a stream may widen the type of its columns.

    Args:
        of_training: whether the schema is that of training, with columns that no graph reads.
    """
    read = Schema.from_json(schema)
    difference = next(_differences(before, read, graph, of_training), None)
    if difference is not None:
        raise ConfigError(
            f"{place}: a version of another model, got {difference}. Publish each model into a "
            "folder of its own. To serve this model instead, unload the served one, then load it."
        )


def check_grows(before: ModelVersion, reader: Reader) -> None:
    """Raise PersistError for a state of a lower number that was published before `before`.

    Versions of a run that began anew have low numbers, but late times.
    """
    number = reader.manifest.version
    if number >= before.version:
        return
    published = published_at(reader)
    if published is not None and before.published is not None and published > before.published:
        return
    raise PersistError(
        f"{reader.folder}: versions only grow, got version {number} after version "
        f"{before.version}, which stays. Publish the earlier state again to return to it, or "
        "unload the model, then load it."
    )


def published_at(reader: Reader) -> float | None:
    """Return when a state was published, in Unix seconds; None where nothing records it."""
    if reader.manifest.published is not None:
        return reader.manifest.published
    if not isinstance(reader.store, LocalStore):
        return None
    return (Path(reader.folder) / MANIFEST_FILE).stat().st_mtime


def _differences(
    before: ModelVersion, schema: Schema, graph: Mapping[str, Any], of_training: bool
) -> Iterator[str]:
    """Yield what differs for clients, as `what it is, instead of what it was`."""
    columns = sorted(schema.raw_columns(labels=False))
    columns_before = sorted(before.schema.raw_columns(labels=False))
    if of_training:
        columns = [name for name in columns if name in columns_before]
    if columns != columns_before:
        yield f"the inputs {columns} instead of {columns_before}"
    for name in columns_before:
        kind = schema.types.get(name, "")
        kind_before = before.schema.types.get(name, "")
        if _kind(kind) != _kind(kind_before) and not {kind, kind_before} & set(_ANYTHING):
            yield f"{kind} in column {name!r} instead of {kind_before}"
    if schema.kept != before.schema.kept:
        yield f"the kept columns {_kept(schema)} instead of {_kept(before.schema)}"
    names = {*columns, *(feature.source for feature in schema.kept_features)}
    widths = {name: width for name, width in _widths(schema).items() if name in names}
    widths_before = _widths(before.schema)
    if widths != widths_before:
        yield f"numbers in {widths or 'no column'} instead of {widths_before or 'no column'}"
    shapes = column_shapes(graph)
    shapes_before = column_shapes(before.graph)
    if shapes != shapes_before:
        yield f"inputs of shape {shapes} instead of {shapes_before}"
    outputs = _outputs(graph)
    outputs_before = _outputs(before.graph)
    if outputs != outputs_before:
        yield f"the outputs {outputs} instead of {outputs_before}"


def _kind(recorded: str) -> str:
    """Return what a recorded type means to a client: text, numbers, or times in their unit."""
    if holds_text(recorded):
        return "text"
    is_number = recorded in ("boolean", "integer", "uint64", "float32", "number")
    return "number" if is_number or decimal_of(recorded) is not None else recorded


def _widths(schema: Schema) -> dict[str, int]:
    """Return how many numbers each dense column has."""
    return {column.source: column.width for column in schema.dense}


def _kept(schema: Schema) -> str:
    """Return the columns that a model keeps, as they are declared."""
    return ", ".join(map(str, schema.kept)) or "none"


def _outputs(graph: Mapping[str, Any]) -> list[str]:
    """Return the outputs of a graph, with their shapes where they have more than one axis."""
    widths = graph.get("ids", {}).get("widths", {})
    return [f"{name}{list(widths[name])}" if name in widths else name for name in graph["outputs"]]
