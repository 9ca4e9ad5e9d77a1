# SPDX-License-Identifier: Apache-2.0
"""Text of delimited fields: csv, tsv and their relatives, and libsvm."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from hotbed.connectors.files import (
    SAMPLE_BYTES,
    Endings,
    FileSource,
    Paths,
    Rows,
    Section,
    first_line,
    infer_from_heads,
)
from hotbed.connectors.lines import HEAD_BYTES, ShortLines, Utf8Lines, last_line_end
from hotbed.connectors.plan import BadRow, ReadPlan
from hotbed.connectors.position import Place
from hotbed.connectors.types import declared
from hotbed.errors import ConfigError, DecodeError, SchemaError

BLOCK_BYTES = 1 << 22
SCAN_BYTES = 1 << 28
"""Sections up to this size are searched for quotes; in larger ones each line end ends a row."""

LINE_BYTES = BLOCK_BYTES // 2
"""Limit of a line: pyarrow needs a line end in each block."""

# An integer has no sign "+", no leading zeros and no point: "007" and hex hashes that consist of
# digits stay strings.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"


@dataclass(frozen=True)
class Csv(FileSource):
    r"""Delimited text, one line per row; LF or CRLF, compressed with gzip/zstd/bz2 by file ending.

    Types are inferred from the first MiB. A column is integer only if all its values there are
    plain integers, so hex hashes and "007" stay strings. A value behind it that is not a plain
    integer, such as "007", is an error in a column that was inferred as integer.

    Args:
        path: A file, a glob or a list of both.
        delimiter: One or more characters (`"\t"` for tsv, `"::"`).
        header: Whether the first line holds the names.
        columns: Without header the names in order, as a list or as a mapping name -> type ("int64",
            "uint64", "float64", "float32", "string", "bool"; None = infer). With header a list
            renames all columns, and a mapping declares types of some.
        null_values: Texts that mean "missing".
        quote: The quote character; None = quotes are ordinary characters.
        encoding: Of the text, as Python names it.

    Raises:
        DecodeError: A number is bad, or a line has too few or too many fields (file, row = 1-based
            line, column).

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
        for name, kind in self._declared().items():
            if kind is not None:
                declared(f"columns.{name}", kind)

    def place(self, file: str, row: int) -> Place:
        return Place(file, row + 1 + int(self.header), "line")

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        schema = self.schema()
        types: dict[str, pa.DataType] = {}
        for name in plan.wanted(schema.names):
            types[name] = plan.types.get(name, schema.field(name).type)
        try:
            yield from _drop(_Reading(self, section, plan).rows(types), skip_rows)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if plan.skips is None:
                # Only a reader with one thread knows the line: read again to name it.
                try:
                    for _ in _Reading(self, section, plan, threads=False).rows(types):
                        pass
                except (pa.ArrowException, OSError, UnicodeDecodeError) as located:
                    raise _decode_error(located, section, schema.names, self.header) from located
            raise _decode_error(error, section, schema.names, self.header) from error

    def holds_lines(self, file: str) -> bool:
        return Section(file).compression is None and not self._is_wide

    def rows_end(self, section: Section) -> int:
        end = last_line_end(section)
        if self.quote is None or end - section.begin > SCAN_BYTES:
            return end
        lines = Section(section.file, section.begin, end)
        return _last_row_end(lines, self.quote, self.delimiter)

    @property
    def _is_utf8(self) -> bool:
        return codecs.lookup(self.encoding).name == "utf-8"

    @property
    def _is_wide(self) -> bool:
        """Whether every character has several bytes, so that a line end is not one byte."""
        return codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))

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
            threads: Whether to parse with several threads.
            leave_out: Handler of rows with too few or too many fields; None = they are errors.
            names: The columns of a section without a header.
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
                encoding=self.encoding,
            ),
            "parse_options": pacsv.ParseOptions(
                delimiter=self.separator,
                quote_char=self.quote or False,
                double_quote=self.quote is not None,
                newlines_in_values=self.quote is not None,
                invalid_row_handler=leave_out,
            ),
        }

    @property
    def separator(self) -> str:
        """The delimiter for pyarrow, which takes one byte."""
        if len(self.delimiter) == 1:
            return self.delimiter
        return "\x1f"

    def open(self, section: Section, replace: Callable[[int, bytes], bytes]) -> Any:
        """Open the bytes for pyarrow, with `replace` in place of lines that are too long."""
        stream = section.open()
        if len(self.delimiter) > 1:
            # Long delimiters become the unit separator. The section passes through memory whole.
            stream = pa.BufferReader(self._separated(stream.read()))
        if self._is_wide:
            return stream
        return ShortLines(stream, LINE_BYTES, replace)

    def names_of(self, file: str) -> list[str]:
        """Return the names of the columns of a file, from its header."""
        with Section(file).open() as stream:
            head = self._sample(stream.read(SAMPLE_BYTES))
        options = self._options(threads=False, leave_out=lambda row: "skip")
        table = pacsv.read_csv(pa.BufferReader(head), **options)
        names: list[str] = table.schema.names
        return names

    def _sample(self, head: bytes) -> bytes:
        """Return the begin of a file as pyarrow reads it."""
        if self._is_utf8:  # the handler of pyarrow takes text only
            head = head.decode(errors="replace").encode()
        return self._separated(head)

    def _separated(self, data: bytes) -> bytes:
        """Return `data` with the separator in place of a long delimiter."""
        if len(self.delimiter) == 1:
            return data
        return data.replace(self.delimiter.encode(), self.separator.encode())

    def infer(self) -> pa.Schema:
        return infer_from_heads(self.files(), self._infer_file)

    def _infer_file(self, file: str) -> pa.Schema:
        try:
            with Section(file).open() as stream:
                head = stream.read(SAMPLE_BYTES)
        except OSError as error:
            raise _decode_error(error, Section(file), []) from error
        if len(head) == SAMPLE_BYTES and b"\n" in head:
            head = head[: head.rindex(b"\n") + 1]
        head = self._sample(head)
        options = self._options(threads=False, leave_out=lambda row: "skip")  # reading reports it
        try:
            names = pacsv.read_csv(pa.BufferReader(head), **options).schema.names
            convert = pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=list(self.null_values),
                strings_can_be_null=True,
            )
            table = pacsv.read_csv(pa.BufferReader(head), convert_options=convert, **options)
        except pa.ArrowException as error:
            raise _decode_error(error, Section(file), []) from error
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise SchemaError(
                f"{file}: columns {duplicates} appear twice, got {names}. Rename all with "
                "columns=[...]."
            )
        declarations = self._declared()
        unknown = [name for name in declarations if name not in names]
        if unknown:
            raise SchemaError(
                f"{file}: declared columns {unknown} are absent, got {names}. Correct `columns`."
            )
        types: list[tuple[str, pa.DataType]] = []
        for name in names:
            kind = declarations.get(name)
            if kind is None:
                types.append((name, _infer(table[name])))
            else:
                types.append((name, declared(f"columns.{name}", kind)))
        return pa.schema(types)


def _infer(column: pa.ChunkedArray) -> pa.DataType:
    """Return the narrowest of int64, uint64, float64 and string that loses nothing.

    It is null if all values are missing.
    """
    values = column.drop_null()
    if len(values) == 0:
        return pa.null()
    is_integer = pc.match_substring_regex(values, _INTEGER)
    if pc.all(is_integer).as_py():
        for kind in (pa.int64(), pa.uint64()):
            try:
                values.cast(kind)
                return kind
            except pa.ArrowInvalid:
                continue
        return pa.string()
    has_leading_zero = pc.match_substring_regex(values, r"^-?0[0-9]")
    if pc.any(has_leading_zero).as_py():
        return pa.string()
    try:
        values.cast(pa.float64())
        return pa.float64()
    except pa.ArrowInvalid:
        return pa.string()


class _Reading:
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
        # heads of lines that were replaced, which pyarrow reads next, and why they were
        self._replaced: list[tuple[bytes, str]] = []

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
        stream = source.open(self.section, self._replace)
        if skips and source._is_utf8:
            stream = Utf8Lines(stream, self._replace_damaged)
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

    def _guessed(self, types: Mapping[str, pa.DataType]) -> set[str]:
        """Return the columns that are whole numbers because their first values are plain ones."""
        declared_types = self.source._declared()
        names = {name for name, kind in types.items() if pa.types.is_integer(kind)}
        return {name for name in names if declared_types.get(name) is None} - self.plan.types.keys()

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

    def _replace(self, begin: int, head: bytes) -> bytes:
        """Return the line that pyarrow reads in place of a long line: it has too many fields.

        Raises:
            DecodeError: The plan has no `skips`.
        """
        if self.plan.skips is None:
            file = self.section.file
            line = self.section.rows + 1
            with self.section.open() as stream:
                for position in range(0, begin, BLOCK_BYTES):
                    line += stream.read(min(BLOCK_BYTES, begin - position)).count(b"\n")
            raise DecodeError(
                f"{file}, line {line}: longer than {LINE_BYTES} bytes, got {head[:80]!r}. Correct "
                "it or use on_error='skip'.",
                file,
                line,
            )
        self._replaced.append((head, f"longer than {LINE_BYTES} bytes"))
        return self._too_many

    def _replace_damaged(self, line: bytes, lines: bytes) -> bytes:
        """Return the line that pyarrow reads for a `line` that is not UTF-8.

        A line with a wrong number of fields is replaced, because pyarrow gives its handler text
        only. Any other line stays, and so does a line that may be part of a quoted value.
        """
        source = self.source
        separators = line.count(source.separator.encode())
        is_quoted = source.quote is not None and source.quote.encode() in lines
        if is_quoted or separators == len(self._too_many) - 2:
            return line
        self._replaced.append((line[:HEAD_BYTES], f"{separators + 1} fields, not UTF-8"))
        return self._too_many

    @cached_property
    def _too_many(self) -> bytes:
        """A line with more fields than the header."""
        names = self.source.names_of(self.section.file)
        separator = self.source.separator.encode()
        return separator * (len(names) + 1)

    def _leave_out(self, row: Any) -> str:
        """Note a row with too few or too many fields, and tell pyarrow to skip it."""
        number = self.section.rows + row.number - self._headers
        self._left_out.append(number)
        text: str | bytes = row.text
        cause = f"{row.actual_columns} fields instead of {row.expected_columns}"
        if self._replaced and row.text.encode() == self._too_many:
            text, cause = self._replaced.pop(0)
        where = self.source.place(self.section.file, number - 1)
        message = f"{where}: {cause}: {text[:80]!r}"
        self.plan.leave_out("fields", message, [(number, text)])
        return "skip"

    def _checked(
        self, batch: pa.RecordBatch, numbers: np.ndarray, types: Mapping[str, pa.DataType]
    ) -> Rows:
        """Return a `batch` cast to `types`, without the rows that have a bad value.

        Raises:
            DecodeError: A value is bad, and the plan has no `skips`.
        """
        columns: dict[str, pa.Array] = {}
        good = np.ones(batch.num_rows, bool)
        guessed = self._guessed(types)
        for name, kind in types.items():
            raw = batch.column(name)
            if name in guessed:
                cast = _plain_integers(_as_text(raw), kind)
            else:
                cast = _cast(raw, kind)
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
            DecodeError: The plan has no `skips`.
        """
        if not len(rows):
            return
        first = int(rows[0])
        place = self.source.place(self.section.file, int(numbers[first]) - 1)
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
            bad.append((int(number), json.dumps(letter, ensure_ascii=False)))
        message = f"{place}, column {name!r}: {value!r} is not {kind}"
        self.plan.leave_out("value", message, bad)


def _as_text(values: pa.Array) -> pa.Array:
    """Return bytes as text, null where they are not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [_decoded(value) for value in values.to_pylist()]
        return pa.array(decoded, pa.string())


def _plain_integers(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return whole numbers, null where a text is not a plain integer of type `kind`."""
    odd = pc.starts_with(text, "-0")
    has_zero = pc.starts_with(text, "0")
    if pc.any(has_zero).as_py():
        has_more = pc.greater(pc.binary_length(text), 1)
        odd = pc.or_(odd, pc.and_(has_zero, has_more))
    if not pc.any(odd).as_py():
        try:
            return text.cast(kind)
        except pa.ArrowInvalid:
            pass
    is_plain = pc.match_substring_regex(text, _INTEGER)
    return _cast(pc.if_else(is_plain, text, pa.scalar(None, pa.string())), kind)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return bytes or text as type `kind`, null where a value does not parse."""
    if values.type.equals(kind):
        return values
    text = _as_text(values)
    if pa.types.is_string(kind):
        return text
    if pa.types.is_boolean(kind):
        words = pc.utf8_lower(text)
        is_known = pc.is_in(words, pa.array(["true", "1", "false", "0"]))
        is_true = pc.is_in(words, pa.array(["true", "1"]))
        return pc.if_else(is_known, is_true, pa.scalar(None, pa.bool_()))
    wanted = pl.Series(pa.array([], kind)).dtype
    numbers = pl.Series(text).cast(wanted, strict=False)
    return numbers.to_arrow().cast(kind)


def _decoded(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


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


def _last_row_end(lines: Section, quote: str, delimiter: str) -> int:
    """Return the offset after the last row of some whole lines.

    A line end between quotes does not end a row.
    """
    begin = lines.begin
    if lines.end is None:
        end = begin
    else:
        end = lines.end
    size = SAMPLE_BYTES
    with open(lines.file, "rb") as file:
        while begin < end:
            file.seek(begin)
            piece = file.read(min(size, end - begin))
            whole = piece[: piece.rfind(b"\n") + 1]
            taken = _rows_bytes(whole, quote.encode(), delimiter.encode())
            if not taken and begin + size >= end:
                break
            begin += taken
            if taken:
                size = SAMPLE_BYTES
            else:
                size = 2 * size
    return begin


def _rows_bytes(lines: bytes, quote: bytes, delimiter: bytes) -> int:
    """Return how many bytes of some lines are whole rows."""
    if quote not in lines:
        return len(lines)
    mark = re.escape(quote)
    before = rb"(?:\A|(?<=\n)|(?<=%s))" % re.escape(delimiter)
    field = re.compile(before + mark + rb"(?:[^%s]|%s%s)*+" % (mark, mark, mark))
    row = 0
    after = 0  # offset after the previous quoted field
    for match in field.finditer(lines):
        line_end = lines.rfind(b"\n", after, match.start())
        row = max(row, line_end + 1)
        if match.end() == len(lines):  # its closing quote is not in `lines`
            return row
        after = match.end()
    return len(lines)


def _decode_error(
    error: Exception, section: Section, names: list[str], header: bool = False
) -> DecodeError:
    file = section.file
    text = first_line(error)
    row = re.search(r"Row #(\d+)", text)
    column = re.search(r"In CSV column #(\d+)", text)
    where = file
    cause = text
    line = None
    name = None
    if row:
        _, _, details = text.rpartition("Row #")
        cause = details.split(": ", 1)[-1]
        line = int(row.group(1))
        if section.begin:
            line += section.rows + int(header)
        where += f", line {line}"
    if column and int(column.group(1)) < len(names):
        name = names[int(column.group(1))]
        where += f", column {name!r}" if name else ""
    return DecodeError(
        f"{where}: cannot be read, got {cause}. Correct it, declare the column's type in "
        "`columns`, or use on_error='skip'.",
        file,
        line,
        name,
    )
