# SPDX-License-Identifier: Apache-2.0
"""Text with one record per line, and messages of a broker, which have no line ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.connectors.compression import TextStream
from hotbed.connectors.files import FileSource, Rows, Section, first_line
from hotbed.connectors.paths import open_bytes
from hotbed.connectors.position import RowPlace
from hotbed.connectors.read_plan import BadRow, ReadPlan
from hotbed.errors import DecodeError

BLOCK_BYTES = 1 << 22


class LineSource(FileSource):
    """Files that are read in blocks of whole lines.

    A block that does not parse is read again line by line, to name or skip the bad line.

    `comment`: what begins a comment, which ends with its line; "" = there are none.
    """

    comment: ClassVar[bytes] = b""

    @abstractmethod
    def parse(self, lines: list[bytes], plan: ReadPlan) -> pa.RecordBatch:
        """Return the rows of some lines, which have no line ends and are not blank.

        Raises:
            ValueError: a line is bad (or an Arrow error).
        """

    def read_file(
        self, section: Section, skip_rows: int, batch_rows: int, plan: ReadPlan
    ) -> Iterator[Rows]:
        self.schema()
        reading = _LineReading(self, section, plan)
        try:
            with section.open_text() as stream:
                for lines in blocks(stream):
                    block = reading.rows_of(lines)
                    dropped = 0
                    if plan.skips is None:
                        dropped = min(skip_rows, len(block.texts))
                    skip_rows -= dropped
                    for start in range(dropped, len(block.texts), batch_rows):
                        batch, good = reading.parse(block, start, start + batch_rows)
                        skip = min(skip_rows, batch.num_rows)
                        skip_rows -= skip
                        if batch.num_rows > skip:
                            yield batch.slice(skip), good[skip:]
        except (OSError, pa.ArrowException) as error:
            line = reading.lines_before + reading.num_lines
            raise DecodeError(
                f"{section.file}: cannot be read after line {line}, got {error}. Write the file "
                "again.",
                section.file,
                line,
            ) from error

    def holds_lines(self, file: str) -> bool:
        return Section(file).compression is None

    def rows_end(self, section: Section, *, grows: bool) -> int:
        return last_line_end(section)

    def section(self, file: str, begin: int, end: int, extent: int) -> Section | None:
        if not is_plain(file):
            return super().section(file, begin, end, extent)
        return lines_between(file, (begin, end, extent), last_line_end)

    def place(self, section: Section, row: int) -> RowPlace:
        file = section.file
        num_lines = 0
        try:
            num_lines = lines_before(section)
            with section.open_text() as stream:
                for lines in blocks(stream):
                    places = self.row_places(lines)
                    if row < len(places):
                        return RowPlace(file, num_lines + int(places[row]) + 1, "line")
                    row -= len(places)
                    num_lines += len(lines)
        except (OSError, pa.ArrowException):  # the file has changed since
            pass
        return RowPlace(file, num_lines + row + 1, "line")

    def row_places(self, lines: list[bytes]) -> np.ndarray:
        """Return the places of the rows among some lines: of those that are not blank."""
        contents = lines
        comment = self.comment
        if comment and any(comment in line for line in lines):
            contents = [line.partition(comment)[0] for line in lines]
        if all(map(bytes.strip, contents)):
            return np.arange(len(lines))
        return np.flatnonzero([bool(text.strip()) for text in contents])


class _Block(NamedTuple):
    """Rows of a block: their text, and their numbers among the lines and the rows of the file.

    `lines` count from the begin of the section.
    """

    texts: list[bytes]
    lines: np.ndarray
    numbers: np.ndarray


class _LineReading:
    """One reading of a section: how many lines and rows were read, and those that are bad."""

    def __init__(self, source: LineSource, section: Section, plan: ReadPlan) -> None:
        self.source = source
        self.section = section
        self.plan = plan
        self.num_lines = 0
        self._num_rows = section.rows  # of the file

    @cached_property
    def lines_before(self) -> int:
        """Lines of the file before the section."""
        return lines_before(self.section)

    def rows_of(self, lines: list[bytes]) -> _Block:
        """Return the rows of the next lines."""
        places = self.source.row_places(lines)
        texts = lines
        if len(places) < len(lines):
            texts = [lines[place] for place in places]
        numbers = np.arange(len(texts)) + self._num_rows + 1
        block = _Block(texts, places + self.num_lines + 1, numbers)
        self.num_lines += len(lines)
        self._num_rows += len(texts)
        return block

    def parse(self, block: _Block, start: int, stop: int) -> Rows:
        """Return the good ones of some rows, and their numbers among the rows of the file.

        Raises:
            DecodeError: a row is bad and the plan has no `skips`.
        """
        texts = block.texts
        if start or stop < len(texts):
            texts = texts[start:stop]
        numbers = block.numbers[start:stop]
        parse = self.source.parse
        try:
            return parse(texts, self.plan), numbers
        except (ValueError, pa.ArrowException):
            pass
        good: list[int] = []
        for index, text in enumerate(texts):
            try:
                parse([text], self.plan)
                good.append(index)
            except (ValueError, pa.ArrowException) as error:
                line = self.lines_before + int(block.lines[start + index])
                self._leave_out(int(numbers[index]), line, text, error)
        return parse([texts[index] for index in good], self.plan), numbers[good]

    def _leave_out(self, number: int, line: int, text: bytes, error: Exception) -> None:
        file = self.section.file
        begin = text[:80].decode(errors="replace")
        message = f"{file}, line {line}: cannot be read ({first_line(error)}), got {begin!r}"
        if self.plan.skips is None:
            raise DecodeError(
                f"{message}. Correct it or use on_error='skip'.", file, line
            ) from error
        self.plan.leave_out("value", message, [BadRow(number, text, line)])


def is_plain(file: str) -> bool:
    """Return whether a file is not compressed; False if it is damaged: reading reports that."""
    try:
        return Section(file).compression is None
    except (DecodeError, OSError):
        return False


def lines_between(
    file: str, places: tuple[int, int, int], rows_end: Callable[[Section], int]
) -> Section | None:
    """Return the rows of a file of plain lines that end between two places; None without one.

    Args:
        file: the file.
        places: offsets of the begin and the end, and the size of the file.
        rows_end: returns the offset after the last row that ends in a section.
    """
    begin, end, size = places
    first = 0
    if begin:
        first = rows_end(Section(file, 0, begin))
    last = end
    if end < size:
        last = rows_end(Section(file, first, end))
    if first == last:
        return None
    return Section(file, first, last)


def lines_before(section: Section) -> int:
    """Return the number of line ends of a file before a section."""
    if not section.begin:
        return 0
    num_lines = 0
    with open_bytes(section.file, ahead=True) as file:
        stream = file.get_stream(0, section.begin)
        while data := stream.read(BLOCK_BYTES):
            num_lines += data.count(b"\n")
    return num_lines


def last_line_end(section: Section) -> int:
    """Return the offset after the last line end of a section; without one, its begin."""
    with open_bytes(section.file) as file:
        if section.end is None:
            stop = file.size()
        else:
            stop = section.end
        while stop > section.begin:
            start = max(section.begin, stop - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            if newline >= 0:
                return int(start + newline + 1)
            stop = start
    return section.begin


def blocks(stream: TextStream) -> Iterator[list[bytes]]:
    """Yield lists of lines without their CRLF or LF ends."""
    rest = b""
    while block := stream.read(BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            continue
        text = rest + head
        lines = text.split(b"\n")
        rest = tail
        if b"\r" in text:
            lines = [line.removesuffix(b"\r") for line in lines]
        yield lines
    if rest:
        yield [rest.rstrip(b"\r")]
