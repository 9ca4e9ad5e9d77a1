# SPDX-License-Identifier: Apache-2.0
"""Files of JSON objects, one per line."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pyarrow.json as pajson

from hotbed import _core
from hotbed.connectors.files import Endings, Section, first_line, infer_from_heads
from hotbed.connectors.paths import Paths
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.text.lines import LineSource, blocks, last_line_end
from hotbed.connectors.types import declared, is_list, with_numbers
from hotbed.errors import DecodeError


@dataclass(frozen=True)
class Jsonl(LineSource):
    """One JSON object per line.

    Columns and types come from the first 4 MiB. Lists become list columns; an absent key is null.
    A line that is nested deeper than 100 levels is bad, also in fields that are not read.

    Args:
        path: a file, a glob or a list of both.
        columns: names and types ("int64", "uint64", "float64", "float32", "string", "bool",
            "list<uint64>", ...) of columns that are declared. A declared column may be absent.

    Raises:
        DecodeError: a line is not an object of those types (file, line).

    Example: `hb.sources.Jsonl("events/*.jsonl.gz", columns={"items": "list<uint64>"})`
    """

    open_type: ClassVar[pa.DataType] = pa.string()
    endings: ClassVar[Endings] = {".jsonl": {}, ".ndjson": {}, ".json": {}}
    path: Paths
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared_columns(self.columns)

    @property
    def declared_types(self) -> pa.Schema:
        return declared_columns(self.columns)

    def infer(self) -> pa.Schema:
        return infer_from_heads(self.files(), self._infer_file)

    def _infer_file(self, file: str) -> pa.Schema:
        try:
            with Section(file).open_text() as stream:
                lines = [line for line in next(blocks(stream), []) if line.strip()]
        except OSError as error:
            raise DecodeError(
                f"{file}: cannot be read, got {error}. Write the file again.", file
            ) from error
        return infer_json(lines, file, self.declared_types)

    def rows_end(self, section: Section, *, grows: bool) -> int:
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
            if name in plan.types:
                kind = with_numbers(kind, plan.types[name])
            kinds[name] = kind
        return read_json_lines(lines, pa.schema(list(kinds.items())))


MAX_DEPTH = 100
"""Levels of objects and lists of a row. Arrow's types are as deep as the values, and types that are
much deeper end the process or cannot be written to a position.
"""


def _is_object(text: bytes) -> bool:
    """Return whether `text` is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_bracketed(line: bytes) -> bool:
    """Return whether a line begins and ends as an object does."""
    if line[:1] == b"{" and line[-1:] == b"}":
        return True
    text = line.strip()
    return text.startswith(b"{") and text.endswith(b"}")


def read_json_lines(lines: list[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of `schema` from JSON objects, one per line; absent keys are null."""
    if not lines:
        empty = [pa.array([], type=column.type) for column in schema]
        return pa.RecordBatch.from_arrays(empty, schema=schema)
    # else the ends of a line could belong to objects of its neighbours
    if not all(map(_is_bracketed, lines)):
        raise ValueError("not a JSON object")
    data = b"\n".join(lines)
    if _core.deep_lines(data, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        table = _read_json(data, schema)
    except pa.ArrowInvalid as error:
        if len(lines) == 1:
            raise ValueError(_named(data, schema, error)) from error
        raise
    if table.num_rows != len(lines):
        raise ValueError(f"{len(lines)} lines hold {table.num_rows} objects")
    batch: pa.RecordBatch = table.combine_chunks().to_batches()[0]
    return batch.select(schema.names)


def _named(line: bytes, schema: pa.Schema, error: pa.ArrowInvalid) -> str:
    """Return the message of an error in a line, with the name of its column and its type."""
    for column in schema:
        try:
            _read_json(line, pa.schema([column]))
        except pa.ArrowInvalid as cause:
            return f"column {column.name!r} must be {column.type}, got {first_line(cause)}"
    return first_line(error)


def declared_columns(columns: Mapping[str, str]) -> pa.Schema:
    """Return names and types of the columns that a user declared.

    Raises:
        ConfigError: there is no such type.
    """
    kinds: dict[str, pa.DataType] = {}
    for name, text in columns.items():
        kinds[name] = declared(f"columns.{name}", text, lists=True)
    return pa.schema(list(kinds.items()))


def infer_json(lines: list[bytes], file: str, known: pa.Schema) -> pa.Schema:
    """Return the columns `known`, and the other ones with the types of the first lines.

    Bad lines among them are passed over; reading them later names or skips them. A type is null
    where only nulls or empty lists were seen.
    """
    deep = set(_core.deep_lines(b"\n".join(lines), MAX_DEPTH))
    lines = [line for number, line in enumerate(lines) if number not in deep]
    schema = None
    cause = "no line"
    count = len(lines)
    data = b""
    while schema is None and count:
        try:
            data = b"\n".join(lines[:count])
            schema = _read_json(data).schema
        except pa.ArrowException as error:
            cause = first_line(error)
            if count > 1:
                count //= 2
            else:
                lines = lines[1:]
                count = len(lines)
    if schema is None:
        raise DecodeError(
            f"{file}: the first block holds no JSON object, got {cause}. Write one object per "
            "line, with values of one type in each column.",
            file,
        )
    others = [column for column in schema if column.name not in known.names]
    return pa.schema([*known, *(_as_text(_as_ids(data, column)) for column in others)])


def _as_ids(data: bytes, column: pa.Field) -> pa.Field:
    """Return a column of floats as uint64 if its numbers are integers above int64, also in lists.

    Arrow reads such integers as floats, which lose digits.
    """
    wanted = column.with_type(_with_ids(column.type))
    if wanted.type.equals(column.type):
        return column
    try:
        _read_json(data, pa.schema([wanted]))
    except pa.ArrowException:
        return column
    return wanted


def _with_ids(kind: pa.DataType) -> pa.DataType:
    if is_list(kind):
        return pa.list_(_with_ids(kind.value_type))
    return pa.uint64() if pa.types.is_floating(kind) else kind


def _as_text(column: pa.Field) -> pa.Field:
    """Return a column of times as text: the Time role parses it itself, with zones."""
    return column.with_type(_with_text(column.type))


def _with_text(kind: pa.DataType) -> pa.DataType:
    if is_list(kind):
        return pa.list_(_with_text(kind.value_type))
    return pa.string() if pa.types.is_timestamp(kind) else kind


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
