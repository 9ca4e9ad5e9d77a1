# SPDX-License-Identifier: Apache-2.0
"""Files of JSON objects, one per line."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.json as pajson

from hotbed.connectors.files import Paths, Section
from hotbed.connectors.lines import LineSource, blocks, last_line_end
from hotbed.connectors.plan import ReadPlan
from hotbed.errors import DecodeError


@dataclass(frozen=True)
class Jsonl(LineSource):
    """One JSON object per line.

    Columns and types come from the first 4 MiB. Lists become list columns; an absent key is null.

    Raises:
        DecodeError: A line is not an object of those types (file, line).

    Example: `hb.sources.Jsonl("events/*.jsonl.gz")`
    """

    endings: ClassVar[Mapping[str, Mapping[str, Any]]] = {".jsonl": {}, ".ndjson": {}, ".json": {}}
    path: Paths

    def infer(self) -> pa.Schema:
        file = self.first_file()
        try:
            with Section(file).open() as stream:
                lines = [line for line in next(blocks(stream), []) if line.strip()]
        except OSError as error:
            raise DecodeError(
                f"{file}: cannot be read, got {error}. Write the file again.", file
            ) from error
        # Arrow reads some strings as times; the Time role parses them itself, with zones.
        inferred = infer_json(lines, file)
        return pa.schema([(column.name, plain_type(column.type)) for column in inferred])

    def rows_end(self, section: Section) -> int:
        end = last_line_end(section)
        with Section(section.file, end, section.end).open() as stream:
            rest = stream.read()
        if _is_object(rest):
            return end + len(rest)
        return end

    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        schema = self.schema()
        if plan.columns is not None:
            schema = pa.schema([column for column in schema if column.name in plan.columns])
        for index, column in enumerate(schema):
            if is_number(column.type) and column.name in plan.types:
                kind = plan.types[column.name]
                schema = schema.set(index, pa.field(column.name, kind))
        return read_json_lines(lines, schema)


def _is_object(text: bytes) -> bool:
    """Return whether `text` is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_json_lines(lines: list[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of `schema` from JSON objects, one per line; absent keys are null."""
    if not lines:
        return pa.RecordBatch.from_arrays(
            [pa.array([], type=field.type) for field in schema], schema=schema
        )
    options = pajson.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=False
    )
    data = b"\n".join(lines)
    table = pajson.read_json(io.BytesIO(data), read_options=_whole(data), parse_options=options)
    if table.num_rows != len(lines):
        raise ValueError(f"{len(lines)} lines hold {table.num_rows} objects")
    batch: pa.RecordBatch = table.combine_chunks().to_batches()[0]
    return batch.select(schema.names)


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def infer_json(lines: list[bytes], file: str) -> pa.Schema:
    """Return the types of the first lines.

    Bad lines among them are passed over; reading them later names or skips them.
    """
    schema = None
    count = len(lines)
    data = b""
    while schema is None and count:
        try:
            data = b"\n".join(lines[:count])
            schema = pajson.read_json(io.BytesIO(data), read_options=_whole(data)).schema
        except pa.ArrowException:
            if count > 1:
                count //= 2
            else:
                lines = lines[1:]
                count = len(lines)
    if schema is None:
        raise DecodeError(
            f"{file}: the first block holds no JSON object. Write one object per line.", file
        )
    return _with_big_ids(data, schema)


def _with_big_ids(data: bytes, schema: pa.Schema) -> pa.Schema:
    """Return the schema with uint64 for columns of integers above int64.

    Arrow reads such integers as floats, which lose digits.
    """
    for index, column in enumerate(schema):
        if pa.types.is_floating(column.type):
            wanted = pa.field(column.name, pa.uint64())
            options = pajson.ParseOptions(
                explicit_schema=pa.schema([wanted]), unexpected_field_behavior="ignore"
            )
            try:
                pajson.read_json(io.BytesIO(data), read_options=_whole(data), parse_options=options)
                schema = schema.set(index, wanted)
            except pa.ArrowException:
                continue
    return schema


def _whole(data: bytes) -> pajson.ReadOptions:
    """Return options that read `data` as one block, so that block ends do not change types."""
    return pajson.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 10))


def has_nulls(kind: pa.DataType) -> bool:
    """Return whether only nulls (or empty lists) were read, so that the type is not known yet."""
    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and has_nulls(kind.value_type)))


def plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind
