# SPDX-License-Identifier: Apache-2.0
"""Rows of delimited text as streams: where they end, which lines they begin on, and bad ones."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

from hotbed import _core

HEAD_BYTES = 200
"""Bytes that messages and dead letters show of a line that cannot be read."""

FIRST_BYTES = 1 << 17
"""Bytes of the first reads of a stream; later ones grow with the text before them."""


class RowFormat(NamedTuple):
    """How rows are written.

    `quote`: The quote character; -1 = quotes are ordinary characters. `delimiter`: Between two
    fields. `limit`: Bytes that a row may have.
    """

    quote: int
    delimiter: int
    limit: int


class BadLine(NamedTuple):
    """A line that cannot be read as a row.

    Attributes:
        line: its number, from 1.
        row: the number that its row would have, from 0.
        head: its first bytes.
        fault: why it cannot be read.
    """

    line: int
    row: int
    head: bytes
    fault: str


class WholeRows(io.RawIOBase):
    """A stream of delimited text in which bad lines are replaced.

    A bad line is longer than a row may be, or opens a quote that is never closed. A quoted field
    may hold line ends if a delimiter or a line end follows its closing quote, and if its row is not
    longer than the limit.

    A read returns whole rows, so it may return fewer bytes than asked. The first reads are short:
    the first rows come soon, and a slice of a file costs little more than its own rows. The last
    row gets a line end.

    Args:
        stream: the text.
        row_format: how rows are written.
        replace: called with each bad line; returns the text to use instead, or raises.
        is_whole: whether the text ends where the stream does. If False, a last row that may be
            incomplete is not returned.
    """

    def __init__(
        self,
        stream: Any,
        row_format: RowFormat,
        replace: Callable[[BadLine], bytes],
        *,
        is_whole: bool = True,
    ) -> None:
        self._stream = stream
        self._format = row_format
        self._replace = replace
        self._is_whole = is_whole
        self.num_bytes = 0
        """Bytes of the text before its first row that was not returned."""
        self.num_rows = 0
        """Rows that were returned, with the header and the replaced lines."""
        self._tail = b""  # a row whose end was not read yet
        # the bytes up to the next line end belong to a line that was replaced
        self._dropping = False
        self._lines = 0  # line ends before the tail
        # from the row `_jumps[i]` on, the text has `_excess[i]` line ends that ended no row
        self._jumps = [0]
        self._excess = [0]

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    # a view, where one suffices: a copy takes as long as looking for the rows
    def read(self, size: int = -1) -> bytes | memoryview:
        while True:
            missing = size - len(self._tail)
            most = max(missing, self._format.limit)
            before = self.num_bytes + len(self._tail)
            chunk = self._stream.read(min(most, max(FIRST_BYTES, before // 2)))
            is_last = not chunk and self._is_whole
            rows_before = self.num_rows
            rows = self._whole_rows(self._tail + chunk, is_last)
            # pyarrow takes a first block of blank lines for an empty file
            if self.num_rows > rows_before:
                if is_last:
                    # and a single row without a line end, too
                    return bytes(rows).removesuffix(b"\n") + b"\n"
                return rows
            if not chunk:
                return b""

    def line_of(self, row: int) -> int:
        """Return the line on which a row begins; rows count from 0, lines from 1."""
        place = bisect_right(self._jumps, row) - 1
        return row + self._excess[place] + 1

    def forget(self, row: int) -> None:
        """Forget the lines of the rows before `row`."""
        place = bisect_right(self._jumps, row) - 1
        del self._jumps[:place], self._excess[:place]

    def _whole_rows(self, text: bytes, is_last: bool) -> bytes | memoryview:
        """Return the whole rows of `text`, which begins with the tail; keep the rest as tail."""
        view = memoryview(text)
        parts: list[bytes | memoryview] = []
        begin = 0
        if self._dropping:
            begin = self._after_line(text, 0)
        while not self._dropping:
            scan = _core.scan_rows(text, begin, self._format, is_last)
            end, rows, lines, jumps, excess, bad = scan
            skew = self._lines - self.num_rows
            self._jumps += [self.num_rows + row for row in (0, *jumps)]
            self._excess += [skew + count for count in (0, *excess)]
            parts.append(view[begin:end])
            begin = end
            self.num_rows += rows
            if bad is None:
                self._lines += lines
                break
            _, line, place, is_long = bad
            self._lines += line
            parts += [self._instead(text, begin, place, is_long), b"\n"]
            self.num_rows += 1
            begin = self._after_line(text, place)
        self._tail = text[begin:]
        self.num_bytes += begin
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    def _instead(self, text: bytes, begin: int, place: int, is_long: bool) -> bytes:
        """Return the text to use instead of a bad row; `place` is in its bad line."""
        fault = "a quote opens and is never closed"
        if is_long:
            fault = f"longer than {self._format.limit} bytes"
        end = text.find(b"\n", place)
        row = text[begin:] if end < 0 else text[begin:end]
        head = row[:HEAD_BYTES].rstrip(b"\r")
        return self._replace(BadLine(self._lines + 1, self.num_rows, head, fault))

    def _after_line(self, text: bytes, begin: int) -> int:
        """Return the offset after the line end that follows `begin`; note whether there is one."""
        newline = text.find(b"\n", begin)
        self._dropping = newline < 0
        if self._dropping:
            return len(text)
        self._lines += 1
        return newline + 1


class Utf8Lines(io.RawIOBase):
    """A stream of text whose lines that are not UTF-8 are replaced.

    Args:
        stream: a stream whose reads return whole lines.
        replace: called with such a line and all lines of the read; returns the line to use instead.
    """

    def __init__(self, stream: WholeRows, replace: Callable[[bytes, bytes], bytes]) -> None:
        self._stream = stream
        self._replace = replace

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        lines = bytes(self._stream.read(size))
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
