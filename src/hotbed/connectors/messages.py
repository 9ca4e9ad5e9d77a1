# SPDX-License-Identifier: Apache-2.0
"""Messages of a broker: decoders that turn them into rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from hotbed.connectors.position import schema_from_text, schema_to_text
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.text.jsonl import declared_columns, infer_json, read_json_lines
from hotbed.connectors.types import (
    completed,
    conform,
    is_number,
    is_open,
    types_of,
    with_columns_of,
)
from hotbed.errors import SchemaError


class Decoder(ABC):
    """Decodes the messages of a broker into rows."""

    many: ClassVar[bool] = False
    """A message holds any number of rows and is decoded alone; else it holds exactly one."""

    @property
    def declared_types(self) -> pa.Schema:
        """The columns whose types the arguments tell, whatever the messages hold."""
        return pa.schema([])

    @abstractmethod
    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        """Return names and types of the declared fields and of the fields of some messages.

        Raises:
            ValueError: no message can be decoded; or both messages and declared fields are missing.
        """

    @abstractmethod
    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns of `schema` from some messages; absent columns are null.

        Raises:
            ValueError: a message is bad (or an Arrow error).
        """


@dataclass(frozen=True)
class Json(Decoder):
    """One JSON object per message.

    Args:
        columns: names and types ("int64", "uint64", "float64", "string", "bool", "list<int64>",
            ...) of columns that are declared. Every other column keeps the type of its first value.

    Example: `hb.sources.Json({"user": "int64", "genres": "list<string>"})`
    """

    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared_columns(self.columns)

    @property
    def declared_types(self) -> pa.Schema:
        return declared_columns(self.columns)

    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        declared = self.declared_types
        lines: list[bytes] = []
        for value in values:
            if value.lstrip().startswith(b"{"):
                lines.append(_as_line(value))
        if not lines and (values or not self.columns):
            raise ValueError("no JSON object among them")
        if not lines:
            return declared
        return infer_json(lines, "a message", declared)

    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        return read_json_lines([_as_line(value) for value in values], schema)


def _as_line(value: bytes) -> bytes:
    return value.replace(b"\n", b" ")


@dataclass(frozen=True)
class Arrow(Decoder):
    """One Arrow IPC stream per message, with any number of rows.

    Decoding takes about a tenth of the work of JSON.

    Example:
        A producer writes a message like this:

        >>> with pa.ipc.new_stream(sink, batch.schema) as writer:
        ...     writer.write_batch(batch)
    """

    many: ClassVar[bool] = True

    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        schema = pa.schema([])
        for value in values:
            try:
                stream = pa.ipc.open_stream(value)
                if _tells_more(stream.schema, schema):
                    types = types_of(stream.read_all())
                    schema = with_columns_of(completed(schema, types), types)
            except (OSError, pa.ArrowException):
                continue
        if not schema.names:
            raise ValueError("no Arrow stream among them")
        return schema

    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        parts = [pa.ipc.open_stream(value).read_all() for value in values]
        table = pa.concat_tables(parts).combine_chunks()
        columns: list[pa.Array] = []
        for name, kind in zip(schema.names, schema.types, strict=True):
            if name in table.schema.names:
                column = _flat(table[name].combine_chunks())
                columns.append(conform(column, kind, "the message", name))
            else:
                columns.append(pa.nulls(table.num_rows, kind))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column


def _tells_more(columns: pa.Schema, schema: pa.Schema) -> bool:
    """Return whether a message has columns that are not `known`, or not with a type."""
    closed = {column.name for column in schema if not is_open(column.type)}
    return not set(columns.names) <= closed


def wanted_types(
    decoder: Decoder, values: Sequence[bytes], plan: ReadPlan, types: str
) -> tuple[pa.Schema, str]:
    """Return the columns to decode with their types, and the new value of `types`.

    Args:
        decoder: infers the types of new columns.
        values: the messages.
        plan: its columns are decoded; None = all.
        types: the types of the columns read so far, as text: a column keeps its first type.

    Raises:
        SchemaError: a column is not in `types`, not declared, and not in any of the messages.
    """
    schema = schema_from_text(types)
    columns = schema.names
    if plan.columns is not None:
        columns = list(plan.columns)
    if plan.columns is None or not set(columns) <= set(schema.names):
        try:
            inferred = decoder.infer(values)
        except ValueError:  # no message can be decoded, so all types stay unknown
            inferred = pa.schema([(name, pa.null()) for name in columns])
        if plan.columns is None:
            columns += [name for name in inferred.names if name not in columns]
        schema = _with_new_types(schema, inferred, columns)
        types = schema_to_text(schema)
        schema = with_columns_of(schema, inferred)  # open types are those of these messages alone
    kinds: dict[str, pa.DataType] = {}
    for name in columns:
        kind = pa.null()
        if name in schema.names:
            kind = schema.field(name).type
        if name in plan.types and is_number(kind):
            kind = plan.types[name]
        kinds[name] = kind
    return pa.schema(list(kinds.items())), types


def _with_new_types(schema: pa.Schema, inferred: pa.Schema, columns: list[str]) -> pa.Schema:
    """Return `schema` with the inferred types of those `columns` that it lacks."""
    names = {*schema.names, *inferred.names}
    absent = [name for name in columns if name not in names]
    if absent:
        raise SchemaError(
            f"columns: no message has columns {absent}, got {inferred.names}. Correct the "
            "schema, or declare columns that may be absent: Json(columns={...})."
        )
    fields = list(schema)
    for column in inferred:
        is_new = column.name in columns and column.name not in schema.names
        if is_new and not is_open(column.type):
            fields.append(column)
    return pa.schema(fields)


Decoded = tuple[list[pa.RecordBatch], list[int], dict[int, Exception]]
"""Rows; the number of rows of each message; the errors of the messages that cannot be decoded."""


def decode_messages(
    decoder: Decoder, values: Sequence[bytes], schema: pa.Schema, first: int = 0
) -> Decoded:
    """Decode messages, numbered from `first`, at once; halve them to locate bad ones."""
    if not decoder.many or len(values) == 1:
        try:
            batch = decoder.decode(values, schema)
            if not decoder.many and batch.num_rows != len(values):
                raise ValueError(f"{len(values)} messages gave {batch.num_rows} rows")
            counts = [1] * len(values)
            if decoder.many:
                counts = [batch.num_rows]
            return [batch], counts, {}
        except (ValueError, TypeError, KeyError, OSError, pa.ArrowException) as error:
            if len(values) == 1:
                return [], [0], {first: error}
    half = len(values) // 2
    batches, counts, errors = decode_messages(decoder, values[:half], schema, first)
    more_batches, more_counts, more_errors = decode_messages(
        decoder, values[half:], schema, first + half
    )
    return ([*batches, *more_batches], [*counts, *more_counts], {**errors, **more_errors})
