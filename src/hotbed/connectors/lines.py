# SPDX-License-Identifier: Apache-2.0
"""Text with one record per line, and messages of a broker, which have no line ends."""

from __future__ import annotations

import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from hotbed.connectors.base import ReadPlan, schema_from_text, schema_to_text
from hotbed.connectors.files import FileSource, Paths, Rows, Section, first_line
from hotbed.errors import ConfigError, DecodeError, SchemaError

BLOCK_BYTES = 1 << 22
HEAD_BYTES = 200
"""Bytes that messages and dead letters show of a line that is too long."""
_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


class LineSource(FileSource):
    """Files that are read in blocks of whole lines.

    A block that does not parse is read again line by line, to name or skip the bad line.
    """

    @abstractmethod
    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        """Return the rows of some lines, which have no line ends and are not blank.

        Raises:
            ValueError: A line is bad (or an Arrow error).
        """

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        self.schema()
        file = section.file
        line = section.rows
        row = section.rows
        try:
            with section.open() as stream:
                for lines in blocks(stream):
                    numbered = [(line + i, text) for i, text in enumerate(lines, 1) if text.strip()]
                    numbers = np.arange(row, row + len(numbered)) + 1
                    line += len(lines)
                    row += len(numbered)
                    dropped = min(skip_rows, len(numbered)) if plan.skips is None else 0
                    skip_rows -= dropped
                    for start in range(dropped, len(numbered), batch_rows):
                        stop = start + batch_rows
                        batch, good = self._parse(
                            numbered[start:stop], numbers[start:stop], file, plan
                        )
                        skip = min(skip_rows, batch.num_rows)
                        skip_rows -= skip
                        if batch.num_rows > skip:
                            yield batch.slice(skip), good[skip:]
        except (OSError, pa.ArrowException) as error:
            raise DecodeError(
                f"{file}: cannot be read after line {line}, got {error}. Write the file again.",
                file,
                line,
            ) from error

    def holds_lines(self, file: str) -> bool:
        return Section(file).compression is None

    def rows_end(self, section: Section) -> int:
        return last_line_end(section)

    def _parse(
        self, numbered: list[tuple[int, bytes]], numbers: np.ndarray, file: str, plan: ReadPlan
    ) -> Rows:
        """Return the rows of the good lines, and their numbers among the rows of the file.

        Args:
            numbered: Lines, each with its line number in the file.
            numbers: Their numbers among the rows of the file.
            file: Its path, for messages.
            plan: If it has no `skips`, the first bad line raises DecodeError.
        """
        try:
            return self.parse([line for _, line in numbered], plan), numbers
        except (ValueError, pa.ArrowException):
            pass
        good: list[int] = []
        for index, (number, line) in enumerate(numbered):
            try:
                self.parse([line], plan)
                good.append(index)
            except (ValueError, pa.ArrowException) as error:
                cause = first_line(error)
                start = line[:80].decode(errors="replace")
                message = f"{file}, line {number}: cannot be read ({cause}), got {start!r}"
                if plan.skips is None:
                    raise DecodeError(
                        f"{message}. Correct it or use on_error='skip'.", file, number
                    ) from error
                plan.leave_out("value", message, [(int(numbers[index]), line)])
        return self.parse([numbered[index][1] for index in good], plan), numbers[good]


def last_line_end(section: Section) -> int:
    """Return the offset after the last line end of a section, or its begin if there is none."""
    with open(section.file, "rb") as file:
        stop = os.fstat(file.fileno()).st_size if section.end is None else section.end
        while stop > section.begin:
            start = max(section.begin, stop - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            stop = start
    return section.begin


def blocks(stream: pa.NativeFile) -> Iterator[list[bytes]]:
    """Yield lists of lines without their CRLF or LF ends."""
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        lines = (rest + head).split(b"\n")
        rest = tail
        yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.rstrip(b"\r")]


@dataclass(frozen=True)
class Jsonl(LineSource):
    """One JSON object per line.

    Columns and types come from the first 4 MiB. Lists become list columns; an absent key is null.

    Raises:
        DecodeError: A line is not an object of those types (file, line).

    Example: `hb.sources.Jsonl("events/*.jsonl.gz")`
    """

    path: Paths

    def schema(self) -> pa.Schema:
        cached: pa.Schema | None = self.__dict__.get("_schema")
        if cached is None:
            file = self.first_file()
            try:
                with Section(file).open() as stream:
                    lines = [line for line in next(blocks(stream), []) if line.strip()]
            except OSError as error:
                raise DecodeError(
                    f"{file}: cannot be read, got {error}. Write the file again.", file
                ) from error
            # Arrow reads some strings as times; the Time role parses them itself, with zones.
            cached = pa.schema(
                [(column.name, _plain(column.type)) for column in _infer_json(lines, file)]
            )
            object.__setattr__(self, "_schema", cached)
        return cached

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
            if _is_number(column.type) and column.name in plan.types:
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


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _infer_json(lines: list[bytes], file: str) -> pa.Schema:
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


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


class ShortLines(io.RawIOBase):
    """A stream of text whose lines of more than `limit` bytes are replaced.

    A read returns whole lines, so it may return fewer bytes than asked.

    Args:
        stream: The text.
        limit: Bytes that a line may have.
        replace: Called with the offset of a long line and its first bytes; returns the text to use
            instead, or raises.
    """

    def __init__(
        self, stream: pa.NativeFile, limit: int, replace: Callable[[int, bytes], bytes]
    ) -> None:
        self._stream = stream
        self._limit = limit
        self._replace = replace
        self._tail = b""  # a line whose end was not read yet
        self._read = 0  # bytes before the tail
        # the bytes up to the next line end belong to a line that was replaced
        self._dropping = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        while True:
            chunk = self._stream.read(max(size - len(self._tail), self._limit))
            if not chunk:
                tail = self._tail
                self._tail = b""
                return tail
            if lines := self._whole_lines(self._tail + chunk):
                return lines

    def _whole_lines(self, data: bytes) -> bytes:
        """Return the whole lines of `data`, which begins with the tail; keep the rest as tail."""
        parts: list[bytes] = []
        start = 0  # of the bytes that are not in `parts`
        end = 0  # of the lines that were checked
        while end < len(data):
            if self._dropping:
                end = data.find(b"\n", end) + 1 or len(data)
                start = end
                self._dropping = data[end - 1 : end] != b"\n"
            elif newline := data.rfind(b"\n", end, end + self._limit + 1) + 1:
                end = newline
            elif len(data) - end > self._limit:
                head = data[end : end + HEAD_BYTES]
                parts += [data[start:end], self._replace(self._read + end, head), b"\n"]
                self._dropping = True
            else:
                break
        self._tail = data[end:]
        self._read += end
        parts.append(data[start:end])
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Decoder(ABC):
    """Decodes the messages of a broker into rows."""

    many: ClassVar[bool] = False
    """A message holds any number of rows and is decoded alone; else it holds exactly one."""

    @abstractmethod
    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        """Return names and types of the declared fields and of the fields of some messages.

        Raises:
            ValueError: No message can be decoded, or there are no messages and no declared fields.
        """

    @abstractmethod
    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns of `schema` from some messages; absent columns are null.

        Raises:
            ValueError: A message is bad (or an Arrow error).
        """


@dataclass(frozen=True)
class Json(Decoder):
    """One JSON object per message.

    Args:
        columns: Names and types ("int64", "uint64", "float64", "string", "bool", "list<int64>",
            ...) of columns that are declared. Every other column keeps the type of its first value.

    Example: `hb.sources.Json({"user": "int64", "genres": "list<string>"})`
    """

    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            _declared(name, kind)

    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        declared = pa.schema([(name, _declared(name, kind)) for name, kind in self.columns.items()])
        lines = [
            value.replace(b"\n", b" ") for value in values if value and value.lstrip()[:1] == b"{"
        ]
        if not lines and (values or not self.columns):
            raise ValueError("no JSON object among them")
        if not lines:
            return declared
        columns = list(declared)
        for column in _infer_json(lines, "a message"):
            if column.name not in declared.names:
                kind = column.type if has_nulls(column.type) else _plain(column.type)
                columns.append(pa.field(column.name, kind))
        return pa.schema(columns)

    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        for value in values:
            if value[:1] != b"{" and value.lstrip()[:1] != b"{":
                raise ValueError("not a JSON object")
        return read_json_lines([value.replace(b"\n", b" ") for value in values], schema)


@dataclass(frozen=True)
class Arrow(Decoder):
    """One Arrow IPC stream per message, with any number of rows.

    Decoding takes about a tenth of the work of JSON.

    Example:
        A producer writes a message so:

        >>> with pa.ipc.new_stream(sink, batch.schema) as writer:
        ...     writer.write_batch(batch)
    """

    many: ClassVar[bool] = True

    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        for value in values:
            try:
                return pa.ipc.open_stream(value).schema.remove_metadata()
            except (OSError, pa.ArrowException):
                continue
        raise ValueError("no Arrow stream among them")

    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        table = pa.concat_tables([pa.ipc.open_stream(value).read_all() for value in values])
        table = table.combine_chunks()
        columns: list[pa.Array] = []
        for name, kind in zip(schema.names, schema.types, strict=True):
            if name in table.schema.names:
                columns.append(_flat(table[name].combine_chunks().cast(kind)))
            else:
                columns.append(pa.nulls(table.num_rows, kind))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _declared(name: str, kind: str) -> pa.DataType:
    """Return the Arrow type that is written as `kind`."""
    inner = kind.removeprefix("list<").removesuffix(">")
    if inner not in _TYPES or kind not in (inner, f"list<{inner}>"):
        raise ConfigError(
            f"columns.{name}: unknown type, got {kind!r}. Use one of {', '.join(_TYPES)}, or "
            "list<one of them>."
        )
    return _TYPES[inner] if kind == inner else pa.list_(_TYPES[inner])


def wanted_types(
    decoder: Decoder, values: Sequence[bytes], plan: ReadPlan, types: str
) -> tuple[pa.Schema, str]:
    """Return the columns to decode with their types, and the new value of `types`.

    Args:
        decoder: Infers the types of new columns.
        values: The messages.
        plan: Its columns are decoded; None = all.
        types: The types of the columns read so far, as text: a column keeps its first type.

    Raises:
        SchemaError: A column is not in `types`, not declared, and not in any of the messages.
    """
    schema = schema_from_text(types)
    columns = list(schema.names if plan.columns is None else plan.columns)
    if plan.columns is None or not set(columns) <= set(schema.names):
        try:
            inferred = decoder.infer(values)
        except ValueError:  # no message can be decoded, so all types stay unknown
            inferred = pa.schema([(name, pa.null()) for name in columns])
        if plan.columns is None:
            columns += [name for name in inferred.names if name not in columns]
        if absent := [name for name in columns if name not in {*schema.names, *inferred.names}]:
            raise SchemaError(
                f"columns: no message has columns {absent}, got {inferred.names}. Correct the "
                "schema, or declare columns that may be absent: Json(columns={...})."
            )
        new = [c for c in inferred if c.name in columns and c.name not in schema.names]
        schema = pa.schema([*schema, *(column for column in new if not has_nulls(column.type))])
        types = schema_to_text(schema)
    kinds = {name: pa.null() for name in columns}
    for name in columns:
        if name in schema.names:
            kinds[name] = schema.field(name).type
        if name in plan.types and _is_number(kinds[name]):
            kinds[name] = plan.types[name]
    return pa.schema(list(kinds.items())), types


Decoded = tuple[list[pa.RecordBatch], list[int], dict[int, Exception]]
"""Rows; the number of rows of each message; the errors of the messages that cannot be decoded."""


def decode(decoder: Decoder, values: Sequence[bytes], schema: pa.Schema, first: int = 0) -> Decoded:
    """Decode messages, numbered from `first`, at once; halve them to locate bad ones."""
    if not decoder.many or len(values) == 1:
        try:
            batch = decoder.decode(values, schema)
            if not decoder.many and batch.num_rows != len(values):
                raise ValueError(f"{len(values)} messages gave {batch.num_rows} rows")
            counts = [batch.num_rows] if decoder.many else [1] * len(values)
            return [batch], counts, {}
        except (ValueError, TypeError, KeyError, OSError, pa.ArrowException) as error:
            if len(values) == 1:
                return [], [0], {first: error}
    half = len(values) // 2
    left = decode(decoder, values[:half], schema, first)
    right = decode(decoder, values[half:], schema, first + half)
    return [*left[0], *right[0]], [*left[1], *right[1]], {**left[2], **right[2]}
