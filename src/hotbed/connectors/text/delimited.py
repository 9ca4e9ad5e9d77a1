# SPDX-License-Identifier: Apache-2.0
"""Text of delimited fields: csv, tsv and their relatives, and libsvm."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hotbed import checks
from hotbed.connectors.compression import read_full
from hotbed.connectors.files import (
    SAMPLE_BYTES,
    Endings,
    FileSource,
    Rows,
    Section,
    first_line,
    infer_from_heads,
)
from hotbed.connectors.paths import Paths
from hotbed.connectors.position import RowPlace
from hotbed.connectors.read_plan import BadRow, ReadPlan
from hotbed.connectors.text.lines import is_plain, last_line_end, lines_before, lines_between
from hotbed.connectors.text.rows import HEAD_BYTES, BadLine, RowFormat, Utf8Lines, WholeRows
from hotbed.connectors.text.values import as_text, cast_text, infer_type, plain_integers
from hotbed.connectors.types import declared
from hotbed.errors import ConfigError, DecodeError, SchemaError

BLOCK_BYTES = 1 << 22
ROW_BYTES = BLOCK_BYTES // 2
"""Limit of a row, with the line ends between its quotes: pyarrow needs the end of a row in each
block.
"""

NAMES_BYTES = 1 << 16
"""Bytes of a file in which names are looked for first."""

UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors of a file that cannot be read."""


@dataclass(frozen=True)
class Csv(FileSource):
    r"""Delimited text, one line per row; LF or CRLF, also compressed with gzip, zstd, bz2 or lz4.

    Types are inferred from the first MiB. A column is integer only if all its values there are
    plain integers, so hex hashes and "007" stay strings. A value behind it that is not a plain
    integer, such as "007", is an error in a column that was inferred as integer.

    Args:
        path: a file, a glob or a list of both.
        delimiter: one or more characters (`"\t"` for tsv, `"::"`).
        header: whether the first line holds the names.
        columns: without header the names in order, as a list or as a mapping name -> type ("int64",
            "uint64", "float64", "float32", "string", "bool"; None = infer). With header a list
            renames all columns, and a mapping declares types of some.
        null_values: texts that mean "missing".
        quote: the quote character; None = quotes are ordinary characters.
        encoding: of the text, as Python names it.

    Raises:
        DecodeError: a number is bad, a line has too few or too many fields, or a quote is never
            closed (file, row = 1-based line, column).

    Example:
        >>> names = ["label", "I1", "C1"]
        >>> source = hb.sources.Csv("day_0.tsv", delimiter="\t", header=False, columns=names)
    """

    open_type: ClassVar[pa.DataType] = pa.string()
    endings: ClassVar[Endings] = {".csv": {}, ".tsv": {"delimiter": "\t"}, ".txt": {}}
    path: Paths
    delimiter: str = ","
    header: bool = True
    columns: Sequence[str] | Mapping[str, str | None] | None = None
    null_values: Sequence[str] = ("",)
    quote: str | None = '"'
    encoding: str = "utf8"

    def __post_init__(self) -> None:
        if not self.delimiter:
            raise ConfigError(
                "delimiter: must not be empty, got ''. Give the text between two fields, such "
                "as ','."
            )
        if self.quote is not None and len(self.quote) != 1:
            raise ConfigError(
                f"quote: must be one character or None, got {self.quote!r}. Use '\"' or None."
            )
        for name in ("columns", "null_values"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, checks.names(getattr(self, name)))
        _ = self.declared_types

    def place(self, section: Section, row: int) -> RowPlace:
        number = row
        if self.header and not section.begin:
            number += 1
        return RowPlace(section.file, self._line_of(section, number), "line")

    def _line_of(self, section: Section, row: int) -> int:
        """Return the line on which a row of a section begins; rows count from 0, with a header."""
        try:
            num_lines = lines_before(section)
            with self.open(section, _blank) as stream:
                while stream.num_rows <= row and stream.read(BLOCK_BYTES):
                    stream.forget(min(row, stream.num_rows))
                return num_lines + stream.line_of(row)
        except UNREADABLE:  # the file has changed since
            return row + 1

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        schema = self.schema()
        types: dict[str, pa.DataType] = {}
        for name in plan.wanted(schema.names):
            types[name] = plan.types.get(name, schema.field(name).type)
        try:
            yield from _drop(_DelimitedReading(self, section, plan).rows(types), skip_rows)
        except UNREADABLE as error:
            if plan.skips is not None:
                raise _decode_error(error, section.file) from error
            # Only a reader with one thread knows the row: read again to name it.
            reading = _DelimitedReading(self, section, plan, threads=False)
            try:
                for _ in reading.rows(types):
                    pass
            except UNREADABLE as located:
                raise reading.located(located, schema.names) from located
            raise _decode_error(error, section.file) from error

    def count_rows(self) -> int:
        # reading them would also parse their values
        return sum(self._count_rows_of(file) for file in self.files())

    def _count_rows_of(self, file: str) -> int:
        try:
            with self.open(Section(file), _blank) as stream:
                while stream.read(BLOCK_BYTES):
                    stream.forget(stream.num_rows)
                return max(0, stream.num_rows - int(self.header))
        except UNREADABLE as error:
            raise _decode_error(error, file) from error

    def holds_lines(self, file: str) -> bool:
        return Section(file).compression is None and not self._is_wide

    def rows_end(self, section: Section, *, grows: bool) -> int:
        end = last_line_end(section)
        if self.quote is None or end == section.begin:
            return end
        begin = section.begin
        if not grows:  # all lines are there, and only the last one may be torn in a quoted field
            begin = last_line_end(Section(section.file, begin, end - 1))
        text = Section(section.file, begin, end).open_text()
        with WholeRows(text, self._row_format, _blank, is_whole=False) as stream:
            while stream.read(BLOCK_BYTES):
                pass
            return begin + text.num_skipped + stream.num_bytes

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        is_plain_text = self._is_utf8 and len(self.delimiter.encode()) == 1
        if self._is_wide or not is_plain(file) or not (self.quote is None or is_plain_text):
            return super().section(file, begin, end, extent)
        return lines_between(file, (begin, end, extent), self._rows_end)

    def _rows_end(self, section: Section) -> int:
        try:
            return self.rows_end(section, grows=True)
        except DecodeError:  # reading the rows reports the damage
            return section.begin

    @property
    def _row_format(self) -> RowFormat:
        quote = -1
        if self.quote is not None:
            quote = ord(self.quote)
        return RowFormat(quote, ord(self.separator), ROW_BYTES)

    @property
    def _is_utf8(self) -> bool:
        return codecs.lookup(self.encoding).name == "utf-8"

    @property
    def _is_wide(self) -> bool:
        """Whether every character has several bytes, so that a line end is not one byte."""
        return codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))

    @property
    def declared_types(self) -> pa.Schema:
        types: list[tuple[str, pa.DataType]] = []
        for name, kind in self._declared().items():
            if kind is not None:
                types.append((name, declared(f"columns.{name}", kind)))
        return pa.schema(types)

    def _declared(self) -> dict[str, str | None]:
        if isinstance(self.columns, Mapping):
            return dict(self.columns)
        return {}

    def _options(
        self,
        threads: bool,
        leave_out: Callable[[Any], str] | None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Return the options for pyarrow.

        Args:
            threads: whether to parse with several threads.
            leave_out: handler of rows with too few or too many fields; None = they are errors.
            names: the columns of a section without a header.
        """
        skip_rows = 0
        only_types = self.header and isinstance(self.columns, Mapping)
        if names is None and self.columns is not None and not only_types:
            names = list(self.columns)
            skip_rows = int(self.header)
        return {
            "read_options": pacsv.ReadOptions(
                use_threads=threads,
                block_size=BLOCK_BYTES,
                column_names=names,
                autogenerate_column_names=names is None and not self.header,
                skip_rows=skip_rows,
            ),
            "parse_options": pacsv.ParseOptions(
                delimiter=self.separator,
                quote_char=self.quote or False,
                double_quote=self.quote is not None,
                invalid_row_handler=leave_out,
            ),
        }

    @property
    def separator(self) -> str:
        """The delimiter for pyarrow, which takes one byte."""
        if len(self.delimiter.encode()) == 1:
            return self.delimiter
        return "\x1f"

    def open(self, section: Section, replace: Callable[[BadLine], bytes]) -> WholeRows:
        """Open the rows for pyarrow, as UTF-8; `replace` gives the text for bad lines."""
        return WholeRows(self._text(section), self._row_format, replace)

    def _text(self, section: Section) -> Any:
        """Open the text as UTF-8, with the separator in place of a long delimiter."""
        stream: Any = section.open_text(is_utf8=self._is_utf8)
        if not self._is_utf8:
            text = pa.PythonFile(stream, mode="r")
            stream = pa.transcoding_input_stream(text, self.encoding, "utf8")
        if self.separator == self.delimiter:
            return stream
        data = b"".join(iter(lambda: stream.read(BLOCK_BYTES), b""))
        return pa.BufferReader(data.replace(self.delimiter.encode(), self.separator.encode()))

    def names_of(self, file: str) -> list[str]:
        """Return the names of the columns of a file, from its header."""
        options = self._options(threads=False, leave_out=lambda row: "skip")
        return _names_in(self._head(file), options)

    def _head(self, file: str) -> bytes:
        """Return the first rows of a file, without lines that are not rows.

        Raises:
            DecodeError: the header is not a row.
        """

        def leave_out(bad: BadLine) -> bytes:
            if self.header and bad.row == 0:
                raise _no_row(bad, file, bad.line)
            return b""

        with self._text(Section(file)) as stream:
            text = read_full(stream, SAMPLE_BYTES)
        is_whole = len(text) < SAMPLE_BYTES
        rows = WholeRows(io.BytesIO(text), self._row_format, leave_out, is_whole=is_whole)
        head = b"".join(iter(lambda: rows.read(SAMPLE_BYTES), b""))
        if self._is_utf8 and not head.isascii():  # the handler of pyarrow takes text only
            head = head.decode(errors="replace").encode()
        return head

    def infer(self) -> pa.Schema:
        return infer_from_heads(self.files(), self._infer_file)

    def _infer_file(self, file: str) -> pa.Schema:
        options = self._options(threads=False, leave_out=lambda row: "skip")  # reading reports it
        try:
            head = self._head(file)
            names = _names_in(head, options)
            convert = pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=list(self.null_values),
                strings_can_be_null=True,
            )
            table = pacsv.read_csv(pa.BufferReader(head), convert_options=convert, **options)
        except UNREADABLE as error:
            raise _decode_error(error, file) from error
        declarations = self._declared()
        types = dict(zip(self.declared_types.names, self.declared_types.types, strict=True))
        unknown = [name for name in declarations if name not in names]
        if unknown:
            raise SchemaError(
                f"{file}: declared columns {unknown} are absent, got {names}. Correct `columns`."
            )
        columns = zip(names, table.columns, strict=True)
        return pa.schema(
            [(name, types.get(name) or infer_type(values)) for name, values in columns]
        )


class _DelimitedReading:
    """One reading of a section: its rows, and the rows that were left out."""

    def __init__(
        self, source: Csv, section: Section, plan: ReadPlan, *, threads: bool = True
    ) -> None:
        self.source = source
        self.section = section
        self.plan = plan
        # with threads, pyarrow does not know the number of a bad row
        self._threads = threads and plan.skips is None
        self._headers = int(source.header and section.begin == 0)
        self._next = section.rows + 1  # number of the next row
        self._left_out: list[int] = []  # numbers of rows from `_next` on that pyarrow left out
        # texts that pyarrow reads in place of bad lines: the heads of these, and their faults
        self._replaced: dict[str, tuple[bytes, str]] = {}
        self._num_replaced = 0
        self._stream = source.open(section, self._replace)

    def rows(self, types: Mapping[str, pa.DataType]) -> Iterator[Rows]:
        """Yield batches of the columns of `types`."""
        source = self.source
        file = self.section.file
        skips = self.plan.skips is not None
        # To skip bad values, read all as bytes: pyarrow's own conversion stops at a bad value, the
        # cast in `_checked` gives null for it. It also takes "007" as 7.
        read_types = {**types, **dict.fromkeys(self._guessed(types), pa.string())}
        if skips:
            read_types = dict.fromkeys(types, pa.binary())
        convert = pacsv.ConvertOptions(
            column_types=read_types,
            include_columns=list(types),
            null_values=list(source.null_values),
            strings_can_be_null=True,
        )
        names = None
        if source.header and self.section.begin:
            names = source.names_of(file)
        options = source._options(self._threads, self._leave_out if skips else None, names)
        stream: io.RawIOBase = self._stream
        if skips and source._is_utf8:
            stream = Utf8Lines(self._stream, self._replace_damaged)
        try:
            reader = pacsv.open_csv(stream, convert_options=convert, **options)
        except pa.ArrowKeyError as error:
            raise SchemaError(
                f"{file}: a column is absent, got {error}. Give all files the columns of the "
                f"first: {source.schema().names}."
            ) from error
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        with reader:
            for batch in reader:
                numbers = self._numbers(batch.num_rows)
                if read_types == types:
                    yield batch, numbers
                else:
                    yield self._checked(batch, numbers, types)
                self._stream.forget(self._row_of(self._next))

    def _guessed(self, types: Mapping[str, pa.DataType]) -> set[str]:
        """Return the columns that are whole numbers because their first values are plain ones."""
        declared_types = self.source._declared()
        names = {name for name, kind in types.items() if pa.types.is_integer(kind)}
        return {name for name in names if declared_types.get(name) is None} - self.plan.types.keys()

    def located(self, error: Exception, names: list[str]) -> DecodeError:
        """Return an error of pyarrow as an error that names the line and the column."""
        text = first_line(error)
        row = re.search(r"Row #(\d+)", text)
        if row is None:
            return _decode_error(error, self.section.file, names)
        _, _, details = text.rpartition("Row #")
        line = self._lines_before + self._stream.line_of(int(row.group(1)) - 1)
        return _decode_error(error, self.section.file, names, details.split(": ", 1)[-1], line)

    def _row_of(self, number: int) -> int:
        """Return the place of a row in the section, from 0, by its number in the file."""
        return number - self.section.rows - 1 + self._headers

    def _place(self, number: int) -> RowPlace:
        line = self._lines_before + self._stream.line_of(self._row_of(number))
        return RowPlace(self.section.file, line, "line")

    @cached_property
    def _lines_before(self) -> int:
        """Line ends of the file before the section."""
        return lines_before(self.section)

    def _numbers(self, count: int) -> np.ndarray:
        """Return the numbers of the next `count` rows that pyarrow did not leave out."""
        end = self._next + count + len(self._left_out)
        numbers = np.arange(self._next, end)
        if self._left_out:
            numbers = numbers[~np.isin(numbers, self._left_out)][:count]
        if count:
            self._next = int(numbers[-1]) + 1
            self._left_out = [number for number in self._left_out if number >= self._next]
        return numbers

    def _replace(self, bad: BadLine) -> bytes:
        """Return the line that pyarrow reads in place of a line that is not a row.

        Raises:
            DecodeError: the plan has no `skips`, or the line is the header.
        """
        if self.plan.skips is None or bad.row < self._headers:
            raise _no_row(bad, self.section.file, self._lines_before + bad.line)
        return self._mark(bad.head, bad.fault)

    def _replace_damaged(self, line: bytes, lines: bytes) -> bytes:
        """Return the line that pyarrow reads for a `line` that is not UTF-8.

        A line with a wrong number of fields is replaced, because pyarrow gives its handler text
        only. Any other line stays, and so does a line that may be part of a quoted value.
        """
        source = self.source
        num_fields = line.count(source.separator.encode()) + 1
        is_quoted = source.quote is not None and source.quote.encode() in lines
        if is_quoted or num_fields == self._num_columns:
            return line
        return self._mark(line[:HEAD_BYTES], f"{num_fields} fields, not UTF-8")

    @cached_property
    def _num_columns(self) -> int:
        return len(self.source.names_of(self.section.file))

    def _mark(self, head: bytes, fault: str) -> bytes:
        """Return a line with a wrong number of fields that stands for a bad line."""
        text = f"\x1a{self._num_replaced}"
        self._num_replaced += 1
        if self._num_columns == 1:
            text += self.source.separator
        self._replaced[text] = (head, fault)
        return text.encode()

    def _leave_out(self, row: Any) -> str:
        """Note a row with too few or too many fields, and tell pyarrow to skip it."""
        number = self.section.rows + row.number - self._headers
        self._left_out.append(number)
        text: str | bytes = row.text
        fault = f"{row.actual_columns} fields instead of {row.expected_columns}"
        if row.text in self._replaced:
            text, fault = self._replaced.pop(row.text)
        place = self._place(number)
        message = f"{place}: {fault}: {text[:80]!r}"
        self.plan.leave_out("fields", message, [BadRow(number, text, place.number)])
        return "skip"

    def _checked(
        self, batch: pa.RecordBatch, numbers: np.ndarray, types: Mapping[str, pa.DataType]
    ) -> Rows:
        """Return a `batch` cast to `types`, without the rows that have a bad value.

        Raises:
            DecodeError: a value is bad, and the plan has no `skips`.
        """
        columns: dict[str, pa.Array] = {}
        good = np.ones(batch.num_rows, bool)
        guessed = self._guessed(types)
        for name, kind in types.items():
            raw = batch.column(name)
            if name in guessed:
                cast = plain_integers(as_text(raw), kind)
            else:
                cast = cast_text(raw, kind)
            if cast.null_count == raw.null_count:
                columns[name] = cast
                continue
            failed = pc.and_(cast.is_null(), raw.is_valid())
            wrong = failed.to_numpy(zero_copy_only=False)
            if wrong.any():
                self._put_aside(batch, numbers, name, kind, np.flatnonzero(wrong & good))
                good &= ~wrong
            columns[name] = cast
        schema = pa.schema(list(types.items()))
        rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
        if good.all():
            return rows, numbers
        return rows.filter(pa.array(good)), numbers[good]

    def _put_aside(
        self,
        batch: pa.RecordBatch,
        numbers: np.ndarray,
        name: str,
        kind: pa.DataType,
        rows: np.ndarray,
    ) -> None:
        """Leave out `rows`, whose values of column `name` are not of type `kind`.

        Raises:
            DecodeError: the plan has no `skips`.
        """
        if not len(rows):
            return
        first = int(rows[0])
        place = self._place(int(numbers[first]))
        value = _shown(batch.column(name)[first].as_py())
        if self.plan.skips is None:
            raise DecodeError(
                f"{place}, column {name!r}: cannot be read, got {value!r}, which is not {kind} as "
                "the values before it. Correct it, declare the column's type in `columns`, or use "
                "on_error='skip'.",
                self.section.file,
                place.number,
                name,
            )
        bad: list[BadRow] = []
        for number, row in zip(numbers[rows], batch.take(pa.array(rows)).to_pylist(), strict=True):
            letter = {column: _shown(value) for column, value in row.items()}
            line = self._place(int(number)).number
            bad.append(BadRow(int(number), json.dumps(letter, ensure_ascii=False), line))
        message = f"{place}, column {name!r}: {value!r} is not {kind}"
        self.plan.leave_out("value", message, bad)


def _names_in(head: bytes, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of the first rows of a file."""
    few_rows = head[: head.rfind(b"\n", 0, NAMES_BYTES) + 1]
    try:
        table = pacsv.read_csv(pa.BufferReader(few_rows), **options)
    except pa.ArrowInvalid:  # a row is longer, or was cut
        table = pacsv.read_csv(pa.BufferReader(head), **options)
    names: list[str] = table.schema.names
    return names


def _shown(value: bytes | str | None) -> str | None:
    """Return the first bytes of a value as text for a message, whether they are UTF-8 or not."""
    if value is None or isinstance(value, str):
        return value
    return value[:HEAD_BYTES].decode(errors="backslashreplace")


def _drop(batches: Iterator[Rows], rows: int) -> Iterator[Rows]:
    for batch, numbers in batches:
        dropped = min(rows, batch.num_rows)
        rows -= dropped
        if batch.num_rows > dropped:
            yield batch.slice(dropped), numbers[dropped:]


def _blank(bad: BadLine) -> bytes:
    return b""


def _no_row(bad: BadLine, file: str, line: int) -> DecodeError:
    """Return the error of a line that is not a row."""
    advice = "Close it, set quote=None if quotes are ordinary characters,"
    if "quote" not in bad.fault:
        advice = "Correct it"
    return DecodeError(
        f"{file}, line {line}: {bad.fault}, got {bad.head[:80]!r}. {advice} or use "
        "on_error='skip'.",
        file,
        line,
    )


def _decode_error(
    error: Exception,
    file: str,
    names: Sequence[str] = (),
    cause: str | None = None,
    line: int | None = None,
) -> DecodeError:
    """Return the error of a file that cannot be read, for that of pyarrow."""
    text = first_line(error)
    column = re.search(r"In CSV column #(\d+)", text)
    where = file
    name = None
    if line is not None:
        where += f", line {line}"
    if column and int(column.group(1)) < len(names):
        name = names[int(column.group(1))]
        where += f", column {name!r}" if name else ""
    advice = "Correct it, declare the column's type in `columns`, or use on_error='skip'."
    if "invalid UTF8" in text:
        advice = "Name the encoding of the file, such as encoding='latin-1', or write it as UTF-8."
    return DecodeError(f"{where}: cannot be read, got {cause or text}. {advice}", file, line, name)
