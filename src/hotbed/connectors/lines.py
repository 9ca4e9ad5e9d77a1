# SPDX-License-Identifier: Apache-2.0
"""Text with one record per line, and messages of a broker, which have no line ends."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from hotbed.connectors.files import FileSource, Rows, Section, first_line
from hotbed.connectors.plan import ReadPlan
from hotbed.errors import DecodeError

BLOCK_BYTES = 1 << 22
HEAD_BYTES = 200
"""Bytes that messages and dead letters show of a line that is too long."""


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
                    dropped = 0
                    if plan.skips is None:
                        dropped = min(skip_rows, len(numbered))
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
        lines = [numbered[index][1] for index in good]
        return self.parse(lines, plan), numbers[good]


def last_line_end(section: Section) -> int:
    """Return the offset after the last line end of a section; without one, its begin."""
    with open(section.file, "rb") as file:
        if section.end is None:
            stop = os.fstat(file.fileno()).st_size
        else:
            stop = section.end
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
            missing = size - len(self._tail)
            chunk = self._stream.read(max(missing, self._limit))
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
                instead = self._replace(self._read + end, head)
                parts += [data[start:end], instead, b"\n"]
                self._dropping = True
            else:
                break
        self._tail = data[end:]
        self._read += end
        parts.append(data[start:end])
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)


class Utf8Lines(io.RawIOBase):
    """A stream of text whose lines that are not UTF-8 are replaced.

    Args:
        stream: A stream whose reads return whole lines.
        replace: Called with such a line and all lines of the read; returns the line to use instead.
    """

    def __init__(self, stream: ShortLines, replace: Callable[[bytes, bytes], bytes]) -> None:
        self._stream = stream
        self._replace = replace

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        lines = self._stream.read(size)
        if _is_utf8(lines):
            return lines
        read = lines.split(b"\n")
        for number, line in enumerate(read):
            if not _is_utf8(line):
                read[number] = self._replace(line, lines)
        return b"\n".join(read)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
