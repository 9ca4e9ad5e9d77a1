# SPDX-License-Identifier: Apache-2.0
"""Files: paths and globs, sections, and positions in a list of files."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from hotbed.connectors.compression import TextStream, codec_by_head, codec_of
from hotbed.connectors.paths import Paths, expand, folder_values, open_bytes, size_of, state_of
from hotbed.connectors.position import OPENED, Batches, Position, RowPlace
from hotbed.connectors.read_plan import READ_ALL, READ_ROWS, BadRow, ReadPlan
from hotbed.connectors.source import Source, described
from hotbed.connectors.types import completed, has_open, with_open
from hotbed.errors import ConfigError, DataError, DecodeError, SchemaError
from hotbed.files import local_path
from hotbed.objects import Identity, is_url

SAMPLE_BYTES = 1 << 20
"""Bytes of a file from which the names and types of its columns are inferred."""

MOST_HEADS = 16
"""Files whose heads are read to find the types of columns that the first file leaves open."""

_BLANK_BYTES = 1 << 16

Endings = Mapping[str, Mapping[str, Any]]
"""Endings of file names, each with the options that it stands for."""

Rows = tuple[pa.RecordBatch, np.ndarray]
"""Rows of a section, and for each its number among all rows of the file, good and bad, from 1."""


@dataclass(frozen=True)
class Section:
    """Bytes `begin` to `end` of a file, None = to its end; `rows`: the rows before them.

    Where a file can only be read from its start, a section is `num_rows` rows after the first
    `rows` ones, None = all that follow.
    """

    file: str
    begin: int = 0
    end: int | None = None
    rows: int = 0
    num_rows: int | None = None

    @property
    def compression(self) -> str | None:
        """The codec of the file, by its content; None = not compressed.

        Raises:
            DecodeError: its name says that it is compressed, and its content does not.
            OSError: the file cannot be read.
        """
        return codec_of(self.file)

    def open(self) -> pa.NativeFile:
        """Return a stream of the decompressed bytes.

        Raises:
            OSError: the file cannot be read.
        """
        stream = open_bytes(self.file, ahead=True)
        if self.begin:
            codec = self.compression
        else:  # without a request of its own for an object
            codec = codec_by_head(stream.read(10), self.file)
            stream.seek(0)
        if self.begin or self.end is not None:
            if self.end is None:
                end = stream.size()
            else:
                end = self.end
            stream = stream.get_stream(self.begin, end - self.begin)
        if codec is None:
            return stream
        return pa.CompressedInputStream(stream, codec)

    def open_text(self, *, is_utf8: bool = True) -> TextStream:
        """Return a stream of the decompressed text without a byte order mark.

        Raises:
            DecodeError: the file is of another kind, or of another encoding.
            OSError: the file cannot be read.
        """
        return TextStream(self.open(), self.file, is_utf8=is_utf8)

    def is_blank(self) -> bool:
        """Return whether it holds only white space, or nothing."""
        try:
            with self.open() as stream:
                while data := stream.read(_BLANK_BYTES):
                    if data.strip():
                        return False
        except (OSError, pa.ArrowException, DecodeError):  # reading the rows reports the damage
            return False
        return True


@dataclass(frozen=True)
class FileSource(Source):
    """A list of files of one format, read one after another.

    A position holds the file and the number of its rows that were read.

    `endings`: the endings of such files, each with the options that it stands for. `open_type`: the
    type of a column of which no file tells the type.
    """

    endings: ClassVar[Endings] = {}
    open_type: ClassVar[pa.DataType] = pa.null()
    path: Paths

    def schema(self) -> pa.Schema:
        return self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        return with_open(self.inferred, self.open_type)

    @cached_property
    def inferred(self) -> pa.Schema:
        """Names and types of the columns; a type is null where no file tells it."""
        schema: pa.Schema | None = self.__dict__.get("_known")
        if schema is None:
            return pa.schema([*self.infer(), *self._folder_columns])
        if not has_open(schema):
            return schema
        return completed(schema, self.infer())

    @cached_property
    def _folder_columns(self) -> pa.Schema:
        """Columns that only the names of folders hold: whole numbers if all values are, or text."""
        folders: list[dict[str, str | None]] = []
        with suppress(DataError):  # a format may tell its columns before there is a file
            folders = list(map(folder_values, self.files()))
        if not folders or not folders[0]:
            return pa.schema([])
        file_columns = self.infer().names
        columns: list[tuple[str, pa.DataType]] = []
        for name in folders[0]:
            if name not in file_columns:
                texts = [values[name] for values in folders if values.get(name) is not None]
                columns.append((name, _type_of_texts(texts)))
        return pa.schema(columns)

    @abstractmethod
    def infer(self) -> pa.Schema:
        """Return names and types of the columns; null where only nulls or no rows were seen."""

    @property
    def declared_types(self) -> pa.Schema:
        """The columns whose types the arguments tell, whatever the files hold."""
        return pa.schema([])

    def like_first(self, path: str, types: pa.Schema | None) -> FileSource:
        """Return this source of another path.

        Args:
            path: the file.
            types: the types of the files before it; it may complete those that they left open. None
                = there are none.
        """
        source = replace(self, path=path)
        if types is not None:
            source.__dict__["_known"] = types
        return source

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = described(self, without="path")
        return settings

    def files(self) -> list[str]:
        """Return the files in reading order."""
        return expand(self.path)

    @abstractmethod
    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        """Yield the rows of a section after its first `skip_rows` rows, cast to `schema()`.

        If the plan has `skips`, rows that cannot be read are left out; they do not count towards
        `skip_rows`.

        Raises:
            DecodeError: the file is damaged, or a row cannot be read and the plan has no `skips`.
        """

    def holds_lines(self, file: str) -> bool:
        """Return whether a file holds plain lines, so that appended bytes are more rows.

        Any other file can only be read as a whole.
        """
        return False

    def rows_end(self, section: Section, *, grows: bool) -> int:
        """Return the offset after the last whole row of a section of plain lines.

        If the section holds no whole row, this is its begin.

        Args:
            section: the lines.
            grows: whether the file may still grow.
        """
        raise NotImplementedError

    @property
    def divisible(self) -> bool:
        try:
            return self.num_rows() is not None
        except DecodeError:  # of a file that has its number of rows, and is damaged
            return True

    def share(self, begin: Fraction, end: Fraction) -> Source:
        return _FileShare(self, begin, end)

    @cached_property
    def _extents(self) -> dict[tuple[str, int, int], int]:
        """Of files, by path, size and time of change: each range of an epoch asks for them."""
        return {}

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        """Return the rows of a file that end between two places; None if there are none.

        Places are numbers of rows where `num_rows` knows these, else of bytes. A file that cannot
        be cut belongs as a whole to the section with its end.

        Args:
            file: the file.
            begin: the place before the section.
            end: the place of its end.
            extent: the place of the end of the file.
        """
        if end == extent:
            return Section(file)
        return None

    def locate(self, position: Position, back: int) -> RowPlace:
        file = self.files()[int(position["file"])]
        row = int(position["row"]) - back
        return self.place(Section(file), row)

    def place(self, section: Section, row: int) -> RowPlace:
        """Return the place of the row that follows the first `row` rows of a section."""
        return RowPlace(section.file, section.rows + row + 1)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        sections = [Section(file) for file in self.files()]
        start = None
        if position is not None:
            position.require("files", self)
            start = _resumed(sections, position)
        return _rows_of(self, sections, start, batch_rows, plan)


@dataclass(frozen=True)
class _FileShare(Source):
    """The rows of files between two fractions of their extents.

    Columns and types are those of all files.
    """

    source: FileSource
    begin: Fraction
    end: Fraction

    def schema(self) -> pa.Schema:
        return self.source.schema()

    @property
    def inferred(self) -> pa.Schema:
        return self.source.inferred

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.source.settings

    def num_rows(self) -> int | None:
        total = 0
        for section in self._sections:
            count = section.num_rows
            if section == Section(section.file):
                count = self.source.like_first(section.file, None).num_rows()
            if count is None:
                return None
            total += count
        return total

    def locate(self, position: Position, back: int) -> RowPlace:
        section = self._sections[int(position["file"])]
        return self.source.place(section, int(position["row"]) - back)

    def read(
        self,
        position: Position | None = None,
        batch_rows: int = READ_ROWS,
        plan: ReadPlan = READ_ALL,
    ) -> Batches:
        share = [str(self.begin), str(self.end)]
        start = None
        if position is not None:
            position.require("a part of files", self)
            if position["share"] != share:
                raise DataError(
                    f"position: it lies in the share {position['share']} of the files, got the "
                    f"share {share}. Give the part that the position was written for."
                )
            start = _resumed(self._sections, position)
        for batch, after in _rows_of(self.source, self._sections, start, batch_rows, plan):
            yield batch, Position({**after.state, "share": share})

    @cached_property
    def _sections(self) -> list[Section]:
        files = self.source.files()
        extents = [_extent_of(self.source, file) for file in files]
        total = sum(extents)
        first = int(self.begin * total)
        last = int(self.end * total)
        sections: list[Section] = []
        for file, extent in zip(files, extents, strict=True):
            begin = min(max(first, 0), extent)
            end = min(max(last, 0), extent)
            section = None
            # a file without rows is read by the share in which it begins: it may be damaged
            begins_here = first <= 0 and (last > 0 or self.end == 1)
            if begins_here and end == extent and self.begin < self.end:
                section = Section(file)
            elif begin < end:
                section = self.source.section(file, begin, end, extent)
            if section is not None:
                sections.append(section)
            first -= extent
            last -= extent
        return sections


def _extent_of(source: FileSource, file: str) -> int:
    """Return the number of rows of a file where it is known, else of bytes; 0 if it is damaged."""
    try:
        key = state_of(file)
        extent = None if key is None else source._extents.get(key)
        if extent is None:
            extent = source.like_first(file, None).num_rows()
            if extent is None:
                extent = size_of(file)
            if key is not None:
                source._extents[key] = extent
    except DecodeError:
        return 0
    return extent


def rows_of_section(
    source: FileSource, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
) -> Iterator[Rows]:
    """Yield what `source.read_file` does, with the columns that the folders of the file name."""
    of_folders = source._folder_columns.names
    schema = source.schema()
    names = [name for name in schema.names if plan.columns is None or name in plan.columns]
    constants = [name for name in names if name in of_folders]
    if not constants:
        yield from source.read_file(section, skip_rows, batch_rows, plan)
        return
    values = {name: _folder_value(section.file, schema.field(name)) for name in constants}
    file_columns = [name for name in names if name not in of_folders]
    # without a column of its own, a batch has no number of rows
    names_to_read = (
        file_columns or [name for name in schema.names if schema.names.count(name) == 1][:1]
    )
    plan = replace(plan, columns=tuple(names_to_read))
    for batch, numbers in source.read_file(section, skip_rows, batch_rows, plan):
        columns = {name: batch.column(name) for name in file_columns}
        for name, value in values.items():
            columns[name] = pa.repeat(value, batch.num_rows)
        yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)), numbers


def _rows_of(
    source: FileSource,
    sections: Sequence[Section],
    start: tuple[int, int] | None,
    batch_rows: int,
    plan: ReadPlan,
) -> Batches:
    """Yield the rows of sections, one after another.

    Args:
        source: reads them.
        sections: the sections.
        start: the section to begin in, by its number, and the rows of it to pass over; None =
            those of the first row.
        batch_rows: as for `Source.read`.
        plan: as for `Source.read`.
    """
    first, row = start or (0, 0)
    for index in range(first, len(sections)):
        section = sections[index]
        state: dict[str, Any] = {"file": index, "name": os.path.basename(section.file)}
        if is_url(section.file):
            state["identity"] = str(Identity.of(section.file))
        if plan.opens and start is None and not index:
            yield OPENED, Position.of(source, {**state, "row": row})
        if plan.opening is not None:
            plan.opening(section.file)
        try:
            for whole, _ in rows_of_section(source, section, row, batch_rows, plan):
                for batch in cut(whole, batch_rows):
                    row += batch.num_rows
                    yield batch, Position.of(source, {**state, "row": row})
        except DecodeError as error:
            if plan.skips is None:
                raise
            # a fault before the section is counted where its rows are read
            if error.row is None or error.row > section.rows:
                message = f"{error}; the rest of {plan.rest or section.file} is left out"
                plan.leave_out("file", message, [BadRow(error.row or row + 1, message)])
        row = 0


def _resumed(sections: Sequence[Section], position: Position) -> tuple[int, int]:
    """Return the section of a position, by its number, and its rows before the position."""
    index = int(position["file"])
    name = position["name"]
    current = "absent"
    if index < len(sections):
        current = os.path.basename(sections[index].file)
    if current != name:
        raise DataError(
            f"position: file {index} was {name!r} and is now {current!r}. Put "
            "the files back in the same order."
        )
    file = sections[index].file
    if is_url(file) and position.state.get("identity") is not None:
        now = str(Identity.of(file))
        if now != position["identity"]:
            raise DataError(
                f"position: {file} was replaced since, got {now} instead of "
                f"{position['identity']}. Put the object back, or begin anew."
            )
    return index, int(position["row"])


def _type_of_texts(texts: Sequence[str | None]) -> pa.DataType:
    """Return the type of a column of folder names; the null type without values."""
    if not texts:
        return pa.null()
    if all(re.fullmatch(r"-?[0-9]{1,18}", text or "") for text in texts):
        return pa.int64()
    return pa.string()


def _folder_value(file: str, column: pa.Field) -> pa.Scalar:
    """Return the value of a column that the folders of a file name.

    Raises:
        SchemaError: no folder names it, or the value is not of the column's type.
    """
    values = folder_values(file)
    if column.name not in values:
        raise SchemaError(
            f"{file}: column {column.name!r} is absent, got folders that name {sorted(values)}. "
            f"Put the file into a folder '{column.name}=value', as the first file."
        )
    text = values[column.name]
    try:
        return pa.scalar(text, pa.string()).cast(column.type)
    except pa.ArrowException as error:
        raise SchemaError(
            f"{file}: column {column.name!r} must be {column.type}, as in the folders before, got "
            f"{text!r}. Rename the folder."
        ) from error


def infer_from_heads(files: Sequence[str], infer: Callable[[str], pa.Schema]) -> pa.Schema:
    """Return the columns of the first file that is not blank.

    Types that it leaves open come from the next files that tell them, `MOST_HEADS` files in all.

    Args:
        files: the files.
        infer: returns the columns of a file from its head.

    Raises:
        DataError: the first file cannot be read; a later one is reported when its rows are read.
    """
    schema = None
    num_heads = 0
    for file in files:
        if Section(file).is_blank():
            continue
        num_heads += 1
        if schema is None:
            schema = infer(file)
        else:
            with suppress(DataError):
                schema = completed(schema, infer(file))
        if not has_open(schema) or num_heads == MOST_HEADS:
            return schema
    if schema is None:
        return infer(files[0])
    return schema


def one_path(where: str, path: Paths) -> str:
    """Return the path of a source that is written.

    Raises:
        ConfigError: it is a list, or the URL of an object store.
    """
    if isinstance(path, (str, os.PathLike)):
        return str(local_path(os.fspath(path), where))
    raise ConfigError(f"{where}: one file is written, got {path!r}. Give the path of one file.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the point at its end."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def cut(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in views of at most `batch_rows` rows; nothing for an empty batch."""
    for start in range(0, batch.num_rows, batch_rows):
        yield batch.slice(start, batch_rows)
