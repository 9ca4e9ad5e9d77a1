# SPDX-License-Identifier: Apache-2.0
"""Files of JSON objects, one per line."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.json as pajson

from hotbed.connectors.files import Endings, Paths, Section
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

    endings: ClassVar[Endings] = {".jsonl": {}, ".ndjson": {}, ".json": {}}
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
        kinds: dict[str, pa.DataType] = {}
        for name in plan.wanted(schema.names):
            kind = schema.field(name).type
            if name in plan.types and is_number(kind):
                kind = plan.types[name]
            kinds[name] = kind
        return read_json_lines(lines, pa.schema(list(kinds.items())))


def _is_object(text: bytes) -> bool:
    """Return whether `text` is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_json_lines(lines: list[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of `schema` from JSON objects, one per line; absent keys are null."""
    if not lines:
        empty = [pa.array([], type=column.type) for column in schema]
        return pa.RecordBatch.from_arrays(empty, schema=schema)
    data = b"\n".join(lines)
    table = _read_json(data, schema)
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
            schema = _read_json(data).schema
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
        if not pa.types.is_floating(column.type):
            continue
        wanted = pa.field(column.name, pa.uint64())
        try:
            _read_json(data, pa.schema([wanted]))
        except pa.ArrowException:
            continue
        schema = schema.set(index, wanted)
    return schema


def _read_json(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows of `data`: the columns of `schema`, or all columns with inferred types.

    The data are read as one block, so that block ends do not change types.
    """
    read_options = pajson.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 10))
    parse_options = None
    if schema is not None:
        parse_options = pajson.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=False
        )
    return pajson.read_json(
        io.BytesIO(data), read_options=read_options, parse_options=parse_options
    )


def has_nulls(kind: pa.DataType) -> bool:
    """Return whether only nulls (or empty lists) were read, so that the type is not known yet."""
    if pa.types.is_list(kind):
        return has_nulls(kind.value_type)
    return bool(pa.types.is_null(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind
