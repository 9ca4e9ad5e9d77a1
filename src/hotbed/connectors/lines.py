# SPDX-License-Identifier: Apache-2.0
"""Text with one record a line; and messages of a broker, which are the same without line ends."""

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
"""Bytes of a line that is too long which messages and dead letters show."""
_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


class LineSource(FileSource):
    """Files cut into blocks of whole lines; a block that does not parse is read again line by line
    to name or skip the bad one.
    """

    @abstractmethod
    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        """Rows of some lines (no line ends, none blank). Raises ValueError (or an Arrow error) if
        any line is bad.
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
                f"{file}: cannot be read after line {line} — {error} — write the file again",
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
        """The rows of some lines, each with its number in the file, and the numbers of the good
        rows.
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
                message = f"{file}, line {number}: cannot be read — {cause}: {start!r}"
                if plan.skips is None:
                    raise DecodeError(
                        f"{message} — correct it or use on_error='skip'", file, number
                    ) from error
                plan.leave_out("value", message, [(int(numbers[index]), line)])
        return self.parse([numbered[index][1] for index in good], plan), numbers[good]


def last_line_end(section: Section) -> int:
    """The offset after the last line end of a section; where it begins if there is none."""
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
    """Lists of lines, CRLF and LF ends removed."""
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        lines = (rest + head).split(b"\n")
        rest = tail
        yield [line[:-1] if line.endswith(b"\r") else line for line in lines]
    if rest:
        yield [rest.rstrip(b"\r")]


@dataclass(frozen=True)
class Jsonl(LineSource):
    """One JSON object a line. Columns and types come from the first 4 MiB; lists become list
    columns; an absent key is null.

    Raises DecodeError (file, line) for a line that is not an object of those types.

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
                    f"{file}: cannot be read — {error} — write the file again", file
                ) from error
            # Arrow guesses times from strings; the Time role does that itself, zones included.
            cached = pa.schema(
                [(column.name, _plain(column.type)) for column in _infer_json(lines, file)]
            )
            object.__setattr__(self, "_schema", cached)
        return cached

    def rows_end(self, section: Section) -> int:
        end = last_line_end(section)
        with Section(section.file, end, section.end).open() as stream:
            rest = stream.read()
        return end + len(rest) if _is_object(rest) else end

    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        schema = self.schema()
        if plan.columns is not None:
            schema = pa.schema([field for field in schema if field.name in plan.columns])
        schema = pa.schema(
            [
                pa.field(f.name, plan.types.get(f.name, f.type) if _is_number(f.type) else f.type)
                for f in schema
            ]
        )
        return read_json_lines(lines, schema)


def _is_object(text: bytes) -> bool:
    """Whether it is a whole JSON object; a part of one never is."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_json_lines(lines: list[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` of some JSON objects, a line each; absent keys are null."""
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
    """Types of the first lines. Bad ones among them are no reason to give up: reading names or
    skips them.
    """
    found = None
    count = len(lines)
    data = b""
    while found is None and count:
        try:
            data = b"\n".join(lines[:count])
            found = pajson.read_json(io.BytesIO(data), read_options=_whole(data)).schema
        except pa.ArrowException:
            lines, count = (lines, count // 2) if count > 1 else (lines[1:], len(lines) - 1)
    if found is None:
        raise DecodeError(
            f"{file}: holds no JSON object — no line of the first block is one — write one a line",
            file,
        )
    return _with_big_ids(data, found)


def _with_big_ids(data: bytes, found: pa.Schema) -> pa.Schema:
    """Arrow reads integers above int64 as floats, which lose digits: such columns become uint64."""
    for place, column in enumerate(found):
        if pa.types.is_floating(column.type):
            wanted = pa.field(column.name, pa.uint64())
            options = pajson.ParseOptions(
                explicit_schema=pa.schema([wanted]), unexpected_field_behavior="ignore"
            )
            try:
                pajson.read_json(io.BytesIO(data), read_options=_whole(data), parse_options=options)
                found = found.set(place, wanted)
            except pa.ArrowException:
                continue
    return found


def _whole(data: bytes) -> pajson.ReadOptions:
    """One block, so that types do not depend on where blocks end."""
    return pajson.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1 << 10))


def has_nulls(kind: pa.DataType) -> bool:
    """Whether nothing but nulls (or empty lists) was met, so that the type is not known yet."""
    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and has_nulls(kind.value_type)))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


class ShortLines(io.RawIOBase):
    """A stream of text whose lines of more than `limit` bytes are replaced.

    `replace` gets where such a line begins and its first bytes, and returns what stands for it, or
    raises. A read returns whole lines, so that it may be shorter than asked.
    """

    def __init__(
        self, stream: pa.NativeFile, limit: int, replace: Callable[[int, bytes], bytes]
    ) -> None:
        self._stream = stream
        self._limit = limit
        self._replace = replace
        self._tail = b""  # a line whose end is not read yet
        self._read = 0  # bytes before the tail
        # what follows, up to a line end, belongs to a line that was replaced
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
        """The lines of `data`, which begins with the tail; the last one becomes the new tail."""
        parts: list[bytes] = []
        start = 0  # of what is not in `parts`
        end = 0  # of lines that are short enough
        while end < len(data):
            if self._dropping:
                start = end = data.find(b"\n", end) + 1 or len(data)
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
    """Turns the bytes of a broker's messages into rows. `many`: a message may hold any number of
    rows (it is decoded alone), else exactly one.
    """

    many: ClassVar[bool] = False

    @abstractmethod
    def infer(self, values: Sequence[bytes]) -> pa.Schema:
        """Names and types of the fields of some messages, and of those that are declared. Raises
        ValueError where no message can be decoded, or there is none and nothing is declared.
        """

    @abstractmethod
    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        """The columns of `schema`, absent ones null. Raises ValueError (or an Arrow error) if any
        message is bad.
        """


@dataclass(frozen=True)
class Json(Decoder):
    """A JSON object a message. `columns`: names and types ("int64", "uint64", "float64", "string",
    "bool", "list<int64>",
    ...) where they are known; the others have the type with which they are first met, and keep it.

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
        found = [
            column
            for column in _infer_json(lines, "a message")
            if column.name not in declared.names
        ]
        return pa.schema(
            [*declared, *((c.name, c.type if has_nulls(c.type) else _plain(c.type)) for c in found)]
        )

    def decode(self, values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        for value in values:
            if value[:1] != b"{" and value.lstrip()[:1] != b"{":
                raise ValueError("no JSON object")
        return read_json_lines([value.replace(b"\n", b" ") for value in values], schema)


@dataclass(frozen=True)
class Arrow(Decoder):
    """An Arrow IPC stream a message, with any number of rows: a tenth of JSON's work.

    Example of the writing side: `with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)`
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
        table = pa.concat_tables(
            [pa.ipc.open_stream(value).read_all() for value in values]
        ).combine_chunks()
        columns = [
            table[name].combine_chunks().cast(kind)
            if name in table.schema.names
            else pa.nulls(table.num_rows, kind)
            for name, kind in zip(schema.names, schema.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays([_flat(column) for column in columns], schema=schema)


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _declared(name: str, kind: str) -> pa.DataType:
    """The type called `kind`."""
    inner = kind.removeprefix("list<").removesuffix(">")
    if inner not in _TYPES or kind not in (inner, f"list<{inner}>"):
        raise ConfigError(
            f"columns.{name}: unknown type — received {kind!r} — use one of {', '.join(_TYPES)}, "
            "or list<one of them>"
        )
    return _TYPES[inner] if kind == inner else pa.list_(_TYPES[inner])


def wanted_types(
    decoder: Decoder, values: Sequence[bytes], plan: ReadPlan, types: str
) -> tuple[pa.Schema, str]:
    """The columns to decode and their types; and, as text, the types met so far: a column keeps its
    first one.

    Raises SchemaError for a column that is neither known nor in any of the messages.
    """
    known = schema_from_text(types)
    columns = list(known.names if plan.columns is None else plan.columns)
    if plan.columns is None or not set(columns) <= set(known.names):
        try:
            found = decoder.infer(values)
        except ValueError:  # no message can be decoded, so nothing is known about them either
            found = pa.schema([(name, pa.null()) for name in columns])
        columns += (
            []
            if plan.columns is not None
            else [name for name in found.names if name not in columns]
        )
        if absent := [name for name in columns if name not in {*known.names, *found.names}]:
            raise SchemaError(
                f"no message has columns {absent} — received {found.names} — correct the schema, "
                "or declare columns "
                "that may be absent: Json(columns={...})"
            )
        met = [
            c
            for c in found
            if c.name in columns and c.name not in known.names and not has_nulls(c.type)
        ]
        known = pa.schema([*known, *met])
        types = schema_to_text(known)
    kinds = {name: known.field(name).type if name in known.names else pa.null() for name in columns}
    numbers = {
        name: kind for name, kind in plan.types.items() if name in kinds and _is_number(kinds[name])
    }
    return pa.schema(list({**kinds, **numbers}.items())), types


Decoded = tuple[list[pa.RecordBatch], list[int], dict[int, Exception]]
"""Rows; how many of them each message gave; the messages that could not be decoded."""


def decode(decoder: Decoder, values: Sequence[bytes], schema: pa.Schema, first: int = 0) -> Decoded:
    """Messages (numbered from `first`) decoded at once; bad ones among them are found by halving."""
    if not decoder.many or len(values) == 1:
        try:
            batch = decoder.decode(values, schema)
            if not decoder.many and batch.num_rows != len(values):
                raise ValueError(f"{len(values)} messages gave {batch.num_rows} rows")
            return [batch], [batch.num_rows] if decoder.many else [1] * len(values), {}
        except (ValueError, TypeError, KeyError, OSError, pa.ArrowException) as error:
            if len(values) == 1:
                return [], [0], {first: error}
    half = len(values) // 2
    left = decode(decoder, values[:half], schema, first)
    right = decode(decoder, values[half:], schema, first + half)
    return [*left[0], *right[0]], [*left[1], *right[1]], {**left[2], **right[2]}
